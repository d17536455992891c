"""Attention over blocks, held against plain softmax attention over each request's whole sequence.

Every case of `attention_cases.py` runs through the reference and the torch form, in both layouts and three
dtypes.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity

from kvgroups import ops
from kvgroups.errors import BackendUnavailableError, ShapeError
from kvgroups.kernels.paged_attention import dense, reference, torch_impl
from kvgroups.kernels.paged_attention.tiles import TILES, Tile
from kvgroups.ops import dispatch
from tests.ops.attention_cases import (
    CASES,
    DTYPES,
    LAYOUTS,
    NAMED,
    NAN,
    Batch,
    Case,
    assert_close,
    attend,
    build,
    oracle,
)

SMALLEST = {kind: Tile(rows=16, keys=16, warps=4, stages=1) for kind in TILES["sm_90"]}
"""For the Triton form: the cases are small, and with these they take several programs and turns of each loop."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_equals_the_oracle(case, layout, prepared):
    _, output, truth = prepared(case, layout)
    assert output.shape == truth.shape and output.dtype == torch.float32
    torch.testing.assert_close(output.double(), truth, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_torch_form_is_as_good_as_the_reference(case, layout, dtype, prepared, assert_same_bits):
    batch, reference_output, truth = prepared(case, layout, dtype)
    before = [tensor.clone() for tensor in batch.operands]
    assert_close(attend(batch, "torch"), reference_output, truth)
    for tensor, copy in zip(batch.operands, before, strict=True):
        assert_same_bits(tensor, copy)  # attention reads only


def _interpreted(case: Case, *dtypes: torch.dtype) -> tuple[pytest.MarkDecorator, ...]:
    """The interpreter takes seconds a case: every case in fp32 and every third in the other dtypes, the rest is slow."""
    is_rare = CASES.index(case) % 3 != 0 and torch.float32 not in dtypes
    return (pytest.mark.slow,) if is_rare else ()


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case.name}-{dtype}", marks=_interpreted(case, dtype))
        for case in CASES
        for dtype in DTYPES
    ],
)
def test_triton_form_is_as_good_as_the_reference(case, dtype, prepared, assert_same_bits, triton_backend):
    layout = LAYOUTS[(CASES.index(case) + DTYPES.index(dtype)) % 2]  # the layouts differ in strides only
    batch, reference_output, truth = prepared(case, layout, dtype)
    before = [tensor.clone() for tensor in batch.operands]
    assert_close(attend(batch, triton_backend), reference_output, truth)
    for tensor, copy in zip(batch.operands, before, strict=True):
        assert_same_bits(tensor, copy)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=_interpreted(case)) for case in CASES])
def test_triton_tiles_change_nothing(case, prepared, triton_backend, monkeypatch):
    """With the smallest tiles a case takes several programs and several turns of each loop."""
    monkeypatch.setitem(TILES, "sm_90", SMALLEST)
    batch, reference_output, truth = prepared(case)
    assert_close(attend(batch, triton_backend), reference_output, truth)


@pytest.mark.parametrize(
    "limits",
    [
        {"MAX_TILE": 3},
        {"MIN_WINDOWED_TILE": 1},
        {"MAX_PACKED_QUERIES": 1},
        {"MAX_PACKED_QUERIES": 1, "MAX_BIAS_ELEMENTS": 1},
    ],
    ids=["tiles of three queries", "tiles of half a window", "no packing", "tiles of one query"],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tiles_and_packing_change_nothing(case, limits, prepared, monkeypatch):
    """The cases are small: shrink the limits so that they meet tile edges wherever these fall."""
    for name, limit in limits.items():
        monkeypatch.setattr(torch_impl if hasattr(torch_impl, name) else dense, name, limit)
    batch, reference_output, truth = prepared(case)
    assert_close(attend(batch, "torch"), reference_output, truth)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 25), st.integers(0, 20), st.integers(0, 20)), max_size=4),
    block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.none() | st.integers(1, 30),
    chunk=st.none() | st.integers(1, 30),
    has_sinks=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
)
def test_any_batch(requests, block_size, window, chunk, has_sinks, layout):
    """Batches nobody thought of: the torch form finds its way through its kinds, tiles and slices."""
    case = Case(
        "drawn", tuple(requests), block_size=block_size, window=window, chunk=chunk, has_sinks=has_sinks
    )
    batch = build(case, layout, torch.float32, _plain_nan_cache)
    assert_close(attend(batch, "torch"), attend(batch, "reference"), oracle(case, batch))


def _plain_nan_cache(*shape, dtype):
    """Hypothesis and function-scoped fixtures do not mix; the strided arena is every other test's."""
    return None, torch.full(shape, NAN, dtype=dtype)


# The table has teeth.


def _with_options(**changes):
    def mutant(*operands, **options):
        changed = {name: change(options[name]) for name, change in changes.items()}
        return reference.paged_attention(*operands, **{**options, **changed})

    return mutant


def _interleaved_heads(query, *operands, **options):
    """Query head h on KV head `h % num_kv_heads`."""
    num_kv_heads = operands[0].shape[1]
    order = torch.arange(query.shape[1]).view(-1, num_kv_heads).T.flatten()
    options["sinks"] = None if options["sinks"] is None else options["sinks"][order]
    return reference.paged_attention(query[:, order], *operands, **options)[:, order.argsort()]


def _scores_masked_but_not_values(*operands, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch_impl, "_blank", lambda keys, values, where: keys.masked_fill_(where[:, None, :, None], 0)
        )
        return torch_impl.paged_attention(*operands, **options)


def _neighbour_s_pages(query, key, value, key_cache, value_cache, table, **options):
    return reference.paged_attention(query, key, value, key_cache, value_cache, table.roll(1, 0), **options)


def _left_aligned_queries(query, key, value, *pages, **options):
    """The first query on the first step key, as if the last keys were not there."""
    starts, lengths = options["kv_start_loc"].tolist(), options["query_start_loc"].diff().tolist()
    kept = [
        token
        for start, length in zip(starts, lengths, strict=False)
        for token in range(start, start + length)
    ]
    return reference.paged_attention(
        query, key[kept], value[kept], *pages, **{**options, "kv_start_loc": None}
    )


@pytest.mark.parametrize(
    "wrong, name",
    [
        (_with_options(window=lambda window: window + 1), "window not a multiple of the block"),
        (_with_options(window=lambda window: window - 1), "window as wide as a block"),
        (_with_options(window=lambda _: None), "chunk of tokens longer than the window"),
        (_with_options(chunk=lambda chunk: chunk + 1), "chunked attention"),
        (_with_options(softcap=lambda _: None), "softcap"),
        (_with_options(sinks=lambda _: None), "sinks"),
        (_with_options(scale=lambda scale: scale * 1.01), "prefill of ragged rows"),
        (
            _with_options(num_computed_tokens=lambda computed: (computed - 1).clamp(min=0)),
            "decode of ragged rows",
        ),
        (_with_options(ring_blocks=lambda ring: ring - 1), "ring with slack, many times around"),
        (_interleaved_heads, "prefill of ragged rows"),
        (_scores_masked_but_not_values, "one block lost"),
        (_neighbour_s_pages, "decode of ragged rows"),
        (_left_aligned_queries, "fewer queries than keys"),
    ],
    ids=[
        "window one too wide",
        "window one too narrow",
        "window forgotten",
        "attention chunk one too long",
        "softcap forgotten",
        "sinks forgotten",
        "scale off by one percent",
        "history one too short",
        "ring one block short",
        "query heads interleaved",
        "values not masked",
        "another request's pages",
        "queries left-aligned",
    ],
)
def test_a_wrong_form_fails(wrong, name, prepared, monkeypatch):
    if name == "one block lost":
        batch, truth = _with_a_null_block(prepared, queries=3)
        reference_output = attend(batch, "reference")
    else:
        batch, reference_output, truth = prepared(NAMED[name])
    monkeypatch.setitem(dispatch.FORMS["paged_attention"], "torch", dispatch.Form(wrong))
    with pytest.raises(AssertionError):
        assert_close(attend(batch, "torch"), reference_output, truth)


@pytest.mark.parametrize(
    "old, new, name",
    [
        ("(stored >= start) & ", "", "window not a multiple of the block"),
        ("is_stored & (block != NULL)", "is_stored", "one block lost"),
        ("(stored < end)", "(stored <= end)", "decode of ragged rows"),
        ("logical_block, mask=first < end", "logical_block - 1, mask=first < end", "blocks of 48 tokens"),
        ("BLOCK_SIZE, BLOCK_SIZE]), [KEYS])", "BLOCK_SIZE, BLOCK_SIZE]).trans(), [KEYS])", "decode of ragged rows"),
        ("whole_stop = first_position + 1", "whole_stop = last_position + 1", "long prefill, more queries than are packed"),
        ("tl.cdiv(tl.maximum(whole_start, start), KEYS)", "start // KEYS", "long prefill and history in a window"),
        ("num_whole, 0)\n                stored", "0, 0)\n                stored", "long prefill and history in a window"),
        (">= first_seen[:, None]", "> first_seen[:, None]", "window as wide as a block"),
        ("<= position[:, None]", "< position[:, None]", "prefill of ragged rows"),
        ("logical_block % ring_blocks", "(logical_block + 1) % ring_blocks", "ring of exactly the window"),
        ("position = token + to_position", "position = token - query_start", "chunk on a history"),
        ("head = kv_head * G + row % G", "head = kv_head + row % G", "decode of ragged rows"),
        ("total = tl.where(split == 0, 1.0, total)", "", "sinks"),
        ('tl.where(new_peak == float("-inf"), 0.0, new_peak)', "new_peak", "queries before every key"),
        ("tl.where(total > 0, total, 1.0)", "total", "queries before every key"),
        ("weighted * fade[:, None]", "weighted", "long prefill, more queries than are packed"),
        ("queries_per_tile + num_reqs + 1", "queries_per_tile + num_reqs", "padded tokens behind the last row"),
        ("INTERPRETED and query.dtype == torch.bfloat16", "False", "long prefill, more queries than are packed"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_wrong_kernel_fails(old, new, name, prepared, mutant, monkeypatch, triton_backend):
    from kvgroups.kernels.paged_attention import triton_impl

    wrong = mutant(triton_impl, old, new)
    monkeypatch.setitem(TILES, "sm_90", SMALLEST)
    monkeypatch.setitem(dispatch.FORMS["paged_attention"], "triton", dispatch.Form(wrong.paged_attention))
    dtype = torch.bfloat16 if "bfloat16" in old else torch.float32
    if name == "one block lost":
        batch, truth = _with_a_null_block(prepared, queries=3)
        reference_output = attend(batch, "reference")
    else:
        batch, reference_output, truth = prepared(NAMED[name], dtype=dtype)
    with pytest.raises(AssertionError):
        assert_close(attend(batch, triton_backend), reference_output, truth)


# Rules that are read off directly.


@pytest.mark.parametrize("length", [3, 4, 5, 6, 13])
@pytest.mark.parametrize("way", ["prefill", "chunk", "decode"])
def test_window_of_four_sees_itself_and_three_more(length, way, backend):
    """Values are one-hot positions and scores are equal, so the output names the positions that were seen."""
    computed = {"prefill": 0, "chunk": length - 2, "decode": length - 1}[way]
    one_hot = torch.eye(length)[:, None]
    cache = torch.full((6, 1, 3, length), NAN)
    table = torch.tensor([[5, 1, 4, 2, 3]], dtype=torch.int32)
    for position in range(computed):
        cache[table[0, position // 3], 0, position % 3] = one_hot[position]
    step = one_hot[computed:]
    output = ops.paged_attention(
        torch.zeros_like(step),
        torch.zeros_like(step),
        step,
        torch.where(cache.isnan(), NAN, 0.0),
        cache,
        table,
        query_start_loc=torch.tensor([0, length - computed]),
        num_computed_tokens=torch.tensor([computed]),
        scale=1.0,
        window=4,
        backend=backend,
    )
    seen = output[-1, 0].nonzero().flatten().tolist()
    assert seen == list(range(max(0, length - 4), length))
    assert output[-1, 0].sum() == 1


@pytest.mark.parametrize("case", [NAMED["prefill of ragged rows"], NAMED["sinks in a window, as gpt-oss"]],
                         ids=lambda case: case.name)  # fmt: skip
def test_no_caches_where_nothing_is_computed(case, prepared, backend):
    case = replace(case, requests=((0, 7), (0, 1), (0, 12)))
    batch, reference_output, truth = prepared(case)
    output = ops.paged_attention(*batch.operands[:3], None, None, None, **batch.options, backend=backend)
    assert_close(output, reference_output, truth)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("queries, keys", [(1, 0), (3, 0), (20, 0), (3, 1)])
def test_query_without_a_visible_key_yields_zero(queries, keys, has_sinks, softcap, backend):
    """All of its history is behind null blocks: 0, not NaN, and not the mean of what is masked."""
    cache = torch.full((3, 2, 4, 8), NAN)
    query, step = torch.ones(queries, 4, 8), torch.ones(keys, 2, 8)
    output = ops.paged_attention(
        query,
        step,
        step,
        cache,
        cache,
        torch.zeros(1, 8, dtype=torch.int32),
        query_start_loc=torch.tensor([0, queries]),
        num_computed_tokens=torch.tensor([24]),
        kv_start_loc=torch.tensor([0, keys]),
        scale=1.0,
        softcap=softcap,
        sinks=torch.zeros(4) if has_sinks else None,
        backend=backend,
    )
    assert (output[: queries - keys] == 0).all()
    assert (output[queries - keys :] != 0).all()


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_null_block_in_sight_is_no_key(queries, has_sinks, prepared, backend):
    """A null block among visible ones (never left so by a pool) is passed over, whatever its bytes."""
    batch, truth = _with_a_null_block(prepared, queries, has_sinks)
    assert_close(attend(batch, backend), attend(batch, "reference"), truth)


def _with_a_null_block(prepared, queries, has_sinks=False):
    """A batch whose requests have lost their second block, and the oracle without the keys in it."""
    case = Case("one block lost", ((14, queries), (9, queries)), has_sinks=has_sinks)
    batch, *_ = prepared(case)
    batch.operands[5][:, 1] = 0
    lost = [
        tuple(part[[p for p in range(len(part)) if p // 4 != 1]] for part in pair) for pair in batch.sequences
    ]
    # No window or chunk in this case: without the lost keys the queries still see all that came before.
    return batch, oracle(case, replace(batch, sequences=tuple(lost)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_does_not_grow_with_the_pool(layout, nan_arena):
    """The step reads the blocks it names: along the wrong dimension torch copies the whole cache first."""
    token, table = torch.zeros(1, 2, 8), torch.tensor([[1, 2]], dtype=torch.int32)
    allocated = []
    for num_blocks in (4, 400):
        _, pages = nan_arena(num_blocks, *((4, 2, 8) if layout == "NHD" else (2, 4, 8)))
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
            ops.paged_attention(
                token,
                token,
                token,
                pages,
                pages,
                table,
                query_start_loc=torch.tensor([0, 1]),
                num_computed_tokens=torch.tensor([7]),
                scale=1.0,
                layout=layout,
                backend="torch",
            )
        allocated.append(sum(max(event.self_cpu_memory_usage, 0) for event in profile.events()))
    assert allocated[0] == allocated[1] > 0


@pytest.mark.parametrize("name", ["prefill, chunk and decode in one batch", "softcap", "sinks"])
def test_a_call_outside_no_grad_runs(name, prepared, backend):
    """Models are called plainly too: their keys then require grad, and what is gathered is written in place."""
    batch, reference_output, truth = prepared(NAMED[name])
    operands = [tensor.clone().requires_grad_() for tensor in batch.operands[:3]] + list(batch.operands[3:])
    if backend == "triton":
        with pytest.raises(BackendUnavailableError, match="triton: computes no gradients: call it under torch.no_grad"):
            ops.paged_attention(*operands, **batch.options, backend=backend)
        return
    output = ops.paged_attention(*operands, **batch.options, backend=backend)
    assert output.requires_grad
    assert_close(output.detach(), reference_output, truth)


def test_a_gradient_flows_through_attention_and_not_into_the_caches(prepared):
    """Caches that want one change nothing: it would keep the graph of every step alive."""
    batch, *_ = prepared(NAMED["prefill, chunk and decode in one batch"])
    operands = [tensor.clone().requires_grad_() for tensor in batch.operands[:5]] + list(batch.operands[5:])
    gradients = []
    for backend in ("reference", "torch"):
        output = ops.paged_attention(*operands, **batch.options, backend=backend)
        gradients.append(torch.autograd.grad(output.square().sum(), operands[:5], allow_unused=True))
    assert gradients[0][3:] == gradients[1][3:] == (None, None)
    for expected, got in zip(gradients[0][:3], gradients[1][:3], strict=True):
        torch.testing.assert_close(got, expected)


_OPTIONS = {"query_start_loc": torch.tensor([0, 42]), "scale": 8**-0.5, "sinks": None}


@cache
def _sequence(length, num_kv_heads=2, num_heads=4, dim=8):
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(length, num_heads, dim, generator=generator)
    key, value = torch.randn(2, length, num_kv_heads, dim, generator=generator)
    return query, key, value


def _generate_in_chunks(lengths, case, nan_arena, backend):
    """One request, step by step: attend, write, then free and poison what no later query can see."""
    query, key, value = _sequence(sum(lengths))
    block_size, ring = case.block_size, case.ring_blocks
    width = ring or -(-len(query) // block_size)
    _, key_cache = nan_arena(width + 1, 2, block_size, 8)
    _, value_cache = nan_arena(width + 1, 2, block_size, 8)
    table = (torch.randperm(width, generator=torch.Generator().manual_seed(1)) + 1).to(torch.int32)[None]
    outputs, computed = [], 0
    for length in lengths:
        step = slice(computed, computed + length)
        starts = torch.tensor([0, length], dtype=torch.int32)
        outputs.append(
            ops.paged_attention(
                query[step],
                key[step],
                value[step],
                key_cache,
                value_cache,
                table,
                query_start_loc=starts,
                num_computed_tokens=torch.tensor([computed], dtype=torch.int32),
                scale=8**-0.5,
                window=case.window,
                chunk=case.chunk,
                ring_blocks=ring,
                backend=backend,
            )
        )
        slots = ops.slot_mapping(
            [table],
            torch.tensor([0]),
            starts,
            torch.arange(step.start, step.stop),
            torch.tensor([step.stop]),
            block_sizes=[block_size],
            modes=["ring" if ring else "paged"],
            ring_blocks=[ring],
            backend=backend,
        )[0]
        ops.write_kv(key[step], value[step], key_cache, value_cache, slots, layout="HND", backend=backend)
        computed = step.stop
        if not ring:
            for block in range(case.first_visible(computed) // block_size):
                key_cache[table[0, block]] = value_cache[table[0, block]] = NAN
                table[0, block] = 0
    return torch.cat(outputs)


@pytest.mark.parametrize("size", range(1, 31))
@pytest.mark.parametrize(
    "case",
    [
        Case("full", ()),
        Case("window", (), window=8),
        Case("window, blocks of three", (), window=8, block_size=3),
        Case("ring", (), window=8, ring_blocks=2),
        Case("attention chunks", (), chunk=8),
    ],
    ids=lambda case: case.name,
)
def test_prompt_in_chunks_then_decode_equals_one_shot(size, case, nan_arena):
    """A prompt of 30 tokens in chunks of 1 to 30, then 12 decode steps: the split does not show."""
    lengths = [*[size] * (30 // size), *[30 % size] * (30 % size > 0), *[1] * 12]
    query, key, value = _sequence(42)
    whole = replace(case, requests=((0, 42),))
    truth = oracle(whole, Batch((query,), _OPTIONS, ((key, value),)))
    output = _generate_in_chunks(lengths, case, nan_arena, "torch")
    torch.testing.assert_close(output.double(), truth, atol=2e-6, rtol=0)


def test_reference_in_chunks_equals_one_shot(nan_arena):
    case = Case("ring", ((0, 42),), window=8, ring_blocks=2)
    query, key, value = _sequence(42)
    truth = oracle(case, Batch((query,), _OPTIONS, ((key, value),)))
    output = _generate_in_chunks([13, 9, 1, 1, 8, 10], case, nan_arena, "reference")
    torch.testing.assert_close(output.double(), truth, atol=2e-6, rtol=0)


def test_a_row_is_the_same_alone_and_in_a_batch(prepared, nan_arena):
    """Identical requests give one distinct answer, whoever else is in the batch."""
    batch, output, _ = prepared(Case("four of a kind", ((9, 1),) * 4 + ((30, 1), (0, 12))))
    query, key, value, key_cache, value_cache, table = batch.operands
    query[1:4], key[1:4], value[1:4], table[1:4] = query[:1], key[:1], value[:1], table[:1]
    output = attend(batch, "torch")
    assert len(output[:4].unique(dim=0)) == 1
    alone = ops.paged_attention(
        query[:1],
        key[:1],
        value[:1],
        key_cache,
        value_cache,
        table[:1],
        query_start_loc=torch.tensor([0, 1]),
        num_computed_tokens=torch.tensor([9]),
        scale=8**-0.5,
        backend="torch",
    )
    torch.testing.assert_close(output[:1], alone, atol=1e-6, rtol=0)


# Bad calls.


@pytest.mark.parametrize(
    "change, words",
    [
        ({"query": torch.zeros(1, 3, 8)}, "query: expected a multiple of the 2 KV heads of key, got 3 heads"),
        (
            {"query": torch.zeros(1, 4, 6)},
            "key: expected (*, *, 6) float32 on cpu, got (1, 2, 8) float32 on cpu",
        ),
        ({"query": torch.zeros(2, 4, 8)}, "Pass kv_start_loc where they differ"),
        ({"value": torch.zeros(2, 2, 8)}, "value: expected (1, 2, *) float32"),
        ({"key": torch.zeros(1, 2, 8, dtype=torch.float16)}, "key: expected (*, *, 8) float32"),
        (
            {"block_table": torch.ones(1, 2)},
            "block_table: expected (1, >=1) int32 on cpu, got (1, 2) float32",
        ),
        ({"ring_blocks": 3}, "block_table: expected (1, >=3) int32"),
        ({"value_cache": None}, "got None for value_cache only"),
        (
            {"key_cache": None, "value_cache": None, "block_table": None},
            "got a request with history of 3 tokens",
        ),
        ({"query_start_loc": torch.tensor([0])}, "query_start_loc: expected (2,) int32 or int64"),
        ({"sinks": torch.zeros(2)}, "sinks: expected (4,) floating"),
        ({"window": 0}, "window: expected more than 0, or None for no window, got 0"),
        ({"window": 4.0}, "window: expected a whole number, got 4.0"),
        ({"scale": 0.0}, "scale: expected more than 0, got 0.0"),
        ({"scale": -0.3}, "scale: expected more than 0, got -0.3"),
        ({"layout": "NHD"}, "key: expected (*, 4, 8) float32 on cpu, got (1, 2, 8) float32"),
        ({"ring_blocks": -1}, "ring_blocks: expected 1 or more, or 0 for a plain table, got -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_call_is_refused_in_a_sentence(change, words):
    arguments = {
        "query": torch.zeros(1, 4, 8),
        "key": torch.zeros(1, 2, 8),
        "value": torch.zeros(1, 2, 8),
        "key_cache": torch.zeros(3, 2, 4, 8),
        "value_cache": torch.zeros(3, 2, 4, 8),
        "block_table": torch.ones(1, 2, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1]),
        "num_computed_tokens": torch.tensor([3]),
        "scale": 1.0,
    }
    ops.paged_attention(**arguments)
    with pytest.raises(ShapeError) as refusal:
        ops.paged_attention(**{**arguments, **change})
    assert words in str(refusal.value)
