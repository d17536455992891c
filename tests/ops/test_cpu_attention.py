"""The C++ form of attention: as good as the reference, the same in any company, and sparing of what it is not for."""

import dataclasses

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import BackendUnavailableError, OutOfRangeError
from kvgroups.kernels import cpu_library as library_module
from kvgroups.kernels.cpu_library import ISAS, CpuLibrary, cpu_library, isas_up_to
from kvgroups.kernels.cpu_operand import ELEMENT_TYPES
from kvgroups.kernels.paged_attention import cpu_impl, torch_impl
from kvgroups.ops import dispatch
from tests.ops.attention_cases import CASES, DTYPES, LAYOUTS, NAMED, Case, assert_close, attend, build

pytestmark = pytest.mark.skipif(cpu_library().functions is None, reason=cpu_library().reason or "it is there")


@pytest.fixture
def isa(cpu_isa):
    """Run what the library holds for each instruction set."""
    cpu_isa(cpu_impl)


@pytest.fixture
def multiplies_fast(monkeypatch):
    """`multiplies_fast(dtype)`: PyTorch multiplies matrices of that dtype fast, and of no other."""

    def pretend(dtype):
        library = dataclasses.replace(cpu_library(), fast_matrix_types=1 << ELEMENT_TYPES[dtype])
        monkeypatch.setattr(cpu_impl, "cpu_library", lambda: library)

    return pretend


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_as_good_as_the_reference(case, dtype, prepared, assert_same_bits, isa):
    layout = LAYOUTS[(CASES.index(case) + DTYPES.index(dtype)) % 2]  # the layouts differ in strides only
    batch, reference_output, truth = prepared(case, layout, dtype)
    before = [tensor.clone() for tensor in batch.operands]
    assert_close(attend(batch, "cpu"), reference_output, truth)
    for tensor, copy in zip(batch.operands, before, strict=True):
        assert_same_bits(tensor, copy)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_long_chunks_go_to_the_torch_form_and_come_back(case, prepared, monkeypatch, multiplies_fast):
    """Requests of more than three queries, or of one with many heads, among others that stay."""
    heads, kv_heads = case.heads
    multiplies_fast(torch.float32)
    monkeypatch.setattr(cpu_impl, "MAX_ROWS", 3 * heads // kv_heads)
    batch, reference_output, truth = prepared(case)
    assert_close(attend(batch, "cpu"), reference_output, truth)


@pytest.mark.parametrize("num_queries, is_left", [(16, False), (17, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_what_pytorch_multiplies_fast_goes_to_the_torch_form(
    dtype, num_queries, is_left, prepared, monkeypatch, multiplies_fast
):
    """Two query heads of a KV head: 16 queries are 32 rows."""
    batch, *_ = prepared(Case("prompt", ((0, num_queries),)), dtype=dtype)
    left = []
    monkeypatch.setattr(
        torch_impl, "paged_attention", lambda query, *_, **options: left.append(query) or torch.zeros_like(query)
    )
    for fast in DTYPES:
        multiplies_fast(fast)
        left.clear()
        attend(batch, "cpu")
        assert bool(left) == (is_left and fast == dtype)


@pytest.mark.parametrize(
    "case, is_asked",
    [
        (Case("prompt", ((0, 5),)), False),
        (Case("chunk", ((9, 5),)), False),
        (Case("padded chunk", ((9, 4),), num_padded_tokens=1), True),
        (Case("padded decode", ((9, 1),), num_padded_tokens=4), True),
        (Case("fewer keys than queries", ((9, 5, 4),)), True),
        (Case("two prompts", ((0, 5), (0, 4))), True),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_lone_long_request_is_not_first_asked_for_in_cpp(case, is_asked, prepared, monkeypatch, multiplies_fast):
    multiplies_fast(torch.float32)
    monkeypatch.setattr(cpu_impl, "MAX_ROWS", 6)
    calls, run = [], cpu_library().function("paged_attention")
    monkeypatch.setattr(CpuLibrary, "function", lambda self, name: lambda call: calls.append(call) or run(call))
    batch, reference_output, truth = prepared(case)
    assert_close(attend(batch, "cpu"), reference_output, truth)
    assert len(calls) == is_asked


LONG = [
    Case("several spans", ((1500, 1), (700, 3), (511, 1), (512, 1)), heads=(6, 2), dims=(64, 48), block_size=16),
    Case("a window of several spans", ((1500, 2),), heads=(5, 1), dims=(33, 80), block_size=48, window=1100),
    Case("own keys of several spans", ((0, 1, 1300), (10, 2, 600)), dims=(24, 16), has_sinks=True, softcap=3.0),
    Case("tiles of queries", ((0, 64), (700, 65), (0, 200), (3, 129)), heads=(6, 2), dims=(40, 24), block_size=16),
    Case("a lone tile of several spans", ((2600, 40), (1100, 64)), heads=(4, 1), dims=(64, 64), block_size=16),
    Case("heads that share nothing", ((40, 300), (0, 270)), heads=(2, 2), dims=(64, 20), block_size=16),
    Case("many heads on one", ((40, 50), (100, 3)), heads=(40, 1), dims=(20, 64), block_size=16, softcap=5.0),
    Case("a window over tiles of queries", ((300, 180), (0, 150)), heads=(3, 1), dims=(16, 40), window=100),
    Case("attention chunks over tiles of queries", ((90, 180),), heads=(2, 2), dims=(32, 32), chunk=70, has_sinks=True),
    Case("one KV head, tiles for threads", ((0, 64), (0, 131), (100, 40)), heads=(4, 1), dims=(24, 40), block_size=16),
    Case("one KV head, spans for threads", ((1000, 64), (600, 50), (500, 100)), heads=(4, 1), dims=(20, 64), softcap=9.0),
    Case("a window over spans for threads", ((2000, 70),), heads=(3, 1), dims=(16, 16), window=700, has_sinks=True),
    Case("fewer keys than queries, in tiles", ((0, 150, 100), (20, 130, 90)), heads=(2, 1), dims=(16, 16)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_tiles_and_spans_are_joined(case, dtype, nan_arena, isa):
    """In 16 bits too arithmetic is in fp32, and the output is rounded once."""
    batch = build(case, "HND", dtype, nan_arena)
    output, lse = ops.paged_attention(*batch.operands, **batch.options, return_lse=True, backend="cpu")
    floats = [tensor.float() if tensor.is_floating_point() else tensor for tensor in batch.operands]
    expected, expected_lse = ops.paged_attention(*floats, **batch.options, return_lse=True, backend="torch")
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    torch.testing.assert_close(output.float(), expected, atol=2e-6, rtol=rounding)
    torch.testing.assert_close(lse, expected_lse, atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        "prefill, chunk and decode in one batch",
        "padded tokens behind the last row",
        "more queries than keys exist",
        "queries before every key",
        "sinks and softcap in an attention chunk",
        "only empty rows",
    ],
)
def test_log_sum_exp(name, prepared, isa):
    batch, *_ = prepared(NAMED[name])
    _, lse = ops.paged_attention(*batch.operands, **batch.options, return_lse=True, backend="cpu")
    _, expected = ops.paged_attention(*batch.operands, **batch.options, return_lse=True, backend="reference")
    torch.testing.assert_close(lse, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("heads", [(8, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_bit_for_bit_in_any_batch_and_on_any_number_of_threads(dtype, heads, nan_arena, isa):
    rows = ((1400, 1), (30, 3), (1400, 1), (0, 12), (700, 50), (20, 290), (0, 64), (1000, 64))
    case = Case("rows", rows, heads=heads, dims=(64, 64), block_size=16)
    batch = build(case, "HND", dtype, nan_arena)
    *tokens, key_cache, value_cache, table = batch.operands
    together = attend(batch, "cpu")
    start = 0
    for row, (computed, queries) in enumerate(rows):
        own = slice(start, start := start + queries)
        alone = ops.paged_attention(
            *(each[own] for each in tokens),
            *(key_cache, value_cache, table[row : row + 1]),
            query_start_loc=torch.tensor([0, queries]),
            num_computed_tokens=torch.tensor([computed]),
            scale=batch.options["scale"],
            backend="cpu",
        )
        assert torch.equal(together[own], alone)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 2)
    try:
        assert torch.equal(attend(batch, "cpu"), together)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_16_bits_is_read_and_written_as_torch_does(dtype, isa):
    """One key each, so the output is the value: all 65536 bit patterns, subnormals, infinities and NaN too."""
    value = torch.arange(1 << 16).to(torch.int16).view(dtype).view(-1, 1, 64)
    output = ops.paged_attention(
        torch.zeros_like(value),
        torch.zeros_like(value),
        value,
        None,
        None,
        None,
        query_start_loc=torch.arange(len(value) + 1),
        num_computed_tokens=torch.zeros(len(value), dtype=torch.int64),
        scale=1.0,
        backend="cpu",
    )
    torch.testing.assert_close(output, value, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("softcap", [None, 30.0], ids=["plain", "softcap"])
def test_large_and_tiny_scores(softcap, isa):
    """Scores from -200 to 200 in one row: what the exponential and the tangent yield at both ends."""
    scores = torch.cat([torch.linspace(-200, 200, 401), torch.logspace(-30, 0, 61)])
    key = scores.view(-1, 1, 1)
    value = torch.randn(len(scores), 1, 4, generator=torch.Generator().manual_seed(0))
    options = {"query_start_loc": torch.tensor([0, 1]), "kv_start_loc": torch.tensor([0, len(scores)]),
               "num_computed_tokens": torch.tensor([0]), "scale": 1.0, "softcap": softcap}  # fmt: skip
    output, lse = ops.paged_attention(
        torch.ones(1, 1, 1), key, value, None, None, None, **options, return_lse=True, backend="cpu"
    )
    exact = scores.double() if softcap is None else (scores.double() / softcap).tanh() * softcap
    expected = exact.softmax(0) @ value[:, 0].double()
    torch.testing.assert_close(output[0, 0].double(), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.item(), exact.logsumexp(0).item(), atol=0, rtol=1e-6)


@pytest.mark.parametrize("sink", [None, 0.5], ids=["plain", "sink"])
@pytest.mark.parametrize("num_hidden", [1, 64, 100, 1024, 1200], ids="{} scores of -inf".format)
def test_scores_of_minus_infinity_weigh_nothing(num_hidden, sink, isa):
    """The first tile, the first span, or all that there is."""
    key = torch.full((1200, 1, 8), 1e-30)
    key[:num_hidden] = -1e30
    value = torch.randn(1200, 1, 4, generator=torch.Generator().manual_seed(0))
    call = (torch.full((1, 1, 8), 1e30), key, value, None, None, None)
    options = {"query_start_loc": torch.tensor([0, 1]), "kv_start_loc": torch.tensor([0, 1200]),
               "num_computed_tokens": torch.tensor([0]), "scale": 1.0,
               "sinks": None if sink is None else torch.tensor([sink]), "return_lse": True}  # fmt: skip
    expected = ops.paged_attention(*call, **options, backend="reference")
    torch.testing.assert_close(ops.paged_attention(*call, **options, backend="cpu"), expected, equal_nan=True)


def test_no_query_heads(prepared, isa):
    batch, *_ = prepared(NAMED["prefill, chunk and decode in one batch"])
    query, *others = batch.operands
    output, lse = ops.paged_attention(query[:, :0], *others, **batch.options, return_lse=True, backend="cpu")
    assert output.shape == (len(query), 0, 8) and lse.shape == (len(query), 0)


def test_nan_in_what_is_seen_is_not_hidden(prepared, isa):
    batch, *_ = prepared(NAMED["decode of ragged rows"])
    batch.operands[2][1, 0] = float("nan")  # the second request's own value, first KV head
    output = attend(batch, "cpu")
    assert output[1, :2].isnan().all()
    assert output[[0, 2, 3]].isfinite().all() and output[1, 2:].isfinite().all()


PARTLY_SEEN = [
    Case("all that came before", ((9, 22),)),
    Case("a head of its own each", ((9, 90),), heads=(2, 2)),
    Case("three heads on one, in a window", ((9, 40),), heads=(3, 1), window=7),
    Case("a window of one", ((0, 21),), heads=(2, 2), window=1),
    Case("an attention chunk, softly capped", ((3, 70),), heads=(1, 1), chunk=10, softcap=2.0),
]


@pytest.mark.parametrize("spoiled", [0, 1, 6, 20])
@pytest.mark.parametrize("case", PARTLY_SEEN, ids=lambda case: case.name)
def test_rows_that_do_not_see_a_token_are_the_same_bit_for_bit_whatever_it_is(case, spoiled, nan_arena, isa):
    """Neighbouring rows are worked on together, and each sees another range of keys."""
    batch = build(case, "HND", torch.float32, nan_arena)
    _, key, value, *_ = batch.operands
    clean = attend(batch, "cpu")
    key[spoiled], value[spoiled] = float("inf"), float("nan")
    output = attend(batch, "cpu")
    (row,) = case.rows
    for query in range(row.queries):
        if case.sees(row.computed + query, row.computed + spoiled):
            assert output[query].isnan().all()
        else:
            assert torch.equal(output[query], clean[query])


def test_a_block_that_does_not_exist_is_an_error_and_not_a_crash(prepared):
    batch, *_ = prepared(NAMED["decode of one row"])
    batch.operands[5][0, 0] = 1 << 30
    with pytest.raises(OutOfRangeError, match=r"block_table: expected block ids from 0 to \d+, got 1073741824 at \[0, 0\]"):
        attend(batch, "cpu")


@pytest.mark.parametrize("starts", [(0, 41), (-1, 39), (40, 0), (1 << 40, (1 << 40) + 40)], ids=str)
@pytest.mark.parametrize("name", ["query_start_loc", "kv_start_loc"])
def test_tokens_that_do_not_exist_are_an_error_and_not_a_crash(name, starts, prepared):
    batch, *_ = prepared(NAMED["long prefill, more queries than are packed"])
    right = torch.tensor([0, 40])
    changes = {"query_start_loc": right, "kv_start_loc": right, name: torch.tensor(starts)}
    with pytest.raises(OutOfRangeError, match=f"{name}: expected start locations that ascend from 0 to at most 40"):
        attend(batch, "cpu", **changes)


def test_a_gradient_that_only_sinks_want_is_not_lost(prepared):
    batch, *_ = prepared(NAMED["sinks"])
    batch.options["sinks"].requires_grad_()
    assert attend(batch, "auto").requires_grad
    with pytest.raises(BackendUnavailableError, match="computes no gradients"):
        attend(batch, "cpu")


@pytest.mark.parametrize("wanted", ["query", "key", "value", "key_cache", "value_cache", "sinks"])
def test_auto_takes_the_torch_form_where_a_gradient_is_wanted(wanted, prepared):
    batch, *_ = prepared(NAMED["sinks"])
    names = ("query", "key", "value", "key_cache", "value_cache")
    tensors = dict(zip(names, batch.operands, strict=False)) | {"sinks": batch.options["sinks"]}
    tensors[wanted].requires_grad_()

    def taken():
        return dispatch.form_for("paged_attention", "auto", *batch.operands, **batch.options)[0]

    assert taken() == ("cpu" if "cache" in wanted else "torch")
    with torch.no_grad():
        assert taken() == "cpu"


def test_refusals_name_all_reasons_and_auto_goes_on(prepared):
    batch, _, truth = prepared(NAMED["decode of one row"])
    operands = [batch.operands[0].double().requires_grad_(), *(tensor.double() for tensor in batch.operands[1:5])]
    operands[3] = operands[3].mT.contiguous().mT
    call = (*operands, batch.operands[5])
    with pytest.raises(BackendUnavailableError) as refusal:
        ops.paged_attention(*call, **batch.options, backend="cpu")
    assert str(refusal.value) == (
        "paged_attention: backend 'cpu' does not serve this call (cpu: needs float32, bfloat16 or float16, got "
        "float64; needs key_cache contiguous over its last dimension, got stride 4; computes no gradients: call it "
        "under torch.no_grad()). backend='torch' serves it."
    )
    output = ops.paged_attention(*call, **batch.options)
    torch.testing.assert_close(output.detach(), truth, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "text, reason",
    [
        (None, "which were not built: install kvgroups with a C.. compiler"),
        ("no library", "which cannot be loaded: "),
    ],
)
def test_without_the_library_the_torch_form_serves(text, reason, prepared, monkeypatch, tmp_path):
    if text is not None:
        (tmp_path / "_cpu.so").write_text(text)
    monkeypatch.setattr(library_module, "PATH", tmp_path / "_cpu.so")
    monkeypatch.setattr(dispatch, "cpu_library", library_module.cpu_library.__wrapped__)
    batch, reference_output, truth = prepared(NAMED["decode of one row"])
    assert_close(attend(batch, "auto"), reference_output, truth)
    with pytest.raises(BackendUnavailableError, match=reason):
        attend(batch, "cpu")


def test_a_library_of_another_version_is_not_called(monkeypatch):
    monkeypatch.setattr(library_module, "INTERFACE", library_module.INTERFACE + 1)
    stale = library_module.cpu_library.__wrapped__()
    assert stale.functions is None and "install kvgroups again" in stale.reason


@pytest.mark.parametrize("wanted", [ISAS[number] for number in isas_up_to(cpu_library().isa)])
def test_an_instruction_set_can_be_asked_for(wanted, monkeypatch):
    monkeypatch.setenv("KVGROUPS_CPU_ISA", wanted)
    assert ISAS[library_module.cpu_library.__wrapped__().isa] == wanted


def test_an_instruction_set_that_is_not_there_is_no_reason_to_take_another(monkeypatch):
    monkeypatch.setenv("KVGROUPS_CPU_ISA", "avx1024")
    refused = library_module.cpu_library.__wrapped__()
    assert refused.functions is None and "KVGROUPS_CPU_ISA among " in refused.reason and "'avx1024'" in refused.reason


def test_auto_takes_it(prepared, monkeypatch):
    called = []
    monkeypatch.setattr(cpu_impl, "cpu_library", lambda: called.append(True) or cpu_library())
    batch, *_ = prepared(NAMED["decode of one row"])
    attend(batch, "auto")
    assert called and isinstance(cpu_library(), CpuLibrary)
