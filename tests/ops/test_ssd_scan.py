"""The scan of Mamba-2: its options, chunks and dtypes, as transformers computes them.

What it shares with the other scans (slots, snapshots, cuts, padding) is in test_state_scans.py.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from kvgroups import ops
from kvgroups.errors import ShapeError
from kvgroups.kernels.ssd_scan import torch_impl

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS, HEAD_DIM, STATE_SIZE = 4, 3, 5
ONE_REQUEST = {"initial_slots": torch.tensor([0]), "final_slots": torch.tensor([1])}


@pytest.fixture(params=["reference", "torch"])
def backend(request):
    return request.param


def drawing(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def operands(count, dtype=torch.float32, groups=2):
    """x, dt, A, B and C of `count` tokens; A is in fp32, as models keep it."""
    draw = drawing(dtype)
    x, dt = draw(count, HEADS, HEAD_DIM), draw(count, HEADS)
    A, B, C = -drawing(seed=1)(HEADS).exp(), draw(count, groups, STATE_SIZE), draw(count, groups, STATE_SIZE)
    return x, dt, A, B, C


def options(has_D, has_z, has_bias, count, dtype=torch.float32):
    draw = drawing(dtype, seed=2)
    return {
        "D": draw(HEADS) if has_D else None,
        "z": draw(count, HEADS, HEAD_DIM) if has_z else None,
        "dt_bias": draw(HEADS) if has_bias else None,
        "dt_softplus": True,
    }


def in_fp64(x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, math.inf)):
    """The scan of one new sequence, and its last state."""
    x, dt, A, B, C = (tensor.double() for tensor in (x, dt, A, B, C))
    B, C = (tensor.repeat_interleave(HEADS // tensor.shape[1], dim=1) for tensor in (B, C))
    dt = dt if dt_bias is None else dt + dt_bias.double()
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    state, outputs = torch.zeros(HEADS, HEAD_DIM, STATE_SIZE, dtype=torch.float64), []
    for t in range(len(x)):
        entering = (dt[t, :, None] * x[t])[..., None] * B[t, :, None]
        state = torch.exp(dt[t] * A)[:, None, None] * state + entering
        result = (state * C[t, :, None]).sum(-1)
        result = result if D is None else result + D.double()[:, None] * x[t]
        outputs.append(result if z is None else result * F.silu(z[t].double()))
    return torch.stack(outputs), state


def scan_one(args, backend, chunk_size=8, **given):
    states, starts = torch.zeros(2, HEADS, HEAD_DIM, STATE_SIZE), torch.tensor([0, len(args[0])])
    given |= {"chunk_size": chunk_size, "query_start_loc": starts, "backend": backend, **ONE_REQUEST}
    return ops.ssd_scan(*args, states, **given), states


def error(got, exact):
    return float((got.double() - exact).abs().max())


def ulp(dtype, exact):
    return torch.finfo(dtype).eps * float(exact.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("has_D", "has_bias"), list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("groups", [1, 2, HEADS])
def test_a_sequence_is_that_of_transformers(groups, has_D, has_bias, dtype, backend):
    from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

    args, given = operands(21, dtype, groups), options(has_D, False, has_bias, 21, dtype)
    x, dt, A, B, C = args
    batched = {name: tensor for name, tensor in given.items() if name != "z"}
    theirs, their_state = mamba2_chunk_scan(
        x[None], dt[None], A, B[None], C[None], chunk_size=8, return_final_states=True, **batched
    )
    exact, exact_state = in_fp64(*args, **given)
    ours, states = scan_one(args, backend, **given)
    assert ours.dtype == theirs.dtype == torch.float32
    # In 16 bits the step sizes are rounded by transformers and the torch form, and not by the reference.
    assert error(ours, exact) <= max(1.5 * error(theirs[0], exact), 4 * ulp(torch.float32, exact))
    assert error(states[1], exact_state) <= max(
        1.5 * error(their_state[0], exact_state), 4 * ulp(torch.float32, exact_state)
    )
    if backend == "torch":
        assert error(ours, theirs[0].double()) <= 8 * ulp(torch.float32, exact)


@pytest.mark.parametrize("has_z", [True, False])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("chunk_size", [1, 4, 16, 64])
def test_the_result_does_not_depend_on_the_chunk_size(chunk_size, count, has_z):
    args, given = operands(count), options(True, has_z, True, count)
    exact, exact_state = in_fp64(*args, **given)
    got, states = scan_one(args, "torch", chunk_size, **given)
    assert error(got, exact) <= 8 * ulp(torch.float32, exact)
    assert error(states[1], exact_state) <= 8 * ulp(torch.float32, exact_state)


def test_strong_decay_in_a_long_chunk_keeps_its_digits():
    """Sums of log decays reach thousands, and what counts are their small differences."""
    x, dt, A, B, C = operands(64)
    dt = dt.abs() * torch.where(torch.arange(64) % 2 == 0, 40.0, 0.01)[:, None]
    exact, exact_state = in_fp64(x, dt, A, B, C)
    got, states = scan_one((x, dt, A, B, C), "torch", 64)
    assert error(got, exact) <= 8 * ulp(torch.float32, exact)
    small = exact.abs() < 1
    assert ((got.double() - exact).abs() / exact.abs())[small].median() < 1e-6
    assert error(states[1], exact_state) <= 8 * ulp(torch.float32, exact_state)


@pytest.mark.parametrize("limit", [(0.5, math.inf), (0.0, 0.7), (0.5, 0.7)])
def test_the_limit_applies_to_limited_requests_only(limit, backend):
    """DTY-4: transformers clamps step sizes in prefill and not in decode. Requests 0 and 2 are prefills."""
    args, given = operands(15), options(True, False, True, 15)
    starts = torch.tensor([0, 6, 7, 14, 15])
    states = torch.zeros(5, HEADS, HEAD_DIM, STATE_SIZE)
    got = ops.ssd_scan(
        *args,
        states,
        chunk_size=4,
        query_start_loc=starts,
        initial_slots=torch.zeros(4, dtype=torch.int64),
        final_slots=torch.arange(1, 5),
        dt_limit=limit,
        is_limited=torch.tensor([True, False, True, False]),
        backend=backend,
        **given,
    )
    for request, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
        x, dt, A, B, C = args
        own = (x[start:stop], dt[start:stop], A, B[start:stop], C[start:stop])
        own_limit = limit if request in (0, 2) else (0.0, math.inf)
        exact, exact_state = in_fp64(*own, **given, dt_limit=own_limit)
        assert error(got[start:stop], exact) <= 8 * ulp(torch.float32, exact)
        assert error(states[request + 1], exact_state) <= 8 * ulp(torch.float32, exact_state)
        # Teeth: the other rule gives something else.
        other, _ = in_fp64(*own, **given, dt_limit=(0.0, math.inf) if own_limit == limit else limit)
        assert error(got[start:stop], other) > 1e-3


def test_without_is_limited_the_limit_applies_to_all(backend):
    args, given = operands(9), options(True, False, True, 9)
    exact, _ = in_fp64(*args, **given, dt_limit=(0.5, 0.7))
    got, _ = scan_one(args, backend, dt_limit=(0.5, 0.7), **given)
    assert error(got, exact) <= 8 * ulp(torch.float32, exact)


def test_a_short_request_does_not_pay_for_a_long_chunk(monkeypatch):
    """One request of 64 tokens among 30 of one: chunks of one step for these."""
    shapes, chunk = [], torch_impl._Chunk.__init__

    def spy(self, x, dt, A, B, C, tokens, state):
        shapes.append(tuple(tokens.shape))
        chunk(self, x, dt, A, B, C, tokens, state)

    monkeypatch.setattr(torch_impl._Chunk, "__init__", spy)
    lengths = torch.tensor([0, *[1] * 15, 64, *[1] * 15])
    ops.ssd_scan(
        *operands(94),
        torch.zeros(32, HEADS, HEAD_DIM, STATE_SIZE),
        chunk_size=32,
        query_start_loc=lengths.cumsum(0),
        initial_slots=torch.zeros(31, dtype=torch.int64),
        final_slots=torch.arange(1, 32),
    )
    assert shapes == [(30, 1), (1, 32), (1, 32)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"B": torch.zeros(2, 3, 5)},
            r"B: expected a number of SSM groups that divides the 4 heads of x, got 3",
        ),
        ({"C": torch.zeros(2, 1, 5)}, r"C: expected \(2, 2, 5\) float32 on cpu, got \(2, 1, 5\)"),
        ({"dt": torch.zeros(2, 4, 3)}, r"dt: expected \(2, 4\) floating"),
        ({"A": torch.zeros(4, 3, 5)}, r"A: expected \(4,\) floating"),
        ({"D": torch.zeros(4, 3)}, r"D: expected \(4,\) floating"),
        ({"states": torch.zeros(3, 4, 5, 3)}, r"states: expected \(\*, 4, 3, 5\) floating"),
        ({"is_limited": torch.tensor([1])}, r"is_limited: expected \(1,\) bool"),
        (
            {"dt_limit": (0.5, 0.1)},
            r"dt_limit: expected the least and the greatest step size, got \(0.5, 0.1\)",
        ),
        ({"chunk_size": 0}, r"chunk_size: expected at least 1 token, got 0"),
    ],
)
def test_a_wrong_call_is_refused(changed, message):
    arguments = dict(zip(("x", "dt", "A", "B", "C"), operands(2), strict=True))
    arguments |= {"states": torch.zeros(3, 4, 3, 5), "query_start_loc": torch.tensor([0, 2]), "chunk_size": 4}
    arguments |= ONE_REQUEST
    ops.ssd_scan(**arguments)
    with pytest.raises(ShapeError, match=message):
        ops.ssd_scan(**arguments | changed)
