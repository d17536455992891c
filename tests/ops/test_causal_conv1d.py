"""The causal convolution: activations, widths and dtypes, as transformers computes them; and one token at a time.

What it shares with the other scans (slots, snapshots, cuts, padding) is in test_state_scans.py.
"""

import pytest
import torch
import torch.nn.functional as F

from kvgroups import ops
from kvgroups.errors import ShapeError
from kvgroups.kernels.cpu_library import cpu_library
from tests.ops.conftest import needs_interpreter

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ONE_REQUEST = {"initial_slots": torch.tensor([0]), "final_slots": torch.tensor([1])}


@pytest.fixture(params=["reference", "torch"])
def scan_backend(request):
    return request.param


@pytest.fixture(params=["reference", "torch", "cpu", pytest.param("triton", marks=needs_interpreter)])
def update_backend(request):
    if request.param == "cpu" and cpu_library().functions is None:
        pytest.skip(cpu_library().reason)
    return request.param


def drawing(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def in_fp64(x, weight, bias, activation):
    """The convolution of one new sequence (num_tokens, channels)."""
    windows = F.pad(x.double(), (0, 0, weight.shape[1] - 1, 0)).unfold(0, weight.shape[1], 1)
    result = (windows * weight.double()).sum(-1) + (0 if bias is None else bias.double())
    return result if activation is None else F.silu(result)


def error(got, exact):
    return float((got.double() - exact).abs().max())


def ulp(dtype, exact):
    return torch.finfo(dtype).eps * float(exact.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_sequence_is_that_of_transformers(has_bias, width, activation, dtype, scan_backend):
    from transformers.models.bamba.modeling_bamba import causal_conv1d_fn

    draw = drawing(dtype)
    x, weight, bias = draw(17, 6), draw(6, width), draw(6) if has_bias else None
    theirs = causal_conv1d_fn(x.t()[None], weight, bias, activation=activation)[0].t()
    states = torch.zeros(2, 6, width, dtype=dtype)
    starts = torch.tensor([0, 17])
    options = {"query_start_loc": starts, "activation": activation, "backend": scan_backend}
    ours = ops.causal_conv1d(x, weight, bias, states, **ONE_REQUEST, **options)
    exact = in_fp64(x, weight, bias, activation)
    assert ours.dtype == dtype
    assert error(ours, exact) <= max(error(theirs, exact), 2 * ulp(dtype, exact))
    if scan_backend == "torch" and dtype != torch.float32:
        assert torch.equal(ours, theirs)  # a 16-bit model gives the same tokens
    assert torch.equal(states[1], F.pad(x.t(), (width, 0))[:, -width:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_decode_is_that_of_transformers(
    width, activation, dtype, update_backend, nan_arena, assert_same_bits
):
    from transformers.models.bamba.modeling_bamba import causal_conv1d_update

    draw = drawing(dtype)
    x, weight, bias = draw(3, 6), draw(6, width), draw(6)
    arena, states = nan_arena(12, 6, width, dtype=dtype)
    slots = torch.tensor([5, 2, 9], dtype=torch.int32)
    theirs_states = draw(3, 6, width)
    states[slots.long()] = theirs_states
    expected = arena.clone()
    exact = torch.cat([theirs_states[..., 1:], x[..., None]], -1).double() * weight.double()
    exact = exact.sum(-1) + bias.double()
    exact = exact if activation is None else F.silu(exact)

    theirs = causal_conv1d_update(x[..., None], theirs_states, weight, bias, activation=activation)[..., 0]
    ours = ops.causal_conv1d_update(
        x, states, slots, weight, bias, activation=activation, backend=update_backend
    )
    assert error(ours, exact) <= max(error(theirs, exact), 2 * ulp(dtype, exact))
    if update_backend in ("torch", "cpu") and dtype != torch.float32:
        assert torch.equal(ours, theirs)
    expected[slots.long(), 3 : 3 + 6 * width] = theirs_states.flatten(1)
    assert_same_bits(arena, expected)


def test_weights_of_another_dtype_than_the_tokens(scan_backend):
    """fp32 weights in a bf16 model: the sum is rounded once, to the dtype of the tokens."""
    draw = drawing()
    x, weight, bias = draw(9, 6).bfloat16(), draw(6, 4), draw(6)
    states = torch.zeros(2, 6, 4, dtype=torch.bfloat16)
    starts = torch.tensor([0, 9])
    got = ops.causal_conv1d(
        x, weight, bias, states, query_start_loc=starts, backend=scan_backend, **ONE_REQUEST
    )
    assert torch.equal(got, in_fp64(x, weight, bias, None).bfloat16())


def test_an_update_is_a_step_of_one_token_each(update_backend, nan_arena, assert_same_bits):
    draw = drawing()
    x, weight, bias = draw(4, 6), draw(6, 4), draw(6)
    arena, states = nan_arena(12, 6, 4)
    slots = torch.tensor([5, 2, 9, 0])
    states[slots[:3]] = draw(3, 6, 4)
    scanned, scanned_states = nan_arena(12, 6, 4)
    scanned_states[slots[:3]] = states[slots[:3]]
    expected = ops.causal_conv1d(
        x,
        weight,
        bias,
        scanned_states,
        query_start_loc=torch.arange(5),
        initial_slots=slots,
        final_slots=slots,
        activation="silu",
    )
    got = ops.causal_conv1d_update(x, states, slots, weight, bias, activation="silu", backend=update_backend)
    torch.testing.assert_close(got[:3], expected[:3])
    assert_same_bits(arena, scanned)


def test_an_update_of_no_requests(update_backend):
    states, none = torch.ones(3, 6, 4), torch.zeros(0, dtype=torch.int32)
    got = ops.causal_conv1d_update(
        torch.zeros(0, 6), states, none, torch.ones(6, 4), None, backend=update_backend
    )
    assert got.shape == (0, 6) and (states == 1).all()


def call(**changed):
    """A right call of one request with two tokens, or one made wrong."""
    arguments = {
        "x": torch.zeros(2, 6),
        "weight": torch.zeros(6, 4),
        "bias": torch.zeros(6),
        "states": torch.zeros(3, 6, 4),
        "query_start_loc": torch.tensor([0, 2]),
        "initial_slots": torch.tensor([0]),
        "final_slots": torch.tensor([1]),
    }
    return ops.causal_conv1d(**arguments | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"activation": "gelu"}, r"activation: expected silu, swish or None, got 'gelu'. Apply"),
        # The causal-conv1d package keeps one input fewer.
        (
            {"states": torch.zeros(3, 6, 3)},
            r"states: expected \(\*, 6, 4\) floating on cpu, got \(3, 6, 3\) float32",
        ),
        ({"weight": torch.zeros(5, 4)}, r"weight: expected \(6, >=1\) floating on cpu, got \(5, 4\)"),
        ({"bias": torch.zeros(5)}, r"bias: expected \(6,\)"),
        ({"query_start_loc": torch.tensor([0.0, 2.0])}, r"query_start_loc: expected \(2,\) int32 or int64"),
        ({"final_slots": torch.tensor([1, 2])}, r"final_slots: expected \(1,\) int32 or int64"),
        (
            {"snapshot_tokens": torch.tensor([1])},
            r"snapshot_slots: expected one per snapshot, got None. Pass",
        ),
        (
            {"snapshot_tokens": torch.tensor([1]), "snapshot_slots": torch.tensor([2, 3])},
            r"snapshot_tokens: expected \(2,\) int64",
        ),
    ],
)
def test_a_wrong_call_is_refused(changed, message):
    call()
    with pytest.raises(ShapeError, match=message):
        call(**changed)
