"""A model that is changed after `patch`: followed where nothing is in the way, else noticed and refused."""

import copy

import pytest
import torch

import kvgroups
from kvgroups.errors import UnsupportedCallError
from kvgroups.testing import tiny

IDS = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(0))


class LowRank(torch.nn.Module):
    """A projection and a low-rank change of it, as LoRA puts in its place."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.weight, self.bias = inner.weight, inner.bias
        self.down = torch.nn.Linear(inner.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, inner.out_features, bias=False)
        torch.nn.init.normal_(self.up.weight, std=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.up(self.down(x))


class Around(torch.nn.Module):
    """A layer inside another module, as adapters wrap whole layers."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def step_by_step(model) -> torch.Tensor:
    cache = kvgroups.GroupedCache(model)
    with torch.no_grad():
        first = model(IDS[:, :6], cache=cache).logits
        return torch.cat([first, *(model(IDS[:, at : at + 1], cache=cache).logits for at in range(6, 13))], dim=1)


def uncached(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def assert_right(model) -> None:
    assert (step_by_step(model) - uncached(model)).abs().max() < 1e-4


def assert_refused_until_patched_again(model, words: str) -> None:
    """Refused in one sentence with nothing held; `patch` notices that the model is another one."""
    with pytest.raises(UnsupportedCallError, match=words) as caught:
        step_by_step(model)
    assert "\n" not in str(caught.value) and "patch it again" in str(caught.value)
    assert vars(model)["_kvgroups"].context.manager.usage().held_bytes == 0
    kvgroups.patch(model)
    assert_right(model)
    assert not kvgroups.is_patched(kvgroups.unpatch(model))


def modules_named(model, name: str) -> list[torch.nn.Module]:
    """The modules that have a child of this name."""
    return [module for module in model.modules() if name in module._modules]


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("bamba", ["q_proj", "in_proj", "out_proj"]),
        ("jamba", ["in_proj", "x_proj", "out_proj"]),
        ("lfm2", ["q_proj", "in_proj", "out_proj"]),
        ("qwen3_next", ["q_proj", "out_proj"]),
    ],
)
def test_low_rank_projections(family, names):
    model = kvgroups.patch(tiny(family))
    before = uncached(model)
    for name in names:
        for module in modules_named(model, name):
            setattr(module, name, LowRank(getattr(module, name)))
    assert (uncached(model) - before).abs().max() > 1e-2
    assert_right(model)


@pytest.mark.parametrize(("family", "name"), [("llama", "self_attn"), ("bamba", "mamba"), ("bamba", "self_attn")])
def test_a_layer_that_is_wrapped(family, name):
    model = kvgroups.patch(tiny(family))
    for module in modules_named(model, name):
        setattr(module, name, Around(getattr(module, name)))
    assert_right(model)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba"])
def test_attention_that_is_replaced_and_reads_the_same_config(family):
    model = kvgroups.patch(tiny(family))
    module = modules_named(model, "self_attn")[0]
    other = type(module.self_attn)(module.self_attn.config, module.self_attn.layer_idx).eval()
    module.self_attn = other
    assert_right(model)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba", "deepseek_v3"])
def test_attention_that_is_replaced_and_brings_its_own_config(family):
    """Its own setting sends it past our attention, with the K of one step: noticed at the end of the forward."""
    model = kvgroups.patch(tiny(family))
    module = modules_named(model, "self_attn")[-1]
    module.self_attn = copy.deepcopy(module.self_attn)
    assert_refused_until_patched_again(model, "its attention did not read K and V from pages")


@pytest.mark.parametrize(("family", "name"), [("bamba", "mamba"), ("jamba", "mamba"), ("lfm2", "conv")])
def test_a_fused_mixer_that_is_replaced(family, name):
    """The new one knows nothing of slots and would start from zeros at every step."""
    model = kvgroups.patch(tiny(family))
    module = modules_named(model, name)[0]
    setattr(module, name, copy.deepcopy(getattr(module, name)))
    assert_refused_until_patched_again(model, "another module than the one that runs fused")


def test_a_generic_mixer_that_is_replaced():
    """It gets its states handed, whichever module it is."""
    model = kvgroups.patch(tiny("bamba"), fused=False)
    module = modules_named(model, "mamba")[0]
    module.mamba = copy.deepcopy(module.mamba)
    assert_right(model)


@pytest.mark.parametrize(("family", "fused"), [("llama", True), ("bamba", True), ("bamba", False)])
def test_a_layer_that_is_left_out(family, fused):
    """Nothing is stored for it, and what comes after would not know."""
    model = kvgroups.patch(tiny(family), fused=fused)
    skip = {"llama": lambda x, *_, **__: x, "bamba": lambda x, *_, **__: (x, None)}
    model.model.layers[0].forward = skip[family]
    with pytest.raises(UnsupportedCallError, match="layer 0: (no K and V were stored|its states were not used)"):
        step_by_step(model)


@pytest.mark.parametrize("family", ["bamba", "qwen3_next"])
def test_a_layer_that_is_left_out_once(family):
    """The last state layer is left out of one step: no layer before it has written its state, so the step can be
    done again."""
    model = kvgroups.patch(tiny(family), fused=False)
    cache = kvgroups.GroupedCache(model)
    states = [layer for layer in vars(model)["_kvgroups"].context.facts if layer.states]
    mixer = model.get_submodule(states[-1].mixer)
    with torch.no_grad():
        model(IDS[:, :6], cache=cache)
        mixer.forward = lambda hidden_states, *_, **__: torch.zeros_like(hidden_states)
        with pytest.raises(UnsupportedCallError, match="its states were not used"):
            model(IDS[:, 6:7], cache=cache)
        del mixer.forward
        got = model(IDS[:, 6:7], cache=cache).logits
    assert (got - uncached(model)[:, 6:7]).abs().max() < 1e-4


def test_a_forward_that_is_put_on_a_fused_mixer():
    """A hook of accelerate that comes after patch would be passed over: patched again, the mixer is generic."""
    model = kvgroups.patch(tiny("bamba"))
    mixer, calls = model.model.layers[0].mamba, []
    own = mixer.forward

    def hooked(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    mixer.forward = hooked
    assert_refused_until_patched_again(model, r"BambaMixer \(cache layer 0\): something has put a forward of its own on it")
    assert calls and mixer.forward is hooked


def test_a_config_that_is_replaced():
    """Layers go on reading the config that they were built with."""
    model = kvgroups.patch(tiny("gemma3_text"))
    model.config = copy.deepcopy(model.config)
    model.model.config = copy.deepcopy(model.config)
    assert_right(model)


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_a_model_in_another_dtype(family):
    model = kvgroups.patch(tiny(family))
    model.to(torch.bfloat16)
    with pytest.raises(UnsupportedCallError, match=r"bfloat16 on cpu and was patched as torch.float32.*patch it again"):
        step_by_step(model)
    with pytest.raises(UnsupportedCallError, match="patch it again"):
        model.generate(IDS, max_new_tokens=2)
    kvgroups.patch(model)
    assert step_by_step(model).isfinite().all()
    model.to(torch.float32)
    assert_right(kvgroups.patch(model))


def test_one_layer_in_another_dtype():
    """Its K does not fit its pages, whatever the model as a whole says of itself."""
    model = kvgroups.patch(tiny("llama"))
    model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *args: args[-1].double())
    with pytest.raises(UnsupportedCallError, match="layer 1 .*hold torch.float32 and it stores torch.float64"):
        step_by_step(model)


@pytest.mark.parametrize("family", ["llama", "gemma2", "bamba", "jamba", "lfm2"])
def test_autocast(family):
    """As far from the full-precision logits as eager under autocast is, and not further than twice that."""
    model = tiny(family)
    exact = uncached(model)
    with torch.autocast("cpu", torch.bfloat16):
        error = (uncached(model) - exact).abs().max()
        kvgroups.patch(model)
        got = step_by_step(model)
    assert (got - exact).abs().max() < 2 * error


def test_a_mixer_with_a_forward_of_its_own_stays_generic():
    """Hooks of accelerate are such forwards: they run, once for each pass, and come off as they were."""
    model = tiny("bamba")
    mixer, calls = model.model.layers[0].mamba, []
    own = mixer.forward

    def hooked(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    mixer.forward = hooked
    kvgroups.patch(model)
    context = vars(model)["_kvgroups"].context
    assert 0 not in context.fused_layers and context.fused_layers
    calls.clear()
    assert_right(model)
    assert len(calls) == 8 + 1
    assert kvgroups.unpatch(model).model.layers[0].mamba.forward is hooked


def test_what_is_no_cache():
    model = kvgroups.patch(tiny("llama"))
    for wrong in ((), ("k", "v"), "dynamic", 3, {"k": 1}):
        with pytest.raises(UnsupportedCallError, match=f"cache: expected .* got {type(wrong).__name__}"):
            model(IDS, cache=wrong)
        with pytest.raises(UnsupportedCallError, match="cache: "):
            model.generate(IDS, cache=wrong, max_new_tokens=2)


@pytest.mark.parametrize("family", ["llama", "bamba", "mamba"])
def test_a_cache_after_unpatch(family):
    model = kvgroups.patch(tiny(family))
    cache = kvgroups.GroupedCache(model)
    with torch.no_grad():
        model(IDS, cache=cache)
    kvgroups.unpatch(model)
    with pytest.raises(UnsupportedCallError, match=r"outside of its model's forward.*after kvgroups.unpatch"):
        model(IDS, cache=cache)
    with pytest.raises(UnsupportedCallError, match="outside of its model's forward"):
        model.generate(torch.cat((IDS, IDS), dim=1), cache=cache, max_new_tokens=2)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_keys_of_a_layer(name):
    cache = kvgroups.GroupedCache(kvgroups.patch(tiny("bamba")))
    for layer in cache.layers:
        with pytest.raises(UnsupportedCallError, match=r"cache.layers\[i\].keys or .values"):
            getattr(layer, name)
