"""What a forward returns beside logits, where rows are computed once, alone or in several passes."""

import pytest
import torch

import kvgroups
from kvgroups.errors import ShapeError, UnsupportedCallError
from kvgroups.testing import tiny
from kvgroups.testing.oracle import oracle_logits

TOLERANCE = 1e-4
ROWS = torch.randint(3, 97, (3, 9), generator=torch.Generator().manual_seed(0))
EQUAL = ROWS[:1].expand(3, -1)


def forward(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, cache=kvgroups.GroupedCache(model), **inputs)


def assert_close(got, want):
    assert got.shape == want.shape
    assert (got - want).abs().max().item() < TOLERANCE * want.abs().max().item()


@pytest.mark.parametrize("ids", [ROWS, EQUAL], ids=["rows", "equal rows"])
def test_router_logits_and_their_loss_are_eagers(ids):
    model = tiny("mixtral")
    with torch.no_grad():
        want = model(ids, output_router_logits=True, labels=ids)
    got = forward(kvgroups.patch(model), ids, output_router_logits=True, labels=ids)
    assert_close(got.logits, want.logits)
    assert_close(got.loss, want.loss)
    assert_close(got.aux_loss, want.aux_loss)
    assert len(got.router_logits) == len(want.router_logits) > 0
    for layer, other in zip(got.router_logits, want.router_logits, strict=True):
        assert_close(layer, other)


@pytest.mark.parametrize("how", ["argument", "config"])
def test_router_logits_of_padding_are_refused(how):
    model = tiny("mixtral")
    model.config.output_router_logits = how == "config"
    kvgroups.patch(model)
    mask = torch.ones_like(ROWS)
    mask[0, :2] = 0
    options = {"output_router_logits": True} if how == "argument" else {}
    with pytest.raises(UnsupportedCallError, match="output_router_logits: the batch has padding"):
        forward(model, ROWS, attention_mask=mask, **options)
    assert vars(model)["_kvgroups"].context.manager.usage().held_bytes == 0
    logits = forward(model, ROWS, attention_mask=mask, output_router_logits=False).logits
    assert_close(logits[1], oracle_logits(model, ROWS[1]))


def test_router_logits_of_several_passes_are_refused():
    model = tiny("mixtral")
    kvgroups.patch(model, kvgroups.infer_config(model, max_num_batched_tokens=10))
    with pytest.raises(UnsupportedCallError, match="output_router_logits: .* several passes"):
        forward(model, ROWS, output_router_logits=True)
    assert vars(model)["_kvgroups"].context.manager.usage().held_bytes == 0


class TestLabels:
    @pytest.mark.parametrize("family", ["llama", "bamba", "qwen3_next"])
    @pytest.mark.parametrize("ids", [ROWS, EQUAL], ids=["rows", "equal rows"])
    def test_the_loss_is_eagers(self, family, ids):
        model = tiny(family)
        with torch.no_grad():
            want = model(ids, labels=ids).loss
        assert_close(forward(kvgroups.patch(model), ids, labels=ids).loss, want)

    def test_of_padding_that_is_ignored(self):
        """Labels of -100 where padding is and at the token behind it: the loss of the rows alone."""
        model = kvgroups.patch(tiny("bamba"))
        mask, labels = torch.ones_like(ROWS), ROWS.clone()
        mask[0, :3], labels[0, :4] = 0, -100
        got = forward(model, ROWS, attention_mask=mask, labels=labels).loss
        losses = []
        for row, start in zip(ROWS, (3, 0, 0), strict=True):
            logits = oracle_logits(model, row[start:])
            losses.append(torch.nn.functional.cross_entropy(logits[:-1], row[start + 1 :], reduction="none"))
        assert_close(got, torch.cat(losses).mean())

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_that_count_padding(self, side):
        model = kvgroups.patch(tiny("llama"))
        mask = torch.ones_like(ROWS)
        mask[1, slice(0, 2) if side == "left" else slice(7, 9)] = 0
        with pytest.raises(UnsupportedCallError, match="labels: the one in column . of row 1 .*-100"):
            forward(model, ROWS, attention_mask=mask, labels=ROWS)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("keep", [[3, 0, 3], [8, -1, 0, 5], [2]])
def test_chosen_logits_come_in_the_callers_order(fused, keep):
    """A ragged batch; the generic tier puts them together from passes of its rows."""
    model = kvgroups.patch(tiny("bamba"), fused=fused)
    mask = torch.ones_like(ROWS)
    mask[1, 7:] = 0
    got = forward(model, ROWS, attention_mask=mask, logits_to_keep=torch.tensor(keep)).logits
    whole = forward(model, ROWS, attention_mask=mask).logits
    for row in (0, 2):
        assert_close(got[row], whole[row][keep])
        assert_close(whole[row], oracle_logits(model, ROWS[row]))


@pytest.mark.parametrize("fused", [True, False])
def test_a_mask_of_columns_chooses_as_in_eager(fused):
    """Also where tokens are fed again before the new ones, and the mask is of the new ones only."""
    model = kvgroups.patch(tiny("bamba"), fused=fused)
    keep = torch.tensor([False, True, False, True, False, False, False, False, True])
    got = forward(model, ROWS, logits_to_keep=keep).logits
    for row in range(3):
        assert_close(got[row], oracle_logits(model, ROWS[row])[keep])
    if fused:
        cache = kvgroups.GroupedCache(model, max_rewind=4)
        with torch.no_grad():
            model(ROWS[:, :6], cache=cache)
            cache.crop(-2)
            got = model(ROWS[:, 4:8], cache=cache, logits_to_keep=torch.tensor([False, False, True, False])).logits
        assert_close(got[0], oracle_logits(model, ROWS[0])[6:7])


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (torch.tensor([9]), "columns from -9 to 8, got"),
        (torch.tensor([True, False]), r"an int, \(n,\) int64 or \(9,\) bool, got \(2,\) bool"),
        (torch.tensor([1.0]), r"got \(1,\) float32"),
        (-2, "expected 0 for all or the number of last columns, got -2"),
    ],
)
def test_columns_that_there_are_not(keep, words):
    with pytest.raises(ShapeError, match=words):
        forward(kvgroups.patch(tiny("llama")), ROWS, logits_to_keep=keep)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba", "qwen3_next"])
@pytest.mark.parametrize("most", [1, 2, 5, 13])
def test_no_pass_has_more_tokens_than_the_config_allows(family, most, monkeypatch):
    """A ragged batch, a second turn and decode steps, in passes of at most so many tokens."""
    from kvgroups.geometry import BatchGeometry

    model = tiny(family)
    kvgroups.patch(model, kvgroups.infer_config(model, max_num_batched_tokens=most))
    sizes, build = [], BatchGeometry.build

    def count(query_lens, **rest):
        sizes.append(sum(query_lens))
        return build(query_lens=query_lens, **rest)

    monkeypatch.setattr(BatchGeometry, "build", count)
    cache = kvgroups.GroupedCache(model)
    tokens = [row.tolist() for row in ROWS]
    tokens[0] = tokens[0][4:]
    mask = torch.ones_like(ROWS)
    mask[0, :4] = 0
    with torch.no_grad():
        logits = model(ROWS, attention_mask=mask, cache=cache, output_hidden_states=True)
        assert all(layer.shape[:2] == ROWS.shape for layer in logits.hidden_states)
        for row, got in enumerate(logits.logits):
            assert_close(got[9 - len(tokens[row]) :], oracle_logits(model, tokens[row]))
        for more in (ROWS[:, :5], ROWS[:, 5:6], ROWS[:, 6:7]):
            logits = model(more, cache=cache).logits
            for row, got in enumerate(logits):
                tokens[row] += more[row].tolist()
                assert_close(got, oracle_logits(model, tokens[row])[-len(got) :])
    assert max(sizes) <= most
    vars(model)["_kvgroups"].context.manager.check()
