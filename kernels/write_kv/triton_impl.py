"""Store keys and values: a program takes a tile of tokens of one KV head."""

import triton
import triton.language as tl

from kvgroups.kernels.strides import in_units

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

TOKENS_PER_PROGRAM = 16


def refusals(key, value, key_cache, value_cache, slot_mapping, *, layout="HND"):
    """The reasons against this form for a call."""
    return [
        f"needs {name} contiguous over its last dimension, got stride {cache.stride(3)}"
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache))
        if cache.shape[3] > 1 and cache.stride(3) != 1
    ]


def write_kv(key, value, key_cache, value_cache, slot_mapping, *, layout="HND"):
    """See `kvgroups.ops.write_kv`."""
    num_tokens, num_kv_heads, dim = key.shape
    dim_v = value.shape[2]
    if not num_tokens:
        return
    key, value = key.detach(), value.detach()
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    token_dim, head_dim = (1, 2) if layout == "NHD" else (2, 1)
    unit, strides = in_units(dim, (key, 0, 1), (key_cache, 0, token_dim, head_dim))
    unit_v, strides_v = in_units(dim_v, (value, 0, 1), (value_cache, 0, token_dim, head_dim))
    _write_kv_kernel[(triton.cdiv(num_tokens, TOKENS_PER_PROGRAM), num_kv_heads)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        num_tokens,
        *strides,
        *strides_v,
        BLOCK_SIZE=key_cache.shape[token_dim],
        DIM=dim,
        DIM_V=dim_v,
        PADDED_DIM=triton.next_power_of_2(dim),
        PADDED_DIM_V=triton.next_power_of_2(dim_v),
        UNIT=unit,
        UNIT_V=unit_v,
        TILE=TOKENS_PER_PROGRAM,
    )


_STRIDES = ["token_stride", "head_stride", "cache_block_stride", "cache_token_stride", "cache_head_stride"]


# slot_mapping is one group's row of a larger tensor, aligned or not as the number of tokens has it.
@triton.jit(
    do_not_specialize=["num_tokens", *_STRIDES, *(f"{name}_v" for name in _STRIDES)],
    do_not_specialize_on_alignment=["slot_mapping"],
)
def _write_kv_kernel(
    key,  # (tokens, heads, DIM)
    value,  # (tokens, heads, DIM_V)
    key_cache,  # (blocks, BLOCK_SIZE, heads, DIM) in any order of strides
    value_cache,
    slot_mapping,  # (at least tokens,), int64
    num_tokens,
    token_stride,  # strides in units of UNIT and UNIT_V elements
    head_stride,
    cache_block_stride,
    cache_token_stride,
    cache_head_stride,
    token_stride_v,
    head_stride_v,
    cache_block_stride_v,
    cache_token_stride_v,
    cache_head_stride_v,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_V: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
    # Below BLOCK_SIZE lie padding (-1) and the null block, which nobody writes.
    is_stored = slot >= BLOCK_SIZE
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    dim = tl.arange(0, PADDED_DIM)
    mask = is_stored[:, None] & (dim < DIM)[None, :]
    source = token * token_stride + head * head_stride
    target = block * cache_block_stride + offset * cache_token_stride + head * cache_head_stride
    entries = tl.load(key + source[:, None] * UNIT + dim[None, :], mask=mask, other=0.0)
    tl.store(key_cache + target[:, None] * UNIT + dim[None, :], entries, mask=mask)

    dim_v = tl.arange(0, PADDED_DIM_V)
    mask = is_stored[:, None] & (dim_v < DIM_V)[None, :]
    source = token * token_stride_v + head * head_stride_v
    target = block * cache_block_stride_v + offset * cache_token_stride_v + head * cache_head_stride_v
    entries = tl.load(value + source[:, None] * UNIT_V + dim_v[None, :], mask=mask, other=0.0)
    tl.store(value_cache + target[:, None] * UNIT_V + dim_v[None, :], entries, mask=mask)
