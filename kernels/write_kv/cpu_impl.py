"""Store keys and values in C++: a decode step has few tokens, and the cost is that of the call."""

from struct import Struct

from kvgroups.kernels.cpu_library import cpu_library
from kvgroups.kernels.signature import addresses as addresses_of

FACTS = Struct("16q")
"""After the addresses of the tensors, `WriteCall` in cpu.cpp."""


def refusals(key, value, key_cache, value_cache, slot_mapping, *, layout="HND"):
    """The reasons against this form for a call."""
    named = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    return [
        f"needs {name} contiguous over its last dimension, got stride {tensor.stride(-1)}"
        for name, tensor in named.items()
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1
    ]


def prepare_write_kv(key, value, key_cache, value_cache, slot_mapping, *, layout="HND"):
    """See `kvgroups.ops.write_kv`: the function for all calls like this one, with only addresses left open."""
    num_tokens, num_heads, _ = key.shape
    num_blocks, block_size = len(key_cache), key_cache.shape[1 if layout == "NHD" else 2]
    facts = FACTS.pack(
        *_strides(key, key_cache, layout),
        *_strides(value, value_cache, layout),
        *(num_tokens, num_heads, num_blocks, block_size),
    )
    run = cpu_library().function("write_kv")

    def write(key, value, key_cache, value_cache, slot_mapping, addresses=None, **settings):
        slots = slot_mapping.contiguous()
        if addresses is None or slots is not slot_mapping:
            addresses = addresses_of(key, value, key_cache, value_cache, slots)
        if run(addresses + facts):
            raise IndexError("slot_mapping holds a slot that the caches do not have")

    return write


def _strides(tokens, cache, layout):
    """`Strides` in cpu.cpp."""
    size = tokens.element_size()
    token, head, _ = tokens.stride()
    block, first, second, _ = cache.stride()
    to_token, to_head = (first, second) if layout == "NHD" else (second, first)
    return token * size, head * size, block * size, to_head * size, to_token * size, tokens.shape[2] * size
