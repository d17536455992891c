"""The causal convolution. One token per request: a program takes a tile of one request's channels. Packed tokens: a
program takes a tile of tokens and channels, wherever requests begin in it; the states follow in launches of their
own, since the state that a request starts from may lie where it leaves its own.
"""

import torch
import triton
import triton.language as tl

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.state_slots.triton_ragged import request_of
from kvgroups.kernels.strides import in_units

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

NULL: tl.constexpr = tl.constexpr(NULL_BLOCK_ID)

CHANNELS_PER_PROGRAM = 256
TOKENS_PER_PROGRAM = 8


def causal_conv1d(
    x,
    weight,
    bias,
    states,
    *,
    query_start_loc,
    initial_slots,
    final_slots,
    activation=None,
    snapshot_tokens=None,
    snapshot_slots=None,
):
    """See `kvgroups.ops.causal_conv1d`."""
    (num_tokens, num_channels), width = x.shape, weight.shape[1]
    x = x.detach() if x.stride(1) == 1 else x.detach().contiguous()
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not output.numel():
        return output
    num_reqs, num_tiles = len(initial_slots), triton.cdiv(num_channels, CHANNELS_PER_PROGRAM)
    unit, (x_token_stride,) = in_units(num_channels, (x, 0))
    operands = (x, states, query_start_loc, initial_slots)
    batch = (num_reqs, num_reqs.bit_length(), num_channels, x_token_stride, *states.stride())
    settings = {"WIDTH": width, "UNIT": unit, "TILE": CHANNELS_PER_PROGRAM}
    is_fp64 = torch.float64 in (weight.dtype, states.dtype)
    _convolve_kernel[(num_tiles, triton.cdiv(num_tokens, TOKENS_PER_PROGRAM))](
        output,
        weight.detach(),
        None if bias is None else bias.detach(),
        num_tokens,
        *weight.stride(),
        *operands,
        *batch,
        **settings,
        HAS_ACTIVATION=activation is not None,
        DTYPE=tl.float64 if is_fp64 else tl.float32,
        TOKENS=TOKENS_PER_PROGRAM,
    )
    # Snapshots first: the last launch overwrites the states that both start from.
    settings["PADDED_WIDTH"] = triton.next_power_of_2(width)
    if snapshot_tokens is not None and len(snapshot_tokens):
        grid = (num_tiles, len(snapshot_tokens))
        _keep_kernel[grid](snapshot_tokens, snapshot_slots, *operands, *batch, **settings, IS_SNAPSHOT=True)
    if num_reqs:
        _keep_kernel[(num_tiles, num_reqs)](
            query_start_loc, final_slots, *operands, *batch, **settings, IS_SNAPSHOT=False
        )
    return output


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


_BATCH = ["num_reqs", "num_halvings", "x_token_stride"]


@triton.jit(
    do_not_specialize=["num_tokens", *_BATCH],
    do_not_specialize_on_alignment=["query_start_loc", "initial_slots"],
)
def _convolve_kernel(
    output,  # (tokens, channels), contiguous
    weight,  # (channels, WIDTH)
    bias,  # (channels,), contiguous, or None
    num_tokens,
    weight_channel_stride,
    weight_column_stride,
    x,  # (tokens, channels), contiguous over channels
    states,  # (slots, channels, WIDTH), oldest input first
    query_start_loc,  # (requests + 1,)
    initial_slots,  # (requests,)
    num_reqs,
    num_halvings,
    num_channels,
    x_token_stride,  # in units of UNIT elements
    slot_stride,
    channel_stride,
    column_stride,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    HAS_ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_channel = channel < num_channels
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    request = request_of(token, query_start_loc, num_reqs, num_halvings)
    is_token = request < num_reqs
    step = token - tl.load(query_start_loc + request, mask=is_token, other=0)

    summed = tl.full([TOKENS, TILE], 0, DTYPE)
    for column in tl.static_range(WIDTH):
        back = WIDTH - 1 - column
        is_own = is_token & (step >= back)
        tap = tl.load(
            weight + channel * weight_channel_stride + column * weight_column_stride, mask=is_channel, other=0.0
        )
        inputs = tl.load(
            x + ((token - back) * x_token_stride * UNIT)[:, None] + channel[None, :],
            mask=is_own[:, None] & is_channel[None, :],
            other=0.0,
        )
        summed += inputs.to(DTYPE) * tap.to(DTYPE)[None, :]
    # Near a request's start the window reaches back into its state. Most tiles have no such token.
    if tl.min(tl.where(is_token, step, WIDTH), 0) < WIDTH - 1:
        slot = tl.load(initial_slots + request, mask=is_token, other=NULL).to(tl.int64)
        for column in tl.static_range(WIDTH - 1):
            back = WIDTH - 1 - column
            is_past = is_token & (step < back) & (slot != NULL)
            tap = tl.load(
                weight + channel * weight_channel_stride + column * weight_column_stride,
                mask=is_channel,
                other=0.0,
            )
            cell = slot * slot_stride + (WIDTH + step - back) * column_stride
            inputs = tl.load(
                states + cell[:, None] + (channel * channel_stride)[None, :],
                mask=is_past[:, None] & is_channel[None, :],
                other=0.0,
            )
            summed += inputs.to(DTYPE) * tap.to(DTYPE)[None, :]

    if bias is not None:
        summed += tl.load(bias + channel, mask=is_channel, other=0.0).to(DTYPE)[None, :]
    # A convolution in 16 bits returns 16 bits, which are then activated.
    summed = summed.to(weight.dtype.element_ty).to(DTYPE)
    if HAS_ACTIVATION:
        summed *= tl.sigmoid(summed)
    summed = tl.where(is_token[:, None], summed, 0.0)
    tl.store(
        output + (token * num_channels)[:, None] + channel[None, :],
        summed.to(output.dtype.element_ty),
        mask=(token < num_tokens)[:, None] & is_channel[None, :],
    )


@triton.jit(
    do_not_specialize=_BATCH,
    do_not_specialize_on_alignment=["tokens", "slots", "query_start_loc", "initial_slots"],
)
def _keep_kernel(
    tokens,  # (snapshots,), int64, or query_start_loc
    slots,  # (snapshots,) or (requests,)
    x,
    states,
    query_start_loc,
    initial_slots,
    num_reqs,
    num_halvings,
    num_channels,
    x_token_stride,
    slot_stride,
    channel_stride,
    column_stride,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    IS_SNAPSHOT: tl.constexpr,
):
    index = tl.program_id(1).to(tl.int64)
    target = tl.load(slots + index).to(tl.int64)
    if target == NULL:
        return
    if IS_SNAPSHOT:
        token = tl.load(tokens + index).to(tl.int64)
        request = request_of(token, query_start_loc, num_reqs, num_halvings)
    else:
        token = tl.load(query_start_loc + index + 1).to(tl.int64) - 1
        request = index
    start = tl.load(query_start_loc + request).to(tl.int64)
    if token < start:
        return  # a request without tokens
    slot = tl.load(initial_slots + request).to(tl.int64)

    # The inputs of a request are those in its state, then its tokens: the window is WIDTH of them.
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, PADDED_WIDTH)
    is_cell = (channel < num_channels)[:, None] & (column < WIDTH)[None, :]
    source = token - start + 1 + column
    is_own = source >= WIDTH
    own = tl.load(
        x + ((start + source - WIDTH) * x_token_stride * UNIT)[None, :] + channel[:, None],
        mask=is_cell & is_own[None, :],
        other=0.0,
    )
    num_read = tl.where(slot != NULL, WIDTH, 0)
    past = tl.load(
        states + slot * slot_stride + (channel * channel_stride)[:, None] + (source * column_stride)[None, :],
        mask=is_cell & (source < num_read)[None, :],
        other=0.0,
    )
    window = tl.where(is_own[None, :], own.to(states.dtype.element_ty), past)
    tl.debug_barrier()  # where it lies the window moves: no thread may write what another has yet to read
    tl.store(
        states + target * slot_stride + (channel * channel_stride)[:, None] + (column * column_stride)[None, :],
        window,
        mask=is_cell,
    )
