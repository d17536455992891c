"""Attention over blocks plus the step's own keys and values, one query at a time."""

import torch
from einops import einsum, rearrange, repeat

from kvgroups.constants import NULL_BLOCK_ID


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
    query_starts = query_start_loc.tolist()
    key_starts = query_starts if kv_start_loc is None else kv_start_loc.tolist()
    output = query.new_zeros(*query.shape[:2], value.shape[2])
    lse = query.new_full(query.shape[:2], float("-inf"), dtype=_exact(query.dtype))

    for request, num_computed in enumerate(num_computed_tokens.tolist()):
        key_start, key_stop = key_starts[request : request + 2]
        query_start, query_stop = query_starts[request : request + 2]

        def fetch(position, request=request, num_computed=num_computed, key_start=key_start):
            """The key and value at a position: from the step, from a block, or None behind a null block."""
            if position >= num_computed:
                token = key_start + position - num_computed
                return key[token], value[token]
            block_size = key_cache.shape[1 if layout == "NHD" else 2]
            logical_block, offset = divmod(position, block_size)
            block = int(block_table[request, logical_block % ring_blocks if ring_blocks else logical_block])
            if block == NULL_BLOCK_ID:
                return None
            where = (block, offset) if layout == "NHD" else (block, slice(None), offset)
            return key_cache[where].detach(), value_cache[where].detach()

        # Right-aligned: the request's last query sits on its last key.
        first_position = num_computed + (key_stop - key_start) - (query_stop - query_start)
        for token in range(query_start, query_stop):
            query_position = first_position + token - query_start
            seen = [
                fetch(position)
                for position in range(query_position + 1)
                if (window is None or position > query_position - window)
                and (chunk is None or position // chunk == query_position // chunk)
            ]
            keys_and_values = [pair for pair in seen if pair is not None]
            if keys_and_values:
                keys, values = (torch.stack(tensors) for tensors in zip(*keys_and_values, strict=True))
                output[token], lse[token] = _attend(query[token], keys, values, scale, softcap, sinks)
            elif sinks is not None:
                lse[token] = sinks
    return (output, lse) if return_lse else output


def _exact(dtype):
    """What softmax runs in: fp32 or, for fp64, fp64."""
    return torch.promote_types(dtype, torch.float32)


def _attend(query, keys, values, scale, softcap, sinks):
    """One query (heads, dim) over the keys it sees (seen, kv_heads, dim), and its log-sum-exp (heads,)."""
    dtype = _exact(query.dtype)
    shared = query.shape[0] // keys.shape[1]
    keys = repeat(keys.to(dtype), "seen kv_head dim -> seen (kv_head shared) dim", shared=shared)
    values = repeat(values.to(dtype), "seen kv_head dim -> seen (kv_head shared) dim", shared=shared)
    scores = einsum(query.to(dtype), keys, "head dim, seen head dim -> head seen") * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if sinks is not None:
        scores = torch.cat([scores, rearrange(sinks.to(dtype), "head -> head 1")], dim=1)
    weights = scores.softmax(dim=1)[:, : len(keys)]
    return einsum(weights, values, "head seen, seen head dim -> head dim"), scores.logsumexp(dim=1)
