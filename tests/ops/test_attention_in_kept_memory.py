"""The torch form of attention gathers into memory that it keeps, in pieces, and copies what lies badly: none of it shows."""

import random
import threading

import pytest
import torch

from kvgroups.kernels import scratch
from kvgroups.kernels.paged_attention import dense, torch_impl
from tests.ops.attention_cases import CASES, DTYPES, LAYOUTS, Case, assert_close, attend, build, oracle

GATHERING = [case for case in CASES if any(row.computed and row.queries for row in case.rows)]

SEVERAL = Case(
    "decodes of one length and of several, and chunks",
    ((21, 1), (40, 1), (21, 1), (21, 1), (3, 1), (30, 9), (0, 5), (21, 1), (60, 20)),
    heads=(8, 4),
    has_sinks=True,
    softcap=2.0,
)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    """Each test begins as a thread does, and leaves nothing behind."""
    monkeypatch.setattr(scratch._kept, "bytes", None, raising=False)


def poison():
    """NaN in all that is kept, whatever the dtype."""
    scratch._kept.bytes.fill_(255)


@pytest.mark.parametrize("case", GATHERING, ids=lambda case: case.name)
def test_nothing_is_read_that_was_not_written_and_no_result_lies_there(case, prepared, assert_same_bits):
    dtype, layout = DTYPES[CASES.index(case) % 3], LAYOUTS[CASES.index(case) % 2]
    batch, *_ = prepared(case, layout, dtype)
    first = attend(batch, "torch")
    poison()
    second = attend(batch, "torch")
    copies = first.clone(), second.clone()
    poison()
    for output, copy in zip((first, second), copies, strict=True):
        assert_same_bits(output, copy)
    assert_same_bits(first, second)


def test_longer_and_shorter_batches_follow_one_another(nan_arena, assert_same_bits):
    """In any order and dtype, each call as if it were the first of its thread."""
    batches = [build(case, "HND", dtype, nan_arena) for case in (*GATHERING[::4], SEVERAL) for dtype in DTYPES]
    alone = []
    for batch in batches:
        scratch._kept.bytes = None
        alone.append(attend(batch, "torch"))
    turns = [*range(len(batches))] * 3
    random.Random(0).shuffle(turns)
    for turn in turns:
        assert_same_bits(attend(batches[turn], "torch"), alone[turn])


def test_two_threads_do_not_meet(nan_arena, assert_same_bits):
    case = Case("long rows", ((300, 1), (300, 1), (200, 40)), dims=(64, 64), block_size=16)
    batches = [build(case, "HND", torch.float32, nan_arena, seed=seed) for seed in (0, 1)]
    expected, together, failures = [attend(batch, "torch") for batch in batches], threading.Barrier(2), []

    def work(batch, output):
        try:
            together.wait(timeout=60)
            for _ in range(50):
                assert_same_bits(attend(batch, "torch"), output)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(batches, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("case", [SEVERAL, *GATHERING[::3]], ids=lambda case: case.name)
def test_pieces_change_nothing(case, num_threads, prepared, monkeypatch):
    """Each request, and as many KV heads as there are threads, on its own; sinks and log-sum-exp by head too."""
    batch, reference_output, truth = prepared(case)
    _, lse = attend(batch, "reference", return_lse=True)
    gathered = []
    gather = torch_impl.Pages.gather

    def counted(self, scratch, requests, *args, heads, **options):
        gathered.append((len(requests), len(heads)))
        return gather(self, scratch, requests, *args, heads=heads, **options)

    monkeypatch.setattr(torch_impl.Pages, "gather", counted)
    monkeypatch.setattr(torch_impl, "GATHERED_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    assert_close(attend(batch, "torch"), reference_output, truth)
    output, got_lse = attend(batch, "torch", return_lse=True)
    assert_close(output, reference_output, truth)
    torch.testing.assert_close(got_lse, lse, atol=2e-6, rtol=0)
    assert {requests for requests, _ in gathered} <= {1}
    assert {heads for _, heads in gathered} <= {num_threads, case.heads[1] % num_threads or num_threads, 1}


def test_decodes_of_one_length_go_together(prepared, monkeypatch):
    batch, reference_output, truth = prepared(SEVERAL)
    batches = []
    batches_of = torch_impl._batches
    monkeypatch.setattr(torch_impl, "_batches", lambda *args: batches.extend(batches_of(*args)) or batches)
    assert_close(attend(batch, "torch"), reference_output, truth)
    requests = sorted([row.request for row in rows] for rows in batches)
    assert requests == [[0, 2, 3, 7], [1], [4], [5], [6], [8]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_a_multiple_of_4096_bytes_apart_are_copied_together(dtype, nan_arena, assert_same_bits, monkeypatch):
    monkeypatch.setattr(torch_impl, "MIN_COPIED_QUERIES", 32)
    dim = 1024 // dtype.itemsize
    case = Case("aliased", ((0, 40), (0, 40), (0, 33), (0, 8)), heads=(8, 4), dims=(dim, dim))
    batch = build(case, "HND", dtype, nan_arena)
    before = [tensor.clone() for tensor in batch.operands[:3]]
    strides = []
    attend_span = torch_impl._attend_span

    def watched(query, keys, values, *args, **options):
        strides.append([query.stride(2), keys.stride(2), values.stride(2)])
        return attend_span(query, keys, values, *args, **options)

    monkeypatch.setattr(torch_impl, "_attend_span", watched)
    attend(batch, "torch")  # what is kept now has been used
    poison()
    output = attend(batch, "torch")
    copy = output.clone()
    poison()
    assert_same_bits(output, copy)
    assert_close(output, attend(batch, "reference"), oracle(case, batch))
    for tensor, clone in zip(batch.operands, before, strict=False):
        assert_same_bits(tensor, clone)
    assert sorted(strides) == sorted(([[dim] * 3] * 2 + [[8 * dim, 4 * dim, 4 * dim]]) * 2)  # 8 tokens are too few


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_lone_prompt_is_not_copied(dtype, prepared, monkeypatch):
    """PyTorch's kernel reads the operands where they lie, and its output is the call's."""
    batch, reference_output, truth = prepared(Case("lone prompt", ((0, 40),), heads=(8, 2), dims=(64, 64)), dtype=dtype)
    attention, addresses = dense.F.scaled_dot_product_attention, []

    def watched(*operands, **options):
        output = attention(*operands, **options)
        addresses.extend(tensor.data_ptr() for tensor in (*operands, output))
        return output

    monkeypatch.setattr(dense.F, "scaled_dot_product_attention", watched)
    output = attend(batch, "torch")
    assert_close(output, reference_output, truth)
    assert addresses == [tensor.data_ptr() for tensor in (*batch.operands[:3], output)]
    assert output.is_contiguous()


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.name)
def test_heads_share_keys_through_a_stride_of_zero_as_elsewhere_than_on_the_cpu(case, prepared, monkeypatch):
    batch, reference_output, truth = prepared(case)
    monkeypatch.setattr(dense, "_has_shared_heads", lambda device: False)
    monkeypatch.setattr(dense, "MAX_PACKED_QUERIES", 1)
    assert_close(attend(batch, "torch"), reference_output, truth)


@pytest.mark.parametrize("wanted", ["queries, keys and values", "sinks"])
def test_gradients_do_not_pass_through_kept_memory(wanted, nan_arena):
    """A graph holds what was gathered until its backward, while other calls go on."""
    case = Case("decode and chunk", ((9, 1), (13, 6)), has_sinks=wanted == "sinks")

    def gradients(calls_between):
        batch = build(case, "HND", torch.float32, nan_arena)
        operands = [batch.options["sinks"]] if case.has_sinks else batch.operands[:3]
        operands = [tensor.requires_grad_() for tensor in operands]
        output = attend(batch, "torch")
        for seed in range(calls_between):
            with torch.no_grad():
                attend(build(case, "HND", torch.float32, nan_arena, seed=seed + 1), "torch")
        return torch.autograd.grad(output.square().sum(), operands)

    for alone, among in zip(gradients(0), gradients(3), strict=True):
        assert alone.abs().sum() > 0
        torch.testing.assert_close(alone, among, atol=0, rtol=0)
