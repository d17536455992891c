"""Attention over blocks plus the step's own keys and values, in C++: decodes and short chunks on the CPU.

A request with more than `MAX_QUERIES` queries is bound by arithmetic and not by memory, and goes through the
torch form, whose matrix products are those of the processor's vendor.
"""

from struct import Struct

import torch
import torch.nn.functional as F

from kvgroups.kernels.cpu_library import cpu_library
from kvgroups.kernels.paged_attention import torch_impl

MAX_QUERIES = 16
"""Queries of a request up to which this form is the faster one."""

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

CALL = Struct("44q2d")
"""`AttentionCall` in cpu.h."""


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
    if query.dtype not in ELEMENT_TYPES:
        name = str(query.dtype).removeprefix("torch.")
        reasons.append(f"needs float32, bfloat16 or float16, got {name}")
    named = {"query": query, "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    for name, tensor in named.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            reasons.append(f"needs {name} contiguous over its last dimension, got stride {tensor.stride(-1)}")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
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
    library = cpu_library()
    num_tokens, num_heads, dim = query.shape
    num_kv_heads, dim_v = value.shape[1:]
    output = torch.empty((num_tokens, num_heads, dim_v), dtype=query.dtype)
    lse = torch.empty((num_tokens, num_heads)) if return_lse else None
    # Names keep what may be a copy alive until the call is over.
    starts, computed = query_start_loc.contiguous(), num_computed_tokens.contiguous()
    key_starts = starts if kv_start_loc is None else kv_start_loc.contiguous()
    logits = None if sinks is None else sinks.detach().float().contiguous()
    table = block_table if block_table is None or block_table.stride(1) == 1 else block_table.contiguous()
    call = CALL.pack(
        *_tokens(query),
        *_tokens(key),
        *_tokens(value),
        *_pages(key_cache, layout),
        *_pages(value_cache, layout),
        *_table(table, key_cache, layout),
        ring_blocks,
        *(starts.data_ptr(), starts.dtype == torch.int64),
        *(key_starts.data_ptr(), key_starts.dtype == torch.int64),
        *(computed.data_ptr(), computed.dtype == torch.int64),
        output.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        0 if logits is None else logits.data_ptr(),
        *(len(computed), num_tokens, num_heads, num_kv_heads, dim, dim_v, ELEMENT_TYPES[query.dtype]),
        *(window or 0, chunk or 0, MAX_QUERIES, torch.get_num_threads(), library.isa),
        *(scale, softcap or 0.0),
    )
    num_left = library.run("paged_attention", call)
    if num_left < 0:
        raise IndexError(
            f"block_table: expected block ids from 0 to {len(key_cache) - 1}, got {int(block_table.min())} to "
            f"{int(block_table.max())}. A table must name blocks of the caches that it is passed with."
        )
    if num_left:
        rest = _Rest(starts, key_starts, computed)
        attended = torch_impl.paged_attention(
            query[rest.queries],
            key[rest.keys],
            value[rest.keys],
            key_cache,
            value_cache,
            None if block_table is None else block_table[rest.requests],
            query_start_loc=rest.query_start_loc,
            kv_start_loc=rest.kv_start_loc,
            num_computed_tokens=computed[rest.requests],
            scale=scale,
            window=window,
            chunk=chunk,
            softcap=softcap,
            sinks=sinks,
            layout=layout,
            ring_blocks=ring_blocks,
            return_lse=return_lse,
        )
        if lse is not None:
            output[rest.queries], lse[rest.queries] = attended
        else:
            output[rest.queries] = attended
    return (output, lse) if return_lse else output


class _Rest:
    """The requests with many queries, as a step of their own."""

    def __init__(self, query_start_loc, kv_start_loc, num_computed_tokens):
        queries, keys = query_start_loc.diff(), kv_start_loc.diff()
        self.requests = (queries > MAX_QUERIES).nonzero().squeeze(1)
        self.queries = _runs(query_start_loc, queries, self.requests)
        self.keys = _runs(kv_start_loc, keys, self.requests)
        self.query_start_loc = F.pad(queries[self.requests].cumsum(0), (1, 0))
        self.kv_start_loc = F.pad(keys[self.requests].cumsum(0), (1, 0))


def _runs(starts, lengths, requests):
    """The tokens of those requests: a slice where they lie one after another, else an index."""
    first, last = int(requests[0]), int(requests[-1])
    if int(lengths[first : last + 1].sum()) == int(lengths[requests].sum()):
        return slice(int(starts[first]), int(starts[last + 1]))
    return torch.cat([torch.arange(int(starts[i]), int(starts[i + 1])) for i in requests.tolist()])


def _tokens(tensor):
    """`Tokens` in cpu.h."""
    return (tensor.data_ptr(), *tensor.stride()[:2])


def _pages(cache, layout):
    """`Pages` in cpu.h."""
    if cache is None:
        return 0, 0, 0, 0
    block, first, second, _ = cache.stride()
    return (cache.data_ptr(), block, second, first) if layout == "NHD" else (cache.data_ptr(), block, first, second)


def _table(table, cache, layout):
    """The block table, and how many blocks there are of what size."""
    if table is None:
        return 0, 0, 0, 0, 1
    return table.data_ptr(), table.stride(0), table.shape[1], len(cache), cache.shape[1 if layout == "NHD" else 2]
