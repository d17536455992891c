"""One token per request through Mamba-1 or Mamba-2, as transformers computes it, in place on state slots."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from kvgroups import ops
from kvgroups.errors import ShapeError
from kvgroups.kernels.cpu_library import cpu_library
from kvgroups.kernels.state_update import torch_impl
from tests.ops.conftest import needs_interpreter

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS, HEAD_DIM, STATE_SIZE = 4, 3, 5
SLOTS = torch.tensor([5, 2, 9, 0], dtype=torch.int32)
"""Rows 0, 1 and 2 on slots 5, 2 and 9; row 3 is padding."""


@pytest.fixture(params=["reference", "torch", "cpu", pytest.param("triton", marks=needs_interpreter)])
def backend(request):
    """The forms of `conftest.py` and the C++ one."""
    if request.param == "cpu" and cpu_library().functions is None:
        pytest.skip(cpu_library().reason)
    if request.param == "cpu" and "state_dtype" in request.node.callspec.params:
        pytest.skip("takes states in fp32 or the dtype of x, see test_cpu_state_update.py")
    return request.param


def drawing(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def mamba1(dtype=torch.float32, has_D=True, has_z=True, has_bias=True):
    """The arguments after the slots, of four requests with six channels, and the options."""
    draw = drawing(dtype)
    args = (
        draw(4, 6),
        draw(4, 6),
        -drawing(seed=1)(6, STATE_SIZE).exp(),
        draw(4, STATE_SIZE),
        draw(4, STATE_SIZE),
    )
    given = {"D": draw(6), "z": draw(4, 6), "dt_bias": draw(6).float(), "dt_softplus": True}
    return args, {**given, **without(has_D, has_z, has_bias)}


def mamba2(dtype=torch.float32, has_D=True, has_z=False, has_bias=True, groups=2):
    """The same for four heads; what is one number per head is expanded, as mixers do."""
    draw, inner = drawing(dtype), (HEADS, HEAD_DIM)
    A = -drawing(seed=1)(HEADS).exp()[:, None, None].expand(*inner, STATE_SIZE)
    dt, D, dt_bias = (draw(*shape, HEADS)[..., None].expand(*shape, *inner) for shape in ((4,), (), ()))
    args = draw(4, *inner), dt, A, draw(4, groups, STATE_SIZE), draw(4, groups, STATE_SIZE)
    given = {"D": D, "z": draw(4, *inner), "dt_bias": dt_bias, "dt_softplus": True}
    return args, {**given, **without(has_D, has_z, has_bias)}


def without(has_D, has_z, has_bias):
    wanted = {"D": has_D, "z": has_z, "dt_bias": has_bias}
    return {name: None for name, is_wanted in wanted.items() if not is_wanted}


FORMS = [mamba1, mamba2]


def in_fp64(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
    """The outputs and the states of all requests."""
    state, x, dt, A, B, C = (tensor.double() for tensor in (state, x, dt, A, B, C))
    if x.dim() == 3:
        B, C = (tensor.repeat_interleave(HEADS // tensor.shape[1], dim=1)[:, :, None] for tensor in (B, C))
    else:
        B, C = B[:, None], C[:, None]
    dt = dt if dt_bias is None else dt + dt_bias.double()
    dt = F.softplus(dt) if dt_softplus else dt
    state = torch.exp(dt[..., None] * A) * state + (dt * x)[..., None] * B
    result = (state * C).sum(-1)
    result = result if D is None else result + D.double() * x
    return (result if z is None else result * F.silu(z.double())), state


def filled(nan_arena, args, state_dtype=torch.float32):
    """An arena with drawn states in slots 5, 2 and 9, its view, and the four requests' states."""
    arena, states = nan_arena(12, *args[2].shape, dtype=state_dtype)
    initial = drawing(state_dtype, seed=3)(4, *args[2].shape)
    initial[3] = 0
    states[SLOTS[:3].long()] = initial[:3]
    return arena, states, initial


def error(got, exact):
    return float((got.double() - exact).abs().max())


def ulp(dtype, exact):
    return torch.finfo(dtype).eps * float(exact.abs().max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("has_D", "has_z", "has_bias"), list(itertools.product([True, False], repeat=3)))
def test_outputs_and_states_are_those_of_the_recurrence(
    form, has_D, has_z, has_bias, backend, nan_arena, assert_same_bits
):
    args, given = form(has_D=has_D, has_z=has_z, has_bias=has_bias)
    arena, states, initial = filled(nan_arena, args)
    expected = arena.clone()
    exact, exact_states = in_fp64(initial, *args, **given)
    got = ops.selective_state_update(states, SLOTS, *args, backend=backend, **given)
    assert got.shape == args[0].shape and error(got[:3], exact[:3]) <= 8 * ulp(torch.float32, exact)
    written = SLOTS[:3].long()
    assert error(states[written], exact_states[:3]) <= 8 * ulp(torch.float32, exact_states)
    expected[written, 3 : 3 + states[0].numel()] = states[written].flatten(1)
    assert_same_bits(arena, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decode_is_that_of_transformers(form, dtype, backend, nan_arena):
    from transformers.models.bamba.modeling_bamba import mamba2_selective_state_update
    from transformers.models.jamba.modeling_jamba import mamba_selective_state_update

    args, given = form(dtype)
    _, states, initial = filled(nan_arena, args)
    exact, exact_states = in_fp64(initial, *args, **given)
    update = mamba_selective_state_update if form is mamba1 else mamba2_selective_state_update
    their_states = initial.clone()
    theirs = update(their_states, *args, **given)
    ours = ops.selective_state_update(states, SLOTS, *args, backend=backend, **given)
    assert ours.dtype == dtype
    assert error(ours[:3], exact[:3]) <= max(1.5 * error(theirs[:3], exact[:3]), 4 * ulp(dtype, exact))
    our_states = states[SLOTS[:3].long()]
    their_error = error(their_states[:3], exact_states[:3])
    assert error(our_states, exact_states[:3]) <= max(1.5 * their_error, 4 * ulp(torch.float32, exact_states))
    if backend in ("torch", "cpu") and dtype != torch.float32:
        assert torch.equal(ours[:3], theirs[:3])  # a 16-bit model decodes to the same tokens


@pytest.mark.parametrize("groups", [1, 2, HEADS])
def test_heads_use_their_ssm_group(groups, backend, nan_arena):
    args, given = mamba2(groups=groups)
    _, states, initial = filled(nan_arena, args)
    exact, _ = in_fp64(initial, *args, **given)
    got = ops.selective_state_update(states, SLOTS, *args, backend=backend, **given)
    assert error(got[:3], exact[:3]) <= 8 * ulp(torch.float32, exact)


def test_expanded_arguments_are_no_other_than_copied_ones(backend, nan_arena):
    args, given = mamba2()
    results = []
    for copy in (lambda tensor: tensor, torch.Tensor.contiguous):
        arena, states, _ = filled(nan_arena, args)
        own = {
            name: copy(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()
        }
        results.append(
            (
                ops.selective_state_update(states, SLOTS, *map(copy, args), backend=backend, **own)[:3],
                arena,
            )
        )
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_states_are_updated_where_they_lie(form, dtype, monkeypatch, nan_arena, assert_same_bits):
    """The torch form's two ways give the same: all states gathered, or each in its slot."""
    args, given = form(dtype)
    results = []
    with torch.no_grad():
        for threshold in (1, 1 << 20):
            monkeypatch.setattr(torch_impl, "MIN_IN_PLACE", threshold)
            arena, states, _ = filled(nan_arena, args)
            results.append((ops.selective_state_update(states, SLOTS, *args, **given), arena))
    (in_slots, its_arena), (gathered, other_arena) = results
    torch.testing.assert_close(in_slots, gathered)
    torch.testing.assert_close(its_arena, other_arena, equal_nan=True)
    untouched = [slot for slot in range(12) if slot not in SLOTS.tolist()]
    assert_same_bits(its_arena[[0, *untouched]], other_arena[[0, *untouched]])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threshold", [1, 1 << 20])
def test_no_gradient_flows_into_the_states(form, threshold, monkeypatch, nan_arena):
    monkeypatch.setattr(torch_impl, "MIN_IN_PLACE", threshold)
    args, given = form()
    args = tuple(tensor.clone().requires_grad_() for tensor in args)
    _, states, _ = filled(nan_arena, args)
    ops.selective_state_update(states, SLOTS, *args, **given)
    assert not states.requires_grad


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("threshold", [1, 1 << 20])
@torch.no_grad()
def test_states_of_another_dtype(threshold, state_dtype, backend, monkeypatch, nan_arena):
    """They are worked on in fp32 at least, and rounded when they are written."""
    monkeypatch.setattr(torch_impl, "MIN_IN_PLACE", threshold)
    args, given = mamba2()
    _, states, initial = filled(nan_arena, args, state_dtype)
    exact, exact_states = in_fp64(initial, *args, **given)
    got = ops.selective_state_update(states, SLOTS, *args, backend=backend, **given)
    assert error(got[:3], exact[:3]) <= 8 * ulp(torch.float32, exact)
    coarser = torch.bfloat16 if state_dtype == torch.bfloat16 else torch.float32
    assert error(states[SLOTS[:3].long()], exact_states[:3]) <= 8 * ulp(coarser, exact_states)


@pytest.mark.parametrize("form", [mamba1])
def test_states_may_be_a_slice_of_wider_ones(form, backend, nan_arena, assert_same_bits):
    """Zamba updates each of its heads by itself: states[:, head] of (num_slots, heads, channels, N)."""
    args, given = form()
    arena, wide = nan_arena(12, 3, 6, STATE_SIZE)
    states, initial = wide[:, 1], drawing(seed=3)(4, 6, STATE_SIZE)
    states[SLOTS[:3].long()] = initial[:3]
    expected = arena.clone()
    exact, _ = in_fp64(initial, *args, **given)
    got = ops.selective_state_update(states, SLOTS, *args, backend=backend, **given)
    assert error(got[:3], exact[:3]) <= 8 * ulp(torch.float32, exact)
    same_slice = expected.narrow(1, 3, wide[0].numel()).unflatten(1, wide.shape[1:])[:, 1]
    same_slice[SLOTS[:3].long()] = states[SLOTS[:3].long()]
    assert_same_bits(arena, expected)


def test_an_update_is_a_scan_of_one_token_each(backend, nan_arena):
    (x, dt, A, B, C), given = mamba2()
    _, states, _ = filled(nan_arena, (x, dt, A, B, C))
    _, scanned, _ = filled(nan_arena, (x, dt, A, B, C))
    per_head = {"D": given["D"][:, 0], "dt_bias": given["dt_bias"][:, 0], "dt_softplus": True}
    slots = {"query_start_loc": torch.arange(5), "initial_slots": SLOTS, "final_slots": SLOTS}
    expected = ops.ssd_scan(x, dt[..., 0], A[:, 0, 0], B, C, scanned, chunk_size=4, **slots, **per_head)
    got = ops.selective_state_update(states, SLOTS, x, dt, A, B, C, backend=backend, **given)
    torch.testing.assert_close(got[:3], expected[:3])
    torch.testing.assert_close(states, scanned, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
def test_no_requests(form, backend):
    args, given = form()
    args = (args[0][:0], args[1][:0], args[2], args[3][:0], args[4][:0])
    states = torch.ones(3, *args[2].shape)
    given["z"] = None
    got = ops.selective_state_update(states, SLOTS[:0], *args, backend=backend, **given)
    assert got.shape == args[0].shape and (states == 1).all()


# The comparison has teeth: each of these is wrong, and it must show.


def on_the_neighbour_s_slot(states, slots, *args, **given):
    return ops.selective_state_update(states, torch.cat([slots[:3].roll(1), slots[3:]]), *args, **given)


def with_the_floor_of_a_prefill(states, slots, x, dt, *args, **given):
    """DTY-4."""
    floored = F.softplus(dt + given["dt_bias"]).clamp(min=0.5)
    return ops.selective_state_update(
        states, slots, x, floored, *args, **given | {"dt_bias": None, "dt_softplus": False}
    )


def writing_the_zero_state(states, slots, *args, **given):
    states[0] = 0.0
    return ops.selective_state_update(states, slots, *args, **given)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "wrong", [on_the_neighbour_s_slot, with_the_floor_of_a_prefill, writing_the_zero_state]
)
def test_a_wrong_update_shows(wrong, form, nan_arena):
    args, given = form()
    outcomes = []
    for update in (ops.selective_state_update, wrong):
        arena, states, _ = filled(nan_arena, args)
        outcomes.append((update(states, SLOTS, *args, **given)[:3], arena.nan_to_num(nan=1e6)))
    (right, its_arena), (other, other_arena) = outcomes
    assert error(other, right.double()) > 1e-3 or not torch.equal(its_arena, other_arena)


@pytest.mark.parametrize(
    ("form", "changed", "message"),
    [
        (mamba1, {"B": torch.zeros(4, 1, 5)}, r"B: expected \(\*, \*\) floating on cpu, got \(4, 1, 5\)"),
        (mamba1, {"D": torch.zeros(5)}, r"D: expected \(6,\) floating"),
        (mamba1, {"slots": SLOTS[:3]}, r"slots: expected \(4,\) int32 or int64"),
        (mamba1, {"x": torch.zeros(4)}, r"x: expected \(\*, \*, \*\) floating on cpu, got \(4,\)"),
        (mamba2, {"B": torch.zeros(4, 3, 5)}, r"B: expected a number of SSM groups that divides the 4 heads"),
        (mamba2, {"dt": torch.zeros(4, 4)}, r"dt: expected \(4, 4, 3\) floating on cpu, got \(4, 4\)"),
        (mamba2, {"A": torch.zeros(4)}, r"A: expected \(4, 3, 5\) floating"),
        (mamba2, {"states": torch.zeros(12, 4, 5, 3)}, r"states: expected \(\*, 4, 3, 5\) floating"),
    ],
)
def test_a_wrong_call_is_refused(form, changed, message):
    args, given = form()
    arguments = dict(zip(("x", "dt", "A", "B", "C"), args, strict=True)) | given
    arguments |= {"states": torch.zeros(12, *args[2].shape), "slots": SLOTS}
    ops.selective_state_update(**arguments)
    with pytest.raises(ShapeError, match=message):
        ops.selective_state_update(**arguments | changed)
