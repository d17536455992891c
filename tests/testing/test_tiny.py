"""The tiny models are fit to test with: reproducible, and nothing in them is too weak to be missed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import Cache, PreTrainedModel

from kvgroups.errors import UnsupportedModelError
from kvgroups.testing import tiny, tiny_names

CORE = tiny_names()
REST = [name for name in tiny_names(all=True) if name not in CORE]

PROMPT = torch.tensor([[5, 9, 33, 71, 2, 18, 44, 60, 7, 90, 12, 25]])
"""Twelve tokens: longer than the window of eight."""


def last_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits[0, -1]


def greedy(model: PreTrainedModel, max_new_tokens: int) -> list[int]:
    ids = model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=max_new_tokens, do_sample=False
    )
    return ids[0, PROMPT.shape[1] :].tolist()


def effect_of_the_first_token(model: PreTrainedModel) -> float:
    """The largest change in the last logits when the first token is another one."""
    other = PROMPT.clone()
    other[0, 0] = 50
    return (last_logits(model, PROMPT) - last_logits(model, other)).abs().max().item()


def remembered(cache: Cache) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a cache holds, by name."""
    for index, layer in enumerate(cache.layers):
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            held = getattr(layer, name, None)
            for part in held.values() if isinstance(held, dict) else [held]:
                if isinstance(part, torch.Tensor) and part.numel():
                    yield f"layer {index} {name}", part


def test_core_families_are_among_all_of_them() -> None:
    every = tiny_names(all=True)
    assert set(CORE) < set(every)
    assert len(set(every)) == len(every)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'lama'.*gemma3_text.*llama"):
        tiny("lama")


def test_overrides_reach_the_config() -> None:
    assert tiny("gemma3_text", sliding_window=5).config.sliding_window == 5


def test_a_variant_is_built_from_its_family() -> None:
    assert tiny("gemma4_text+kv_sharing").config.num_kv_shared_layers == 2


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    tiny("llama", seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", CORE)
class TestCore:
    def test_one_seed_gives_one_model(self, name: str) -> None:
        first, again, other = tiny(name), tiny(name), tiny(name, seed=1)
        assert not first.training
        for key, weight in first.state_dict().items():
            assert torch.equal(weight, again.state_dict()[key]), key
        assert not torch.equal(last_logits(first, PROMPT), last_logits(other, PROMPT))

    def test_another_dtype_gives_the_same_weights_rounded(self, name: str) -> None:
        rounded = tiny(name, dtype=torch.bfloat16).state_dict()
        for key, weight in tiny(name).state_dict().items():
            assert torch.equal(rounded[key], weight.to(rounded[key].dtype)), key
        assert greedy(tiny(name, dtype=torch.bfloat16), 4)

    def test_no_token_is_special(self, name: str) -> None:
        model = tiny(name)
        assert model.generation_config.eos_token_id is None
        assert model.generation_config.pad_token_id is None
        assert (model.get_input_embeddings().weight.abs().amax(dim=1) > 0).all()

    def test_no_parameter_is_constant(self, name: str) -> None:
        for key, weight in tiny(name).named_parameters():
            assert weight.numel() == 1 or weight.min() < weight.max(), key

    def test_the_last_logits_depend_on_the_first_token(self, name: str) -> None:
        assert effect_of_the_first_token(tiny(name)) > 0.1

    def test_every_state_that_is_forgotten_shows(self, name: str) -> None:
        """Lose one tensor of one layer after the prompt: the next logits move by far more than rounding."""
        model = tiny(name)

        @torch.no_grad()
        def next_logits(lost: int | None = None) -> torch.Tensor:
            cache = model(PROMPT, use_cache=True).cache
            if lost is not None:
                list(remembered(cache))[lost][1].zero_()
            position = torch.tensor([[PROMPT.shape[1]]])
            return model(torch.tensor([[30]]), cache=cache, position_ids=position).logits[0, -1]

        expected = next_logits()
        tensors = [label for label, _ in remembered(model(PROMPT, use_cache=True).cache)]
        assert tensors
        for index, label in enumerate(tensors):
            assert (next_logits(lost=index) - expected).abs().max() > 0.05, label

    def test_greedy_text_wanders(self, name: str) -> None:
        assert len(set(greedy(tiny(name), 24))) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_every_other_family_runs_and_remembers(name: str) -> None:
    model = tiny(name)
    tokens = greedy(model, 4)
    assert len(tokens) == 4
    assert tokens == greedy(tiny(name), 4)
    assert torch.isfinite(last_logits(model, PROMPT)).all()
    assert effect_of_the_first_token(model) > 0.05
