"""Attention over blocks plus the step's own keys and values, in C++.

A request with more than `MAX_ROWS` rows is bound by arithmetic and not by memory. In a 16-bit type of which the
processor multiplies matrices fast it goes through the torch form.
"""

from functools import partial
from struct import Struct

import torch
import torch.nn.functional as F

from kvgroups.kernels.cpu_library import cpu_library
from kvgroups.kernels.cpu_operand import ELEMENT_TYPES
from kvgroups.kernels.paged_attention import torch_impl
from kvgroups.kernels.signature import addresses as addresses_of

MAX_ROWS = 32
"""Rows of a request, its queries times the query heads of a KV head, up to which this form serves where PyTorch
multiplies matrices of the type fast. Elsewhere it is faster than the torch form or as fast, and gathers nothing."""

OUTPUTS = Struct("2Qq")
FACTS = Struct("32q2d")
"""After the addresses of the tensors, `AttentionCall` in cpu.h: what is new in each call, and what is not."""


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
    given = (query, key, value) if sinks is None else (query, key, value, sinks)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        reasons.append("computes no gradients: call it under torch.no_grad()")
    return reasons


def prepare_paged_attention(
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
    """See `kvgroups.ops.paged_attention`: the function for all calls like this one, with only addresses left open."""
    (num_tokens, num_heads, dim), (num_kv_heads, dim_v) = query.shape, value.shape[1:]
    key_starts = query_start_loc if kv_start_loc is None else kv_start_loc
    facts = (
        *(stride for tensor in (query, key, value) for stride in tensor.stride()[:2]),
        *_page_strides(key_cache, layout),
        *_page_strides(value_cache, layout),
        *_table_facts(block_table, key_cache, layout),
        ring_blocks,
        *(indices.dtype == torch.int64 for indices in (query_start_loc, key_starts, num_computed_tokens)),
        *(len(num_computed_tokens), num_tokens, len(key), num_heads, num_kv_heads, dim, dim_v),
        *(ELEMENT_TYPES[query.dtype], window or 0, chunk or 0, _max_queries(query, key), cpu_library().isa),
        *(scale, softcap or 0.0),
    )
    settings = {
        "scale": scale,
        "window": window,
        "chunk": chunk,
        "softcap": softcap,
        "layout": layout,
        "ring_blocks": ring_blocks,
        "return_lse": return_lse,
    }
    small = (block_table, query_start_loc, num_computed_tokens, kv_start_loc, sinks)
    are_served = all(served is given for served, given in zip(_served(*small), small, strict=True))
    is_long = len(num_computed_tokens) == 1 and kv_start_loc is None and num_tokens > _max_queries(query, key)
    return _Prepared(FACTS.pack(*facts), (num_tokens, num_heads, dim_v), settings, are_served, is_long)


class _Prepared:
    """A call of which only the addresses are open."""

    def __init__(self, facts, output_shape, settings, are_served, is_long):
        self.facts, self.output_shape, self.settings = facts, output_shape, settings
        self.are_served = are_served
        """Whether C++ reads the small tensors as they are."""
        self.is_long = is_long
        """Whether there is one request, which C++ leaves to the torch form unless most of the tokens are padding."""
        self.returns_lse = settings["return_lse"]
        self.run = cpu_library().function("paged_attention")

    def __call__(
        self,
        query,
        key,
        value,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        num_computed_tokens,
        kv_start_loc=None,
        sinks=None,
        addresses=None,
        **known,
    ):
        if self.is_long and query_start_loc.tolist() == [0, len(query)]:
            return torch_impl.paged_attention(
                *(query, key, value, key_cache, value_cache, block_table),
                query_start_loc=query_start_loc,
                num_computed_tokens=num_computed_tokens,
                sinks=sinks,
                **self.settings,
            )
        if addresses is None or not self.are_served:
            block_table, *starts_and_counts, sinks = _served(
                block_table, query_start_loc, num_computed_tokens, kv_start_loc, sinks
            )
            query_start_loc, num_computed_tokens, kv_start_loc = starts_and_counts
            addresses = addresses_of(
                *(query, key, value, key_cache, value_cache, block_table, *starts_and_counts, sinks)
            )
        output = query.new_empty(self.output_shape)
        lse = query.new_empty(self.output_shape[:2], dtype=torch.float32) if self.returns_lse else None
        outputs = OUTPUTS.pack(
            output.data_ptr(), 0 if lse is None else lse.data_ptr(), torch.get_num_threads()
        )
        num_left = self.run(addresses + outputs + self.facts)
        if num_left == 0:
            return (output, lse) if self.returns_lse else output
        key_starts = query_start_loc if kv_start_loc is None else kv_start_loc
        if num_left < -1:
            which = (
                ("query_start_loc", query_start_loc, "query", query),
                ("kv_start_loc", key_starts, "key", key),
            )
            raise _no_tokens(*which[-2 - num_left])
        if num_left < 0:
            raise IndexError("block_table holds a block id that the caches do not have")
        options = {
            "query_start_loc": query_start_loc,
            "num_computed_tokens": num_computed_tokens,
            "kv_start_loc": key_starts,
            "sinks": sinks,
            **self.settings,
        }
        attend = (
            torch_impl.paged_attention
            if num_left == len(num_computed_tokens)
            else partial(_attend_rest, output, lse)
        )
        return attend(query, key, value, key_cache, value_cache, block_table, **options)


def _served(block_table, query_start_loc, num_computed_tokens, kv_start_loc, sinks):
    """Those that C++ cannot read as they are, copied."""
    if block_table is not None and block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    return (
        block_table,
        query_start_loc.contiguous(),
        num_computed_tokens.contiguous(),
        None if kv_start_loc is None else kv_start_loc.contiguous(),
        None if sinks is None else sinks.float().contiguous(),
    )


def _no_tokens(name, starts, tokens_name, tokens):
    """What to raise where start locations lead beside the tokens."""
    return IndexError(
        f"{name}: expected start locations that ascend from 0 to at most {len(tokens)}, the tokens of {tokens_name}, got "
        f"{starts.tolist() if len(starts) <= 8 else f'{int(starts.min())} to {int(starts.max())}'}."
    )


def _attend_rest(
    output,
    lse,
    query,
    key,
    value,
    key_cache,
    value_cache,
    block_table,
    *,
    query_start_loc,
    num_computed_tokens,
    kv_start_loc,
    **options,
):
    """The output, and the log-sum-exp if it is not None, with the requests of many queries put in by the torch form."""
    rest = _Rest(query_start_loc, kv_start_loc, _max_queries(query, key))
    attended = torch_impl.paged_attention(
        query[rest.queries],
        key[rest.keys],
        value[rest.keys],
        key_cache,
        value_cache,
        None if block_table is None else block_table[rest.requests],
        query_start_loc=rest.query_start_loc,
        kv_start_loc=rest.kv_start_loc,
        num_computed_tokens=num_computed_tokens[rest.requests],
        **options,
    )
    if lse is None:
        output[rest.queries] = attended
        return output
    output[rest.queries], lse[rest.queries] = attended
    return output, lse


class _Rest:
    """The requests with many queries, as a step of their own."""

    def __init__(self, query_start_loc, kv_start_loc, max_queries):
        queries, keys = query_start_loc.diff(), kv_start_loc.diff()
        self.requests = (queries > max_queries).nonzero().squeeze(1)
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


def _max_queries(query, key):
    """Queries of a request up to which this form serves: one at least, whatever the heads."""
    if not cpu_library().fast_matrix_types >> ELEMENT_TYPES[query.dtype] & 1:
        return 2**62
    heads_of_kv_head = query.shape[1] // key.shape[1]
    return max(1, MAX_ROWS // max(1, heads_of_kv_head))


def _page_strides(cache, layout):
    """`PageStrides` in cpu.h."""
    if cache is None:
        return 0, 0, 0
    block, first, second, _ = cache.stride()
    return (block, second, first) if layout == "NHD" else (block, first, second)


def _table_facts(table, cache, layout):
    """The block table's stride and width, and how many blocks there are of what size."""
    if table is None:
        return 0, 0, 0, 1
    stride = table.stride(0) if table.stride(1) == 1 else table.shape[1]
    return stride, table.shape[1], len(cache), cache.shape[1 if layout == "NHD" else 2]
