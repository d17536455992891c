"""The scan of Mamba-1: a program takes a tile of one request's channels from its first token to its last.

The state stays in registers, (N, channels), so that a thread holds all N numbers of a channel and the product with C
needs no exchange. A snapshot ends a segment of the loop: within it nothing is asked. All arithmetic is in fp32
(fp64 for fp64 states), rounded once, where the torch form rounds where transformers does.
"""

import torch
import triton
import triton.language as tl

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.state_slots.triton_ragged import (
    num_below,
    segment_end,
    segment_slot,
    softplus,
    sorted_snapshots,
)
from kvgroups.kernels.strides import in_units

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

NULL: tl.constexpr = tl.constexpr(NULL_BLOCK_ID)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

ELEMENTS_PER_PROGRAM = 512
"""Of a state: one warp's channels, at the usual N of 16."""

CLEARED_TOKENS = 16
"""Padded tokens whose output is zeroed at a time."""

UNROLLED_STEPS = 4
"""Tokens whose operands are loaded ahead of the recurrence, which goes one by one."""


def refusals(
    x,
    dt,
    A,
    B,
    C,
    states,
    *,
    query_start_loc,
    initial_slots,
    final_slots,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    snapshot_tokens=None,
    snapshot_slots=None,
):
    """The reasons against this form for a call."""
    if states.shape[-1] == 1 or states.stride(-1) == 1:
        return []
    return [f"needs states contiguous over their last dimension, got stride {states.stride(-1)}"]


def selective_scan(
    x,
    dt,
    A,
    B,
    C,
    states,
    *,
    query_start_loc,
    initial_slots,
    final_slots,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    snapshot_tokens=None,
    snapshot_slots=None,
):
    """See `kvgroups.ops.selective_scan`."""
    (num_tokens, num_channels), state_size, num_reqs = x.shape, A.shape[1], len(initial_slots)
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not output.numel():
        return output
    x, dt, B, C, z = (
        tensor if tensor is None or tensor.stride(1) == 1 else tensor.contiguous()
        for tensor in (tensor if tensor is None else tensor.detach() for tensor in (x, dt, B, C, z))
    )
    A = A.detach().contiguous()
    D, dt_bias = (tensor if tensor is None else tensor.detach().contiguous() for tensor in (D, dt_bias))
    snapshots, slots, num_snapshots, num_halvings = sorted_snapshots(snapshot_tokens, snapshot_slots, x)
    padded_state_size = triton.next_power_of_2(state_size)
    tile = max(1, min(triton.next_power_of_2(num_channels), ELEMENTS_PER_PROGRAM // padded_state_size))
    operands = [tensor for tensor in (x, dt, z) if tensor is not None]
    unit, strides = in_units(num_channels, *((tensor, 0) for tensor in operands))
    x_stride, dt_stride, z_stride = (*strides, 0)[:3]
    state_unit, state_strides = in_units(state_size, (states, 0, 1), (B, 0), (C, 0))
    _scan_kernel[(triton.cdiv(num_channels, tile), num_reqs + 1)](
        output,
        x,
        dt,
        A,
        B,
        C,
        states,
        D,
        z,
        dt_bias,
        query_start_loc,
        initial_slots,
        final_slots,
        snapshots,
        slots,
        num_snapshots,
        num_halvings,
        num_tokens,
        num_reqs,
        num_channels,
        x_stride,
        dt_stride,
        z_stride,
        *state_strides,
        STATE_SIZE=state_size,
        PADDED_STATE_SIZE=padded_state_size,
        HAS_SOFTPLUS=dt_softplus,
        UNIT=unit,
        STATE_UNIT=state_unit,
        DTYPE=tl.float64 if states.dtype == torch.float64 else tl.float32,
        TILE=tile,
        CLEARED=CLEARED_TOKENS,
        UNROLLED=UNROLLED_STEPS,
        num_warps=1,
    )
    return output


@triton.jit(
    do_not_specialize=[
        "num_snapshots", "num_halvings", "num_tokens", "num_reqs", "x_stride", "dt_stride", "z_stride", "slot_stride",
        "channel_stride", "b_stride", "c_stride",
    ],
    do_not_specialize_on_alignment=[
        "query_start_loc", "initial_slots", "final_slots", "snapshot_tokens", "snapshot_slots",
    ],
)  # fmt: skip
def _scan_kernel(
    output,  # (tokens, channels), contiguous
    x,  # (tokens, channels), contiguous over channels, and so dt and z
    dt,
    A,  # (channels, STATE_SIZE), contiguous
    B,  # (tokens, STATE_SIZE), contiguous over the state, and so C
    C,
    states,  # (slots, channels, STATE_SIZE), contiguous over the state
    D,  # (channels,) or None, and so dt_bias
    z,
    dt_bias,
    query_start_loc,  # (requests + 1,)
    initial_slots,  # (requests,), and so final_slots
    final_slots,
    snapshot_tokens,  # (snapshots,), sorted, and their slots
    snapshot_slots,
    num_snapshots,
    num_halvings,
    num_tokens,
    num_reqs,
    num_channels,
    x_stride,  # these three in units of UNIT elements
    dt_stride,
    z_stride,
    slot_stride,  # these four in units of STATE_UNIT elements
    channel_stride,
    b_stride,
    c_stride,
    STATE_SIZE: tl.constexpr,
    PADDED_STATE_SIZE: tl.constexpr,
    HAS_SOFTPLUS: tl.constexpr,
    UNIT: tl.constexpr,
    STATE_UNIT: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    CLEARED: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_channel = channel < num_channels
    start = tl.load(query_start_loc + request).to(tl.int64)
    if request == num_reqs:
        for begin in range(start, num_tokens, CLEARED):
            token = begin + tl.arange(0, CLEARED)
            tl.store(
                output + (token * num_channels)[:, None] + channel[None, :],
                tl.full([CLEARED, TILE], 0, output.dtype.element_ty),
                mask=(token < num_tokens)[:, None] & is_channel[None, :],
            )
        return
    stop = tl.load(query_start_loc + request + 1).to(tl.int64)
    if start == stop:
        return
    initial_slot = tl.load(initial_slots + request).to(tl.int64)
    final_slot = tl.load(final_slots + request).to(tl.int64)
    first = num_below(snapshot_tokens, num_snapshots, num_halvings, start)
    num_kept = num_below(snapshot_tokens, num_snapshots, num_halvings, stop) - first

    row = tl.arange(0, PADDED_STATE_SIZE)
    is_row = row < STATE_SIZE
    is_cell = is_row[:, None] & is_channel[None, :]
    cell = row[:, None] + (channel.to(tl.int64) * channel_stride * STATE_UNIT)[None, :]
    num_read = tl.where(initial_slot != NULL, STATE_SIZE, 0)
    state = tl.load(
        states + initial_slot * slot_stride * STATE_UNIT + cell, mask=is_cell & (row < num_read)[:, None], other=0.0
    ).to(DTYPE)
    a = tl.load(A + row[:, None] + (channel * STATE_SIZE)[None, :], mask=is_cell, other=0.0).to(DTYPE) * LOG2_E
    bias = tl.full([TILE], 0, DTYPE)
    if dt_bias is not None:
        bias = tl.load(dt_bias + channel, mask=is_channel, other=0.0).to(DTYPE)
    skip = tl.full([TILE], 0, DTYPE)
    if D is not None:
        skip = tl.load(D + channel, mask=is_channel, other=0.0).to(DTYPE)

    begin = start
    for segment in range(num_kept + 1):
        end = segment_end(segment, first, num_kept, stop, snapshot_tokens)
        for token in tl.range(begin, end, loop_unroll_factor=UNROLLED):
            step = tl.load(dt + token * dt_stride * UNIT + channel, mask=is_channel, other=0.0).to(DTYPE) + bias
            new = tl.load(x + token * x_stride * UNIT + channel, mask=is_channel, other=0.0).to(DTYPE)
            b = tl.load(B + token * b_stride * STATE_UNIT + row, mask=is_row, other=0.0).to(DTYPE)
            c = tl.load(C + token * c_stride * STATE_UNIT + row, mask=is_row, other=0.0).to(DTYPE)
            if HAS_SOFTPLUS:
                step = softplus(step)
            state = tl.exp2(step[None, :] * a) * state + (step * new)[None, :] * b[:, None]
            result = tl.sum(state * c[:, None], 0)
            if D is not None:
                result += skip * new
            if z is not None:
                gate = tl.load(z + token * z_stride * UNIT + channel, mask=is_channel, other=0.0).to(DTYPE)
                result *= gate / (1 + tl.exp(-gate))
            tl.store(
                output + token * num_channels + channel, result.to(output.dtype.element_ty), mask=is_channel
            )
        slot = segment_slot(segment, first, num_kept, final_slot, snapshot_slots)
        num_written = tl.where(slot != NULL, STATE_SIZE, 0)
        tl.debug_barrier()  # the final slot may be the initial one: it has been read by now
        tl.store(
            states + slot * slot_stride * STATE_UNIT + cell,
            state.to(states.dtype.element_ty),
            mask=is_cell & (row < num_written)[:, None],
        )
        begin = end
