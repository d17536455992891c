"""The slot of every token, vectorised over tokens, without a device-to-host sync."""

import torch

from kvgroups.constants import NULL_BLOCK_ID, PAD_SLOT_ID


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
    num_tokens, num_reqs = len(positions), len(rows)
    if num_padded_tokens is None:
        num_padded_tokens = num_tokens
    slots = torch.full(
        (len(block_tables), num_padded_tokens), PAD_SLOT_ID, dtype=torch.int64, device=positions.device
    )
    if num_reqs == 0 or num_tokens == 0:
        return slots

    # Token j belongs to the first request that ends after j; a padded token belongs to none.
    token = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=positions.device)
    request = torch.searchsorted(query_start_loc[1:], token, right=True)
    is_real = request < num_reqs
    request = request.clamp_(max=num_reqs - 1)
    row = rows.index_select(0, request).long()
    # The position of a padded token may be anything: it must not index a table.
    positions = positions.masked_fill(~is_real, 0)

    for group, table in enumerate(block_tables):
        if modes[group] == "none":
            continue
        block_size = block_sizes[group]
        tokens_per_block = block_size * cp_world_size
        logical_block, offset = positions // tokens_per_block, positions % tokens_per_block
        has_slot = is_real
        if cp_world_size > 1:
            has_slot = has_slot & ((offset // cp_interleave) % cp_world_size == cp_rank)
            offset = offset // (cp_world_size * cp_interleave) * cp_interleave + offset % cp_interleave
        if modes[group] == "ring":
            seq_len = seq_lens.index_select(0, request)
            has_slot = has_slot & (positions >= seq_len - ring_blocks[group] * tokens_per_block)
            logical_block = logical_block % ring_blocks[group]
        block_id = table[row, logical_block].long()
        has_slot = has_slot & (block_id != NULL_BLOCK_ID)
        slots[group, :num_tokens] = torch.where(has_slot, block_id * block_size + offset, PAD_SLOT_ID)
    return slots
