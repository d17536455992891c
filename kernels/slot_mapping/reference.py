"""The slot of every token, one token and one KV-cache group at a time."""

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
    if num_padded_tokens is None:
        num_padded_tokens = len(positions)
    slots = torch.full(
        (len(block_tables), num_padded_tokens), PAD_SLOT_ID, dtype=torch.int64, device=positions.device
    )
    starts = query_start_loc.tolist()
    for request, (row, seq_len) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        for token in range(starts[request], starts[request + 1]):
            position = int(positions[token])
            for group, table in enumerate(block_tables):
                if modes[group] == "none":
                    continue
                block_size = block_sizes[group]
                # A block of the table stands for `block_size` tokens on each of the ranks.
                tokens_per_block = block_size * cp_world_size
                logical_block, offset = divmod(position, tokens_per_block)
                if modes[group] == "ring":
                    if position < seq_len - ring_blocks[group] * tokens_per_block:
                        continue  # a younger token of this very step lands on the same slot
                    logical_block %= ring_blocks[group]
                if (offset // cp_interleave) % cp_world_size != cp_rank:
                    continue  # another rank stores it
                round_of_ranks = offset // (cp_world_size * cp_interleave)
                local_offset = round_of_ranks * cp_interleave + offset % cp_interleave
                block_id = int(table[row, logical_block])
                if block_id != NULL_BLOCK_ID:
                    slots[group, token] = block_id * block_size + local_offset
    return slots
