"""Block tables in other forms: a program takes a tile of one row (CSR), or one row from end to end (intervals)."""

import torch
import triton
import triton.language as tl

from kvgroups.constants import NULL_BLOCK_ID

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

NULL: tl.constexpr = tl.constexpr(NULL_BLOCK_ID)

BLOCKS_PER_TURN = 1024
ROWS_PER_TURN = 256
"""Rows whose blocks are counted at a time, to find where a row starts."""


def pack_csr(block_table, seq_lens, *, block_size):
    """See `kvgroups.ops.pack_csr`."""
    num_reqs, width = block_table.shape
    kv_indptr = block_table.new_empty(num_reqs + 1)
    kv_indices = block_table.new_empty(num_reqs * width)
    last_page_len = block_table.new_empty(num_reqs)
    if not num_reqs:
        return kv_indptr.zero_(), kv_indices, last_page_len
    _csr_kernel[(num_reqs, max(1, triton.cdiv(width, BLOCKS_PER_TURN)))](
        kv_indptr,
        kv_indices,
        last_page_len,
        block_table,
        seq_lens,
        num_reqs,
        width,
        *block_table.stride(),
        block_size,
        TILE=BLOCKS_PER_TURN,
        ROWS=ROWS_PER_TURN,
    )
    return kv_indptr, kv_indices, last_page_len


def pack_intervals(block_table, seq_lens, *, block_size):
    """See `kvgroups.ops.pack_intervals`."""
    num_reqs, width = block_table.shape
    intervals = torch.zeros(num_reqs, width, 2, dtype=torch.int32, device=block_table.device)
    num_intervals = block_table.new_empty(num_reqs)
    if num_reqs:
        _intervals_kernel[(num_reqs,)](
            intervals,
            num_intervals,
            block_table,
            seq_lens,
            width,
            *block_table.stride(),
            block_size,
            TILE=BLOCKS_PER_TURN,
        )
    return intervals, num_intervals


# The width of a step's rows grows with its longest sequence: nothing may be compiled for one.
_SIZES = ["num_reqs", "width", "row_stride", "column_stride", "block_size"]


@triton.jit(
    do_not_specialize=_SIZES,
    do_not_specialize_on_alignment=["kv_indptr", "kv_indices", "last_page_len", "block_table", "seq_lens"],
)
def _csr_kernel(
    kv_indptr,  # (requests + 1,)
    kv_indices,  # (requests * width,)
    last_page_len,  # (requests,)
    block_table,  # (requests, width)
    seq_lens,  # (requests,)
    num_reqs,
    width,
    row_stride,
    column_stride,
    block_size,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    # Every program counts for itself: the lengths of all rows are a few kilobytes.
    num_before = tl.full([ROWS], 0, tl.int32)
    num_all = tl.full([ROWS], 0, tl.int32)
    for first in range(0, num_reqs, ROWS):
        row = first + tl.arange(0, ROWS)
        seq_len = tl.load(seq_lens + row, mask=row < num_reqs, other=0).to(tl.int32)
        num_blocks = (seq_len + block_size - 1) // block_size
        num_before += tl.where(row < request, num_blocks, 0)
        num_all += num_blocks
    start = tl.sum(num_before, 0)
    total = tl.sum(num_all, 0)
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    num_blocks = (seq_len + block_size - 1) // block_size

    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    blocks = tl.load(
        block_table + request * row_stride + column.to(tl.int64) * column_stride, mask=column < num_blocks, other=NULL
    )
    tl.store(kv_indices + start + column, blocks, mask=column < num_blocks)
    # What lies past the end is dealt out like the table itself, so that each entry has one writer.
    entry = request * width + column
    tl.store(kv_indices + entry, tl.full([TILE], NULL, tl.int32), mask=(column < width) & (entry >= total))
    if tl.program_id(1) == 0:
        tl.store(kv_indptr + request + 1, start + num_blocks)
        tl.store(last_page_len + request, seq_len - tl.maximum(num_blocks - 1, 0) * block_size)
        if request == 0:
            tl.store(kv_indptr, 0)


@triton.jit(
    do_not_specialize=_SIZES[1:],
    do_not_specialize_on_alignment=["num_intervals", "block_table", "seq_lens"],
)
def _intervals_kernel(
    intervals,  # (requests, width, 2), all 0
    num_intervals,  # (requests,)
    block_table,  # (requests, width)
    seq_lens,  # (requests,)
    width,
    row_stride,
    column_stride,
    block_size,
    TILE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    num_blocks = (tl.load(seq_lens + request).to(tl.int32) + block_size - 1) // block_size
    count = tl.full([], 0, tl.int32)
    for first in range(0, num_blocks, TILE):
        column = first + tl.arange(0, TILE)
        is_used = column < num_blocks
        place = block_table + request * row_stride + column.to(tl.int64) * column_stride
        block = tl.load(place, mask=is_used, other=NULL)
        before = tl.load(place - column_stride, mask=is_used & (column > 0), other=NULL)
        after = tl.load(place + column_stride, mask=column + 1 < num_blocks, other=NULL)
        # Before the first block stands, as before any run that follows a null block, a null block.
        begins = is_used & ((before == NULL) | (block != before + 1))
        ends = is_used & ((block == NULL) | (after != block + 1))
        run = intervals + (request * width + count + tl.cumsum(begins.to(tl.int32), 0) - 1) * 2
        tl.store(run, block, mask=begins)
        # Its length is the column behind it less the column of its first block, which other threads may hold.
        tl.atomic_add(run + 1, -column, mask=begins)
        tl.atomic_add(run + 1, column + 1, mask=ends)
        count += tl.sum(begins.to(tl.int32), 0)
    tl.store(num_intervals + request, count)
