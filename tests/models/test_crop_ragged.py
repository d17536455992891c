"""Crops of rows that have different numbers of tokens in the columns that go, and crops after crops."""

import copy

import pytest
import torch

import kvgroups
from kvgroups.errors import UnsupportedCallError
from kvgroups.testing import tiny
from kvgroups.testing.oracle import oracle_logits, poison_free_blocks

TOLERANCE = 1e-4
STATES = ["bamba", "jamba", "lfm2", "zamba", "falcon_h1"]


def row(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def feed(model, cache, rows, mask=None, **inputs):
    poison_free_blocks(model)
    mask = None if mask is None else torch.tensor(mask)
    with torch.no_grad():
        return model(torch.tensor(rows), cache=cache, attention_mask=mask, **inputs).logits


def assert_close(got, want):
    assert got.shape == want.shape
    assert (got - want).abs().max().item() < TOLERANCE * want.abs().max().item()


def ragged(family, max_rewind=4):
    """Rows of 9 and 12 tokens; then two columns that exist for row 1 only and one that exists for both."""
    model = kvgroups.patch(tiny(family))
    cache = kvgroups.GroupedCache(model, max_rewind=max_rewind)
    first, second = row(9), row(12, seed=1)
    feed(model, cache, [[5] * 3 + first, second], [[0] * 3 + [1] * 9, [1] * 12])
    feed(model, cache, [[20, 5, 5], [30, 31, 32]], [[1, 0, 0], [1, 1, 1]])
    return model, cache, [*first, 20], [*second, 30, 31, 32]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", *STATES])
@pytest.mark.parametrize("removed", [1, 2, 3])
def test_columns_that_are_padding_for_one_row(family, removed):
    """Row 0 has nothing to take back from the last two columns, so its state stays and nothing is fed twice."""
    model, cache, first, second = ragged(family)
    cache.crop(-removed)
    first, second = first[: 10 - (removed == 3)], second[: 15 - removed]
    assert cache.num_tokens == [len(first), len(second)]
    for token in (40, 41):
        first, second = [*first, token], [*second, token + 10]
        logits = feed(model, cache, [[token], [token + 10]])
        assert_close(logits[0], oracle_logits(model, first)[-1:])
        assert_close(logits[1], oracle_logits(model, second)[-1:])


@pytest.mark.parametrize("family", ["llama", "bamba", "jamba"])
def test_a_crop_after_a_crop(family):
    model, cache, first, second = ragged(family)
    cache.crop(-1)
    cache.crop(-1)
    assert cache.num_tokens == [10, 13]
    logits = feed(model, cache, [[40, 41], [50, 51]])
    assert_close(logits[0], oracle_logits(model, [*first, 40, 41])[-2:])
    assert_close(logits[1], oracle_logits(model, [*second[:13], 50, 51])[-2:])


@pytest.mark.parametrize("mode", ["paged", "ring"])
def test_a_ring_does_not_forget_what_it_has_overwritten(mode):
    """Back by 5 of 40 tokens and by 5 more: a paged window of 8 still holds tokens 23 to 30, a ring of 12 lost 23 to 27."""
    model = tiny("gemma3_text")
    options = {"slot_mapping": {"window": mode}, "block_size": {"window": 4}, "max_rewind": 5}
    kvgroups.patch(model, kvgroups.infer_config(model, **options))
    cache, tokens = kvgroups.GroupedCache(model), row(40)
    feed(model, cache, [tokens[:35]])
    feed(model, cache, [tokens[35:]])
    twin = copy.deepcopy(cache)
    for each in (cache, twin):
        each.crop(-5)
        left = 35
        if mode == "ring":
            with pytest.raises(UnsupportedCallError, match="'window' has let go of tokens"):
                copy.deepcopy(each).crop(-5)
            with pytest.raises(UnsupportedCallError, match="'window' has let go of tokens"):
                each.crop(-5)
        else:
            each.crop(-5)
            left = 30
        assert_close(feed(model, each, [[50]])[0], oracle_logits(model, [*tokens[:left], 50])[-1:])


@pytest.mark.parametrize("family", ["bamba", "lfm2"])
def test_callers_reuse_their_buffers(family):
    """Tokens that are fed again after a crop are those that were fed, whatever their tensors hold by then."""
    model = kvgroups.patch(tiny(family))
    cache, tokens = kvgroups.GroupedCache(model, max_rewind=8), row(20)
    feed(model, cache, [tokens[:14]])
    ids, positions = torch.tensor([tokens[14:]]), torch.arange(14, 20)[None]
    with torch.no_grad():
        model(ids, cache=cache, position_ids=positions)
    cache.crop(-3)
    ids.fill_(5)
    positions.zero_()
    assert_close(feed(model, cache, [[50]])[0], oracle_logits(model, [*tokens[:17], 50])[-1:])


def test_a_checkpoint_does_not_outlive_the_next_forward():
    """It is of the forward before `allow_rewind(0)`, and how later ones were called is not kept."""
    model = kvgroups.patch(tiny("bamba"))
    cache = kvgroups.GroupedCache(model, max_rewind=6)
    feed(model, cache, [row(10)])
    cache.allow_rewind(0)
    feed(model, cache, [row(3)])
    with pytest.raises(UnsupportedCallError, match="there is no checkpoint of the states"):
        cache.crop(-4)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [("llama", "position_ids"), ("bamba", "position_ids"), ("bamba", "labels"), ("bamba", "inputs_embeds")],
)
def test_a_refused_forward_has_hidden_nothing(family, wrong):
    """Its mask takes the last two tokens of row 0 back, and another argument cannot be served."""
    model = kvgroups.patch(tiny(family))
    cache = kvgroups.GroupedCache(model, max_rewind=4)
    rows = [row(12), row(12, seed=1)]
    feed(model, cache, [each[:8] for each in rows])
    feed(model, cache, [each[8:] for each in rows])
    new = torch.tensor([[20, 21], [22, 23]])
    mask = [[1] * 10 + [0, 0, 1, 1], [1] * 14]
    inputs = {"input_ids": new, "labels": new}
    if wrong == "position_ids":
        inputs = {"input_ids": new, "position_ids": torch.tensor([[9, 8], [9, 8]])}
    if wrong == "inputs_embeds":
        inputs = {"inputs_embeds": model.get_input_embeddings()(new).detach()}
    with pytest.raises(UnsupportedCallError, match=wrong), torch.no_grad():
        model(**inputs, cache=cache, attention_mask=torch.tensor(mask))
    assert cache.num_tokens == [12, 12]
    logits = feed(model, cache, new.tolist())
    for index, each in enumerate(rows):
        assert_close(logits[index], oracle_logits(model, each + new[index].tolist())[-2:])


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_rows_are_reordered_between_crop_and_forward(family):
    model, cache, first, second = ragged(family)
    cache.crop(-1)
    cache.reorder_cache([1, 0])
    logits = feed(model, cache, [[40], [50]])
    assert_close(logits[0], oracle_logits(model, [*second[:14], 40])[-1:])
    assert_close(logits[1], oracle_logits(model, [*first, 50])[-1:])


def test_positions_that_the_caller_named_come_again():
    """Positions from 100 on: what is fed again after a crop is fed where it was."""
    model = kvgroups.patch(tiny("falcon_h1"))

    def logits(crops):
        cache = kvgroups.GroupedCache(model, max_rewind=4)
        feed(model, cache, [row(6)], position_ids=torch.arange(100, 106)[None])
        if crops:
            feed(model, cache, [[7, 8, 9, 10]], position_ids=torch.arange(106, 110)[None])
            cache.crop(-2)
            return feed(model, cache, [[11]], position_ids=torch.tensor([[108]]))
        return feed(model, cache, [[7, 8, 11]], position_ids=torch.arange(106, 109)[None])[:, -1:]

    want = logits(crops=False)
    assert_close(logits(crops=True), want)


def test_chosen_logits_after_a_crop():
    """Columns count from the new tokens on, from either end, in the caller's order."""
    model, cache, first, second = ragged("bamba")
    cache.crop(-2)
    keep = torch.tensor([2, 0, -1])
    logits = feed(model, cache, [[40, 41, 42], [50, 51, 52]], logits_to_keep=keep)
    assert_close(logits[0], oracle_logits(model, [*first, 40, 41, 42])[-3:][keep])
    assert_close(logits[1], oracle_logits(model, [*second[:13], 50, 51, 52])[-3:][keep])


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_a_crop_of_a_copy(family):
    """States have their checkpoint in the original: there a copy says so, and either goes on as it was."""
    model, cache, _, second = ragged(family)
    twin = copy.deepcopy(cache)
    if family == "llama":
        twin.crop(-1)
    else:
        with pytest.raises(UnsupportedCallError, match="no checkpoint of the states"):
            twin.crop(-1)
    cache.crop(-1)
    assert_close(feed(model, cache, [[40], [50]])[1], oracle_logits(model, [*second[:14], 50])[-1:])
    if family == "llama":
        second = second[:14]
    assert_close(feed(model, twin, [[40], [50]])[1], oracle_logits(model, [*second, 50])[-1:])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_pads_after_an_answer_may_be_hidden_later(family):
    """Row 0 ended and was fed two pads; the next mask hides them, and its positions go on where it ended."""
    model = kvgroups.patch(tiny(family), kvgroups.infer_config(tiny(family), max_rewind=2))
    cache = kvgroups.GroupedCache(model)
    feed(model, cache, [row(9), row(9, seed=1)])
    for token in (30, 31):
        feed(model, cache, [[5], [token]])
    mask = [[1] * 9 + [0] * 2 + [1] * 2, [1] * 13]
    logits = feed(model, cache, [[40, 41], [50, 51]], mask)
    assert cache.num_tokens == [11, 13]
    assert_close(logits[0], oracle_logits(model, [*row(9), 40, 41])[-2:])
    assert_close(logits[1], oracle_logits(model, [*row(9, seed=1), 30, 31, 50, 51])[-2:])
    vars(model)["_kvgroups"].context.manager.check()


def test_pads_that_are_in_a_state_cannot_be_hidden():
    model = kvgroups.patch(tiny("bamba"))
    cache = kvgroups.GroupedCache(model)
    feed(model, cache, [row(9), row(9, seed=1)])
    feed(model, cache, [[5], [30]])
    with pytest.raises(UnsupportedCallError, match="attention_mask: tokens are hidden that were fed: .*checkpoint"):
        feed(model, cache, [[40], [50]], [[1] * 9 + [0, 1], [1] * 11])
    assert cache.num_tokens == [10, 10]
    assert_close(feed(model, cache, [[40], [50]])[1], oracle_logits(model, [*row(9, seed=1), 30, 50])[-1:])


class TestAfterAForwardThatFailed:
    def test_the_checkpoint_that_was_not_written_is_not_used(self):
        """The forward ran out of K and V after its checkpoint was placed; what it would have kept never was."""
        model = tiny("bamba")
        config = kvgroups.infer_config(model, memory={"full": 1, "state": 4})
        kvgroups.patch(model, config)
        cache = kvgroups.GroupedCache(model, max_rewind=2)
        feed(model, cache, [row(10)])
        with pytest.raises(kvgroups.errors.OutOfBlocksError):
            feed(model, cache, [row(9, seed=1)])
        with pytest.raises(UnsupportedCallError, match="no checkpoint of the states"):
            cache.crop(-1)
        assert_close(feed(model, cache, [[40]])[0], oracle_logits(model, [*row(10), 40])[-1:])

    @pytest.mark.parametrize("family", ["llama", "bamba", "qwen3_next"])
    def test_a_first_forward_without_memory_leaves_an_empty_cache(self, family):
        model = tiny(family)
        blocks = {group.name: 4 if group.is_state else 1 for group in kvgroups.infer_config(model).groups}
        kvgroups.patch(model, kvgroups.infer_config(model, memory=blocks))
        cache = kvgroups.GroupedCache(model)
        with pytest.raises(kvgroups.errors.OutOfBlocksError):
            feed(model, cache, [row(10), row(10, seed=1)])
        assert (cache.batch_size, cache.get_seq_length()) == (-1, 0)
        assert vars(model)["_kvgroups"].context.manager.usage().held_bytes == 0
        assert_close(feed(model, cache, [row(9)])[0], oracle_logits(model, row(9)))

    @pytest.mark.parametrize("is_new", [True, False])
    def test_outputs_that_cannot_be_merged(self, monkeypatch, is_new):
        """Rows had gone through: a new cache is empty again, one with a past refuses to go on."""
        import kvgroups.cached_forward as module

        model = kvgroups.patch(tiny("qwen3_next"))
        cache = kvgroups.GroupedCache(model)
        batch = [[5] * 3 + row(4), row(7, seed=1)]
        mask = [[0] * 3 + [1] * 4, [1] * 7]
        if not is_new:
            feed(model, cache, batch, mask)

        def fail(*_):
            raise RuntimeError("no merge")

        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no merge"):
            patched.setattr(module, "merge_outputs", fail)
            feed(model, cache, batch, mask)
        if is_new:
            assert_close(feed(model, cache, batch, mask)[1], oracle_logits(model, row(7, seed=1)))
            assert cache.num_tokens == [4, 7]
        else:
            with pytest.raises(UnsupportedCallError, match="fail halfway"):
                feed(model, cache, batch, mask)
