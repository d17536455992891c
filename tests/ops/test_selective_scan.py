"""The scan of Mamba-1: its options and dtypes, as transformers computes them.

What it shares with the other scans (slots, snapshots, cuts, padding) is in test_state_scans.py.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

from kvgroups import ops
from kvgroups.errors import ShapeError
from kvgroups.kernels.selective_scan import torch_impl

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHANNELS, STATE_SIZE = 6, 4


@pytest.fixture(params=["reference", "torch"])
def backend(request):
    return request.param


def drawing(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def operands(count, dtype=torch.float32):
    """x, dt, A, B and C of `count` tokens; A is in fp32, as models keep it."""
    draw = drawing(dtype)
    x, dt, B, C = (draw(count, size) for size in (CHANNELS, CHANNELS, STATE_SIZE, STATE_SIZE))
    return x, dt, -drawing(seed=1)(CHANNELS, STATE_SIZE).exp(), B, C


def options(has_D, has_z, has_bias, dt_softplus, count, dtype=torch.float32):
    draw = drawing(dtype, seed=2)
    return {
        "D": draw(CHANNELS).float() if has_D else None,
        "z": draw(count, CHANNELS) if has_z else None,
        "dt_bias": draw(CHANNELS).float() if has_bias else None,
        "dt_softplus": dt_softplus,
    }


def in_fp64(x, dt, A, B, C, D, z, dt_bias, dt_softplus):
    """The scan of one new sequence, and its last state."""
    x, dt, A, B, C = (tensor.double() for tensor in (x, dt, A, B, C))
    dt = dt if dt_bias is None else dt + dt_bias.double()
    dt = F.softplus(dt) if dt_softplus else dt
    state, outputs = torch.zeros(CHANNELS, STATE_SIZE, dtype=torch.float64), []
    for t in range(len(x)):
        state = torch.exp(dt[t, :, None] * A) * state + (dt[t] * x[t])[:, None] * B[t]
        result = state @ C[t] if D is None else state @ C[t] + D.double() * x[t]
        outputs.append(result if z is None else result * F.silu(z[t].double()))
    return torch.stack(outputs), state


def scan_one(args, given, backend):
    states = torch.zeros(2, CHANNELS, STATE_SIZE)
    slots = {"initial_slots": torch.tensor([0]), "final_slots": torch.tensor([1])}
    starts = torch.tensor([0, len(args[0])])
    return ops.selective_scan(
        *args, states, query_start_loc=starts, backend=backend, **slots, **given
    ), states


def error(got, exact):
    return float((got.double() - exact).abs().max())


def ulp(dtype, exact):
    return torch.finfo(dtype).eps * float(exact.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("has_D", "has_z", "has_bias"), list(itertools.product([True, False], repeat=3)))
def test_a_sequence_is_that_of_transformers(has_D, has_z, has_bias, dtype, backend):
    from transformers.models.jamba.modeling_jamba import mamba_selective_scan

    args, given = operands(21, dtype), options(has_D, has_z, has_bias, True, 21, dtype)
    x, dt, A, B, C = args
    theirs, their_state = mamba_selective_scan(
        x.t()[None],
        dt.t()[None],
        A,
        B.t()[None],
        C.t()[None],
        D=given["D"],
        z=given["z"].t()[None] if has_z else None,
        delta_bias=given["dt_bias"],
        delta_softplus=True,
        return_last_state=True,
    )
    theirs = theirs[0].t().to(dtype)
    exact, exact_state = in_fp64(*args, **given)
    ours, states = scan_one(args, given, backend)
    assert ours.dtype == dtype and states.dtype == torch.float32
    assert error(ours, exact) <= max(1.5 * error(theirs, exact), 4 * ulp(dtype, exact))
    assert error(states[1], exact_state) <= max(
        1.5 * error(their_state[0], exact_state), 4 * ulp(torch.float32, exact_state)
    )
    if backend == "torch" and dtype != torch.float32:
        assert torch.equal(ours, theirs)  # a 16-bit model gives the same tokens


def test_step_sizes_without_softplus(backend):
    args = operands(9)
    args = (args[0], args[1].abs(), *args[2:])
    given = options(True, True, False, False, 9)
    exact, exact_state = in_fp64(*args, **given)
    ours, states = scan_one(args, given, backend)
    assert error(ours, exact) <= 8 * ulp(torch.float32, exact)
    assert error(states[1], exact_state) <= 8 * ulp(torch.float32, exact_state)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_sequence_longer_than_a_rectangle(steps, monkeypatch):
    """The state is handed from rectangle to rectangle, also while requests end."""
    args, given = operands(30), options(True, True, True, True, 30)
    slots = {
        "query_start_loc": torch.tensor([0, 3, 20, 21, 30]),
        "initial_slots": torch.tensor([0, 0, 0, 0]),
        "final_slots": torch.tensor([4, 2, 1, 3]),
        "snapshot_tokens": torch.tensor([9, 13]),
        "snapshot_slots": torch.tensor([5, 6]),
    }
    results = []
    for max_steps in (steps, 64):
        monkeypatch.setattr(torch_impl, "MAX_STEPS", max_steps)
        states = torch.zeros(7, CHANNELS, STATE_SIZE)
        results.append((ops.selective_scan(*args, states, **slots, **given), states))
    torch.testing.assert_close(results[0], results[1])
    assert (results[0][1][1:].abs().sum((1, 2)) > 0).all()


def test_states_may_be_a_slice_of_wider_ones(backend, nan_arena, assert_same_bits):
    """Zamba scans each of its heads by itself: states[:, head] of (num_slots, heads, channels, N)."""
    args, given = operands(9), options(True, True, True, True, 9)
    arena, states = nan_arena(4, 3, CHANNELS, STATE_SIZE)
    expected = arena.clone()
    exact, _ = in_fp64(*args, **given)
    got = ops.selective_scan(
        *args,
        states[:, 1],
        query_start_loc=torch.tensor([0, 9]),
        initial_slots=torch.tensor([0]),
        final_slots=torch.tensor([2]),
        backend=backend,
        **given,
    )
    assert error(got, exact) <= 8 * ulp(torch.float32, exact)
    expected.narrow(1, 3, states[0].numel()).unflatten(1, states.shape[1:])[2, 1] = states[2, 1]
    assert states[2, 1].isfinite().all()
    assert_same_bits(arena, expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"B": torch.zeros(2, 5)}, r"B: expected \(2, 4\) float32 on cpu, got \(2, 5\)"),
        ({"C": torch.zeros(2, 4).bfloat16()}, r"C: expected \(2, 4\) float32 on cpu, got \(2, 4\) bfloat16"),
        ({"dt": torch.zeros(2, 1)}, r"dt: expected \(2, 6\) floating"),
        ({"A": torch.zeros(5, 4)}, r"A: expected \(6, 4\) floating"),
        ({"D": torch.zeros(1)}, r"D: expected \(6,\) floating"),
        ({"z": torch.zeros(1, 6)}, r"z: expected \(2, 6\) float32"),
        ({"dt_bias": torch.zeros(4)}, r"dt_bias: expected \(6,\) floating"),
        ({"states": torch.zeros(3, 4, 6)}, r"states: expected \(\*, 6, 4\) floating on cpu, got \(3, 4, 6\)"),
    ],
)
def test_a_wrong_call_is_refused(changed, message):
    arguments = dict(zip(("x", "dt", "A", "B", "C"), operands(2), strict=True))
    arguments |= {"states": torch.zeros(3, 6, 4), "query_start_loc": torch.tensor([0, 2])}
    arguments |= {"initial_slots": torch.tensor([0]), "final_slots": torch.tensor([1])}
    ops.selective_scan(**arguments)
    with pytest.raises(ShapeError, match=message):
        ops.selective_scan(**arguments | changed)
