"""Block tables in other forms, vectorised over all entries, without a device-to-host sync."""

import torch
import torch.nn.functional as F

from kvgroups.constants import NULL_BLOCK_ID


def pack_csr(block_table, seq_lens, *, block_size):
    """See `kvgroups.ops.pack_csr`."""
    num_reqs, width = block_table.shape
    num_pages = _num_blocks(seq_lens, block_size)
    kv_indptr = F.pad(num_pages.cumsum(0), (1, 0))
    last_page_len = torch.where(num_pages > 0, seq_lens - (num_pages - 1) * block_size, 0).to(torch.int32)
    if not block_table.numel():
        return kv_indptr.to(torch.int32), block_table.new_empty(0), last_page_len
    # Entry j belongs to the last row that starts at or before it; past the end there is no such row.
    entry = torch.arange(num_reqs * width, device=block_table.device)
    row = torch.searchsorted(kv_indptr[1:], entry, right=True).clamp(max=num_reqs - 1)
    column = (entry - kv_indptr[row]).clamp(max=width - 1)
    kv_indices = block_table[row, column].masked_fill(entry >= kv_indptr[-1], NULL_BLOCK_ID)
    return kv_indptr.to(torch.int32), kv_indices, last_page_len


def pack_intervals(block_table, seq_lens, *, block_size):
    """See `kvgroups.ops.pack_intervals`."""
    num_reqs, width = block_table.shape
    column = torch.arange(width, device=block_table.device)
    is_used = column < _num_blocks(seq_lens, block_size)[:, None]
    before = F.pad(block_table[:, : max(width - 1, 0)], (1, 0))[:, :width]
    begins = is_used & ((column == 0) | (block_table != before + 1) | (before == NULL_BLOCK_ID))
    run = (begins.cumsum(1) - 1).clamp(min=0)
    # Each entry adds to its run: the first one its block id, every one a block.
    starts, lengths = (
        block_table.new_zeros(num_reqs, width).scatter_add_(1, run, each.to(torch.int32))
        for each in (block_table * begins, is_used)
    )
    return torch.stack([starts, lengths], dim=2), begins.sum(1, dtype=torch.int32)


def _num_blocks(seq_lens, block_size):
    """How many blocks each sequence uses, (num_reqs,), int64."""
    return -(-seq_lens.long() // block_size)
