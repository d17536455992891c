"""The C++ form of the single-step convolution: every dtype, width and instruction set, and what it is not for."""

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import BackendUnavailableError, OutOfRangeError
from kvgroups.kernels.causal_conv1d import cpu_impl
from kvgroups.kernels.cpu_library import cpu_library

pytestmark = pytest.mark.skipif(cpu_library().functions is None, reason=cpu_library().reason or "it is there")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOTS = torch.tensor([5, 0, 2, 9])
"""Row 1 is padding."""
REAL = [0, 2, 3]


@pytest.fixture(autouse=True)
def isa(cpu_isa):
    """Every test runs on what the library holds for each instruction set."""
    return cpu_isa(cpu_impl)


def drawing(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def operands(nan_arena, dtype, channels, width):
    """A call of four rows, and the arena of its states: twelve slots, NaN but for the null one and the three named."""
    draw = drawing(dtype)
    arena, states = nan_arena(12, channels, width, dtype=dtype)
    states[0] = 7.0  # a NaN that is written over a NaN would not show
    states[SLOTS[REAL]] = draw(3, channels, width)
    x = draw(4, channels)
    x[1] = float("nan")
    return arena, (x, states, SLOTS, draw(channels, width), draw(channels))


def update(call, backend="cpu", activation="silu"):
    return ops.causal_conv1d_update(*call, activation=activation, backend=backend)[REAL]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels, width", [(3, 1), (40, 2), (257, 3), (600, 4), (17, 5), (64, 9)])
def test_any_width_and_number_of_channels(channels, width, dtype, nan_arena, assert_same_bits):
    """A sum may differ in its last bit in fp32, and by that from one 16-bit number to its neighbour; states do not."""
    arena, call = operands(nan_arena, dtype, channels, width)
    expected_arena, expected_call = operands(nan_arena, dtype, channels, width)
    ours, theirs = update(call), update(expected_call, "torch")
    assert_same_bits(arena, expected_arena)
    torch.testing.assert_close(ours, theirs, atol=4e-6, rtol=torch.finfo(dtype).eps)
    if dtype != torch.float32:
        assert (ours != theirs).sum() <= len(ours.flatten()) // 1000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_strided_anyhow(dtype, nan_arena, assert_same_bits):
    """Inputs cut out of a projection or transposed, weights by tap, every second bias, slots of every other row."""
    arena, (x, states, slots, weight, bias) = operands(nan_arena, dtype, 40, 4)
    other_arena, (_, other_states, *_) = operands(nan_arena, dtype, 40, 4)
    expected = update((x, other_states, slots, weight, bias))
    wide = torch.full((4, 100), float("nan"), dtype=dtype)
    wide[:, 30:70] = x
    strided = (
        states,
        torch.stack([slots, slots + 100], 1)[:, 0],
        weight.t().contiguous().t(),
        torch.stack([bias, bias + 1], 1)[:, 0],
    )
    assert torch.equal(update((wide[:, 30:70], *strided)), expected)
    assert_same_bits(arena, other_arena)
    _, (_, states, *_) = operands(nan_arena, dtype, 40, 4)
    assert torch.equal(update((x.t().contiguous().t(), states, *strided[1:])), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_round_as_torch_rounds(dtype):
    """Each of the 65536 numbers beside another one: subnormals, overflow, infinities and NaN too."""
    every = torch.arange(1 << 16).to(torch.int16).view(dtype)
    other = every[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]
    near = every * 2**-9  # as far below as the last bits: halves and what lies beside them
    for new in (other, near, every):
        states = torch.stack([every, every], 1)[None].repeat(2, 1, 1)
        call = new[None], states, torch.tensor([1]), torch.ones(1 << 16, 2, dtype=dtype), None
        ours = ops.causal_conv1d_update(*call, backend="cpu")[0]
        theirs = (every.float() + new.float()).to(dtype)
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)
        assert torch.equal(ours.signbit() | ours.isnan(), theirs.signbit() | theirs.isnan())


def test_large_inputs_are_activated_as_torch_does():
    x = torch.cat([torch.linspace(-200, 200, 801), torch.tensor([float("inf"), 3e38, -3e38])])[None]
    states = torch.zeros(2, x.shape[1], 1)
    got = ops.causal_conv1d_update(
        x, states, torch.tensor([1]), torch.ones(x.shape[1], 1), None, activation="silu", backend="cpu"
    )
    torch.testing.assert_close(got, torch.nn.functional.silu(x), atol=1e-35, rtol=5e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype, nan_arena, assert_same_bits):
    arena, call = operands(nan_arena, dtype, 9000, 4)
    other_arena, other_call = operands(nan_arena, dtype, 9000, 4)
    one, threads = update(call), torch.get_num_threads()
    torch.set_num_threads(threads + 2)
    try:
        other = update(other_call)
    finally:
        torch.set_num_threads(threads)
    assert one.isfinite().all()
    assert_same_bits(one, other)
    assert_same_bits(arena, other_arena)


@pytest.mark.parametrize("slot", [12, -1])
def test_a_slot_that_does_not_exist_is_an_error_and_nothing_is_written(slot, nan_arena, assert_same_bits):
    arena, (x, states, _, *weights) = operands(nan_arena, torch.float32, 40, 4)
    before, slots = arena.clone(), torch.tensor([5, 0, 2, slot], dtype=torch.int32)
    with pytest.raises(OutOfRangeError, match=rf"slots: expected slots from 0 to 11, got {slot} at \[3\]\."):
        ops.causal_conv1d_update(x, states, slots, *weights, backend="cpu")
    assert_same_bits(arena, before)


def test_refusals_name_all_reasons_and_auto_goes_on(nan_arena):
    _, (x, states, slots, weight, bias) = operands(nan_arena, torch.float32, 6, 4)
    x[1] = 0
    states = states.bfloat16().transpose(1, 2).contiguous().transpose(1, 2)
    call = x.double(), states, slots, weight.requires_grad_(), bias
    with pytest.raises(BackendUnavailableError) as refusal:
        ops.causal_conv1d_update(*call, backend="cpu")
    assert str(refusal.value) == (
        "causal_conv1d_update: backend 'cpu' does not serve this call (cpu: needs float32, bfloat16 or float16, got "
        "float64; needs states in the dtype of x, got bfloat16; needs weight in the dtype of x, got float32; needs bias "
        "in the dtype of x, got float32; needs states contiguous over channels and width, got strides (1, 6); computes "
        "no gradients: call it under torch.no_grad()). backend='torch' serves it."
    )
    assert ops.causal_conv1d_update(*call)[REAL].isfinite().all()


def test_auto_takes_it(nan_arena, monkeypatch):
    called = []
    monkeypatch.setattr(cpu_impl, "cpu_library", lambda: called.append(True) or cpu_library())
    _, call = operands(nan_arena, torch.bfloat16, 6, 4)
    update(call, "auto")
    assert called
