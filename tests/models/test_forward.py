"""A `GroupedCache` driven by hand: however a row is cut, padded or batched, its logits are those of the row alone."""

import copy
from itertools import pairwise

import pytest
import torch

import kvgroups
from kvgroups.testing.oracle import cached_logits, oracle_logits, poison_free_blocks

TOLERANCE = 1e-4
"""Largest logit difference to the oracle in fp32. Eager's own cached path differs from it by up to 3e-5 here, and
a wrong key, position or state shows as 1e-2 and more."""


def row(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def decoded_logits(model, tokens: list[int], prompt_len: int) -> torch.Tensor:
    """The oracle of a row whose tokens after `prompt_len` came one by one: one uncached forward, but for the two
    families that floor dt in prefill only, where it is eager's own cached decode."""
    if model.config.model_type in ("zamba2", "nemotron_h"):
        return cached_logits(model, tokens, prompt_len)
    return oracle_logits(model, tokens)


def feed(model, cache, ids, mask=None):
    """Logits (batch, tokens, vocab) of one forward on poisoned free memory."""
    poison_free_blocks(model)
    mask = None if mask is None else torch.tensor(mask)
    with torch.no_grad():
        return model(input_ids=torch.tensor(ids), attention_mask=mask, cache=cache).logits


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max().item() < TOLERANCE * max(1.0, want.abs().max().item())


def assert_pieces_make_the_whole(model, tokens: list[int], edges: list[int]) -> None:
    """Feed a row in pieces, on poisoned free memory; a last token that comes alone is a decode."""
    cache = kvgroups.GroupedCache(model)
    pieces = [feed(model, cache, [tokens[start:stop]])[0] for start, stop in pairwise(edges)]
    comes_alone = edges[-1] - edges[-2] == 1 and len(edges) > 2
    want = decoded_logits(model, tokens, edges[-2]) if comes_alone else oracle_logits(model, tokens)
    assert_close(torch.cat(pieces), want)


def test_every_cut_of_a_prompt(model):
    """20 tokens in two pieces: at block edges (4, 16), around the window (7, 8, 9), inside the convolution (1, 2, 3)."""
    for cut in range(1, 20):
        assert_pieces_make_the_whole(model, row(20), [0, cut, 20])


def test_every_chunk_size(model):
    """20 tokens in chunks of 2 to 21; `test_one_token_at_a_time` has 1."""
    for chunk in range(2, 22):
        assert_pieces_make_the_whole(model, row(20), [*range(0, 20, chunk), 20])


def test_one_token_at_a_time(model):
    """The reported length counts 1 to 20 whatever layer 0 is, and positions need not be passed."""
    tokens, cache = row(20), kvgroups.GroupedCache(model)
    logits = []
    for length, token in enumerate(tokens, start=1):
        logits.append(feed(model, cache, [[token]])[0])
        assert cache.get_seq_length() == length
    assert_close(torch.cat(logits), decoded_logits(model, tokens, 1))


def test_right_padded_prefill_then_decode(model):
    """Rows of 7 and 18: the state of a row is taken at its last real token, not at the pads behind it."""
    short, long = row(7, seed=1), row(18, seed=2)
    cache = kvgroups.GroupedCache(model)
    prefill = feed(model, cache, [short + [5] * 11, long], [[1] * 7 + [0] * 11, [1] * 18])
    assert_close(prefill[0, :7], oracle_logits(model, short))
    assert_close(prefill[1], oracle_logits(model, long))
    for token in (11, 12, 13):
        short, long = [*short, token], [*long, token + 1]
        logits = feed(model, cache, [[token], [token + 1]])
        assert_close(logits[0], decoded_logits(model, short, 7)[-1:])
        assert_close(logits[1], decoded_logits(model, long, 18)[-1:])
    assert cache.num_tokens == [10, 21]


def test_padding_between_turns(model):
    """Left-padded first turn, left-padded second turn on the same cache: masked tokens do not exist."""
    first = [row(7, seed=3), row(18, seed=4)]
    second = [row(6, seed=5), row(3, seed=6)]
    cache = kvgroups.GroupedCache(model)
    feed(model, cache, [[5] * 11 + first[0], first[1]], [[0] * 11 + [1] * 7, [1] * 18])
    logits = feed(
        model,
        cache,
        [second[0], [5] * 3 + second[1]],
        [[0] * 11 + [1] * 7 + [1] * 6, [1] * 18 + [0] * 3 + [1] * 3],
    )
    assert_close(logits[0], oracle_logits(model, first[0] + second[0])[-6:])
    assert_close(logits[1, 3:], oracle_logits(model, first[1] + second[1])[-3:])


def test_a_chunk_in_which_a_row_is_all_padding(model):
    """Rows of 7 and 18 padded left to 18 and cut at 5 and 13: the first piece of row 0 is empty."""
    short, long = row(7, seed=1), row(18, seed=2)
    ids, mask = [[5] * 11 + short, long], [[0] * 11 + [1] * 7, [1] * 18]
    cache = kvgroups.GroupedCache(model)
    for start, stop in ((0, 5), (5, 13), (13, 18)):
        logits = feed(model, cache, [r[start:stop] for r in ids], [r[:stop] for r in mask])
    assert_close(logits[0, -1], oracle_logits(model, short)[-1])
    assert_close(logits[1, -1], oracle_logits(model, long)[-1])


def test_a_chunk_of_nothing_but_padding(model):
    """A prompt padded from 9 to 14 tokens and fed 5 at a time: the first chunk feeds no token at all."""
    tokens, cache = row(9, seed=3), kvgroups.GroupedCache(model)
    ids, mask = [5] * 5 + tokens, [0] * 5 + [1] * 9
    for start, stop in ((0, 5), (5, 10), (10, 14)):
        logits = feed(model, cache, [ids[start:stop]], [mask[:stop]])
        assert logits.shape[:2] == (1, stop - start)
    assert cache.num_tokens == [9]
    assert cache.get_seq_length() == 14
    assert_close(logits[0], oracle_logits(model, tokens)[-4:])


def test_a_first_token_beside_a_decode(model):
    """One token each, but row 1 is new: it starts from a zero state, not from whatever its slot held."""
    old, new = row(9, seed=7), row(1, seed=8)
    cache = kvgroups.GroupedCache(model)
    feed(model, cache, [old[:8], [5] * 8], [[1] * 8, [0] * 8])
    logits = feed(model, cache, [old[8:], new], [[1] * 9, [0] * 8 + [1]])
    assert_close(logits[0], decoded_logits(model, old, 8)[-1:])
    assert_close(logits[1], oracle_logits(model, new))


def test_a_forked_cache_goes_its_own_way(model):
    """Three copies of one cache, fed different tokens after an odd length and after a block edge."""
    for length in (14, 16):
        prefix = row(length, seed=9)
        cache = kvgroups.GroupedCache(model)
        feed(model, cache, [prefix])
        copies = [copy.deepcopy(cache) for _ in range(3)]
        del cache  # the parent may go first
        for seed, fork in enumerate(copies):
            tail = row(5, seed=seed)
            logits = torch.cat([feed(model, fork, [[token]])[0] for token in tail])
            assert_close(logits, decoded_logits(model, prefix + tail, length)[-5:])
        model._kvgroups.context.manager.check()


def test_the_future_does_not_reach_the_past(model):
    """70 tokens, chunks of 16: changing token 50 leaves the logits before it as they were."""
    tokens = row(70)
    changed = [*tokens[:50], (tokens[50] + 1) % 90 + 3, *tokens[51:]]

    def logits(ids):
        cache = kvgroups.GroupedCache(model)
        return torch.cat([feed(model, cache, [ids[start : start + 16]])[0] for start in range(0, 70, 16)])

    before, after = logits(tokens), logits(changed)
    assert torch.equal(
        before[:48], after[:48]
    )  # chunks that lie wholly before the change run the same kernels
    assert_close(after[48:50], before[48:50])
    assert (before[50] - after[50]).abs().max() > 1e-2


def test_selected_logits_are_the_selected_ones(model):
    """logits_to_keep on a ragged batch: the last two columns, and columns by index."""
    if "logits_to_keep" not in model._kvgroups.context.parameters:
        pytest.skip("the model's forward returns all logits")
    short, long = row(4, seed=1), row(9, seed=2)
    ids, mask = torch.tensor([[5] * 5 + short, long]), torch.tensor([[0] * 5 + [1] * 4, [1] * 9])

    def logits(keep):
        cache = kvgroups.GroupedCache(model)
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=mask, cache=cache, logits_to_keep=keep).logits

    last = logits(2)
    assert_close(last[0], oracle_logits(model, short)[-2:])
    assert_close(last[1], oracle_logits(model, long)[-2:])
    chosen = logits(torch.tensor([6, 8]))
    assert_close(chosen[0], oracle_logits(model, short)[[1, 3]])
    assert_close(chosen[1], oracle_logits(model, long)[[6, 8]])
