"""Read a dense history out of blocks, one token at a time."""

from kvgroups.constants import NULL_BLOCK_ID


def gather_kv(key_cache, value_cache, block_table, *, seq_lens, max_seq_len, layout="HND"):
    """See `kvgroups.ops.gather_kv`."""
    heads_dim, block_dim = (2, 1) if layout == "NHD" else (1, 2)
    block_size, num_kv_heads = key_cache.shape[block_dim], key_cache.shape[heads_dim]
    shape = (len(block_table), max_seq_len, num_kv_heads)
    key = key_cache.new_zeros(*shape, key_cache.shape[3])
    value = value_cache.new_zeros(*shape, value_cache.shape[3])
    for request, seq_len in enumerate(seq_lens.tolist()):
        for position in range(min(seq_len, max_seq_len)):
            logical_block, offset = divmod(position, block_size)
            block = int(block_table[request, logical_block])
            if block == NULL_BLOCK_ID:
                continue
            where = (block, offset) if layout == "NHD" else (block, slice(None), offset)
            key[request, position] = key_cache[where]
            value[request, position] = value_cache[where]
    return key, value
