"""The slot of every token in every KV-cache group, in one launch.

A program takes a tile of tokens of one group. What it must know of its group, the address of the table
included, is a row of a small tensor on the device: neither a batch of another shape nor another number of
groups compiles anything.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from kvgroups.constants import NULL_BLOCK_ID, PAD_SLOT_ID

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

NULL: tl.constexpr = tl.constexpr(NULL_BLOCK_ID)
PAD: tl.constexpr = tl.constexpr(PAD_SLOT_ID)

TOKENS_PER_PROGRAM = 256


def slot_mapping(
    block_tables,
    rows,
    query_start_loc,
    positions,
    seq_lens,
    *,
    block_sizes,
    modes,
    ring_blocks,
    num_padded_tokens=None,
    cp_world_size=1,
    cp_rank=0,
    cp_interleave=1,
):
    """See `kvgroups.ops.slot_mapping`."""
    num_groups, num_reqs, device = len(block_tables), len(rows), positions.device
    if num_padded_tokens is None:
        num_padded_tokens = len(positions)
    slots = torch.empty(num_groups, num_padded_tokens, dtype=torch.int64, device=device)
    if not slots.numel():
        return slots
    groups = tuple(
        (table.data_ptr(), table.stride(0), 0 if mode == "none" else block_size, ring)
        for table, block_size, mode, ring in zip(block_tables, block_sizes, modes, ring_blocks, strict=True)
    )
    grid = (triton.cdiv(num_padded_tokens, TOKENS_PER_PROGRAM), num_groups)
    _slot_mapping_kernel[grid](
        slots,
        _on_device(groups, device),
        rows,
        query_start_loc,
        positions,
        seq_lens,
        num_reqs,
        num_padded_tokens,
        num_reqs.bit_length(),
        CP_WORLD_SIZE=cp_world_size,
        CP_RANK=cp_rank,
        CP_INTERLEAVE=cp_interleave,
        TILE=TOKENS_PER_PROGRAM,
    )
    return slots


@lru_cache(maxsize=64)
def _on_device(groups, device):
    """(num_groups, 4), int64. Kept: tables live as long as their cache, so a step moves nothing."""
    return torch.tensor(groups, dtype=torch.int64, device=device)


@triton.jit(
    do_not_specialize=["num_reqs", "num_padded_tokens", "num_halvings"],
    do_not_specialize_on_alignment=["rows", "query_start_loc", "positions", "seq_lens"],
)
def _slot_mapping_kernel(
    slots,  # (groups, padded tokens), int64
    groups,  # (groups, 4), int64: table address, table row stride, block size or 0 for no slots, ring blocks
    rows,  # (requests,)
    query_start_loc,  # (requests + 1,)
    positions,  # (tokens,), int64
    seq_lens,  # (requests,)
    num_reqs,
    num_padded_tokens,
    num_halvings,  # enough to single out one of num_reqs + 1
    CP_WORLD_SIZE: tl.constexpr,
    CP_RANK: tl.constexpr,
    CP_INTERLEAVE: tl.constexpr,
    TILE: tl.constexpr,
):
    group = tl.program_id(1)
    table = tl.load(groups + group * 4).to(tl.pointer_type(tl.int32))
    table_row_stride = tl.load(groups + group * 4 + 1)
    block_size = tl.load(groups + group * 4 + 2)
    ring = tl.load(groups + group * 4 + 3)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.full([TILE], PAD, tl.int64)

    if block_size > 0:
        # Token j belongs to the first request that ends after j; a padded token belongs to none.
        low = tl.full([TILE], 0, tl.int32)
        high = tl.full([TILE], 0, tl.int32) + num_reqs
        for _ in range(num_halvings):
            middle = (low + high) // 2
            end = tl.load(query_start_loc + 1 + middle, mask=low < high, other=0)
            is_later = (low < high) & (token >= end)
            low = tl.where(is_later, middle + 1, low)
            high = tl.where(is_later, high, middle)
        has_slot = low < num_reqs
        position = tl.load(positions + token, mask=has_slot, other=0)
        row = tl.load(rows + low, mask=has_slot, other=0).to(tl.int64)
        seq_len = tl.load(seq_lens + low, mask=has_slot, other=0).to(tl.int64)

        # A block of the table stands for block_size tokens on each of the ranks.
        tokens_per_block = block_size * CP_WORLD_SIZE
        logical_block = position // tokens_per_block
        offset = position % tokens_per_block
        if ring > 0:
            # An older token of this step would land on the slot of a younger one.
            has_slot = has_slot & (position >= seq_len - ring * tokens_per_block)
            logical_block = logical_block % ring
        has_slot = has_slot & ((offset // CP_INTERLEAVE) % CP_WORLD_SIZE == CP_RANK)
        offset = offset // (CP_WORLD_SIZE * CP_INTERLEAVE) * CP_INTERLEAVE + offset % CP_INTERLEAVE
        block = tl.load(table + row * table_row_stride + logical_block, mask=has_slot, other=NULL)
        slot = tl.where(block != NULL, block.to(tl.int64) * block_size + offset, PAD)

    tl.store(slots + group.to(tl.int64) * num_padded_tokens + token, slot, mask=token < num_padded_tokens)
