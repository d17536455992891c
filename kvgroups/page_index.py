"""A block table in the form that a kernel wants: CSR, intervals, and the fill of the last page.

The dense form is `BlockTable.gather` and the per-token form is `BlockTable.compute_slot_mapping`.
"Page" is FlashInfer's word for a block and appears only where its interface says it.
"""

from __future__ import annotations

import numpy as np
import torch

from kvgroups import ops
from kvgroups.constants import NULL_BLOCK_ID


def last_page_len(seq_lens: torch.Tensor, block_size: int) -> torch.Tensor:
    """Tokens in the last block of each sequence: a full block has `block_size`, an empty sequence 0.

    Args:
        seq_lens: (num_reqs,), integer, tokens including this step's.
        block_size: tokens in a block.

    Returns:
        (num_reqs,), int32, on the device of `seq_lens`.

    Source: FlashInfer's `kv_last_page_len`, which leaves the empty sequence undefined.

    Example:
        >>> last_page_len(torch.tensor([0, 32, 33]), block_size=16).tolist()
        [0, 16, 1]
    """
    in_last = (seq_lens - 1) % block_size + 1  # 1 to block_size; also 16 for length 0
    return torch.where(seq_lens > 0, in_last, 0).to(torch.int32)


def csr(
    block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashInfer's page table: the used blocks of all rows, one after another.

    Nothing waits for the device, so the number of used blocks is not known on the host: `kv_indices` has
    room for all, and its valid part ends at `kv_indptr[-1]`. The rest is the null block.

    Args:
        block_table: (num_reqs, width), int32, block ids: this step's rows.
        seq_lens: (num_reqs,), integer, tokens including this step's; at most `width * block_size`.
        block_size: tokens in a block.

    Returns:
        kv_indptr: (num_reqs + 1,), int32. Row i has the entries `[i]` to `[i + 1]` of `kv_indices`.
        kv_indices: (num_reqs * width,), int32, block ids.
        kv_last_page_len: (num_reqs,), int32, tokens, as `last_page_len` gives.

    Source: FlashInfer, `BatchDecodeWithPagedKVCacheWrapper.plan`. Exact for tables addressed by
    `position // block_size`; a ring has no such order.

    Example: 20, 0 and 4 tokens in blocks of 4 use 5, 0 and 1 blocks; only the last row's tail is left out.
        >>> table = torch.tensor([[7, 3, 9, 2, 8], [0, 0, 0, 0, 0], [5, 0, 0, 0, 0]], dtype=torch.int32)
        >>> kv_indptr, kv_indices, kv_last_page_len = csr(table, torch.tensor([20, 0, 4]), block_size=4)
        >>> kv_indptr.tolist(), kv_indices[:6].tolist(), kv_last_page_len.tolist()
        ([0, 5, 5, 6], [7, 3, 9, 2, 8, 5], [4, 0, 4])
    """
    return ops.pack_csr(block_table, seq_lens, block_size=block_size)


def intervals(row_ids: np.ndarray) -> list[tuple[int, int]]:
    """The blocks of one row as runs of consecutive ids, in the order of the row.

    Args:
        row_ids: (num_blocks,), integer, block ids.

    Returns:
        (start block, length) of each run. A null block owns no bytes and joins no run: each is its own
        `(0, 1)`, so that a copy may skip it and block 1 after it still starts a run.

    Example:
        >>> intervals(np.array([7, 8, 9, 3, 4, 0, 0, 1]))
        [(7, 3), (3, 2), (0, 1), (0, 1), (1, 1)]
    """
    ids = np.asarray(row_ids)
    if ids.size == 0:
        return []
    breaks = (np.diff(ids) != 1) | (ids[:-1] == NULL_BLOCK_ID)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(np.append(starts, ids.size))
    return [(int(ids[start]), int(length)) for start, length in zip(starts, lengths, strict=True)]
