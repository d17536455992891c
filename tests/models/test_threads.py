"""What a forward over our cache changes for its own thread, it changes for nobody else."""

import copy
import pickle
import threading
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvgroups
from kvgroups.errors import UnsupportedCallError
from kvgroups.testing import tiny

IDS = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0
SOME = ["gemma3_text", "bamba", "jamba", "qwen3_next"]


def plain(model) -> torch.Tensor:
    """Logits of a padded batch without a cache: attention, masks and mixers all have their part in them."""
    with torch.no_grad():
        return model(IDS, attention_mask=MASK, use_cache=False).logits


def paged(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, attention_mask=MASK, cache=kvgroups.GroupedCache(model)).logits


@contextmanager
def held_in_layer_1(model, call):
    """`call()` runs in another thread and stops before layer 1 for as long as the block takes."""
    inside, leave, results = threading.Event(), threading.Event(), []

    def wait(*_):
        if threading.current_thread() is thread:
            inside.set()
            assert leave.wait(60)

    def run():
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)
        finally:
            inside.set()

    hook = model.model.layers[1].register_forward_pre_hook(wait)
    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(60)
    try:
        yield results
    finally:
        leave.set()
        thread.join()
        hook.remove()


@pytest.mark.parametrize("family", SOME)
def test_a_forward_without_a_cache_beside_ours(family):
    model = kvgroups.patch(tiny(family))
    want, want_paged = plain(model), paged(model)
    with held_in_layer_1(model, lambda: paged(model)) as results:
        got = plain(model)
        assert model.config._attn_implementation != "kvgroups"
    assert torch.equal(got, want)
    assert torch.equal(results[0], want_paged)


@pytest.mark.parametrize("family", SOME)
def test_ours_beside_a_forward_without_a_cache(family):
    """The other way round: ours begins and ends while the other one is in its layers."""
    model = kvgroups.patch(tiny(family))
    want, want_paged = plain(model), paged(model)
    with held_in_layer_1(model, lambda: plain(model)) as results:
        got = paged(model)
    assert torch.equal(got, want_paged)
    assert torch.equal(results[0], want)


@pytest.mark.parametrize("family", SOME)
def test_two_models_of_one_config_and_the_same_layers(family):
    """Both are patched and run at once; the first to finish must not take the other's mixers and setting away."""
    one = tiny(family)
    two = AutoModelForCausalLM.from_config(one.config).eval()
    two.generation_config = copy.deepcopy(one.generation_config)
    two.model.layers, two.model.embed_tokens = one.model.layers, one.model.embed_tokens
    bare = AutoModelForCausalLM.from_config(one.config).eval()
    kvgroups.patch(one)
    kvgroups.patch(two)
    want, want_bare = [paged(one), paged(two)], plain(bare)
    with held_in_layer_1(one, lambda: paged(one)) as results:
        got_two, got_bare = paged(two), plain(bare)
        assert torch.equal(plain(two), plain(two))
    assert torch.equal(results[0], want[0])
    assert torch.equal(got_two, want[1])
    assert torch.equal(got_bare, want_bare)
    assert all("forward" not in vars(module) for module in one.model.modules())


@pytest.mark.parametrize("family", SOME)
def test_a_forward_without_a_cache_from_a_hook_of_ours(family):
    """The same thread, in the middle of our forward."""
    model = kvgroups.patch(tiny(family))
    want, want_paged, seen = plain(model), paged(model), []

    def once(*_):
        hook.remove()
        seen.append(plain(model))

    hook = model.model.layers[1].register_forward_pre_hook(once)
    assert torch.equal(paged(model), want_paged)
    assert torch.equal(seen[0], want)


def test_a_strangers_attention_from_a_hook_of_ours():
    """It shares our config object, and nothing tells it apart from a layer of ours that lost its cache."""
    model = tiny("llama")
    stranger = AutoModelForCausalLM.from_config(model.config).eval()
    kvgroups.patch(model)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: plain(stranger))
    with pytest.raises(UnsupportedCallError, match="LlamaAttention .*K that is in no kvgroups cache"):
        paged(model)
    hook.remove()
    assert torch.equal(plain(stranger), plain(stranger))


def test_a_config_that_is_copied_during_our_forward_is_a_plain_one():
    model = kvgroups.patch(tiny("gemma3_text"))
    kind, setting, seen = type(model.config), model.config._attn_implementation, []
    with held_in_layer_1(model, lambda: paged(model)):
        for twin in (copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config)), copy.copy(model.config)):
            assert type(twin) is kind and twin._attn_implementation == setting and twin == model.config
        model.config._attn_implementation = "eager"  # somebody changes it meanwhile: that stays
        seen.append(model.config.to_dict())
    assert type(model.config) is kind
    assert model.config._attn_implementation == "eager"
    assert model.config.to_dict() == seen[0]


def test_a_model_is_not_copied_in_the_middle_of_a_forward():
    model = kvgroups.patch(tiny("bamba"))
    with held_in_layer_1(model, lambda: paged(model)) as results:
        for call in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedCallError, match="inside a forward over a kvgroups cache"):
                call(model)
    assert isinstance(results[0], torch.Tensor)
    assert torch.equal(paged(copy.deepcopy(model)), results[0])


def test_probing_in_two_threads():
    """Each learns what it learns alone, and the registry is as it was."""
    families = ["gemma3_text", "bamba", "falcon_h1", "lfm2", "llama"]
    want = {family: kvgroups.infer_config(tiny(family)) for family in families}
    got: list[tuple[str, object]] = []

    def probe(order: list[str]) -> None:
        for family in order:
            model = tiny(family)
            for _ in range(3):
                try:
                    got.append((family, kvgroups.infer_config(model)))
                except Exception as error:
                    got.append((family, error))

    threads = [threading.Thread(target=probe, args=(order,)) for order in (families, families[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6 * len(families)
    assert [(family, config) for family, config in got if config != want[family]] == []


def test_probing_while_the_same_config_serves():
    """The probe of one model leaves a forward of another alone that reads its settings from the same config."""
    model = tiny("gemma3_text")
    other = AutoModelForCausalLM.from_config(model.config).eval()
    want = plain(other)
    with held_in_layer_1(other, lambda: plain(other)) as results:
        kvgroups.patch(model)
        paged(model)
    assert torch.equal(results[0], want)
