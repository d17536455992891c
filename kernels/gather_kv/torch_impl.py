"""Read a dense history out of blocks with one gather per cache, without a device-to-host sync."""

import torch

from kvgroups.constants import NULL_BLOCK_ID


def gather_kv(key_cache, value_cache, block_table, *, seq_lens, max_seq_len, layout="HND"):
    """See `kvgroups.ops.gather_kv`."""
    block_size = key_cache.shape[1 if layout == "NHD" else 2]
    block_ids = block_table[:, : -(-max_seq_len // block_size)]
    position = torch.arange(max_seq_len, device=block_table.device)
    is_held = (position < seq_lens[:, None]) & (block_ids[:, position // block_size] != NULL_BLOCK_ID)
    return tuple(_gather(cache, block_ids, is_held, layout) for cache in (key_cache, value_cache))


def _gather(cache, block_ids, is_held, layout):
    """The tokens at `block_ids` (num_reqs, num_blocks), zero where not `is_held` (num_reqs, max_seq_len)."""
    blocks = cache.index_select(0, block_ids.flatten())
    if layout == "HND":
        blocks = blocks.transpose(1, 2)
    tokens = blocks.unflatten(0, block_ids.shape).flatten(1, 2)[:, : is_held.shape[1]]
    # Not a product with the mask: what is not held may be NaN, and 0 * NaN is NaN.
    return tokens.masked_fill(~is_held[:, :, None, None], 0)
