"""The log-sum-exp that attention returns, and attention over parts of a context joined by it."""

from dataclasses import replace

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import BackendUnavailableError, ShapeError
from kvgroups.kernels.merge_attention import reference
from kvgroups.ops import dispatch
from tests.ops.attention_cases import DTYPES, NAMED, Case, assert_close, attend, oracle, oracle_with_lse

NOTHING = float("-inf")

WITH_LSE = [
    "prefill of ragged rows",
    "prefill, chunk and decode in one batch",
    "decode of ragged rows",
    "more queries than keys exist",
    "queries before every key",
    "empty rows between full ones",
    "padded tokens behind the last row",
    "window not a multiple of the block",
    "softcap",
    "sinks in a window, as gpt-oss",
    "ring with slack, many times around",
    "V wider than K, with sinks",
    "only empty rows",
]


def assert_same_lse(got, truth):
    """-inf in the same places, and elsewhere as near as fp32 sums come."""
    assert got.dtype == torch.float32 and got.shape == truth.shape
    torch.testing.assert_close(got.double(), truth, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", WITH_LSE)
def test_lse_is_the_logarithm_of_the_denominator(name, prepared, backend):
    batch, reference_output, truth = prepared(NAMED[name])
    output, lse = attend(batch, backend, return_lse=True)
    assert_close(output, reference_output, truth)
    assert_same_lse(lse, oracle_with_lse(NAMED[name], batch)[1])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_lse_is_fp32_whatever_the_dtype(dtype, prepared, backend):
    case = NAMED["sinks"]
    batch, reference_output, truth = prepared(case, dtype=dtype)
    output, lse = attend(batch, backend, return_lse=True)
    assert_close(output, reference_output, truth)
    assert_same_lse(lse, oracle_with_lse(case, batch)[1])


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_lse_of_a_query_without_keys_and_of_padding(has_sinks, backend):
    """A query behind null blocks has its sink, a padded token has nothing."""
    cache = torch.full((2, 2, 4, 8), float("nan"))
    output, lse = ops.paged_attention(
        torch.ones(4, 2, 8),
        torch.ones(0, 2, 8),
        torch.ones(0, 2, 8),
        cache,
        cache,
        torch.zeros(1, 3, dtype=torch.int32),
        query_start_loc=torch.tensor([0, 3]),
        num_computed_tokens=torch.tensor([9]),
        kv_start_loc=torch.tensor([0, 0]),
        scale=1.0,
        sinks=torch.tensor([0.5, -2.0]) if has_sinks else None,
        return_lse=True,
        backend=backend,
    )
    assert (output == 0).all()
    assert lse[:3].tolist() == [[0.5, -2.0] if has_sinks else [NOTHING] * 2] * 3
    assert (lse[3] == NOTHING).all()


# Parts of a context. A part holds some of the blocks, and null blocks in place of the others.


def parts_of(batch, num_parts):
    """The batch as each of `num_parts` ranks sees it, who are dealt the blocks in turn; the first has the sinks."""
    *others, table = batch.operands
    logical_block = torch.arange(table.shape[1])
    for rank in range(num_parts):
        held = torch.where(logical_block % num_parts == rank, table, 0)
        options = batch.options if rank == 0 else {**batch.options, "sinks": None}
        yield replace(batch, operands=(*others, held), options=options)


STORED = ((18, 5, 0), (1, 1, 0), (23, 1, 0))
"""Chunk and decodes, this step's keys already in blocks."""


@pytest.mark.parametrize(
    "case",
    [
        Case("mixed", STORED),
        Case("window, sinks", STORED, window=9, has_sinks=True),
        Case("attention chunk, softcap", STORED, chunk=12, softcap=1.5),
    ],
    ids=lambda case: case.name,
)
def test_ranks_that_hold_every_third_block_merge_into_the_whole(case, prepared, backend):
    batch, whole, truth = prepared(case)
    parts = [attend(part, backend, return_lse=True) for part in parts_of(batch, num_parts=3)]
    output, lse = ops.merge_attention(*(torch.stack(each) for each in zip(*parts, strict=True)), backend=backend)
    assert_close(output, whole, truth)
    assert_same_lse(lse, oracle_with_lse(case, batch)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_shared_prefix_is_attended_once_for_all_that_share_it(dtype, prepared, backend):
    """A cascade: three decodes on one prefix of eight tokens, and on the rest of each with the step's own key."""
    case = Case("shared prefix", ((13, 1), (9, 1), (17, 1)))
    batch, _, _ = prepared(case, dtype=dtype)
    query, key, value, key_cache, value_cache, table = batch.operands
    table[:, :2] = table[0, :2]
    sequences = tuple(
        tuple(torch.cat([first[:8], own[8:]]) for first, own in zip(batch.sequences[0], pair, strict=True))
        for pair in batch.sequences
    )
    truth, whole = oracle(case, replace(batch, sequences=sequences)), attend(batch, "reference")

    alike = {"scale": batch.options["scale"], "return_lse": True, "backend": backend}
    no_keys = torch.zeros(4, dtype=torch.int64)
    over_prefix = ops.paged_attention(
        query, key[:0], value[:0], key_cache, value_cache, table[:, :2], query_start_loc=torch.arange(4),
        num_computed_tokens=torch.full((3,), 8), kv_start_loc=no_keys, **alike,
    )  # fmt: skip
    tails = ops.paged_attention(
        query, key, value, key_cache, value_cache, table[:, 2:], query_start_loc=torch.arange(4),
        num_computed_tokens=batch.options["num_computed_tokens"] - 8, **alike,
    )  # fmt: skip
    output, _ = ops.merge_attention(
        *(torch.stack(each) for each in zip(over_prefix, tails, strict=True)), backend=backend
    )
    assert_close(output, whole, truth)


def some_parts(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 3, 2, 5, generator=generator).to(dtype)
    lses = torch.randn(4, 3, 2, generator=generator) * 3
    lses[1, 0] = lses[3, :, 1] = lses[:, 2] = NOTHING
    outputs[lses == NOTHING] = float("nan")
    return outputs, lses


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forms_merge_alike(dtype, backend):
    outputs, lses = some_parts(dtype)
    output, lse = ops.merge_attention(outputs, lses, backend=backend)
    expected, expected_lse = reference.merge_attention(outputs.double().nan_to_num(), lses.double())
    assert_close(output, reference.merge_attention(outputs, lses)[0], expected)
    assert_same_lse(lse, expected_lse)
    assert (output[2] == 0).all() and (lse[2] == NOTHING).all()


def test_one_part_is_itself(backend):
    outputs, lses = some_parts()
    output, lse = ops.merge_attention(outputs[:1], lses[:1], backend=backend)
    torch.testing.assert_close(output[:2], outputs[0, :2])
    assert torch.equal(lse, lses[0])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda outputs, lses: (outputs.nan_to_num().mean(0), lses.logsumexp(0)),
        lambda outputs, lses: ((outputs.nan_to_num() * lses.softmax(0)[..., None]).sum(0), lses.logsumexp(0)),
        lambda outputs, lses: (reference.merge_attention(outputs, lses)[0], lses.amax(0)),
        lambda outputs, lses: reference.merge_attention(outputs[1:], lses[1:]),
    ],
    ids=["plain mean", "NaN where nothing is seen", "the largest, not the sum", "first part lost"],
)
def test_a_wrong_merge_fails(wrong, monkeypatch):
    monkeypatch.setitem(dispatch.FORMS["merge_attention"], "torch", dispatch.Form(wrong))
    with pytest.raises(AssertionError):
        test_forms_merge_alike(torch.float32, "torch")


def test_what_cannot_be_merged_is_refused(triton_backend):
    outputs, lses = some_parts()
    with pytest.raises(ShapeError, match=r"lses: expected \(4, 3, 2\) float32 or float64 on cpu, got \(3, 3, 2\)"):
        ops.merge_attention(outputs, lses[1:])
    with pytest.raises(ShapeError, match=r"outputs: expected \(>=1, \*, \*, \*\) floating"):
        ops.merge_attention(outputs[:0], lses[:0])
    with pytest.raises(BackendUnavailableError, match=r"float64; needs lses in float32.*backend='torch' serves it"):
        ops.merge_attention(outputs.double(), lses.double(), backend=triton_backend)
