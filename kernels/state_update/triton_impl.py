"""One token per request through Mamba-1 or Mamba-2: a program takes a tile of one head's state, where it lies.

Mamba-1 is Mamba-2 with one head as wide as all channels and one SSM group. All arithmetic is in fp32 (fp64 for
fp64 states), rounded once, where the torch form rounds where transformers does.
"""

import torch
import triton
import triton.language as tl

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.state_slots.triton_ragged import softplus
from kvgroups.kernels.strides import in_units

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

NULL: tl.constexpr = tl.constexpr(NULL_BLOCK_ID)

ELEMENTS_PER_PROGRAM = 2048


def refusals(states, slots, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False):
    """The reasons against this form for a call."""
    if states.shape[-1] == 1 or states.stride(-1) == 1:
        return []
    return [f"needs states contiguous over their last dimension, got stride {states.stride(-1)}"]


def selective_state_update(states, slots, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False):
    """See `kvgroups.ops.selective_state_update`."""
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not output.numel():
        return output
    x, dt, A, B, C, D, z, dt_bias = (
        tensor if tensor is None else tensor.detach() for tensor in (x, dt, A, B, C, D, z, dt_bias)
    )
    if x.dim() == 2:
        states, x, dt, B, C = (tensor[:, None] for tensor in (states, x, dt, B, C))
        A, D, dt_bias = (tensor if tensor is None else tensor[None] for tensor in (A, D, dt_bias))
        z = z if z is None else z[:, None]
    (num_reqs, num_heads, head_dim), state_size = x.shape, B.shape[2]
    B, C = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (B, C))
    # One step size and one decay for a head, which mixers expand: they are read once.
    is_tied = dt.stride(2) == A.stride(1) == A.stride(2) == 0 and (dt_bias is None or dt_bias.stride(1) == 0)
    if not is_tied and A.stride(2) != 1:
        A = A.contiguous()
    padded_state_size = triton.next_power_of_2(state_size)
    tile = max(1, min(triton.next_power_of_2(head_dim), ELEMENTS_PER_PROGRAM // padded_state_size))
    state_unit, state_strides = in_units(state_size, (states, 0, 1, 2))
    unit, strides = in_units(state_size, (B, 0, 1), (C, 0, 1))
    _update_kernel[(num_reqs, num_heads, triton.cdiv(head_dim, tile))](
        output,
        states,
        slots,
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        num_heads,
        num_heads // B.shape[1],
        *state_strides,
        *strides,
        *x.stride(),
        *dt.stride(),
        *A.stride()[:2],
        *((0, 0) if D is None else D.stride()),
        *((0, 0, 0) if z is None else z.stride()),
        *((0, 0) if dt_bias is None else dt_bias.stride()),
        HEAD_DIM=head_dim,
        STATE_SIZE=state_size,
        PADDED_STATE_SIZE=padded_state_size,
        IS_TIED=is_tied,
        HAS_SOFTPLUS=dt_softplus,
        STATE_UNIT=state_unit,
        UNIT=unit,
        DTYPE=tl.float64 if states.dtype == torch.float64 else tl.float32,
        TILE=tile,
    )
    return output


@triton.jit(
    do_not_specialize=[
        "num_heads", "heads_per_group", "slot_stride", "head_stride", "row_stride", "b_request_stride",
        "b_group_stride", "c_request_stride", "c_group_stride", "x_request_stride", "x_head_stride",
        "x_row_stride", "dt_request_stride", "dt_head_stride", "dt_row_stride", "a_head_stride", "a_row_stride",
        "d_head_stride", "d_row_stride", "z_request_stride", "z_head_stride", "z_row_stride",
        "bias_head_stride", "bias_row_stride",
    ],
    do_not_specialize_on_alignment=["slots", "x", "dt", "D", "z", "dt_bias"],
)  # fmt: skip
def _update_kernel(
    output,  # (requests, heads, HEAD_DIM), contiguous
    states,  # (slots, heads, HEAD_DIM, STATE_SIZE)
    slots,  # (requests,)
    x,  # (requests, heads, HEAD_DIM), and so dt and z
    dt,
    A,  # (heads, HEAD_DIM, STATE_SIZE)
    B,  # (requests, groups, STATE_SIZE), and so C
    C,
    D,  # (heads, HEAD_DIM) or None, and so dt_bias
    z,
    dt_bias,
    num_heads,
    heads_per_group,
    slot_stride,  # these three in units of STATE_UNIT elements
    head_stride,
    row_stride,
    b_request_stride,  # these four in units of UNIT elements
    b_group_stride,
    c_request_stride,
    c_group_stride,
    x_request_stride,
    x_head_stride,
    x_row_stride,
    dt_request_stride,
    dt_head_stride,
    dt_row_stride,
    a_head_stride,
    a_row_stride,
    d_head_stride,
    d_row_stride,
    z_request_stride,
    z_head_stride,
    z_row_stride,
    bias_head_stride,
    bias_row_stride,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    PADDED_STATE_SIZE: tl.constexpr,
    IS_TIED: tl.constexpr,
    HAS_SOFTPLUS: tl.constexpr,
    STATE_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    group = head // heads_per_group
    row = tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_row = row < HEAD_DIM
    column = tl.arange(0, PADDED_STATE_SIZE)
    is_column = column < STATE_SIZE
    is_element = is_row[:, None] & is_column[None, :]

    step = _per_row(
        dt + request * dt_request_stride + head * dt_head_stride, dt_row_stride, row, is_row, IS_TIED
    )
    step = step.to(DTYPE)
    if dt_bias is not None:
        bias = _per_row(dt_bias + head * bias_head_stride, bias_row_stride, row, is_row, IS_TIED)
        step += bias.to(DTYPE)
    if HAS_SOFTPLUS:
        step = softplus(step)
    if IS_TIED:
        decay = tl.exp(step * tl.load(A + head * a_head_stride).to(DTYPE))
    else:
        a = tl.load(
            A + head * a_head_stride + row[:, None] * a_row_stride + column[None, :],
            mask=is_element,
            other=0.0,
        )
        decay = tl.exp(step[:, None] * a.to(DTYPE))

    new = tl.load(
        x + request * x_request_stride + head * x_head_stride + row * x_row_stride, mask=is_row, other=0.0
    ).to(DTYPE)
    b = tl.load(
        B + (request * b_request_stride + group * b_group_stride) * UNIT + column, mask=is_column, other=0.0
    ).to(DTYPE)
    c = tl.load(
        C + (request * c_request_stride + group * c_group_stride) * UNIT + column, mask=is_column, other=0.0
    ).to(DTYPE)

    slot = tl.load(slots + request).to(tl.int64)
    is_stored = (row < tl.where(slot != NULL, HEAD_DIM, 0))[:, None] & is_column[None, :]
    cell = (slot * slot_stride + head * head_stride + row * row_stride) * STATE_UNIT
    state_at = (states + cell)[:, None] + column[None, :]
    state = tl.load(state_at, mask=is_stored, other=0.0).to(DTYPE)
    state = decay * state + (step * new)[:, None] * b[None, :]
    tl.store(state_at, state.to(states.dtype.element_ty), mask=is_stored)

    result = tl.sum(state * c[None, :], 1)
    if D is not None:
        skip = tl.load(D + head * d_head_stride + row * d_row_stride, mask=is_row, other=0.0)
        result += skip.to(DTYPE) * new
    if z is not None:
        gate = tl.load(
            z + request * z_request_stride + head * z_head_stride + row * z_row_stride, mask=is_row, other=0.0
        ).to(DTYPE)
        result *= gate / (1 + tl.exp(-gate))
    output_at = output + (request * num_heads + head) * HEAD_DIM + row
    tl.store(output_at, result.to(output.dtype.element_ty), mask=is_row)


@triton.jit
def _per_row(base, stride, row, is_row, IS_TIED: tl.constexpr):
    """One number for the head, or one for each row."""
    if IS_TIED:
        return tl.load(base)
    else:
        return tl.load(base + row * stride, mask=is_row, other=0.0)
