"""Attention over blocks plus the step's own keys and values: FlashAttention's loop, twice.

A program takes a tile of consecutive queries of one request with all g query heads of one KV head: m = queries
* g rows of one matrix, so that each key is read once for all of them. It walks the keys that these queries can
see, first those in blocks, then the step's own, and keeps a running softmax in fp32. Keys before the window or
the attention chunk of its first query, and after its last query, are never visited.

Letters: m rows, n keys of a tile, d and v the widths of keys and values, g query heads per KV head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.strides import in_units

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

NULL: tl.constexpr = tl.constexpr(NULL_BLOCK_ID)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

MAX_DIM = 512
MAX_HEADS_PER_KV_HEAD = 128
NO_LIMIT = 2**31 - 1
"""A window or attention chunk so long that it holds every position."""


class Tile(NamedTuple):
    """How one program is shaped."""

    rows: int
    """Rows m: queries times query heads per KV head, a power of two of at least 16. More if g is larger."""
    keys: int
    """Keys n of one turn of the loops, a power of two of at least 16."""
    warps: int
    stages: int


DECODE = {
    (2, 64): Tile(16, 64, 4, 2),
    (2, 128): Tile(16, 64, 4, 2),
    (2, 256): Tile(16, 32, 4, 2),
    (2, 512): Tile(16, 16, 4, 2),
    (4, 64): Tile(16, 32, 4, 1),
    (4, 128): Tile(16, 32, 8, 1),
    (4, 256): Tile(16, 16, 4, 1),
    (4, 512): Tile(16, 16, 8, 1),
}
"""(bytes of the dtype, wider of K and V padded to a power of two) -> tile, for steps with at most as many queries
as requests. Up to 256 wide they compile for sm_80, sm_90 and gfx942 without spilling, in under 100 KiB of shared
memory (64 KiB on gfx942). Nothing is measured yet."""

PREFILL = {
    (2, 64): Tile(64, 64, 4, 2),
    (2, 128): Tile(64, 32, 4, 2),
    (2, 256): Tile(64, 32, 8, 2),
    (2, 512): Tile(32, 16, 8, 1),
    (4, 64): Tile(32, 32, 4, 1),
    (4, 128): Tile(32, 16, 8, 1),
    (4, 256): Tile(16, 16, 8, 1),
    (4, 512): Tile(16, 16, 8, 1),
}
"""The same for steps of more queries."""


def refusals(
    query,
    key,
    value,
    key_cache,
    value_cache,
    block_table,
    *,
    query_start_loc,
    num_computed_tokens,
    kv_start_loc=None,
    scale,
    window=None,
    chunk=None,
    softcap=None,
    sinks=None,
    layout="HND",
    ring_blocks=0,
    return_lse=False,
    max_query_len=None,
    max_seq_len=None,
):
    """The reasons against this form for a call."""
    reasons = []
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        reasons.append(f"needs float32, bfloat16 or float16, got {query.dtype}")
    if max(key.shape[2], value.shape[2]) > MAX_DIM:
        reasons.append(f"needs head dims of at most {MAX_DIM}, got {key.shape[2]} and {value.shape[2]}")
    if query.shape[1] // key.shape[1] > MAX_HEADS_PER_KV_HEAD:
        reasons.append(
            f"needs at most {MAX_HEADS_PER_KV_HEAD} query heads per KV head, got {query.shape[1] // key.shape[1]}"
        )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache is not None and cache.shape[3] > 1 and cache.stride(3) != 1:
            reasons.append(f"needs {name} contiguous over its last dimension, got stride {cache.stride(3)}")
    return reasons


def paged_attention(
    query,
    key,
    value,
    key_cache,
    value_cache,
    block_table,
    *,
    query_start_loc,
    num_computed_tokens,
    kv_start_loc=None,
    scale,
    window=None,
    chunk=None,
    softcap=None,
    sinks=None,
    layout="HND",
    ring_blocks=0,
    return_lse=False,
    max_query_len=None,
    max_seq_len=None,
):
    """See `kvgroups.ops.paged_attention`."""
    num_query_tokens, num_heads, dim = query.shape
    num_kv_heads, dim_v = value.shape[1:]
    num_reqs = len(num_computed_tokens)
    output = query.new_empty(num_query_tokens, num_heads, dim_v)
    lse = query.new_empty(num_query_tokens, num_heads, dtype=torch.float32) if return_lse else None
    if not num_query_tokens * num_heads * dim_v:
        return (output, lse) if return_lse else output
    query, key, value = (
        tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value)
    )
    has_history = key_cache is not None
    if has_history:
        token_dim, head_dim = (1, 2) if layout == "NHD" else (2, 1)
        block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    else:
        # Pointers and strides that are never followed.
        key_cache, value_cache, block_table = key[:, :, None], value[:, :, None], num_computed_tokens[:, None]
        token_dim, head_dim = 2, 1
    unit, strides = in_units(dim, (query, 0, 1), (key, 0, 1), (key_cache, 0, token_dim, head_dim))
    unit_v, strides_v = in_units(dim_v, (value, 0, 1), (value_cache, 0, token_dim, head_dim))

    g = num_heads // num_kv_heads
    tile = _tile(query.dtype, max(dim, dim_v), is_decode=num_query_tokens <= num_reqs)
    rows = max(tile.rows, triton.next_power_of_2(g))
    queries_per_tile = rows // g
    # Request i takes tiles from query_start_loc[i] // queries_per_tile + i on: as many as it needs, whatever
    # the lengths, which the host does not know. Padded tokens are one request more. Other programs end at once.
    num_tiles = num_query_tokens // queries_per_tile + num_reqs + 1
    _attention_kernel[(num_tiles, num_kv_heads)](
        output,
        query,
        key,
        value,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        query_start_loc if kv_start_loc is None else kv_start_loc,
        num_computed_tokens,
        query if sinks is None else sinks,
        output if lse is None else lse,
        num_query_tokens,
        num_reqs,
        num_reqs.bit_length(),
        num_heads,
        scale,
        NO_LIMIT if window is None else window,
        NO_LIMIT if chunk is None else chunk,
        1.0 if softcap is None else softcap,
        ring_blocks,
        block_table.stride(0),
        *strides,
        *strides_v,
        G=g,
        DIM=dim,
        DIM_V=dim_v,
        BLOCK_SIZE=key_cache.shape[token_dim],
        HAS_HISTORY=has_history,
        HAS_RING=ring_blocks > 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_LSE=return_lse,
        UNIT=unit,
        UNIT_V=unit_v,
        ROWS=rows,
        KEYS=tile.keys,
        PADDED_DIM=_padded(dim),
        PADDED_DIM_V=_padded(dim_v),
        UPCAST=INTERPRETED and query.dtype == torch.bfloat16,
        num_warps=max(tile.warps, rows // 16),  # many rows where a KV head has many query heads
        num_stages=tile.stages,
    )
    return (output, lse) if return_lse else output


def _tile(dtype, dim, *, is_decode):
    return (DECODE if is_decode else PREFILL)[dtype.itemsize, max(64, _padded(dim))]


def _padded(dim):
    """Matrix instructions take at least 16."""
    return max(16, triton.next_power_of_2(dim))


_STRIDES = ["cache_block_stride", "cache_token_stride", "cache_head_stride"]


@triton.jit(
    do_not_specialize=[
        "num_query_tokens", "num_reqs", "num_halvings", "num_heads", "window", "chunk", "ring_blocks",
        "table_stride", "query_token_stride", "query_head_stride", "key_token_stride", "key_head_stride",
        *_STRIDES, "value_token_stride", "value_head_stride", *(f"{name}_v" for name in _STRIDES),
    ],
    do_not_specialize_on_alignment=[
        "block_table", "query_start_loc", "kv_start_loc", "num_computed_tokens", "sinks", "lse",
    ],
)  # fmt: skip
def _attention_kernel(
    output,  # (query tokens, heads, DIM_V), contiguous
    query,  # (query tokens, heads, DIM)
    key,  # (tokens, KV heads, DIM)
    value,  # (tokens, KV heads, DIM_V)
    key_cache,  # (blocks, BLOCK_SIZE, KV heads, DIM) in any order of strides
    value_cache,
    block_table,  # (requests, width), int32
    query_start_loc,  # (requests + 1,)
    kv_start_loc,  # (requests + 1,)
    num_computed_tokens,  # (requests,)
    sinks,  # (heads,), if HAS_SINKS
    lse,  # (query tokens, heads), contiguous, if HAS_LSE
    num_query_tokens,
    num_reqs,
    num_halvings,  # enough to single out one of num_reqs + 1
    num_heads,
    scale,
    window,  # NO_LIMIT if there is none, and so for chunk
    chunk,
    softcap,
    ring_blocks,
    table_stride,
    query_token_stride,  # from here on in units of UNIT elements
    query_head_stride,
    key_token_stride,
    key_head_stride,
    cache_block_stride,
    cache_token_stride,
    cache_head_stride,
    value_token_stride,  # from here on in units of UNIT_V elements
    value_head_stride,
    cache_block_stride_v,
    cache_token_stride_v,
    cache_head_stride_v,
    G: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    HAS_RING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    UPCAST: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // G
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)

    # The last request whose tiles begin at or before this one; num_reqs stands for the padded tokens.
    request = 0
    high = num_reqs
    for _ in range(num_halvings):
        middle = (request + high + 1) // 2
        is_begun = tl.load(query_start_loc + middle).to(tl.int32) // QUERIES + middle <= tile
        request = tl.where(is_begun, middle, request)
        high = tl.where(is_begun, high, middle - 1)
    query_start = tl.load(query_start_loc + request).to(tl.int32)
    query_stop = num_query_tokens
    key_start = 0
    num_keys = 0
    num_computed = 0
    if request < num_reqs:
        query_stop = tl.load(query_start_loc + request + 1).to(tl.int32)
        key_start = tl.load(kv_start_loc + request).to(tl.int32)
        num_keys = tl.load(kv_start_loc + request + 1).to(tl.int32) - key_start
        num_computed = tl.load(num_computed_tokens + request).to(tl.int32)
    first_query = query_start + (tile - query_start // QUERIES - request) * QUERIES
    if first_query >= query_stop:
        return

    # Right-aligned: the request's last query sits on its last key. Before the first key positions are negative.
    row = tl.arange(0, ROWS)
    token = first_query + row // G
    head = kv_head * G + row % G
    is_row = (row < QUERIES * G) & (token < query_stop)
    to_position = num_computed + num_keys - query_stop
    position = token + to_position
    first_seen = _first_seen(tl.maximum(position, 0), window, chunk)
    start = _first_seen(tl.maximum(first_query + to_position, 0), window, chunk)
    stop = tl.minimum(first_query + QUERIES, query_stop) + to_position

    query_cell = token.to(tl.int64) * query_token_stride + head.to(tl.int64) * query_head_stride
    q = _load(query, query_cell * UNIT, is_row, DIM, PADDED_DIM, UPCAST)
    weighted = tl.full([ROWS, PADDED_DIM_V], 0.0, tl.float32)
    if HAS_SINKS:
        # A sink is a key that every query sees and that has no value.
        peak = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)

    if HAS_HISTORY:
        pages = key_cache + kv_head.to(tl.int64) * cache_head_stride * UNIT
        pages_v = value_cache + kv_head.to(tl.int64) * cache_head_stride_v * UNIT_V
        table_row = block_table + request.to(tl.int64) * table_stride  # type: ignore[attr-defined]  # a tensor by now
        history_stop = tl.minimum(stop, num_computed)
        for at in range(start // KEYS * KEYS, history_stop, KEYS):
            stored = at + tl.arange(0, KEYS)
            # What no query of the tile sees may be NaN: it is not loaded.
            is_stored = (stored >= start) & (stored < history_stop)
            logical_block = stored // BLOCK_SIZE
            if HAS_RING:
                logical_block = logical_block % ring_blocks
            block = tl.load(table_row + logical_block, mask=is_stored, other=NULL).to(tl.int64)
            is_stored = is_stored & (block != NULL)
            offset = stored % BLOCK_SIZE
            cell = block * cache_block_stride + offset * cache_token_stride
            cell_v = block * cache_block_stride_v + offset * cache_token_stride_v
            weighted, total, peak = _attend(
                q,
                _load(pages, cell * UNIT, is_stored, DIM, PADDED_DIM, UPCAST),
                _load(pages_v, cell_v * UNIT_V, is_stored, DIM_V, PADDED_DIM_V, UPCAST),
                _is_seen(stored, is_stored, position, first_seen),
                weighted,
                total,
                peak,
                scale,
                softcap,
                HAS_SOFTCAP,
            )

    step_keys = key + kv_head.to(tl.int64) * key_head_stride * UNIT
    step_values = value + kv_head.to(tl.int64) * value_head_stride * UNIT_V
    for at in range(tl.maximum(start, num_computed), stop, KEYS):
        fresh = at + tl.arange(0, KEYS)
        is_fresh = fresh < stop
        key_token = (key_start + fresh - num_computed).to(tl.int64)
        weighted, total, peak = _attend(
            q,
            _load(step_keys, key_token * key_token_stride * UNIT, is_fresh, DIM, PADDED_DIM, UPCAST),
            _load(
                step_values, key_token * value_token_stride * UNIT_V, is_fresh, DIM_V, PADDED_DIM_V, UPCAST
            ),
            _is_seen(fresh, is_fresh, position, first_seen),
            weighted,
            total,
            peak,
            scale,
            softcap,
            HAS_SOFTCAP,
        )

    # A query that has seen nothing has a total of 0, and yields 0.
    result = weighted / tl.where(total > 0, total, 1.0)[:, None]
    dim_v = tl.arange(0, PADDED_DIM_V)
    output_cell = (token.to(tl.int64) * num_heads + head) * DIM_V
    tl.store(
        output + output_cell[:, None] + dim_v[None, :],
        result.to(output.dtype.element_ty),
        mask=is_row[:, None] & (dim_v < DIM_V)[None, :],
    )
    if HAS_LSE:
        # A padded token has no request, and no sink.
        has_seen = (total > 0) & (request < num_reqs)
        log_total = (peak + tl.log2(tl.where(has_seen, total, 1.0))) / LOG2_E
        tl.store(
            lse + token.to(tl.int64) * num_heads + head,
            tl.where(has_seen, log_total, float("-inf")),
            mask=is_row,
        )


@triton.jit
def _first_seen(position, window, chunk):
    """The lowest position that a query at `position` sees."""
    return tl.maximum(position - window + 1, position // chunk * chunk)


@triton.jit
def _is_seen(key_position, is_key, position, first_seen):
    """Which row sees which key: (m, n) from (n,), (n,), (m,), (m,)."""
    is_past = key_position[None, :] <= position[:, None]
    return is_key[None, :] & is_past & (key_position[None, :] >= first_seen[:, None])


@triton.jit
def _load(base, offset, is_there, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, UPCAST: tl.constexpr):
    """Vectors of DIM elements at `base + offset`, as rows; zeros for those that are not there."""
    dim = tl.arange(0, PADDED_DIM)
    entries = tl.load(
        (base + offset)[:, None] + dim[None, :], mask=is_there[:, None] & (dim < DIM)[None, :], other=0.0
    )
    if UPCAST:
        entries = entries.to(tl.float32)
    return entries


@triton.jit
def _attend(
    q,  # (m, d)
    k,  # (n, d)
    v,  # (n, v)
    is_seen,  # (m, n)
    weighted,  # (m, v): sum of exp2(score - peak) * v
    total,  # (m,): sum of exp2(score - peak)
    peak,  # (m,): the highest score so far; scores are in units of log 2
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
):
    """Add a tile of keys to the running softmax."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap * _tanh(scores / softcap)
    scores = tl.where(is_seen, scores * LOG2_E, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # While nothing is seen the peak is -inf, and -inf - -inf is NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    weighted = tl.dot(weights.to(v.dtype), v, weighted * fade[:, None], input_precision="ieee")
    return weighted, total * fade + tl.sum(weights, 1), new_peak


@triton.jit
def _tanh(x):
    """Where exp overflows it is still right: 1 - 2 / inf."""
    return 1 - 2 / (tl.exp(2 * x) + 1)
