"""Store keys and values, one token at a time."""


def write_kv(key, value, key_cache, value_cache, slot_mapping, *, layout="HND"):
    """See `kvgroups.ops.write_kv`."""
    key, value = key.detach(), value.detach()
    block_size = key_cache.shape[1 if layout == "NHD" else 2]
    for token, slot in enumerate(slot_mapping[: len(key)].tolist()):
        if slot < block_size:
            continue  # padding, or the null block, which nobody writes
        block, offset = divmod(slot, block_size)
        if layout == "NHD":
            key_cache[block, offset] = key[token]
            value_cache[block, offset] = value[token]
        else:
            key_cache[block, :, offset] = key[token]
            value_cache[block, :, offset] = value[token]
