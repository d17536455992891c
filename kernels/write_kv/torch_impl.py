"""Store keys and values with one indexed write each.

Selecting the tokens that have a slot yields a data-dependent shape: on a GPU that is a device-to-host sync.
"""


def write_kv(key, value, key_cache, value_cache, slot_mapping, *, layout="HND"):
    """See `kvgroups.ops.write_kv`."""
    key, value = key.detach(), value.detach()
    block_size = key_cache.shape[1 if layout == "NHD" else 2]
    slot_mapping = slot_mapping[: len(key)]
    # Below block_size lie padding (-1) and the null block, which nobody writes.
    token = (slot_mapping >= block_size).nonzero().squeeze(1)
    slot = slot_mapping[token]
    # The caches are strided over blocks, so a slot is not an address: index by block and offset.
    block, offset = slot // block_size, slot % block_size
    where = (block, offset) if layout == "NHD" else (block, slice(None), offset)
    key_cache[where] = key[token]
    value_cache[where] = value[token]
