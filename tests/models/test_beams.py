"""Beams and samples: rows that share a past hold it once, and part without disturbing each other."""

import copy

import pytest
import torch

import kvgroups
from kvgroups.testing import tiny
from kvgroups.testing.oracle import oracle_logits, poison_free_blocks

TOLERANCE = 1e-4


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


def left_padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[5] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def beams(model, inputs, **options):
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 12, "do_sample": False, **options}
    return model.generate(**inputs, return_dict_in_generate=True, output_scores=True, **options)


class Swaps:
    """Counts the steps at which beams really changed places."""

    def __init__(self, monkeypatch):
        self.count = 0
        plain = kvgroups.GroupedCache.reorder_cache

        def reorder(cache, beam_idx):
            self.count += beam_idx.tolist() != list(range(len(beam_idx)))
            plain(cache, beam_idx)

        monkeypatch.setattr(kvgroups.GroupedCache, "reorder_cache", reorder)


def test_beam_search_is_that_without_a_cache(family, fused, monkeypatch):
    """Sequences and scores of a ragged batch, with beams that really swap, on poisoned free memory."""
    model = tiny(family)
    inputs = left_padded(prompts(6, 11))
    # Families that floor dt in prefill only decode otherwise than they prefill: for them, eager's own cache.
    want = beams(model, inputs, use_cache=family in ("zamba2", "nemotron_h"))
    kvgroups.patch(model, fused=fused)
    poison_free_blocks(model)
    swaps = Swaps(monkeypatch)
    got = beams(model, inputs)
    assert swaps.count > 3
    assert torch.equal(got.sequences, want.sequences)
    assert (got.sequences_scores - want.sequences_scores).abs().max() < TOLERANCE
    assert torch.equal(got.beam_indices, want.beam_indices)
    manager = vars(model)["_kvgroups"].context.manager
    manager.check()
    del got
    assert manager.usage().held_bytes == 0


@pytest.mark.parametrize("family", ["gemma3_text", "falcon_h1"])
def test_beam_sampling_with_one_seed(family):
    model = tiny(family)
    inputs = left_padded(prompts(7, 9))
    options = {"do_sample": True, "temperature": 0.7, "top_k": 12}
    torch.manual_seed(1)
    want = beams(model, inputs, **options)
    kvgroups.patch(model)
    torch.manual_seed(1)
    got = beams(model, inputs, **options)
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("family", ["gemma3_text", "bamba"])
def test_a_prompt_is_computed_and_held_once(family):
    """Eight samples of one prompt of 64 tokens: after the prefill there is one request, afterwards eight that
    share its four full blocks of 16."""
    model = kvgroups.patch(tiny(family))
    manager = vars(model)["_kvgroups"].context.manager
    cache = kvgroups.GroupedCache(model)
    (row,) = prompts(64)
    seen = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    with torch.no_grad():
        logits = model(torch.tensor([row] * 8), cache=cache).logits
        assert seen == [1] and logits.shape[0] == 8
        full = manager.pool("full")
        assert full.num_used == 4
        tokens = [[token] for token in range(10, 18)]
        logits = model(torch.tensor(tokens), cache=cache).logits
    hook.remove()
    assert seen == [1, 8]
    assert full.num_used == 4 + 8
    assert sorted(full.references[full.references > 0]) == [1] * 8 + [8] * 4
    manager.check()
    for index, (token,) in enumerate(tokens):
        assert (logits[index, -1] - oracle_logits(model, [*row, token])[-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["gemma3_text", "bamba"])
def test_beams_copy_tails_and_states_only(family):
    """A step copies at most a partial block and the states of each row; eager copies every row's whole cache."""
    model = kvgroups.patch(tiny(family))
    context = vars(model)["_kvgroups"].context
    inputs = left_padded(prompts(100))
    output = beams(model, inputs, max_new_tokens=20)
    copied = context.manager.usage().copied_bytes
    block_bytes = sum(group.block_bytes for group in context.config.groups)
    assert 0 < copied <= 20 * 2 * block_bytes  # of three children of one parent, one moves and two are copied
    eager = sum(
        tensor.nbytes
        for layer in copy.deepcopy(kvgroups.unpatch(model)).generate(
            **inputs, max_new_tokens=20, do_sample=False, return_dict_in_generate=True
        ).cache.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if tensor is not None
    )  # one row; eager beam search copies three of them each step
    assert copied < 20 * 3 * eager / 4
    del output


class TestVerbs:
    """Reorder, repeat and select by hand, each row against the oracle afterwards."""

    @pytest.fixture(params=["gemma3_text", "falcon_h1", "jamba"])
    def model(self, request):
        return kvgroups.patch(tiny(request.param))

    def filled(self, model, rows):
        cache = kvgroups.GroupedCache(model)
        with torch.no_grad():
            model(**left_padded(rows), cache=cache)
        return cache

    def assert_rows(self, model, cache, rows):
        """Two more steps with a different token in each row."""
        for step in range(2):
            poison_free_blocks(model)
            tokens = [20 + 7 * index + step for index in range(len(rows))]
            rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
            with torch.no_grad():
                logits = model(torch.tensor(tokens)[:, None], cache=cache).logits
            for index, row in enumerate(rows):
                assert (logits[index, -1] - oracle_logits(model, row)[-1]).abs().max() < TOLERANCE
        vars(model)["_kvgroups"].context.manager.check()

    @pytest.mark.parametrize("parents", [[0, 1, 2], [2, 0, 1], [1, 1, 1], [0, 0, 2]])
    def test_reorder(self, model, parents):
        rows = prompts(5, 9, 16)
        cache = self.filled(model, rows)
        cache.reorder_cache(torch.tensor(parents))
        self.assert_rows(model, cache, [rows[parent] for parent in parents])

    def test_repeat_interleave(self, model):
        rows = prompts(5, 16)
        cache = self.filled(model, rows)
        cache.batch_repeat_interleave(3)
        assert cache.batch_size == 6
        self.assert_rows(model, cache, [row for row in rows for _ in range(3)])

    @pytest.mark.parametrize("indices", [torch.tensor([2, 0]), torch.tensor([True, False, True])])
    def test_select(self, model, indices):
        rows = prompts(5, 9, 16)
        cache = self.filled(model, rows)
        cache.batch_select_indices(indices)
        kept = [2, 0] if indices.dtype != torch.bool else [0, 2]
        self.assert_rows(model, cache, [rows[index] for index in kept])

    def test_a_fork_of_twins(self, model):
        """A cache whose rows are still one request is copied as one, and both part on their own."""
        rows = prompts(9) * 2
        cache = self.filled(model, rows)
        twin = copy.deepcopy(cache)
        self.assert_rows(model, cache, rows)
        self.assert_rows(model, twin, rows)

    @pytest.mark.parametrize("parents", [[0, 3], [0], [-1, 0]])
    def test_rows_that_are_not_there(self, model, parents):
        cache = self.filled(model, prompts(5, 9))
        with pytest.raises(kvgroups.errors.ShapeError):
            cache.reorder_cache(torch.tensor(parents))
        self.assert_rows(model, cache, prompts(5, 9))
