"""Operations on block tables: the slots of a step, and what changed since the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvgroups.errors import ShapeError
from kvgroups.ops.checks import ANY, INDEX, AtLeast, check, check_mode, device_of, naming, out_of_range
from kvgroups.ops.dispatch import run

SlotMappingMode = Literal["paged", "ring", "token", "none"]


def slot_mapping(
    block_tables: Sequence[Tensor],
    rows: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    *,
    block_sizes: Sequence[int],
    modes: Sequence[SlotMappingMode],
    ring_blocks: Sequence[int],
    num_padded_tokens: int | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    backend: str = "auto",
) -> Tensor:
    """The slot of each token of this step, in every KV-cache group.

    By the group's mode, with B its block size and R its ring blocks:

    * `paged`: `table[row, pos // B] * B + pos % B`; `token` is the same with B = 1
    * `ring`: `table[row, (pos // B) % R] * B + pos % B` for the last R * B tokens of the row; older tokens of
      this step would land on the same slots and get -1
    * `none`: -1, for groups that store states

    A token whose table entry is the null block gets -1: it has no block because no later query can see it.
    With context parallelism a table entry stands for a virtual block of `B * cp_world_size` tokens dealt out
    to the ranks in runs of `cp_interleave`; a token of another rank gets -1.

    Args:
        block_tables: one per group, (max_num_reqs, width of the group), int32, block ids.
        rows: (num_reqs,), int32 or int64. The table row of each request.
        query_start_loc: (num_reqs + 1,), int32 or int64. Where each request's tokens start in this step; a
            padded request has zero tokens.
        positions: (num_tokens,), int64. May be padded: tokens from `query_start_loc[-1]` on get -1.
        seq_lens: (num_reqs,), int32 or int64, tokens. Counts this step's: `num_computed_tokens + query_len`.
        block_sizes: tokens per block, by group.
        modes: the slot-mapping mode, by group.
        ring_blocks: R by group; 0 where the mode is not `ring`.
        num_padded_tokens: length of the result's rows, `num_tokens` if None. The tail is -1.
        cp_world_size: context-parallel ranks.
        cp_rank: this rank.
        cp_interleave: tokens in a run; divides every block size.

    Returns:
        (num_groups, num_padded_tokens), int64.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or settings that contradict each other.
        OutOfRangeError: for a row or a position that a table does not have (noticed on the CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: the block table of vLLM v1; ring mode and the null-block rule are ours.

    Example:
        A request in blocks 7, 1023 and 5 of 16 tokens: position 34 is at offset 2 of block 5.

        >>> table = torch.tensor([[7, 1023, 5, 0]], dtype=torch.int32)
        >>> rows, starts, seq_lens = torch.tensor([0]), torch.tensor([0, 2]), torch.tensor([36])
        >>> slot_mapping([table], rows, starts, torch.tensor([34, 35]), seq_lens, block_sizes=[16],
        ...              modes=["paged"], ring_blocks=[0], num_padded_tokens=3)
        tensor([[82, 83, -1]])
    """
    device = device_of("positions", positions)
    check("positions", positions, (ANY,), (torch.int64,), device)
    check("rows", rows, (ANY,), INDEX, device)
    num_reqs, num_tokens = len(rows), len(positions)
    check("query_start_loc", query_start_loc, (num_reqs + 1,), INDEX, device)
    check("seq_lens", seq_lens, (num_reqs,), INDEX, device)
    for name, settings in (("block_sizes", block_sizes), ("modes", modes), ("ring_blocks", ring_blocks)):
        if len(settings) != len(block_tables):
            raise ShapeError(
                f"{name}: expected one per block table, {len(block_tables)}, got {len(settings)}. "
                "Pass the settings of every KV-cache group, in one order."
            )
    if not 0 <= cp_rank < cp_world_size or cp_interleave < 1:
        raise ShapeError(
            f"cp_rank: expected a rank below cp_world_size={cp_world_size} and runs of at least one token, "
            f"got cp_rank={cp_rank} and cp_interleave={cp_interleave}."
        )
    for group, (table, block_size, mode, ring) in enumerate(
        zip(block_tables, block_sizes, modes, ring_blocks, strict=True)
    ):
        check_mode(group, block_size, mode, ring, cp_interleave)
        width = AtLeast(ring if mode == "ring" else 0)
        check(f"block_tables[{group}]", table, (ANY, width), (torch.int32,), device)
    if num_padded_tokens is not None and num_padded_tokens < num_tokens:
        raise ShapeError(
            f"num_padded_tokens: expected at least the {num_tokens} of positions, got {num_padded_tokens}."
        )
    try:
        return run(
            "slot_mapping",
            backend,
            block_tables,
            rows,
            query_start_loc,
            positions,
            seq_lens,
            block_sizes=block_sizes,
            modes=modes,
            ring_blocks=ring_blocks,
            num_padded_tokens=num_padded_tokens,
            cp_world_size=cp_world_size,
            cp_rank=cp_rank,
            cp_interleave=cp_interleave,
        )
    except IndexError as error:
        num_rows = min(map(len, block_tables))
        raise out_of_range(error, range(num_rows), "rows", rows=rows) from error


def table_update(table: Tensor, places: Tensor, block_ids: Tensor, *, backend: str = "auto") -> None:
    """Change entries of a block table on its device, in place.

    Args:
        table: (max_num_reqs, width), int32, contiguous. Block ids.
        places: (num_entries,), int64, distinct. `row * width + column` of each changed entry.
        block_ids: (num_entries,), int32. What the entries become.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or a table that is not contiguous.
        OutOfRangeError: for a place that the table does not have (noticed on the CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: ours. vLLM copies whole rows, which grow with the longest sequence and not with what changed.

    Example:
        >>> table = torch.zeros(2, 3, dtype=torch.int32)
        >>> table_update(table, torch.tensor([1, 5]), torch.tensor([7, 9], dtype=torch.int32))
        >>> table.tolist()
        [[0, 7, 0], [0, 0, 9]]
    """
    device = device_of("table", table)
    check("table", table, (ANY, ANY), (torch.int32,), device)
    check("places", places, (ANY,), (torch.int64,), device)
    check("block_ids", block_ids, (len(places),), (torch.int32,), device)
    if not table.is_contiguous():
        raise ShapeError(
            f"table: expected a contiguous {tuple(table.shape)}, got strides {table.stride()}. "
            "Places count through whole rows."
        )
    with naming(range(table.numel()), "places", places=places):
        run("table_update", backend, table, places, block_ids)


def pack_csr(
    block_table: Tensor, seq_lens: Tensor, *, block_size: int, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's page table: the used blocks of all rows, one after another.

    Nothing waits for the device, so the number of used blocks is not known on the host: `kv_indices` has room for
    all, and its valid part ends at `kv_indptr[-1]`. The rest is the null block.

    Args:
        block_table: (num_reqs, width), int32, block ids: this step's rows. Strided anyhow.
        seq_lens: (num_reqs,), int32 or int64, tokens including this step's; at most `width * block_size`.
        block_size: tokens in a block.

    Returns:
        kv_indptr: (num_reqs + 1,), int32. Row i has the entries `[i]` to `[i + 1]` of `kv_indices`.
        kv_indices: (num_reqs * width,), int32, block ids.
        kv_last_page_len: (num_reqs,), int32. Tokens in the last block: `block_size` if it is full, 0 for length 0.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or a block size below 1.
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: FlashInfer, `BatchDecodeWithPagedKVCacheWrapper.plan`. Exact for tables addressed by
        `position // block_size`; a ring has no such order.

    Example: 6, 0 and 4 tokens in blocks of 4 use 2, 0 and 1 blocks.
        >>> table = torch.tensor([[7, 3], [0, 0], [5, 9]], dtype=torch.int32)
        >>> [each.tolist() for each in pack_csr(table, torch.tensor([6, 0, 4]), block_size=4)]
        [[0, 2, 2, 3], [7, 3, 5, 0, 0, 0], [2, 0, 4]]
    """
    _check_rows(block_table, seq_lens, block_size)
    return run("pack_csr", backend, block_table, seq_lens, block_size=block_size)


def pack_intervals(
    block_table: Tensor, seq_lens: Tensor, *, block_size: int, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The used blocks of each row as runs of consecutive ids, in the order of the row.

    A null block owns no bytes and joins no run: each is its own (0, 1), and block 1 after it starts a run.

    Args:
        block_table: (num_reqs, width), int32, block ids: this step's rows. Strided anyhow.
        seq_lens: (num_reqs,), int32 or int64, tokens including this step's; at most `width * block_size`.
        block_size: tokens in a block.

    Returns:
        intervals: (num_reqs, width, 2), int32. Start block and length of each run; the rest is 0.
        num_intervals: (num_reqs,), int32. How many of a row's are runs.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or a block size below 1.
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: ours.

    Example:
        >>> table = torch.tensor([[7, 8, 3, 0]], dtype=torch.int32)
        >>> intervals, num_intervals = pack_intervals(table, torch.tensor([10]), block_size=4)
        >>> intervals.tolist(), num_intervals.tolist()
        ([[[7, 2], [3, 1], [0, 0], [0, 0]]], [2])
    """
    _check_rows(block_table, seq_lens, block_size)
    return run("pack_intervals", backend, block_table, seq_lens, block_size=block_size)


def _check_rows(block_table: Tensor, seq_lens: Tensor, block_size: int) -> None:
    """Raise ShapeError unless each row of the table has a length, and blocks a size."""
    device = device_of("block_table", block_table)
    check("block_table", block_table, (ANY, ANY), (torch.int32,), device)
    check("seq_lens", seq_lens, (len(block_table),), INDEX, device)
    if block_size < 1:
        raise ShapeError(f"block_size: expected at least 1 token, got {block_size}.")


def copy_blocks(blocks: Tensor, sources: Tensor, targets: Tensor, *, backend: str = "auto") -> None:
    """Copy whole blocks of one KV-cache group, all its layers at once, in place.

    A block holds its tokens, or one request's states, for all layers of the group: one copy is one range of bytes.
    The copies of one call are done in any order, so targets are distinct and none of them is a source.

    Args:
        blocks: (num_blocks, block_bytes), uint8, contiguous inside a block, any stride between blocks: the group's
            view of the arena.
        sources: (num_copies,), int32 or int64, block ids. 0: the target is zeroed, and block 0 is not looked at.
        targets: (num_copies,), int32 or int64, block ids. 0: padding, nothing is copied.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or blocks that are not contiguous inside.
        OutOfRangeError: for a block id that blocks do not have (noticed on the CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    The torch form reads the lists on the host: on a GPU that is a device-to-host sync.

    Source: `copy_blocks` of vLLM, which takes one tensor for each layer.

    Example:
        >>> blocks = torch.tensor([[0], [5], [6], [7]], dtype=torch.uint8)
        >>> copy_blocks(blocks, torch.tensor([1, 0, 2]), torch.tensor([3, 2, 0]))
        >>> blocks.flatten().tolist()
        [0, 5, 0, 5]
    """
    device = device_of("blocks", blocks)
    check("blocks", blocks, (ANY, ANY), (torch.uint8,), device)
    if blocks.shape[1] > 1 and blocks.stride(1) != 1:
        raise ShapeError(
            f"blocks: expected blocks contiguous inside, got strides {blocks.stride()}. "
            "Take the group's view of the arena's bytes."
        )
    check("targets", targets, (ANY,), INDEX, device)
    check("sources", sources, (len(targets),), INDEX, device)
    with naming(range(len(blocks)), "block ids", sources=sources, targets=targets):
        run("copy_blocks", backend, blocks, sources, targets)
