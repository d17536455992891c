"""Batches that attention must get right, what they should yield, and how far off a form may be.

Blocks are a random permutation inside a strided, NaN-filled arena; only what a later query can see is ever
written.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvgroups import ops

NAN = float("nan")

TOLERANCE = 4
"""How many times the reference's own error in a dtype a form may be off. That error counts as one unit in the
last place of the largest output at least. The reference rounds once, at the end; a fused kernel also rounds
its weights to the dtype."""


class Request(NamedTuple):
    """One request's share of a step, in tokens."""

    computed: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Case:
    """One batch. A request is (tokens of history, queries) or (tokens of history, queries, step keys)."""

    name: str
    requests: tuple[tuple[int, ...], ...]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (8, 8)
    block_size: int = 4
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    ring_blocks: int = 0
    num_padded_tokens: int = 0

    @property
    def rows(self):
        return [
            Request(*(request if len(request) == 3 else (*request, request[1]))) for request in self.requests
        ]

    def first_visible(self, position):
        """The lowest position that the query at `position` sees, by counting down to it."""
        first = position
        while first > 0 and self.sees(position, first - 1):
            first -= 1
        return first

    def sees(self, query_position, key_position):
        in_window = self.window is None or query_position - key_position < self.window
        in_chunk = self.chunk is None or key_position // self.chunk == query_position // self.chunk
        return key_position <= query_position and in_window and in_chunk


MIXED = ((0, 11), (13, 5), (9, 1), (0, 1), (22, 1))

CASES = [
    Case("prefill of ragged rows", ((0, 7), (0, 1), (0, 12))),
    Case("prefill of rows of one length", ((0, 6), (0, 6), (0, 6))),
    Case("long prefill, more queries than are packed", ((0, 40),)),
    Case("chunk on a history", ((9, 6),)),
    Case("long prefill and history in a window", ((90, 30), (5, 12)), window=70),
    Case("decode of ragged rows", ((3, 1), (17, 1), (1, 1), (30, 1))),
    Case("decode of one row", ((10, 1),)),
    Case("decode of rows of one length", ((7, 1), (7, 1), (7, 1))),
    Case("prefill, chunk and decode in one batch", MIXED),
    Case("sequence ends on a block edge", ((8, 1), (7, 1), (4, 4), (8, 8), (0, 8))),
    Case("step keys begin a new block", ((8, 3), (16, 1))),
    Case("fewer queries than keys", ((5, 2, 6), (0, 1, 9), (8, 1, 4))),
    Case("queries on keys already stored", ((9, 3, 0), (6, 1, 0), (4, 2, 1)), window=6),
    Case("more queries than keys exist", ((0, 2, 0), (1, 4, 1), (0, 5, 3)), has_sinks=True),
    Case("queries before every key", ((0, 2, 0), (1, 4, 1), (0, 5, 3))),
    Case("empty rows between full ones", ((0, 0), (5, 3), (12, 0), (4, 1), (0, 0))),
    Case("padded tokens behind the last row", ((5, 3), (4, 1)), num_padded_tokens=3),
    Case("window of one token", MIXED, window=1),
    Case("window not a multiple of the block", MIXED, window=6),
    Case("window as wide as a block", MIXED, window=4),
    Case("window ends on a block edge", ((12, 1), (11, 1), (8, 5), (0, 20)), window=8),
    Case("page larger than the window", MIXED, window=3, block_size=16),
    Case("chunk of tokens longer than the window", ((20, 15), (0, 30)), window=5),
    Case("window longer than every sequence", MIXED, window=100),
    Case("chunked attention", MIXED, chunk=5),
    Case("attention chunk begins with this query", ((10, 1), (10, 6), (0, 11)), chunk=5),
    Case("attention chunk of one token", MIXED, chunk=1),
    Case("window inside an attention chunk", MIXED, window=4, chunk=7),
    Case("softcap", MIXED, softcap=1.5),
    Case("softcap in a window", MIXED, softcap=1.5, window=6),
    Case("sinks", MIXED, has_sinks=True),
    Case("sinks in a window, as gpt-oss", MIXED, has_sinks=True, window=6),
    Case("sinks and softcap in an attention chunk", MIXED, has_sinks=True, softcap=2.0, chunk=5),
    Case("ring of exactly the window", MIXED, window=8, ring_blocks=2),
    Case("ring with slack, many times around", ((60, 1), (61, 1), (62, 5), (63, 9)), window=6, ring_blocks=3),
    Case("ring of one block", ((7, 1), (8, 1), (9, 3)), window=5, ring_blocks=1),
    Case("ring around an attention chunk", MIXED, chunk=8, ring_blocks=2),
    Case("MQA", MIXED, heads=(4, 1), window=6),
    Case("MHA", MIXED, heads=(3, 3)),
    Case("many queries per KV head", MIXED, heads=(14, 2)),
    Case("head_dim 80", MIXED, dims=(80, 80)),
    Case("head_dim not a power of two", MIXED, dims=(5, 5), window=6),
    Case("V narrower than K", MIXED, dims=(12, 8)),
    Case("V wider than K, with sinks", MIXED, dims=(8, 12), has_sinks=True),
    Case("V wider than K in a window", MIXED, dims=(6, 12), window=5),
    Case("blocks of one token", MIXED, block_size=1, window=6),
    Case("blocks of three tokens", MIXED, block_size=3, softcap=3.0),
    Case("blocks of 16 tokens", MIXED, block_size=16),
    Case("blocks of 48 tokens", ((50, 1), (47, 2), (0, 49)), block_size=48, window=40),
    Case("no requests", ()),
    Case("only empty rows", ((0, 0), (5, 0))),
]
NAMED = {case.name: case for case in CASES}
LAYOUTS = ["NHD", "HND"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, and each request's whole sequence for the oracle."""

    operands: tuple[torch.Tensor, ...]
    options: dict
    sequences: tuple[tuple[torch.Tensor, torch.Tensor], ...]


def build(case, layout, dtype, nan_arena, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    (num_heads, num_kv_heads), (dim, dim_v), rows = case.heads, case.dims, case.rows
    sequences = [
        (
            randn(row.computed + row.keys, num_kv_heads, dim),
            randn(row.computed + row.keys, num_kv_heads, dim_v),
        )
        for row in rows
    ]
    step_keys, step_values = (
        torch.cat(
            [
                *(sequence[part][row.computed :] for sequence, row in zip(sequences, rows, strict=True)),
                torch.full((case.num_padded_tokens, num_kv_heads, case.dims[part]), NAN, dtype=dtype),
            ]
        )
        for part in (0, 1)
    )
    has_other_keys = any(row.queries != row.keys for row in rows)
    options = {
        "query_start_loc": _starts([row.queries for row in rows]),
        "num_computed_tokens": torch.tensor([row.computed for row in rows], dtype=torch.int32),
        "kv_start_loc": _starts([row.keys for row in rows]) if has_other_keys else None,
        "scale": dim**-0.5,
        "window": case.window,
        "chunk": case.chunk,
        "softcap": case.softcap,
        "sinks": randn(num_heads) if case.has_sinks else None,
        "layout": layout,
        "ring_blocks": case.ring_blocks,
    }
    query = randn(int(options["query_start_loc"][-1]) + case.num_padded_tokens, num_heads, dim)
    pages = _write_history(case, layout, dtype, sequences, nan_arena, generator)
    return Batch((query, step_keys, step_values, *pages), options, tuple(sequences))


def _starts(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


def _write_history(case, layout, dtype, sequences, nan_arena, generator):
    """Caches and a block table that hold what the pool would keep: what a query of this step can see."""
    (_, num_kv_heads), (dim, dim_v), block_size = case.heads, case.dims, case.block_size
    longest = max((row.computed for row in case.rows), default=0)
    width = case.ring_blocks or longest // block_size + 1
    num_blocks = len(case.rows) * width + 3
    inner = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
    _, key_cache = nan_arena(num_blocks, *inner, dim, dtype=dtype)
    _, value_cache = nan_arena(num_blocks, *inner, dim_v, dtype=dtype)
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    table = torch.zeros(len(case.rows), width, dtype=torch.int32)
    for request, row in enumerate(case.rows):
        first_query = max(row.computed + row.keys - row.queries, 0)
        for position in range(case.first_visible(first_query), row.computed):
            logical_block, offset = divmod(position, block_size)
            column = logical_block % case.ring_blocks if case.ring_blocks else logical_block
            if table[request, column] == 0:
                table[request, column] = free.pop()
            block = int(table[request, column])
            where = (block, offset) if layout == "NHD" else (block, slice(None), offset)
            assert key_cache[where].isnan().all(), "the ring of this case is too small for its window"
            key_cache[where], value_cache[where] = (part[position] for part in sequences[request])
    return key_cache, value_cache, table


def oracle(case, batch):
    """Plain softmax attention in fp64 over each request's whole sequence, masked by what each query sees."""
    return oracle_with_lse(case, batch)[0]


def oracle_with_lse(case, batch):
    """The same, and the logarithm of what each query's weights are divided by."""
    query, options = batch.operands[0].double(), batch.options
    output = query.new_zeros(*query.shape[:2], case.dims[1])
    lse = query.new_full(query.shape[:2], float("-inf"))
    starts = options["query_start_loc"].tolist()
    for row, (keys, values) in enumerate(batch.sequences):
        tokens = slice(starts[row], starts[row + 1])
        query_positions = range(len(keys) - (tokens.stop - tokens.start), len(keys))
        sees = [case.sees(q, k) for q in query_positions for k in range(len(keys))]
        mask = torch.tensor(sees, dtype=torch.bool).view(len(query_positions), len(keys))
        for head in range(query.shape[1]):
            kv_head = head * case.heads[1] // case.heads[0]
            scores = query[tokens, head] @ keys[:, kv_head].double().T * options["scale"]
            if case.softcap is not None:
                scores = (scores / case.softcap).tanh() * case.softcap
            weights = scores.exp() * mask
            sink = options["sinks"][head].double().exp() if case.has_sinks else 0
            total = weights.sum(dim=1, keepdim=True) + sink
            output[tokens, head] = weights @ values[:, kv_head].double() / total.where(total > 0, 1.0)
            lse[tokens, head] = total[:, 0].log()
    return output, lse


def attend(batch, backend, **changes):
    return ops.paged_attention(*batch.operands, **{**batch.options, **changes}, backend=backend)


def assert_close(got, reference_output, truth):
    """`got` is off from the truth by a few times what the reference is off in this dtype."""
    assert got.shape == truth.shape and got.dtype == reference_output.dtype
    assert got.isfinite().all()
    if not truth.numel():
        return
    unit = torch.finfo(got.dtype).eps * truth.abs().max()
    own_error = max((reference_output - truth).abs().max(), unit)
    error = (got - truth).abs().max()
    assert error <= TOLERANCE * own_error, f"off by {error:.2g}, the reference by {own_error:.2g}"
