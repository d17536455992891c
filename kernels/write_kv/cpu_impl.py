"""Store keys and values in C++: a decode step has few tokens, and the cost is that of the call."""

from struct import Struct

from kvgroups.kernels.cpu_library import cpu_library

CALL = Struct("21q")
"""`WriteCall` in cpu.cpp."""


def refusals(key, value, key_cache, value_cache, slot_mapping, *, layout):
    """The reasons against this form for a call."""
    named = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    return [
        f"needs {name} contiguous over its last dimension, got stride {tensor.stride(-1)}"
        for name, tensor in named.items()
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1
    ]


def write_kv(key, value, key_cache, value_cache, slot_mapping, *, layout):
    """See `kvgroups.ops.write_kv`."""
    slots = slot_mapping.contiguous()
    num_tokens, num_heads, _ = key.shape
    num_blocks, block_size = len(key_cache), key_cache.shape[1 if layout == "NHD" else 2]
    call = CALL.pack(
        *_rows(key, key_cache, layout),
        *_rows(value, value_cache, layout),
        slots.data_ptr(),
        *(num_tokens, num_heads, num_blocks, block_size),
    )
    if cpu_library().run("write_kv", call):
        raise IndexError(
            f"slot_mapping: expected slots below {num_blocks * block_size}, got {int(slots[:num_tokens].max())}. "
            "Slots must lie in blocks of the caches that they are passed with."
        )


def _rows(tokens, cache, layout):
    """`Rows` in cpu.cpp."""
    size = tokens.element_size()
    token, head, _ = tokens.stride()
    block, first, second, _ = cache.stride()
    to_token, to_head = (first, second) if layout == "NHD" else (second, first)
    strides = (block * size, to_head * size, to_token * size)
    return tokens.data_ptr(), token * size, head * size, cache.data_ptr(), *strides, tokens.shape[2] * size
