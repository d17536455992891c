"""Attention over blocks plus the step's own keys and values: FlashAttention's loop, over pages and then over both.

A program takes a tile of consecutive queries of one request with all g query heads of one KV head: m = queries
* g rows of one matrix, so that each key is read once for all of them. It walks the keys that these queries can
see, first those in blocks, then the step's own, and keeps a running softmax in fp32. Keys before the window or
the attention chunk of its first query, and after its last query, are never visited; where every row sees every
key of a tile nothing is masked. A call of few programs splits each over its keys, and merges the parts.

Letters: m rows, n keys of a tile, d and v the widths of keys and values, g query heads per KV head.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.merge_attention.triton_impl import launch_merge
from kvgroups.kernels.paged_attention.tiles import TILES, Tile
from kvgroups.kernels.strides import in_units

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

NULL: tl.constexpr = tl.constexpr(NULL_BLOCK_ID)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

MAX_DIM = 512
MAX_HEADS_PER_KV_HEAD = 128
NO_LIMIT = 2**31 - 1
"""A window or attention chunk so long that it holds every position, and a split that holds every key."""

MIN_SPLIT_KEYS = 256
"""Fewer keys are not worth a program of their own, and a part to be merged."""

MAX_SPLITS = 64


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
    for name, pages in (("key_cache", key_cache), ("value_cache", value_cache)):
        if pages is not None and pages.shape[3] > 1 and pages.stride(3) != 1:
            reasons.append(f"needs {name} contiguous over its last dimension, got stride {pages.stride(3)}")
    given = (query, key, value) if sinks is None else (query, key, value, sinks)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        reasons.append("computes no gradients: call it under torch.no_grad()")
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
    block_size = key_cache.shape[token_dim]
    unit, strides = in_units(dim, (query, 0, 1), (key, 0, 1), (key_cache, 0, token_dim, head_dim))
    unit_v, strides_v = in_units(dim_v, (value, 0, 1), (value_cache, 0, token_dim, head_dim))

    g = num_heads // num_kv_heads
    most_keys = len(key) + (block_table.shape[1] * block_size if has_history else 0)
    limits = (NO_LIMIT if ring_blocks else most_keys, max_seq_len, window, chunk)
    most_seen = min(limit for limit in limits if limit is not None)
    cut = _cut(query, num_kv_heads, max(dim, dim_v), num_reqs, max_query_len, most_seen)
    parts, part_lses = output, lse
    if cut.num_splits > 1:
        parts = query.new_empty(cut.num_splits, *output.shape, dtype=torch.float32)
        part_lses = query.new_empty(cut.num_splits, *output.shape[:2], dtype=torch.float32)
    _attention_kernel[(cut.num_tiles, num_kv_heads, cut.num_splits)](
        parts,
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
        parts if part_lses is None else part_lses,
        num_query_tokens,
        num_reqs,
        num_reqs.bit_length(),
        num_heads,
        scale,
        NO_LIMIT if window is None else window,
        NO_LIMIT if chunk is None else chunk,
        1.0 if softcap is None else softcap,
        ring_blocks,
        cut.split_keys,
        block_table.stride(0),
        *strides,
        *strides_v,
        G=g,
        DIM=dim,
        DIM_V=dim_v,
        BLOCK_SIZE=block_size,
        HAS_HISTORY=has_history,
        HAS_RING=ring_blocks > 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_LSE=part_lses is not None,
        HAS_WHOLE_TILES=cut.is_prefill,
        UNIT=unit,
        UNIT_V=unit_v,
        ROWS=cut.rows,
        KEYS=cut.tile.keys,
        PADDED_DIM=_padded(dim),
        PADDED_DIM_V=_padded(dim_v),
        UPCAST=INTERPRETED and query.dtype == torch.bfloat16,
        **cut.tile.options(cut.rows),
    )
    if cut.num_splits > 1:
        launch_merge(output, lse, parts, part_lses)
    return (output, lse) if return_lse else output


class _Cut(NamedTuple):
    """How a call is cut into programs."""

    tile: Tile
    is_prefill: bool
    rows: int
    num_tiles: int
    num_splits: int
    split_keys: int


def _cut(query, num_kv_heads, dim, num_reqs, max_query_len, most_seen):
    """The programs for `num_reqs` requests none of whose queries sees more than `most_seen` keys."""
    num_query_tokens, num_heads, _ = query.shape
    target, num_processors = _hardware(query.device)
    g = num_heads // num_kv_heads
    decode, prefill = (
        TILES[target][kind, query.dtype.itemsize, max(64, _padded(dim))] for kind in ("decode", "prefill")
    )
    if max_query_len is None:
        max_query_len = 1 if num_query_tokens <= num_reqs else num_query_tokens
    is_prefill = max_query_len > max(1, decode.rows // g)
    tile = prefill if is_prefill else decode
    rows = max(tile.rows, triton.next_power_of_2(g))
    queries_per_tile = rows // g
    # Request i takes tiles from query_start_loc[i] // queries_per_tile + i on: as many as it needs, whatever
    # the lengths, which the host does not know. Padded tokens are one request more. Other programs end at once.
    num_tiles = num_query_tokens // queries_per_tile + num_reqs + 1
    num_busy = num_kv_heads * max(num_query_tokens // queries_per_tile, min(num_query_tokens, num_reqs), 1)
    num_splits = min(MAX_SPLITS, num_processors // num_busy, most_seen // MIN_SPLIT_KEYS)
    if num_splits < 2:
        return _Cut(tile, is_prefill, rows, num_tiles, 1, NO_LIMIT)
    # A split is a number of keys, not a share of a request's: long and short requests then take equal steps.
    split_keys = triton.cdiv(triton.cdiv(most_seen, num_splits), tile.keys) * tile.keys
    return _Cut(tile, is_prefill, rows, num_tiles, triton.cdiv(most_seen, split_keys), split_keys)


@cache
def _hardware(device):
    """The target whose tiles serve a device, and how many programs it runs at the least at once."""
    if INTERPRETED:
        return "sm_90", 1
    driver = triton.runtime.driver.active
    target = driver.get_current_target()
    properties = driver.utils.get_device_properties(driver.get_current_device())
    if target.backend == "hip":
        name = "gfx942"
    else:
        name = "sm_90" if target.arch >= 90 else "sm_80"
    return name, properties["multiprocessor_count"]


def _padded(dim):
    """Matrix instructions take at least 16."""
    return max(16, triton.next_power_of_2(dim))


_STRIDES = ["cache_block_stride", "cache_token_stride", "cache_head_stride"]


@triton.jit(
    do_not_specialize=[
        "num_query_tokens", "num_reqs", "num_halvings", "num_heads", "window", "chunk", "ring_blocks", "split_keys",
        "table_stride", "query_token_stride", "query_head_stride", "key_token_stride", "key_head_stride",
        *_STRIDES, "value_token_stride", "value_head_stride", *(f"{name}_v" for name in _STRIDES),
    ],
    do_not_specialize_on_alignment=[
        "block_table", "query_start_loc", "kv_start_loc", "num_computed_tokens", "sinks", "lse",
    ],
)  # fmt: skip
def _attention_kernel(
    output,  # (splits, query tokens, heads, DIM_V), contiguous
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
    lse,  # (splits, query tokens, heads), contiguous, if HAS_LSE
    num_query_tokens,
    num_reqs,
    num_halvings,  # enough to single out one of num_reqs + 1
    num_heads,
    scale,
    window,  # NO_LIMIT if there is none, and so for chunk
    chunk,
    softcap,
    ring_blocks,
    split_keys,  # a multiple of KEYS, or NO_LIMIT
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
    HAS_WHOLE_TILES: tl.constexpr,  # whether tiles of which every row sees every key have a loop of their own
    UNIT: tl.constexpr,
    UNIT_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    UPCAST: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // G
    # The last tiles of a request see the most keys: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

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

    # Some row sees keys from start to stop - 1; every row sees those from whole_start to whole_stop - 1.
    first_position = first_query + to_position
    last_position = tl.minimum(first_query + QUERIES, query_stop) - 1 + to_position
    start = _first_seen(tl.maximum(first_position, 0), window, chunk)
    stop = last_position + 1
    whole_start = _first_seen(tl.maximum(last_position, 0), window, chunk)
    whole_stop = first_position + 1
    split_start = start // KEYS * KEYS + split * split_keys
    if split < tl.num_programs(2) - 1:
        stop = tl.minimum(stop, split_start + split_keys)
    start = tl.maximum(start, split_start)

    query_cell = token.to(tl.int64) * query_token_stride + head.to(tl.int64) * query_head_stride
    q = _load(query, query_cell * UNIT, is_row, DIM, PADDED_DIM, UPCAST)
    weighted = tl.full([ROWS, PADDED_DIM_V], 0.0, tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    if HAS_SINKS:
        # A sink is a key that every query sees and that has no value. It counts in the first split.
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        peak = tl.where(split == 0, sink, peak)
        total = tl.where(split == 0, 1.0, total)

    if HAS_HISTORY:
        pages = key_cache + kv_head.to(tl.int64) * cache_head_stride * UNIT
        pages_v = value_cache + kv_head.to(tl.int64) * cache_head_stride_v * UNIT_V
        table_row = block_table + request.to(tl.int64) * table_stride  # type: ignore[attr-defined]  # a tensor by now
        # Tiles begin at multiples of KEYS, so that a tile lies in one block where blocks are large.
        begin = start // KEYS * KEYS
        end = tl.minimum(stop, num_computed)
        whole = tl.cdiv(tl.maximum(whole_start, start), KEYS) * KEYS
        num_whole = tl.maximum(tl.minimum(whole_stop, end) // KEYS * KEYS - whole, 0)
        for IS_EDGE in tl.static_range(0 if HAS_WHOLE_TILES else 1, 2):
            # The whole tiles, then those before and behind them.
            for visited in range(
                begin if IS_EDGE else whole,
                end - num_whole if IS_EDGE and HAS_WHOLE_TILES else (end if IS_EDGE else whole + num_whole),
                KEYS,
            ):
                at = visited
                if IS_EDGE and HAS_WHOLE_TILES:
                    at = visited + tl.where(visited >= whole, num_whole, 0)
                stored = at + tl.arange(0, KEYS)
                # What no query of the tile sees may be NaN: it is not loaded.
                is_stored = (stored >= start) & (stored < end)
                block = _blocks(table_row, at, end, ring_blocks, BLOCK_SIZE, KEYS, HAS_RING)
                is_stored = is_stored & (block != NULL)
                offset = stored % BLOCK_SIZE
                cell = block * cache_block_stride + offset * cache_token_stride
                cell_v = block * cache_block_stride_v + offset * cache_token_stride_v
                weighted, total, peak = _attend(
                    q,
                    _load(pages, cell * UNIT, is_stored, DIM, PADDED_DIM, UPCAST),
                    _load(pages_v, cell_v * UNIT_V, is_stored, DIM_V, PADDED_DIM_V, UPCAST),
                    _is_seen(stored, is_stored, position, first_seen, IS_EDGE),
                    weighted,
                    total,
                    peak,
                    scale,
                    softcap,
                    HAS_SOFTCAP,
                )

    step_keys = key + kv_head.to(tl.int64) * key_head_stride * UNIT
    step_values = value + kv_head.to(tl.int64) * value_head_stride * UNIT_V
    begin = tl.maximum(start, num_computed)
    whole = begin + tl.cdiv(tl.maximum(whole_start - begin, 0), KEYS) * KEYS
    num_whole = tl.maximum(tl.minimum(whole_stop, stop) - whole, 0) // KEYS * KEYS
    for IS_EDGE in tl.static_range(0 if HAS_WHOLE_TILES else 1, 2):
        for visited in range(
            begin if IS_EDGE else whole,
            stop - num_whole if IS_EDGE and HAS_WHOLE_TILES else (stop if IS_EDGE else whole + num_whole),
            KEYS,
        ):
            at = visited
            if IS_EDGE and HAS_WHOLE_TILES:
                at = visited + tl.where(visited >= whole, num_whole, 0)
            fresh = at + tl.arange(0, KEYS)
            is_fresh = fresh < stop
            key_token = (key_start + fresh - num_computed).to(tl.int64)
            cell = key_token * key_token_stride
            cell_v = key_token * value_token_stride
            weighted, total, peak = _attend(
                q,
                _load(step_keys, cell * UNIT, is_fresh, DIM, PADDED_DIM, UPCAST),
                _load(step_values, cell_v * UNIT_V, is_fresh, DIM_V, PADDED_DIM_V, UPCAST),
                _is_seen(fresh, is_fresh, position, first_seen, IS_EDGE),
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
    output_row = (split.to(tl.int64) * num_query_tokens + token) * num_heads + head
    tl.store(
        output + output_row[:, None] * DIM_V + dim_v[None, :],
        result.to(output.dtype.element_ty),
        mask=is_row[:, None] & (dim_v < DIM_V)[None, :],
    )
    if HAS_LSE:
        # A padded token has no request, and no sink.
        has_seen = (total > 0) & (request < num_reqs)
        log_total = (peak + tl.log2(tl.where(has_seen, total, 1.0))) / LOG2_E
        tl.store(lse + output_row, tl.where(has_seen, log_total, float("-inf")), mask=is_row)


@triton.jit
def _first_seen(position, window, chunk):
    """The lowest position that a query at `position` sees."""
    return tl.maximum(position - window + 1, position // chunk * chunk)


@triton.jit
def _is_seen(key_position, is_key, position, first_seen, IS_EDGE: tl.constexpr):
    """Which row sees which key: (m, n) from (n,), (n,), (m,), (m,), or (1, n) where all rows see the same."""
    is_seen = is_key[None, :]
    if IS_EDGE:
        is_past = key_position[None, :] <= position[:, None]
        is_seen = is_seen & is_past & (key_position[None, :] >= first_seen[:, None])
    return is_seen


@triton.jit
def _blocks(
    table_row, at, end, ring_blocks, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, HAS_RING: tl.constexpr
):
    """The blocks of the KEYS positions from `at` on, (n,) int64; NULL from `end` on.

    Where blocks and tiles allow, an entry of the table is read once for all keys in it.
    """
    if BLOCK_SIZE % KEYS == 0:
        first = at
    elif KEYS % BLOCK_SIZE == 0:
        first = at + tl.arange(0, KEYS // BLOCK_SIZE) * BLOCK_SIZE
    else:
        first = at + tl.arange(0, KEYS)
    logical_block = first // BLOCK_SIZE
    if HAS_RING:
        logical_block = logical_block % ring_blocks
    block = tl.load(table_row + logical_block, mask=first < end, other=NULL).to(tl.int64)
    if BLOCK_SIZE % KEYS == 0:
        block = tl.full([KEYS], 0, tl.int64) + block
    elif KEYS % BLOCK_SIZE == 0:
        block = tl.reshape(tl.broadcast_to(block[:, None], [KEYS // BLOCK_SIZE, BLOCK_SIZE]), [KEYS])
    return block


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
    is_seen,  # (m, n) or (1, n)
    weighted,  # (m, v): sum of exp2(score - peak) * v
    total,  # (m,): sum of exp2(score - peak)
    peak,  # (m,): the highest score so far; scores are in units of log 2
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
):
    """Add a tile of keys to the running softmax."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_SOFTCAP:
        scores = (softcap * LOG2_E) * _tanh(scores * (scale / softcap))
    else:
        scores = scores * (scale * LOG2_E)
    scores = tl.where(is_seen, scores, float("-inf"))
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
