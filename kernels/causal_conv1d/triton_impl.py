"""The causal convolution for one token per request: a program takes a tile of one request's channels.

Ragged prompts have no Triton form yet.
"""

import torch
import triton
import triton.language as tl

from kvgroups.constants import NULL_BLOCK_ID

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

NULL: tl.constexpr = tl.constexpr(NULL_BLOCK_ID)

CHANNELS_PER_PROGRAM = 256


def causal_conv1d_update(x, states, slots, weight, bias, *, activation=None):
    """See `kvgroups.ops.causal_conv1d_update`."""
    num_reqs, num_channels = x.shape
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not output.numel():
        return output
    is_fp64 = torch.float64 in (weight.dtype, states.dtype)
    _update_kernel[(num_reqs, triton.cdiv(num_channels, CHANNELS_PER_PROGRAM))](
        output,
        x.detach(),
        states,
        slots,
        weight.detach(),
        None if bias is None else bias.detach(),
        num_channels,
        *x.stride(),
        *states.stride(),
        *weight.stride(),
        WIDTH=weight.shape[1],
        HAS_ACTIVATION=activation is not None,
        DTYPE=tl.float64 if is_fp64 else tl.float32,
        TILE=CHANNELS_PER_PROGRAM,
    )
    return output


@triton.jit(
    do_not_specialize=["x_request_stride"],
    do_not_specialize_on_alignment=["slots"],
)
def _update_kernel(
    output,  # (requests, channels), contiguous
    x,  # (requests, channels)
    states,  # (slots, channels, WIDTH), oldest input first
    slots,  # (requests,)
    weight,  # (channels, WIDTH)
    bias,  # (channels,), contiguous, or None
    num_channels,
    x_request_stride,
    x_channel_stride,
    slot_stride,
    channel_stride,
    column_stride,
    weight_channel_stride,
    weight_column_stride,
    WIDTH: tl.constexpr,
    HAS_ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_channel = channel < num_channels
    slot = tl.load(slots + request).to(tl.int64)
    is_stored = channel < tl.where(slot != NULL, num_channels, 0)
    state = states + slot * slot_stride + channel * channel_stride
    taps = weight + channel * weight_channel_stride

    newest = tl.load(x + request * x_request_stride + channel * x_channel_stride, mask=is_channel, other=0.0)
    newest = newest.to(DTYPE)
    summed = newest * tl.load(taps + (WIDTH - 1) * weight_column_stride, mask=is_channel, other=0.0).to(DTYPE)
    # Each input moves one column towards the oldest, which falls out.
    for column in tl.static_range(1, WIDTH):
        moved = tl.load(state + column * column_stride, mask=is_stored, other=0.0)
        tl.store(state + (column - 1) * column_stride, moved, mask=is_stored)
        tap = tl.load(taps + (column - 1) * weight_column_stride, mask=is_channel, other=0.0)
        summed += moved.to(DTYPE) * tap.to(DTYPE)
    tl.store(state + (WIDTH - 1) * column_stride, newest.to(states.dtype.element_ty), mask=is_stored)

    if bias is not None:
        summed += tl.load(bias + channel, mask=is_channel, other=0.0).to(DTYPE)
    # A convolution in 16 bits returns 16 bits, which are then activated.
    summed = summed.to(weight.dtype.element_ty).to(DTYPE)
    if HAS_ACTIVATION:
        summed = summed / (1 + tl.exp(-summed))
    tl.store(output + request * num_channels + channel, summed.to(output.dtype.element_ty), mask=is_channel)
