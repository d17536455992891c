"""`patch` changes what it must and nothing else, and `unpatch` leaves no trace."""

import copy
import gc
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import kvgroups
from kvgroups.block_pool import BlockPool
from kvgroups.errors import BackendUnavailableError, UnsupportedCallError
from kvgroups.group_manager import GroupManager
from kvgroups.manager import Manager
from kvgroups.testing import tiny

IDS = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0


def footprint(model) -> dict:
    """Everything that patching could leave behind, by identity where objects matter."""
    return {
        "attributes": {name: id(value) for name, value in vars(model).items()},
        "attention": [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "forwards": [m.forward.__func__ for m in model.modules()],
        "training": [m.training for m in model.modules()],
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
    }


def training_step(model) -> list[torch.Tensor]:
    """Loss and gradients of one step without our cache."""
    model.zero_grad()
    output = model(input_ids=IDS, attention_mask=MASK, labels=IDS)
    output.loss.backward()
    return [output.loss.detach(), output.logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_all_equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_unpatch_leaves_no_trace(family):
    model = tiny(family)
    before, weights = footprint(model), {name: value.clone() for name, value in model.state_dict().items()}
    kvgroups.patch(model)
    model.generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False)
    assert kvgroups.unpatch(model) is model
    assert footprint(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_without_our_cache_nothing_changes(family):
    """Loss, gradients and padded logits, before, after patching, after a paged run and after unpatching."""
    model = tiny(family)
    want = training_step(model)
    kvgroups.patch(model)
    assert_all_equal(training_step(model), want)
    model.generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False)
    assert_all_equal(training_step(model), want)
    kvgroups.unpatch(model)
    assert_all_equal(training_step(model), want)


def test_a_foreign_cache_in_a_forward_runs_as_before(family):
    model = tiny(family)

    def two_steps():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            first = model(input_ids=IDS, cache=cache).logits
            return [first, model(input_ids=IDS[:, :1], cache=cache).logits]

    want = two_steps()
    kvgroups.patch(model)
    assert_all_equal(two_steps(), want)


def test_use_cache_false_is_eager(family):
    model = kvgroups.patch(tiny(family))
    options = {"attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
    got = model.generate(IDS, use_cache=False, **options)
    assert torch.equal(got, kvgroups.unpatch(model).generate(IDS, use_cache=False, **options))


def test_patch_twice_is_patch_once():
    model = kvgroups.patch(tiny("gemma3_text"))
    first = vars(model)["_kvgroups"]
    assert kvgroups.patch(model) is model
    assert vars(model)["_kvgroups"] is first
    kvgroups.unpatch(model)
    assert not kvgroups.is_patched(model)
    kvgroups.unpatch(model)  # and once more does nothing


def test_another_config_replaces_the_first():
    model = kvgroups.patch(tiny("gemma3_text"))
    config = kvgroups.infer_config(model, block_size={"full": 32})
    kvgroups.patch(model, config)
    assert vars(model)["_kvgroups"].context.config == config
    assert not kvgroups.is_patched(kvgroups.unpatch(model))


def test_a_config_that_went_through_a_file(tmp_path):
    model = tiny("falcon_h1")
    want = model.generate(IDS, max_new_tokens=6, do_sample=False)
    for name in ("config.json", "config.yaml"):
        kvgroups.infer_config(model).save(tmp_path / name)
        kvgroups.patch(model, kvgroups.KVGroupsConfig.load(tmp_path / name))
        assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), want)
        kvgroups.unpatch(model)


def test_a_deep_copy_is_patched_with_pools_of_its_own():
    model = kvgroups.patch(tiny("bamba"))
    want = model.generate(IDS, max_new_tokens=6, do_sample=False)
    twin = copy.deepcopy(model)
    assert kvgroups.is_patched(twin) and kvgroups.is_patched(model)
    assert vars(twin)["_kvgroups"].context.manager is not vars(model)["_kvgroups"].context.manager
    assert torch.equal(twin.generate(IDS, max_new_tokens=6, do_sample=False), want)
    kvgroups.unpatch(twin)
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), want)


def test_a_saved_model_is_a_plain_one(tmp_path):
    model = kvgroups.patch(tiny("jamba"))
    want = model.generate(IDS, max_new_tokens=6, do_sample=False)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded.generation_config.pad_token_id = None
    unpickled = pickle.loads(pickle.dumps(model))
    for plain in (loaded, unpickled):
        assert type(plain) is type(model)
        assert not kvgroups.is_patched(plain)
        assert torch.equal(plain.generate(IDS, max_new_tokens=6, do_sample=False), want)
    assert kvgroups.is_patched(model)


def test_instance_attributes_of_others_come_back():
    """accelerate hangs a forward of its own on the instance: ours goes around it and leaves it there."""
    model = tiny("llama")
    calls = []
    plain = model.forward

    def hooked(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    model.forward = hooked
    kvgroups.patch(model)
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert calls
    assert kvgroups.unpatch(model).forward is hooked


def test_blocks_come_back_with_the_garbage():
    model = kvgroups.patch(tiny("falcon_h1"))
    manager = vars(model)["_kvgroups"].context.manager
    cache = kvgroups.GroupedCache(model)
    with torch.no_grad():
        output = model(IDS, cache=cache)
    assert manager.usage().held_bytes > 0
    del cache, output
    gc.collect()
    assert manager.usage().held_bytes == 0
    manager.check()


@pytest.mark.parametrize(
    ("owner", "name"), [(BlockPool, "allocate"), (GroupManager, "fork_row"), (GroupManager, "free")]
)
def test_the_garbage_collector_comes_in_the_middle_of_a_call(owner, name, monkeypatch):
    """A cache in a reference cycle is collected while the manager hands out or takes back blocks of another."""
    model = kvgroups.patch(tiny("gemma3_text"))
    manager = vars(model)["_kvgroups"].context.manager
    plain, was_freed = getattr(owner, name), []
    free = Manager.free

    def interrupted(self, *args, **kwargs):
        gc.collect()
        before = len(was_freed)
        result = plain(self, *args, **kwargs)
        assert len(was_freed) == before
        return result

    def noted_free(self, request):
        was_freed.append(request)
        free(self, request)

    gc.disable()
    try:
        cache, garbage = kvgroups.GroupedCache(model), kvgroups.GroupedCache(model)
        with torch.no_grad():
            model(IDS, cache=cache)
            model(IDS[:, :5], cache=garbage)
            garbage.cycle = garbage
            del garbage
            monkeypatch.setattr(owner, name, interrupted)
            monkeypatch.setattr(Manager, "free", noted_free)
            twin = copy.deepcopy(cache)
            model(IDS[:, :5], cache=twin)
            twin.close()
        monkeypatch.undo()
        manager.check()
        assert manager.usage().held_bytes > 0
        del cache, twin
        gc.collect()
        assert manager.usage().held_bytes == 0
        manager.check()
    finally:
        gc.enable()


def test_close_empties_a_cache_and_it_can_be_used_again():
    model = kvgroups.patch(tiny("falcon_h1"))
    cache = kvgroups.GroupedCache(model)
    with torch.no_grad():
        first = model(IDS, cache=cache).logits
        cache.close()
        assert vars(model)["_kvgroups"].context.manager.usage().held_bytes == 0
        assert torch.equal(model(IDS[:, :5], cache=cache).logits.argmax(-1), first[:, :5].argmax(-1))


def fail_in_layer_2(model, cache, ids):
    """One forward whose third layer raises; what was held before is held afterwards."""
    manager = vars(model)["_kvgroups"].context.manager
    held = manager.usage().held_bytes
    hook = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        model(ids, cache=cache)
    hook.remove()
    manager.check()
    assert manager.usage().held_bytes == held
    assert model.config._attn_implementation != "kvgroups"
    assert all(module.forward.__func__ is type(module).forward for module in model.model.modules())


@pytest.mark.parametrize(("family", "fused"), [("gemma3_text", True), ("bamba", False), ("jamba", False)])
def test_a_failed_forward_leaves_the_cache_as_it_was(family, fused):
    """A layer that raises: the step is taken back and the same tokens go through afterwards."""
    model = kvgroups.patch(tiny(family), fused=fused)
    cache = kvgroups.GroupedCache(model)
    with torch.no_grad():
        model(IDS[:, :6], cache=cache)
        fail_in_layer_2(model, cache, IDS[:, 6:7])
        assert cache.num_tokens == [6, 6]
        got = torch.cat([model(IDS[:, at : at + 1], cache=cache).logits for at in range(6, 13)], dim=1)
        want = model(IDS, use_cache=False).logits[:, 6:]
    assert (got - want).abs().max() < 1e-4


def test_a_failed_forward_on_states_in_place_says_so():
    """Layer 0 has moved its states on already: the cache refuses to go on, and a new one works."""
    model = kvgroups.patch(tiny("bamba"))
    cache = kvgroups.GroupedCache(model)
    with torch.no_grad():
        model(IDS[:, :6], cache=cache)
        fail_in_layer_2(model, cache, IDS[:, 6:])
        with pytest.raises(UnsupportedCallError, match="make a new one"):
            model(IDS[:, 6:], cache=cache)
        cache.close()
        got = model(IDS, cache=cache).logits
    assert (got - model(IDS, use_cache=False).logits).abs().max() < 1e-4


def test_a_prefill_that_fails_at_its_second_row_empties_the_cache():
    """Rows of a state model go through one after the other; the first one's blocks come back too."""
    model = kvgroups.patch(tiny("bamba"), fused=False)
    cache = kvgroups.GroupedCache(model)
    passes = []

    def fail_second(*_):
        passes.append(1)
        if len(passes) == 2:
            raise RuntimeError("planted")

    hook = model.model.layers[0].register_forward_pre_hook(fail_second)
    with torch.no_grad(), pytest.raises(RuntimeError, match="planted"):
        model(IDS, attention_mask=MASK, cache=cache)
    hook.remove()
    assert vars(model)["_kvgroups"].context.manager.usage().held_bytes == 0
    with torch.no_grad():
        logits = model(IDS, attention_mask=MASK, cache=cache).logits
        alone = model(IDS[:1, 4:], use_cache=False).logits
    assert (logits[0, 4:] - alone[0]).abs().max() < 1e-4


def test_families_with_states_run_fused(family):
    """What has a fused form uses it; the others, gated delta nets among them, stay generic."""
    from tests.models.conftest import WITH_STATES

    context = vars(kvgroups.patch(tiny(family)))["_kvgroups"].context
    with_states = {layer.index for layer in context.facts if layer.states}
    assert context.fused_layers == (with_states if family in WITH_STATES else frozenset())
    assert not vars(kvgroups.patch(tiny(family), fused=False))["_kvgroups"].context.mixers


@pytest.mark.parametrize("family", ["gemma3_text", "bamba"])
def test_a_model_on_the_reference_kernels(family):
    """The naive forms are product code: the same tokens come out of them."""
    model = tiny(family)
    want = model.generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False)
    kvgroups.patch(model, backend="reference")
    assert torch.equal(model.generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False), want)


@pytest.mark.parametrize("fused", ["no", None, 1])
def test_fused_is_yes_or_no(fused):
    model = tiny("bamba")
    with pytest.raises(UnsupportedCallError, match="fused: expected True or False"):
        kvgroups.patch(model, fused=fused)
    assert not kvgroups.is_patched(model)


def test_a_backend_that_nobody_knows():
    model = tiny("llama")
    with pytest.raises(BackendUnavailableError, match=r"^patch: expected a backend among auto, .*, got 'cuda'"):
        kvgroups.patch(model, backend="cuda")
    assert not kvgroups.is_patched(model)
