"""Attention over blocks plus the step's own keys and values, batched: long prompts on the CPU, and everything where
the C++ form was not built.

Shapes in this file: b requests, t queries each, n keys each, h KV heads, g query heads per KV head, d dim. Queries go as
(b, h * g, t, d), keys as (b, h, n, d) and values as (b, h, n, d_v); outputs come as (b, t, h * g, d_v).

A step is cut into batches of requests that look alike, and each batch takes the cheapest way:

* decode (one query on its own key): the visible blocks of requests of one length in one gather;
* fresh (no history): the step's own tensors, no gather, no mask where plain causal attention will do;
* anything else (a chunk on a history, fewer queries than keys): one request at a time.

What is gathered goes into memory that the thread keeps (`kvgroups.kernels.scratch`), in pieces of some requests or of some
KV heads, so that it is read again while it is near. No result lies in that memory.

Start locations and computed counts are read once, with `.tolist()`: on a GPU that is a device-to-host sync.
"""

from collections import defaultdict
from typing import NamedTuple

import torch

from kvgroups.kernels.paged_attention import dense
from kvgroups.kernels.paged_attention.dense import attend, nothing
from kvgroups.kernels.paged_attention.gather import Pages
from kvgroups.kernels.paged_attention.rule import Rule
from kvgroups.kernels.scratch import KEPT_BYTES, Scratch

MAX_BIAS_ELEMENTS = 1 << 22
"""Queries are taken in tiles so that a bias, or the scores where they are explicit, stays under this."""

MAX_TILE = 256
"""Queries in a tile with a bias at most: a longer one computes more of what it masks."""

GATHERED_BYTES = 8 << 20
"""Keys and values that are gathered at once, for each thread: in pieces much smaller the calls cost more than is saved by
finding them in a cache, and much larger ones are not found there."""

ALIASED_BYTES = 4096
"""Tokens this far apart, or a multiple of it, fall into the same few lines of a cache."""

MIN_WINDOWED_TILE = 64
"""Queries in a tile of a narrow window: fewer are not worth a call."""

MIN_COPIED_KEYS, MIN_COPIED_QUERIES = 32, 512
"""Keys and queries from which on copying them closer together costs less than their being aliased."""


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
    rule = Rule(scale, window, chunk, softcap, sinks, return_lse)
    pages = None if key_cache is None else Pages(key_cache, value_cache, block_table, layout, ring_blocks)
    batches = _batches(_rows(query_start_loc, kv_start_loc, num_computed_tokens), pages, rule)
    given = (query, key, value) if sinks is None else (query, key, value, sinks)
    has_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    with Scratch(query.device, is_kept=not has_graph) as scratch:
        if len(batches) == 1 and _covers(batches[0], query.shape[0]):
            output = _attend_batch(batches[0], query, key, value, pages, rule, scratch).flatten(0, 1)
        else:
            output = nothing(query[:, :, None], value.shape[2], rule, has_sinks=False)[:, 0]
            for rows in batches:
                attended = _attend_batch(rows, query, key, value, pages, rule, scratch)
                _put(output, [row.query_start for row in rows], attended)
    if return_lse:
        return output[..., :-1].to(query.dtype), output[..., -1].contiguous()
    return output.contiguous()


class _Row(NamedTuple):
    """One request's share of the step, as host integers."""

    request: int
    query_start: int
    query_len: int
    key_start: int
    key_len: int
    num_computed: int

    @property
    def is_fresh(self):
        return self.num_computed == 0 and self.query_len == self.key_len

    @property
    def is_decode(self):
        return self.query_len == self.key_len == 1


class _Extent(NamedTuple):
    """What a decode sees: tokens, counted from the start of its first gathered block, the last of them its own."""

    first_block: int
    seen: range

    @classmethod
    def of(cls, row, pages, rule):
        first = rule.first_visible(row.num_computed)
        block = first // pages.block_size
        start = block * pages.block_size
        return cls(block, range(first - start, row.num_computed + 1 - start))


def _rows(query_start_loc, kv_start_loc, num_computed_tokens):
    """The requests that have queries in this step."""
    query_starts = query_start_loc.tolist()
    key_starts = query_starts if kv_start_loc is None else kv_start_loc.tolist()
    for request, num_computed in enumerate(num_computed_tokens.tolist()):
        query_start, query_stop = query_starts[request : request + 2]
        key_start, key_stop = key_starts[request : request + 2]
        if query_stop > query_start:
            yield _Row(
                request, query_start, query_stop - query_start, key_start, key_stop - key_start, num_computed
            )


def _batches(rows, pages, rule):
    """Lists of rows, each in the order of their requests, that can be attended together: what all of them see lies at the
    same places, so nothing is padded and nothing masked. (Decodes of unlike length, padded to the longest, were slower
    than one by one, short ones too.)"""
    fresh, decodes, batches = defaultdict(list), defaultdict(list), []
    for row in rows:
        if row.is_fresh:
            fresh[row.query_len].append(row)
        elif row.is_decode:
            decodes[_Extent.of(row, pages, rule).seen].append(row)
        else:
            batches.append([row])
    batches += fresh.values()
    for seen, alike in decodes.items():
        bytes_of_row = pages.num_blocks(seen.stop) * pages.block_size * pages.num_heads * pages.bytes_of_token
        most = len(alike) if len(alike) == 1 else max(1, int(_gathered_bytes(pages.table.device) // bytes_of_row))
        batches += [alike[first : first + most] for first in range(0, len(alike), most)]
    return batches


def _covers(rows, num_tokens):
    """Whether the queries of rows of one length are all of the step's, in their order."""
    length = rows[0].query_len
    return len(rows) * length == num_tokens and all(row.query_start == i * length for i, row in enumerate(rows))


def _attend_batch(rows, query, key, value, pages, rule, scratch):
    """The outputs of rows of one kind and length."""
    if rows[0].is_fresh:
        return _attend_fresh(rows, query, key, value, rule, scratch)
    if rows[0].is_decode:
        return _attend_decode(rows, query, key, value, pages, rule, scratch)
    return _attend_chunk(rows[0], query, key, value, pages, rule, scratch)


def _attend_fresh(rows, query, key, value, rule, scratch):
    """Prompts of one length without history: nothing is gathered."""
    length, key_starts = rows[0].query_len, [row.key_start for row in rows]
    query = _take(query, [row.query_start for row in rows], length)
    keys, values = _take(key, key_starts, length), _take(value, key_starts, length)
    query, keys, values = _apart(query, keys, values, scratch)
    return _attend_span(query, keys, values, rule, query_position=0, key_position=0)


def _apart(query, keys, values, scratch):
    """The same operands, copied where their tokens are a bad distance apart."""
    operands = [query, keys, values]
    copied = [
        i
        for i, fewest in enumerate((MIN_COPIED_QUERIES, MIN_COPIED_KEYS, MIN_COPIED_KEYS))
        if operands[i].shape[2] >= fewest and operands[i].stride(2) * query.element_size() % ALIASED_BYTES == 0
    ]
    if copied and query.device.type == "cpu":
        copies = scratch.empty(query.dtype, *(operands[i].numel() for i in copied))
        for i, copy in zip(copied, copies, strict=True):
            operands[i] = copy.view(operands[i].shape).copy_(operands[i])
    return operands


def _attend_decode(rows, query, key, value, pages, rule, scratch):
    """One query per request, on its history and its own key. All see the same places of what is gathered for them."""
    extents = [_Extent.of(row, pages, rule) for row in rows]
    first_blocks, seen = [extent.first_block for extent in extents], extents[0].seen
    requests, key_starts = [row.request for row in rows], [row.key_start for row in rows]
    query = _take(query, [row.query_start for row in rows], 1)
    own_keys, own_values = _take(key, key_starts, 1), _take(value, key_starts, 1)
    num_blocks = pages.num_blocks(seen.stop)

    def attend_heads(heads, query, rule):
        keys, values, is_null = pages.gather(scratch, requests, first_blocks, num_blocks, heads=heads, seen=seen)
        # The step's own key goes where it would be stored, in the copy: nothing need be concatenated.
        keys.narrow(2, -1, 1).copy_(_of_heads(own_keys, heads))
        values.narrow(2, -1, 1).copy_(_of_heads(own_values, heads))
        bias = None
        if is_null is not None:
            is_null[:, -1] = False  # the own key is there, wherever the table leads
            _blank(keys, values, is_null)
            bias = torch.zeros_like(is_null, dtype=query.dtype).masked_fill_(is_null, float("-inf"))[:, None]
        return attend(query, keys, values, rule, bias)

    bytes_of_head = len(rows) * num_blocks * pages.block_size * pages.bytes_of_token
    return _by_heads(attend_heads, query, rule, pages, bytes_of_head)


def _attend_chunk(row, query, key, value, pages, rule, scratch):
    """One request: its visible history, gathered, with the step's own keys behind it."""
    query = _take(query, [row.query_start], row.query_len)
    own_keys, own_values = (_take(each, [row.key_start], row.key_len) for each in (key, value))
    # Right-aligned: the request's last query sits on its last key.
    query_position = row.num_computed + row.key_len - row.query_len
    first = rule.first_visible(query_position)
    if first >= row.num_computed:
        query, own_keys, own_values = _apart(query, own_keys, own_values, scratch)
        return _attend_span(
            query, own_keys, own_values, rule, query_position=query_position, key_position=row.num_computed
        )

    def attend_heads(heads, query, rule):
        own = _of_heads(own_keys, heads), _of_heads(own_values, heads)
        keys, values, is_null = _with_history(row, first, *own, pages, heads, scratch)
        return _attend_span(
            query, keys, values, rule, query_position=query_position, key_position=first, is_null=is_null
        )

    bytes_of_head = (row.num_computed - first + row.key_len) * pages.bytes_of_token
    return _by_heads(attend_heads, query, rule, pages, bytes_of_head)


def _by_heads(attend_heads, query, rule, pages, bytes_of_head):
    """`attend_heads(heads, query, rule)` for ranges of KV heads: as few as gather no more at once than they should, and no
    fewer heads at once than there are threads."""
    h, g = pages.num_heads, query.shape[1] // pages.num_heads
    num_bytes = _gathered_bytes(query.device)
    most = h if bytes_of_head * h <= num_bytes else max(int(num_bytes // bytes_of_head), torch.get_num_threads())
    if most >= h:
        return attend_heads(range(h), query, rule)
    step = -(-h // -(-h // most))
    outputs = []
    for first in range(0, h, step):
        heads = range(first, min(first + step, h))
        query_heads = slice(heads.start * g, heads.stop * g)
        outputs.append(attend_heads(heads, query[:, query_heads], rule.of_heads(query_heads)))
    return torch.cat(outputs, dim=2)


def _gathered_bytes(device):
    """What may be gathered at once. Elsewhere than on the CPU nothing is gained by pieces."""
    return min(GATHERED_BYTES * torch.get_num_threads(), KEPT_BYTES) if device.type == "cpu" else float("inf")


def _with_history(row, first, own_keys, own_values, pages, heads, scratch):
    """Keys and values (1, h, n, d) of one request from position `first` to its end, and `is_null` (n,) or
    None."""
    first_block = first // pages.block_size
    start = first_block * pages.block_size
    num_blocks = pages.num_blocks(row.num_computed) - first_block
    seen = range(first - start, row.num_computed - start + row.key_len)
    keys, values, is_null = pages.gather(
        scratch, [row.request], [first_block], num_blocks, heads=heads, seen=seen, num_more=row.key_len
    )
    # The step's own keys go where they would be stored, in the copy: nothing need be concatenated.
    own = row.num_computed - first
    keys.narrow(2, own, row.key_len).copy_(own_keys)
    values.narrow(2, own, row.key_len).copy_(own_values)
    if is_null is None:
        return keys, values, None
    is_null[:, own:] = False  # behind the last block, or in the rest of it
    _blank(keys, values, is_null)
    return keys, values, is_null[0]


def _attend_span(query, keys, values, rule, *, query_position, key_position, is_null=None):
    """Queries and keys at consecutive positions, the last of both the same.

    `query_position` and `key_position` are those of the first query and key; `is_null` (n,) marks keys that
    do not exist. Queries go in tiles, each over the keys that it can see.
    """
    position, end = max(query_position, 0), query_position + query.shape[2]
    tiles = []
    if position > query_position:  # a query before every key sees nothing
        tiles = [nothing(query[:, :, : min(position, end) - query_position], values.shape[3], rule)]
    while position < end:
        first = max(key_position, rule.first_visible(position))
        stop = end if rule.chunk is None else min(end, (position // rule.chunk + 1) * rule.chunk)
        bias = None
        # Where nothing earlier is visible: a plain causal square, until a window begins to forget.
        is_causal = is_null is None and first == position and not rule.needs_scores
        if is_causal:
            stop = stop if rule.window is None else min(stop, position + rule.window)
        else:
            stop = min(stop, position + _tile_length(query, position - first, rule))
            if stop - position > 1 or is_null is not None:
                bias = rule.bias(range(position, stop), range(first, stop), query.dtype, query.device)
        tile_keys = slice(first - key_position, stop - key_position)
        operands = query, keys, values
        if stop - position < query.shape[2] or stop - first < keys.shape[2]:
            tile = query[:, :, position - query_position : stop - query_position]
            operands = tile, keys[:, :, tile_keys], values[:, :, tile_keys]
        if is_null is None:
            tiles.append(attend(*operands, rule, bias if bias is None else bias[None], is_causal))
        else:
            tiles.append(_attend_some(*operands, rule, bias, is_null[tile_keys]))
        position = stop
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)


def _attend_some(query, keys, values, rule, bias, is_null):
    """Attention of one tile where keys are missing, and perhaps all that a query could see."""
    bias = bias.masked_fill_(is_null, float("-inf"))
    output = attend(query, keys, values, rule, bias[None])
    # Its log-sum-exp, where there is one, is right as it is.
    output[..., : values.shape[3]].masked_fill_((bias < 0).all(dim=1)[:, None, None], 0)
    return output


def _tile_length(query, num_earlier_keys, rule):
    """How many queries to take at once where a bias or scores are laid out."""
    planes = query.shape[0] * query.shape[1] if rule.needs_scores else 1
    longest = MAX_BIAS_ELEMENTS // (planes * (num_earlier_keys + MAX_TILE))
    # In a window of w keys a tile of t queries has w + t, of which each query sees w.
    useful = MAX_TILE if rule.window is None else max(rule.window // 2, MIN_WINDOWED_TILE)
    return min(MAX_TILE, useful, max(longest, dense.MAX_PACKED_QUERIES))


def _blank(keys, values, is_hidden):
    """Zero, in place, the tokens `is_hidden` (b, n) of (b, h, n, d): masked scores alone would leave 0 * NaN."""
    for each in (keys, values):
        each.masked_fill_(is_hidden[:, None, :, None], 0)


def _of_heads(tokens, heads):
    """Some heads, a range, of (b, h, ...)."""
    return tokens if len(heads) == tokens.shape[1] else tokens[:, heads.start : heads.stop]


def _take(tokens, starts, length):
    """Runs of `length` tokens (..., heads, d) as (b, heads, length, d): a view if they lie one after another. `starts`
    ascend."""
    b = len(starts)
    if starts[-1] - starts[0] != (b - 1) * length:
        return tokens[_run_index(starts, length, tokens.device)].transpose(1, 2)
    run = tokens if b * length == tokens.shape[0] else tokens.narrow(0, starts[0], b * length)
    run = run.unsqueeze(0) if b == 1 else run.view(b, length, *run.shape[1:])
    return run.transpose(1, 2)


def _put(tokens, starts, values):
    """Store values (b, length, ...) in the runs of tokens that begin at `starts`."""
    b, length = values.shape[:2]
    if starts[-1] - starts[0] == (b - 1) * length:
        tokens.narrow(0, starts[0], b * length).copy_(values.flatten(0, 1))
    else:
        tokens[_run_index(starts, length, tokens.device)] = values


def _run_index(starts, length, device):
    return torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)
