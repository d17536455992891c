"""The C++ form of the state update: every dtype, shape and instruction set, and what it is not for."""

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import BackendUnavailableError, OutOfRangeError
from kvgroups.kernels.cpu_library import cpu_library
from kvgroups.kernels.state_update import cpu_impl

pytestmark = pytest.mark.skipif(cpu_library().functions is None, reason=cpu_library().reason or "it is there")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOTS = torch.tensor([5, 0, 2, 9])
"""Row 1 is padding."""
REAL = [0, 2, 3]
SHAPES = {
    "mamba1": (70, 16),  # two tasks, the second short
    "mamba1, one column": (5, 1),
    "mamba1, columns that no vector divides": (130, 21),
    "mamba2": (4, 64, 32),
    "mamba2, one row a head": (6, 1, 5),
    "mamba2, rows and columns that no vector divides": (2, 67, 37),
}


@pytest.fixture(autouse=True)
def isa(cpu_isa):
    """Every test runs on what the library holds for each instruction set."""
    cpu_isa(cpu_impl)


def drawing(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def operands(nan_arena, shape, dtype, state_dtype=torch.float32, groups=2):
    """A call of four rows as mixers make it, its options, and the arena of its states."""
    *inner, state_size = shape
    draw, has_heads = drawing(dtype), len(shape) == 3
    arena, states = nan_arena(12, *shape, dtype=state_dtype)
    states[0] = 7.0  # a NaN that is written over a NaN would not show
    states[SLOTS[REAL]] = drawing(state_dtype, seed=3)(3, *shape)
    x, z = draw(4, *inner), draw(4, *inner)
    b, c = draw(2, 4, *([groups] if has_heads else []), state_size)
    if has_heads:
        heads = inner[:1]
        dt, D, dt_bias = (draw(*many, *heads)[..., None].expand(*many, *inner) for many in ((4,), (), ()))
        A = -drawing(torch.float32, seed=1)(*heads).exp()[:, None, None].expand(*shape)
    else:
        dt, D, dt_bias = draw(4, *inner), draw(*inner), draw(*inner).float()
        A = -drawing(torch.float32, seed=1)(*shape).exp()
    for tensor in (x, dt[..., 0], b, c, z):
        tensor[1] = float("nan")
    return arena, (states, SLOTS, x, dt, A, b, c), {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": True}


def update(call, options, backend="cpu"):
    return ops.selective_state_update(*call, **options, backend=backend)[REAL]


def assert_like_the_torch_form(got, expected):
    """Sums in another order differ in the last bits of fp32. In 16 bits few numbers are others, and those by a rounding."""
    info, size = torch.finfo(got.dtype), float(expected.nan_to_num().abs().max())
    steps = 8 if got.dtype == torch.float32 else 1
    torch.testing.assert_close(got, expected, atol=steps * info.eps * size, rtol=0, equal_nan=True)
    if got.dtype != torch.float32:
        owned = ~expected.isnan()
        assert (got != expected)[owned].sum() <= max(1, int(owned.sum()) // 200)


@pytest.mark.parametrize("dtype, state_dtype", [
    *((dtype, torch.float32) for dtype in DTYPES), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rounds_where_the_torch_form_rounds(shape, dtype, state_dtype, nan_arena, assert_same_bits):
    arena, call, options = operands(nan_arena, shape, dtype, state_dtype)
    other_arena, other_call, _ = operands(nan_arena, shape, dtype, state_dtype)
    ours, theirs = update(call, options), update(other_call, options, "torch")
    assert_like_the_torch_form(ours, theirs)
    assert_like_the_torch_form(arena, other_arena)
    unnamed = [slot for slot in range(12) if slot not in SLOTS[REAL].tolist()]
    assert_same_bits(arena[unnamed], other_arena[unnamed])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(70, 16), (4, 20, 32)], ids=["mamba1", "mamba2"])
def test_operands_strided_anyhow(shape, dtype, nan_arena, assert_same_bits):
    """Transposed, cut out of wider tensors, and copied where mixers expand: the same numbers, so the same bits."""

    def transposed(tensor):
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    def cut(tensor):
        poison = float("nan") if tensor.is_floating_point() else 99
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), poison, dtype=tensor.dtype)
        wide[..., 3::2] = tensor
        return wide[..., 3::2]

    arena, call, options = operands(nan_arena, shape, dtype)
    expected = update(call, options)
    for strided in (transposed, cut, torch.Tensor.contiguous):
        other_arena, (states, slots, *others), _ = operands(nan_arena, shape, dtype)
        own = {name: strided(value) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        assert_same_bits(update((states, cut(slots), *map(strided, others)), own), expected)
        assert_same_bits(other_arena, arena)


@pytest.mark.parametrize("shape", [(70, 16), (4, 20, 32)], ids=["mamba1", "mamba2"])
def test_step_sizes_of_every_size(shape, nan_arena):
    """From where softplus is e^x to where it is x, and decays from 1 to 0."""
    _, (states, slots, x, dt, *rest), _ = operands(nan_arena, shape, torch.float32)
    dt = torch.linspace(-120, 60, x.numel()).view(x.shape)
    others = states.double()
    ours = update((states, slots, x, dt, *rest), {"dt_softplus": True})
    exact = ops.selective_state_update(
        others, slots, *(tensor.double() for tensor in (x, dt, *rest)), dt_softplus=True, backend="reference"
    )[REAL]
    torch.testing.assert_close(ours.double(), exact, atol=1e-6 * float(exact.abs().max()), rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3000, 16), (3, 130, 129)], ids=["mamba1", "mamba2"])
def test_any_number_of_threads_gives_the_same_bits(shape, dtype, nan_arena, assert_same_bits):
    arena, call, options = operands(nan_arena, shape, dtype, groups=1)
    other_arena, other_call, _ = operands(nan_arena, shape, dtype, groups=1)
    one, threads = update(call, options), torch.get_num_threads()
    torch.set_num_threads(threads + 2)
    try:
        other = update(other_call, options)
    finally:
        torch.set_num_threads(threads)
    assert one.isfinite().all()
    assert_same_bits(one, other)
    assert_same_bits(arena, other_arena)


@pytest.mark.parametrize("slot", [12, -1])
@pytest.mark.parametrize("shape", [(70, 16), (4, 20, 32)], ids=["mamba1", "mamba2"])
def test_a_slot_that_does_not_exist_is_an_error_and_nothing_is_written(shape, slot, nan_arena, assert_same_bits):
    arena, (states, _, *others), options = operands(nan_arena, shape, torch.bfloat16)
    before, slots = arena.clone(), torch.tensor([5, 0, 2, slot], dtype=torch.int32)
    with pytest.raises(OutOfRangeError, match=rf"slots: expected slots from 0 to 11, got {slot} at \[3\]\."):
        update((states, slots, *others), options)
    assert_same_bits(arena, before)


def test_refusals_name_all_reasons_and_auto_goes_on(nan_arena):
    _, (states, slots, x, dt, A, B, C), options = operands(nan_arena, (4, 6, 5), torch.float32)
    states = states.bfloat16().transpose(2, 3).contiguous().transpose(2, 3)
    call = states, slots, x, dt.half(), A.double().requires_grad_(), B, C
    options["D"] = options["D"].bfloat16()
    with pytest.raises(BackendUnavailableError) as refusal:
        update(call, options)
    assert str(refusal.value) == (
        "selective_state_update: backend 'cpu' does not serve this call (cpu: needs A in float32, bfloat16 or float16, "
        "got float64; needs dt in the dtype of x, got float16; needs D in the dtype of x, got bfloat16; needs states in "
        "float32 or the dtype of x, got bfloat16; needs states contiguous over their last dimension, got stride 6; "
        "computes no gradients: call it under torch.no_grad()). backend='torch' serves it."
    )
    assert update(call, options, "auto").isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(70, 16), (4, 20, 32)], ids=["mamba1", "mamba2"])
def test_auto_takes_it(shape, dtype, nan_arena, monkeypatch):
    called = []
    monkeypatch.setattr(cpu_impl, "cpu_library", lambda: called.append(True) or cpu_library())
    _, call, options = operands(nan_arena, shape, dtype)
    update(call, options, "auto")
    assert called
