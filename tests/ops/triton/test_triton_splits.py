"""A call of few programs is split over its keys, and the parts are merged: nothing of it may show in the result."""

from dataclasses import replace

import pytest
import torch

from kvgroups.errors import ShapeError
from kvgroups.kernels.paged_attention.tiles import TILES, Tile
from kvgroups.ops import dispatch
from tests.ops.attention_cases import NAMED, Case, assert_close, attend, oracle_with_lse

triton_impl = pytest.importorskip("kvgroups.kernels.paged_attention.triton_impl")

pytestmark = pytest.mark.usefixtures("triton_backend")

TINY = Tile(rows=16, keys=16, warps=4, stages=1)

SINK = """peak = tl.where(split == 0, sink, peak)
        total = tl.where(split == 0, 1.0, total)"""

CASES = [
    Case("decode of ragged rows", ((70, 1), (0, 1), (33, 1)), num_padded_tokens=1),
    Case("sinks", ((70, 1), (0, 1)), has_sinks=True),
    Case("window, blocks of 3, softcap", ((70, 1), (20, 1)), window=40, block_size=3, softcap=2.0),
    Case("chunk on a long history, sinks", ((60, 9), (0, 4)), has_sinks=True),
    Case("ring", ((90, 1), (45, 1)), window=40, ring_blocks=10),
    Case("own keys in a later split than the history", ((20, 20),)),
    NAMED["queries before every key"],
    NAMED["more queries than keys exist"],
]


@pytest.fixture
def many_processors(monkeypatch):
    """Split into 16 keys each, as on a GPU that would otherwise idle."""

    def plant(module=triton_impl):
        monkeypatch.setattr(module, "MIN_SPLIT_KEYS", 16)
        monkeypatch.setattr(module, "_hardware", lambda device: ("sm_90", 10_000))

    monkeypatch.setitem(TILES, "sm_90", dict.fromkeys(TILES["sm_90"], TINY))
    plant()
    return plant


@pytest.fixture
def merges(monkeypatch):
    """How many parts each call has merged."""
    counts = []

    def counting(output, lse, parts, part_lses, launch=triton_impl.launch_merge):
        counts.append(len(parts))
        launch(output, lse, parts, part_lses)

    monkeypatch.setattr(triton_impl, "launch_merge", counting)
    return counts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_splits_change_nothing(case, prepared, many_processors, merges):
    batch, reference_output, truth = prepared(case)
    output, lse = attend(batch, "triton", return_lse=True, max_seq_len=max(sum(row[:2]) for row in case.requests))
    assert_close(output, reference_output, truth)
    torch.testing.assert_close(lse.double(), oracle_with_lse(case, batch)[1], atol=2e-6, rtol=0)
    assert merges or case in NAMED.values()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parts_are_fp32(dtype, prepared, many_processors, merges):
    batch, reference_output, truth = prepared(CASES[0], dtype=dtype)
    assert_close(attend(batch, "triton"), reference_output, truth)
    assert merges


@pytest.mark.parametrize("max_seq_len", [None, 32, 71, 4000])
def test_a_wrong_bound_costs_time_only(max_seq_len, prepared, many_processors):
    """It decides how many splits there are; the last one takes whatever is left."""
    batch, reference_output, truth = prepared(CASES[0])
    assert_close(attend(batch, "triton", max_seq_len=max_seq_len), reference_output, truth)


def test_the_same_call_gives_the_same_bits(prepared, many_processors, assert_same_bits):
    batch, *_ = prepared(CASES[1])
    assert_same_bits(attend(batch, "triton"), attend(batch, "triton"))


@pytest.mark.parametrize(
    "old, new, case",
    [
        (SINK, SINK.replace("split == 0", "split >= 0"), CASES[1]),
        ("start = tl.maximum(start, split_start)", "pass", CASES[0]),
        ("split < tl.num_programs(2) - 1", "split < tl.num_programs(2)", CASES[0]),
        ("split.to(tl.int64) * num_query_tokens + token", "token.to(tl.int64)", CASES[0]),
    ],
    ids=["a sink for each split", "splits overlap", "the rest is lost", "one place for all"],
)
def test_a_wrong_split_shows(old, new, case, prepared, many_processors, mutant, monkeypatch):
    wrong = mutant(triton_impl, old, new)
    many_processors(wrong)
    monkeypatch.setitem(dispatch.FORMS["paged_attention"], "triton", dispatch.Form(wrong.paged_attention))
    batch, reference_output, truth = prepared(case)
    with pytest.raises(AssertionError):
        assert_close(attend(batch, "triton", max_seq_len=40), reference_output, truth)


# How a call is cut.


def cut(num_reqs, most_seen, queries=1, heads=(32, 8), max_query_len=None, processors=132):
    query = torch.empty(num_reqs * queries, heads[0], 128, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_impl, "_hardware", lambda device: ("sm_90", processors))
        return triton_impl._cut(query, heads[1], 128, num_reqs, max_query_len, most_seen)


def test_a_tile_with_more_rows_has_more_warps_and_no_limit_of_registers():
    tile = Tile(rows=16, keys=32, warps=4, stages=4, registers=128)
    assert tile.options(rows=16) == {"num_warps": 4, "num_stages": 4, "maxnreg": 128}
    assert tile.options(rows=128) == {"num_warps": 8, "num_stages": 4}
    assert TINY.options(rows=16) == {"num_warps": 4, "num_stages": 1}


def test_amd_is_told_of_no_registers():
    assert all(tile.registers is None for tile in TILES["gfx942"].values())


def test_splits_fill_the_gpu_and_no_more():
    assert cut(1, 8192).num_splits == 16  # 8 KV heads: 132 // 8
    assert cut(8, 8192).num_splits == 2
    assert cut(64, 8192).num_splits == 1
    assert cut(1, 8192, heads=(32, 1)).num_splits == 32  # 256 keys each, and not fewer
    assert cut(1, 10**6, heads=(32, 1)).num_splits == triton_impl.MAX_SPLITS
    assert cut(1, 300).num_splits == 1
    for seen in (511, 512, 513, 100_000):
        each = cut(2, seen)
        assert each.num_splits == 1 or (each.num_splits - 1) * each.split_keys < seen <= each.num_splits * each.split_keys


def test_a_few_tokens_each_are_a_decode():
    """A draft of four tokens fills the rows of a decode where a KV head has four query heads."""
    assert not cut(3, 100, queries=4, max_query_len=4).is_prefill
    assert cut(3, 100, queries=5, max_query_len=5).is_prefill
    assert cut(3, 100, queries=4).is_prefill  # not known: one request may have all twelve


def test_the_longest_context_decides_as_far_as_the_host_knows_it(prepared, many_processors, merges):
    batch, *_ = prepared(Case("short", ((3, 1),)))
    table = torch.nn.functional.pad(batch.operands[5], (0, 17))  # room for 18 blocks of 4 tokens
    batch = replace(batch, operands=(*batch.operands[:5], table))
    for bound in ({"max_seq_len": 71}, {"max_seq_len": 33}, {"window": 33}, {}):
        attend(batch, "triton", **bound)
    assert merges == [3, 2, 2, 3]  # of 32 keys; without a bound, 73 tokens at most


def test_bounds_below_zero_are_refused(prepared):
    batch, *_ = prepared(CASES[0])
    for name in ("max_query_len", "max_seq_len"):
        with pytest.raises(ShapeError, match=f"{name}: expected 0 or more"):
            attend(batch, "triton", **{name: -1})
