"""Attention over blocks plus the step's own keys and values, batched: the shipped path on the CPU.

Shapes in this file: b requests, t queries each, n keys each, h KV heads, g query heads per KV head, d dim.

A step is cut into batches of requests that look alike, and each batch takes the cheapest way:

* decode (one query on its own key): the visible blocks of all requests in one gather;
* fresh (no history): the step's own tensors, no gather, no mask where plain causal attention will do;
* anything else (a chunk on a history, fewer queries than keys): one request at a time.

Start locations and computed counts are read once, with `.tolist()`: on a GPU that is a device-to-host sync.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvgroups.constants import NULL_BLOCK_ID

MAX_MASK_ELEMENTS = 1 << 22
"""Queries are taken in tiles so that a mask, or the scores where they are explicit, stays under this."""

MAX_TILE = 512
"""Queries in a masked tile at most: a longer tile of a window computes more of what it masks."""

MAX_PACKED_QUERIES = 16
"""Up to here the g query heads of a KV head become rows of one matrix, which reads each key once, not g
times. Beyond it the work is bound by arithmetic, and packing would only make the mask g times larger."""


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
    rule = _Rule(scale, window, chunk, softcap, sinks, return_lse)
    pages = None if key_cache is None else _Pages(key_cache, value_cache, block_table, layout, ring_blocks)
    output = _nothing(query[None], value.shape[2], rule, has_sinks=False)[0]
    for rows in _batches(_rows(query_start_loc, kv_start_loc, num_computed_tokens), pages, rule):
        if rows[0].is_fresh:
            attended = _attend_fresh(rows, query, key, value, rule)
        elif rows[0].is_decode:
            attended = _attend_decode(rows, query, key, value, pages, rule)
        else:
            attended = _attend_chunk(rows[0], query, key, value, pages, rule)
        _put(output, [row.query_start for row in rows], attended)
    return (output[..., :-1].to(query.dtype), output[..., -1].contiguous()) if return_lse else output


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


@dataclass(frozen=True)
class _Rule:
    """What a query sees, and how its scores become weights."""

    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    returns_lse: bool
    """Whether the log-sum-exp is wanted: outputs then are fp32 with one more column, which holds it."""

    def first_visible(self, position):
        """The lowest position that a query at `position` sees."""
        first = 0
        if self.window is not None:
            first = max(first, position - self.window + 1)
        if self.chunk is not None:
            first = max(first, position // self.chunk * self.chunk)
        return first

    @property
    def needs_scores(self):
        """Whether the scores must be in hand, so that the fused kernel cannot serve."""
        return self.softcap is not None or self.sinks is not None or self.returns_lse


@dataclass(frozen=True)
class _Pages:
    """The blocks of one layer and the table that leads to them."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    layout: str
    ring_blocks: int

    @property
    def block_size(self):
        return self.key_cache.shape[1 if self.layout == "NHD" else 2]

    def gather(self, requests, first_blocks, num_blocks, num_more=0):
        """`num_blocks` logical blocks of each request, from its first block on, as they lie: NaN and all.

        Returns keys (b, h, n, d), values (b, h, n, d_v) and `is_null` (b, num_blocks * block_size), or None if no
        block is null; n = num_blocks * block_size and `num_more` tokens that are left to the caller. Blocks
        past the table repeat its last one: no key was ever there, and the caller masks them.
        """
        block_ids = self._block_ids(requests, first_blocks, num_blocks)
        is_null = block_ids == NULL_BLOCK_ID
        is_null = is_null.repeat_interleave(self.block_size, dim=1) if is_null.any() else None
        keys = self._select(self.key_cache, block_ids, num_more)
        return keys, self._select(self.value_cache, block_ids, num_more), is_null

    def _block_ids(self, requests, first_blocks, num_blocks):
        """The table's entries (b, num_blocks); `requests` ascend."""
        width, device = self.block_table.shape[1], self.block_table.device
        first, last = first_blocks[0], first_blocks[0] + num_blocks
        is_rectangle = requests[-1] - requests[0] == len(requests) - 1 and len(set(first_blocks)) == 1
        if is_rectangle and last <= (self.ring_blocks or width):
            return self.block_table[requests[0] : requests[-1] + 1, first:last]
        logical = torch.tensor(first_blocks, device=device)[:, None] + torch.arange(num_blocks, device=device)
        logical = logical % self.ring_blocks if self.ring_blocks else logical.clamp(max=width - 1)
        return self.block_table[torch.tensor(requests, device=device)[:, None], logical]

    def _select(self, cache, block_ids, num_more):
        """The blocks (b, num_blocks) of a cache, and more tokens, as a (b, h, n, d) view of one fresh tensor."""
        b, num_blocks = block_ids.shape
        *_, d = cache.shape
        num_tokens = num_blocks * self.block_size
        if self.layout == "NHD":
            tokens = cache.new_empty(b, num_tokens + num_more, cache.shape[2], d)
            blocks = tokens[:, :num_tokens].unflatten(1, (num_blocks, -1))
            for request in range(b) if num_more else []:
                torch.index_select(cache, 0, block_ids[request], out=blocks[request])
            if not num_more:
                torch.index_select(cache, 0, block_ids.flatten(), out=blocks.flatten(0, 1))
            return tokens.transpose(1, 2)
        # Heads first, so that the tokens of a request lie side by side without a second copy. Along dim 0 into
        # a transposed output, since along dim 1 of a transposed cache torch copies the whole cache first.
        heads = cache.new_empty(cache.shape[1], b, num_tokens + num_more, d)
        for request in range(b) if num_more else []:
            blocks = heads[:, request, :num_tokens].unflatten(1, (num_blocks, -1))
            torch.index_select(cache, 0, block_ids[request], out=blocks.transpose(0, 1))
        if not num_more:
            blocks = heads.view(cache.shape[1], b * num_blocks, -1, d)
            torch.index_select(cache, 0, block_ids.flatten(), out=blocks.transpose(0, 1))
        return heads.transpose(0, 1)


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
    """Lists of rows that can be attended together."""
    batches = defaultdict(list)
    for row in rows:
        if row.is_fresh:
            kind = ("fresh", row.query_len)
        elif row.is_decode:
            first = rule.first_visible(row.num_computed)
            num_blocks = row.num_computed // pages.block_size - first // pages.block_size + 1
            # Block counts of one power of two, so that padding to the longest at most doubles the work.
            kind = ("decode", num_blocks.bit_length())
        else:
            kind = ("chunk", row.request)
        batches[kind].append(row)
    return batches.values()


def _attend_decode(rows, query, key, value, pages, rule):
    """One query per request, on its history and its own key."""
    block_size, device = pages.block_size, query.device
    first_visible = [rule.first_visible(row.num_computed) for row in rows]
    first_blocks = [first // block_size for first in first_visible]
    # From here on tokens are counted from the start of each request's first gathered block.
    start = [first - block * block_size for first, block in zip(first_visible, first_blocks, strict=True)]
    own = [row.num_computed - block * block_size for row, block in zip(rows, first_blocks, strict=True)]
    num_blocks = max(own) // block_size + 1
    keys, values, is_null = pages.gather([row.request for row in rows], first_blocks, num_blocks)

    # The step's own key goes where it would be stored, in the copy: nothing need be concatenated.
    batch, own_token = torch.arange(len(rows), device=device), torch.tensor(own, device=device)
    key_starts = [row.key_start for row in rows]
    keys[batch, :, own_token] = _take(key, key_starts, 1)[:, 0]
    values[batch, :, own_token] = _take(value, key_starts, 1)[:, 0]

    seen = slice(min(start), max(own) + 1)
    visible = None
    if is_null is not None or len(set(start)) > 1 or len(set(own)) > 1:
        token = torch.arange(num_blocks * block_size, device=device)
        visible = (token >= torch.tensor(start, device=device)[:, None]) & (token <= own_token[:, None])
        if is_null is not None:
            visible &= ~is_null
            visible[batch, own_token] = True
        _blank(keys, values, ~visible)
        visible = visible[:, None, seen]
    queries = _take(query, [row.query_start for row in rows], 1)
    return _attend(queries, keys[:, :, seen], values[:, :, seen], rule, visible)


def _attend_fresh(rows, query, key, value, rule):
    """Requests of one length without history."""
    length, key_starts = rows[0].query_len, [row.key_start for row in rows]
    queries = _take(query, [row.query_start for row in rows], length)
    keys, values = (
        _take(key, key_starts, length).transpose(1, 2),
        _take(value, key_starts, length).transpose(1, 2),
    )
    return _attend_span(queries, keys, values, rule, query_position=0, key_position=0)


def _attend_chunk(row, query, key, value, pages, rule):
    """One request: its visible history, gathered, with the step's own keys behind it."""
    queries = query[row.query_start : row.query_start + row.query_len][None]
    keys = key[row.key_start : row.key_start + row.key_len].transpose(0, 1)[None]
    values = value[row.key_start : row.key_start + row.key_len].transpose(0, 1)[None]
    # Right-aligned: the request's last query sits on its last key.
    query_position = row.num_computed + row.key_len - row.query_len
    key_position, is_null = row.num_computed, None
    first = rule.first_visible(query_position)
    if first < row.num_computed:
        keys, values, is_null = _with_history(row, first, keys, values, pages)
        key_position = first
    return _attend_span(
        queries, keys, values, rule, query_position=query_position, key_position=key_position, is_null=is_null
    )


def _with_history(row, first, own_keys, own_values, pages):
    """Keys and values (1, h, n, d) of one request from position `first` to its end, and `is_null` (n,) or
    None."""
    first_block = first // pages.block_size
    start = first_block * pages.block_size
    num_blocks = -(-row.num_computed // pages.block_size) - first_block
    keys, values, is_null = pages.gather([row.request], [first_block], num_blocks, row.key_len)
    # The step's own keys go where they would be stored, in the copy: nothing need be concatenated.
    own = slice(row.num_computed - start, row.num_computed - start + row.key_len)
    keys[:, :, own], values[:, :, own] = own_keys, own_values
    tokens = slice(first - start, own.stop)
    keys, values = keys[:, :, tokens], values[:, :, tokens]
    if is_null is None:
        return keys, values, None
    is_null = F.pad(is_null[:, first - start : own.start], (0, row.key_len))
    _blank(keys, values, is_null)
    return keys, values, is_null[0]


def _attend_span(query, keys, values, rule, *, query_position, key_position, is_null=None):
    """Queries (b, t, heads, d) and keys (b, h, n, d) at consecutive positions, the last of both the same.

    `query_position` and `key_position` are those of the first query and key; `is_null` (n,) marks keys that
    do not exist. Queries go in tiles, each over the keys that it can see.
    """
    position, end = max(query_position, 0), query_position + query.shape[1]
    tiles = []
    if position > query_position:  # a query before every key sees nothing
        tiles = [_nothing(query[:, : min(position, end) - query_position], values.shape[3], rule)]
    while position < end:
        first = max(key_position, rule.first_visible(position))
        stop = end if rule.chunk is None else min(end, (position // rule.chunk + 1) * rule.chunk)
        if is_null is None and first == position and not rule.needs_scores:
            # Nothing earlier is visible: a plain causal square, until a window begins to forget.
            is_causal = True
            stop = stop if rule.window is None else min(stop, position + rule.window)
        else:
            is_causal = False
            stop = min(stop, position + _tile_length(query, position - first, rule))
        tile_keys = slice(first - key_position, stop - key_position)
        visible = None
        if not is_causal and (stop - position > 1 or is_null is not None):
            at = torch.arange(first, stop, device=query.device)
            query_at = at[position - first :, None]
            visible = at <= query_at
            if rule.window is not None:
                visible &= at > query_at - rule.window
            if is_null is not None:
                visible &= ~is_null[tile_keys]
            visible = visible[None]
        tile = slice(position - query_position, stop - query_position)
        tiles.append(
            _attend(query[:, tile], keys[:, :, tile_keys], values[:, :, tile_keys], rule, visible, is_causal)
        )
        position = stop
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)


def _tile_length(query, num_earlier_keys, rule):
    """How many queries to take at once where a mask or scores are laid out."""
    planes = query.shape[0] * query.shape[2] if rule.needs_scores else 1
    longest = MAX_MASK_ELEMENTS // (planes * (num_earlier_keys + MAX_TILE))
    return min(MAX_TILE, max(longest, MAX_PACKED_QUERIES))


def _attend(query, keys, values, rule, visible=None, is_causal=False):
    """Softmax attention: query (b, t, heads, d), keys (b, h, n, d), visible (b or 1, t, n) -> (b, t, heads,
    d_v).

    `is_causal` is for t = n, and then every query sees itself and what came before.
    """
    # Query heads h * g .. h * g + g - 1 share KV head h.
    query = query.unflatten(2, (keys.shape[1], -1)).permute(0, 2, 3, 1, 4)  # (b, h, g, t, d)
    if rule.needs_scores:
        output = _attend_with_scores(query, keys, values, rule, visible)
    else:
        output = _attend_fused(query, keys, values, rule, visible, is_causal)
    output = output.permute(0, 3, 1, 2, 4).flatten(2, 3)
    if visible is not None:
        # Its log-sum-exp, where there is one, is right as it is.
        output[..., : values.shape[3]].masked_fill_(~visible.any(dim=2)[:, :, None, None], 0)
    return output


def _nothing(query, dim_v, rule, has_sinks=True):
    """The outputs of queries (b, t, heads, d) that see no key; without sinks if they are only padding."""
    if not rule.returns_lse:
        return query.new_zeros(*query.shape[:3], dim_v)
    output = query.new_zeros(*query.shape[:3], dim_v + 1, dtype=_exact(query.dtype))
    output[..., -1] = rule.sinks if has_sinks and rule.sinks is not None else float("-inf")
    return output


def _exact(dtype):
    """What softmax runs in: fp32 or, for fp64, fp64."""
    return torch.promote_types(dtype, torch.float32)


def _attend_fused(query, keys, values, rule, visible, is_causal):
    """PyTorch's kernel: query (b, h, g, t, d) -> (b, h, g, t, d_v)."""
    b, h, g, t, d = query.shape
    d_v = values.shape[3]
    if d != d_v:
        # Its fast form wants one width; zeros change neither scores nor the columns that are kept.
        query, keys = F.pad(query, (0, max(d_v - d, 0))), F.pad(keys, (0, max(d_v - d, 0)))
        values = F.pad(values, (0, max(d - d_v, 0)))
    if t <= MAX_PACKED_QUERIES and not (is_causal and t > 1):
        if visible is not None:
            visible = visible[:, None, None].expand(-1, 1, g, -1, -1).flatten(2, 3)
        query = query.reshape(b, h, g * t, -1)
    else:
        # The g heads look at one copy of the keys, through a stride of zero.
        query, keys, values = query.flatten(0, 1), keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None]
        keys, values = keys.expand(-1, g, -1, -1), values.expand(-1, g, -1, -1)
        visible = None if visible is None else visible[:, None]
    output = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=visible, is_causal=is_causal, scale=rule.scale
    )
    return output.reshape(b, h, g, t, -1)[..., :d_v]


def _attend_with_scores(query, keys, values, rule, visible):
    """Explicit scores in fp32 (fp64 for fp64): query (b, h, g, t, d) -> (b, h, g, t, d_v or d_v + 1)."""
    dtype = _exact(query.dtype)
    g, t = query.shape[2:4]
    scores = query.to(dtype).flatten(2, 3) @ keys.to(dtype).mT
    scores = scores.unflatten(2, (g, t)).mul_(rule.scale)
    if rule.softcap is not None:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    if visible is not None:
        scores = scores.masked_fill_(~visible[:, None, None], float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.to(dtype).view(1, -1, g, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat([scores, sinks], dim=4)
    weights = scores.softmax(dim=4)[..., : keys.shape[2]]
    output = (weights.flatten(2, 3) @ values.to(dtype)).unflatten(2, (g, t))
    if rule.returns_lse:
        return torch.cat([output, scores.logsumexp(dim=4, keepdim=True)], dim=4)
    return output.to(query.dtype)


def _blank(keys, values, where):
    """Zero, in place, the tokens `where` (b, n) of (b, h, n, d): masked scores alone would leave 0 * NaN."""
    batch, token = where.nonzero(as_tuple=True)
    keys[batch, :, token] = 0
    values[batch, :, token] = 0


def _take(tokens, starts, length):
    """Runs of `length` tokens as (b, length, ...): a view if they lie one after another. `starts` ascend."""
    if starts[-1] - starts[0] == (len(starts) - 1) * length:
        return tokens[starts[0] : starts[0] + len(starts) * length].unflatten(0, (len(starts), length))
    return tokens[_run_index(starts, length, tokens.device)]


def _put(tokens, starts, values):
    """Store values (b, length, ...) in the runs of tokens that begin at `starts`."""
    b, length = values.shape[:2]
    if starts[-1] - starts[0] == (b - 1) * length:
        tokens[starts[0] : starts[0] + b * length] = values.flatten(0, 1)
    else:
        tokens[_run_index(starts, length, tokens.device)] = values


def _run_index(starts, length, device):
    return torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)
