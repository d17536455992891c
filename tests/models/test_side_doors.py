"""Ways around `generate`'s own loop: the same as on the unpatched model, or refused by name."""

import pytest
import torch
from transformers import CompileConfig

import kvgroups
from kvgroups.errors import UnsupportedCallError
from kvgroups.testing import tiny

IDS = torch.randint(3, 97, (1, 13), generator=torch.Generator().manual_seed(0))


def both(family, **options):
    """What generate gives unpatched and patched."""
    model = tiny(family)
    options = {"max_new_tokens": 5, "do_sample": False, **options}
    want = model.generate(IDS, **options)
    return want, kvgroups.patch(model).generate(IDS, **options)


def test_transformers_own_engine():
    """It would run beside our groups, without a word."""
    model = kvgroups.patch(tiny("llama"))
    model.generate_batch = lambda *_, **__: pytest.fail("the engine was started")
    with pytest.raises(UnsupportedCallError, match=r"cache_implementation='paged'.*model.generate_batch"):
        model.generate(IDS, cache_implementation="paged", max_new_tokens=2)
    config = model.generation_config
    config.cache_implementation = "paged"
    with pytest.raises(UnsupportedCallError, match="cache_implementation='paged'"):
        model.generate(IDS, max_new_tokens=2)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_drafts_of_the_models_own_first_layers(family):
    """The assistant is the patched model itself with fewer layers, and a cache of transformers'."""
    want, got = both(family, assistant_early_exit=2)
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_a_compile_config(family):
    """A cache of ours is not for compiled steps, and generate does not try."""
    want, got = both(family, compile_config=CompileConfig())
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_a_loop_of_the_users_own(family):
    """`custom_generate` gets the cache that generate would use, and it works as any other."""

    def greedy(model, input_ids, logits_processor, stopping_criteria, generation_config, **inputs):
        kinds.append(type(inputs["cache"]))
        step = input_ids
        for _ in range(5):
            logits = model(step, cache=inputs["cache"]).logits
            step = logits[:, -1:].argmax(-1)
            input_ids = torch.cat((input_ids, step), dim=1)
        return input_ids

    kinds: list[type] = []
    want, got = both(family, custom_generate=greedy)
    assert torch.equal(got, want)
    assert kinds[1] is kvgroups.GroupedCache


@pytest.mark.parametrize(
    "options",
    [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "low"}, {"num_beams": 4, "num_beam_groups": 2}],
    ids=["contrastive", "dola", "group beams"],
)
def test_modes_that_transformers_moved_out(options):
    """transformers asks for remote code; a patched model neither runs something else nor says something else."""
    model = tiny("llama")
    with pytest.raises(ValueError, match="trust_remote_code") as unpatched:
        model.generate(IDS, max_new_tokens=2, **options)
    with pytest.raises(ValueError, match="trust_remote_code") as patched:
        kvgroups.patch(model).generate(IDS, max_new_tokens=2, **options)
    assert str(patched.value) == str(unpatched.value)
