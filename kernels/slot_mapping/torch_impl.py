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
    request = request.clamp(max=num_reqs - 1)
    row, seq_len = rows[request].long(), seq_lens[request].long()

    for group, table in enumerate(block_tables):
        if modes[group] == "none":
            continue
        block_size = block_sizes[group]
        tokens_per_block = block_size * cp_world_size
        logical_block, offset = positions // tokens_per_block, positions % tokens_per_block
        has_slot = is_real & ((offset // cp_interleave) % cp_world_size == cp_rank)
        local_offset = offset // (cp_world_size * cp_interleave) * cp_interleave + offset % cp_interleave
        if modes[group] == "ring":
            has_slot &= positions >= seq_len - ring_blocks[group] * tokens_per_block
            logical_block = logical_block % ring_blocks[group]
        # The position of a padded token may be anything: it must not index the table.
        block_id = table[row, logical_block.masked_fill(~is_real, 0)].long()
        has_slot &= block_id != NULL_BLOCK_ID
        slots[group, :num_tokens] = (block_id * block_size + local_offset).masked_fill(~has_slot, PAD_SLOT_ID)
    return slots
