"""Block tables as CSR and as intervals: every form against the naive one and against what the rows say."""

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import ShapeError
from kvgroups.kernels.page_index import triton_impl
from kvgroups.page_index import csr, intervals

POISON = 2**30
"""Behind the used blocks of a row: an entry that must not be read into a result."""

CASES = {
    "rows of every fill": ([20, 0, 4, 3, 1], 4),
    "full last pages": ([16, 8, 4], 4),
    "one row": ([7], 16),
    "empty rows at both ends": ([0, 9, 0], 2),
    "only empty rows": ([0, 0], 4),
    "blocks of one token": ([5, 2], 1),
    "a block size that is no power of two": ([50, 49, 48], 12),
}


def rows(seq_lens, block_size, width=24):
    """A table cut out of a wider one: runs, null blocks, a random order, and poison behind what is used."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.full((len(seq_lens), 3, width), POISON, dtype=torch.int32)
    table = wide[:, 1]
    for row, seq_len in zip(table, seq_lens, strict=True):
        used = -(-seq_len // block_size)
        ids = torch.randperm(40, generator=generator)[:used] + 1
        ids[: used // 2] = torch.arange(used // 2) + 50
        ids[used // 3 : used // 2] = 0
        row[:used] = ids
    return table, torch.tensor(seq_lens, dtype=torch.int32)


@pytest.mark.parametrize("case", CASES)
def test_csr(case, backend):
    seq_lens, block_size = CASES[case]
    table, lengths = rows(seq_lens, block_size)
    indptr, indices, last = ops.pack_csr(table, lengths, block_size=block_size, backend=backend)
    assert indptr.dtype == indices.dtype == last.dtype == torch.int32
    num_blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
    assert indptr.tolist() == [sum(num_blocks[:row]) for row in range(len(num_blocks) + 1)]
    packed = [block for row, count in zip(table.tolist(), num_blocks, strict=True) for block in row[:count]]
    assert indices.tolist() == packed + [0] * (table.numel() - len(packed))
    assert last.tolist() == [(seq_len - 1) % block_size + 1 if seq_len else 0 for seq_len in seq_lens]
    for ours, theirs in zip((indptr, indices, last), csr(table, lengths, block_size), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("case", CASES)
def test_intervals(case, backend):
    seq_lens, block_size = CASES[case]
    table, lengths = rows(seq_lens, block_size)
    runs, counts = ops.pack_intervals(table, lengths.long(), block_size=block_size, backend=backend)
    assert runs.dtype == counts.dtype == torch.int32
    for row, seq_len, own, count in zip(table, seq_lens, runs.tolist(), counts.tolist(), strict=True):
        expected = intervals(row[: -(-seq_len // block_size)].numpy())
        assert [tuple(run) for run in own[:count]] == expected
        assert own[count:] == [[0, 0]] * (len(own) - count)


def test_runs_across_the_tiles_of_a_kernel(monkeypatch, triton_backend):
    """A turn of its loop holds fewer blocks than the rows: runs begin, go on and end at every edge."""
    monkeypatch.setattr(triton_impl, "BLOCKS_PER_TURN", 4)
    monkeypatch.setattr(triton_impl, "ROWS_PER_TURN", 2)
    table, lengths = rows([24, 17, 0, 23, 1], 1)
    table[0] = torch.arange(24) + 5
    table[1, 2:9] = torch.tensor([7, 8, 9, 10, 0, 1, 2])
    for operation in (ops.pack_csr, ops.pack_intervals):
        expected = operation(table, lengths, block_size=1, backend="reference")
        got = operation(table, lengths, block_size=1, backend=triton_backend)
        assert all(map(torch.equal, got, expected))


def test_a_million_tokens_on_an_idle_arena_are_one_interval(backend):
    table = torch.arange(1, 65_537, dtype=torch.int32)[None]
    runs, counts = ops.pack_intervals(table, torch.tensor([1 << 20]), block_size=16, backend=backend)
    assert counts.tolist() == [1] and runs[0, 0].tolist() == [1, 65_536] and not runs[0, 1:].any()


def test_no_rows(backend):
    table, lengths = torch.zeros(0, 8, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    indptr, indices, last = ops.pack_csr(table, lengths, block_size=4, backend=backend)
    assert indptr.tolist() == [0] and indices.shape == last.shape == (0,)
    runs, counts = ops.pack_intervals(table, lengths, block_size=4, backend=backend)
    assert runs.shape == (0, 8, 2) and counts.shape == (0,)


@pytest.mark.parametrize("operation", [ops.pack_csr, ops.pack_intervals])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_table": torch.zeros(2, 3)}, r"block_table: expected \(\*, \*\) int32 on cpu, got \(2, 3\) float32"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, r"seq_lens: expected \(2,\) int32 or int64"),
        ({"block_size": 0}, r"block_size: expected at least 1 token, got 0"),
    ],
)
def test_a_wrong_call_is_refused(operation, changed, message):
    arguments = {"block_table": torch.zeros(2, 3, dtype=torch.int32), "seq_lens": torch.tensor([1, 2]), "block_size": 4}
    operation(**arguments)
    with pytest.raises(ShapeError, match=message):
        operation(**arguments | changed)
