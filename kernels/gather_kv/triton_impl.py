"""Read a dense history out of blocks: a program takes a tile of positions of one request and KV head."""

import triton
import triton.language as tl

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.strides import in_units

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

NULL: tl.constexpr = tl.constexpr(NULL_BLOCK_ID)

TOKENS_PER_PROGRAM = 32


def refusals(key_cache, value_cache, block_table, *, seq_lens, max_seq_len, layout="HND"):
    """The reasons against this form for a call."""
    return [
        f"needs {name} contiguous over its last dimension, got stride {cache.stride(3)}"
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache))
        if cache.shape[3] > 1 and cache.stride(3) != 1
    ]


def gather_kv(key_cache, value_cache, block_table, *, seq_lens, max_seq_len, layout="HND"):
    """See `kvgroups.ops.gather_kv`."""
    return tuple(
        _gather(cache, block_table, seq_lens, max_seq_len, layout) for cache in (key_cache, value_cache)
    )


def _gather(cache, block_table, seq_lens, max_seq_len, layout):
    token_dim, head_dim = (1, 2) if layout == "NHD" else (2, 1)
    num_reqs, num_kv_heads, dim = len(block_table), cache.shape[head_dim], cache.shape[3]
    tokens = cache.new_empty(num_reqs, max_seq_len, num_kv_heads, dim)
    if not tokens.numel():
        return tokens
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    unit, strides = in_units(dim, (cache, 0, token_dim, head_dim))
    _gather_kernel[(triton.cdiv(max_seq_len, TOKENS_PER_PROGRAM), num_reqs, num_kv_heads)](
        tokens,
        cache,
        block_table,
        seq_lens,
        max_seq_len,
        num_kv_heads,
        block_table.stride(0),
        *strides,
        BLOCK_SIZE=cache.shape[token_dim],
        DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        UNIT=unit,
        TILE=TOKENS_PER_PROGRAM,
    )
    return tokens


@triton.jit(
    do_not_specialize=["max_seq_len", "num_kv_heads", "table_stride", "block_stride", "token_stride", "head_stride"],
    do_not_specialize_on_alignment=["block_table", "seq_lens"],
)  # fmt: skip
def _gather_kernel(
    tokens,  # (requests, max_seq_len, heads, DIM), contiguous
    cache,  # (blocks, BLOCK_SIZE, heads, DIM) in any order of strides
    block_table,  # (requests, width), int32
    seq_lens,  # (requests,)
    max_seq_len,
    num_kv_heads,
    table_stride,
    block_stride,  # these three in units of UNIT elements
    token_stride,
    head_stride,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    position = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_position = position < max_seq_len
    is_held = is_position & (position < tl.load(seq_lens + request))
    block = tl.load(
        block_table + request * table_stride + position // BLOCK_SIZE, mask=is_held, other=NULL
    ).to(tl.int64)
    is_held = is_held & (block != NULL)

    dim = tl.arange(0, PADDED_DIM)
    is_dim = (dim < DIM)[None, :]
    source = block * block_stride + (position % BLOCK_SIZE).to(tl.int64) * token_stride + head * head_stride
    # What is not held may be NaN: it is never loaded, not multiplied with a mask.
    entries = tl.load(
        cache + source[:, None] * UNIT + dim[None, :], mask=is_held[:, None] & is_dim, other=0.0
    )
    target = (request * max_seq_len + position) * num_kv_heads + head
    tl.store(tokens + target[:, None] * DIM + dim[None, :], entries, mask=is_position[:, None] & is_dim)
