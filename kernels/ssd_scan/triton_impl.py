"""The scan of Mamba-2 in chunks: a program takes a tile of one head's state, for one request, from its first token
to its last.

A chunk is three products of matrices, and the step of the state to its end a fourth. Chunks are cut out of the request's own
tokens, so none holds tokens of two; a snapshot ends a chunk, so the state that is kept is the one at hand. Requests
of few tokens go in a launch of their own: one of a single token does not pay for a chunk of 64.

Letters: t and s time steps of a chunk, p dim of a head, n state per dim.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.state_slots.triton_ragged import (
    num_below,
    request_of,
    segment_end,
    segment_slot,
    softplus,
    sorted_snapshots,
)
from kvgroups.kernels.strides import in_units

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

NULL: tl.constexpr = tl.constexpr(NULL_BLOCK_ID)

MAX_STATE_SIZE = 256
MAX_ROWS = 64

STEP_TILE = 16, 64
"""Tokens and heads of a program that computes step sizes."""

CLEARED_TOKENS = 16
"""Padded tokens whose output is zeroed at a time."""


class Tile(NamedTuple):
    """How one program is shaped."""

    steps: int
    """Tokens of a chunk, a power of two of at least 16."""
    elements: int
    """Of the state: rows p times columns n. At least 16 rows."""
    warps: int


SHORT = {
    ("sm_80", torch.bfloat16): Tile(16, 4096, 4),
    ("sm_80", torch.float16): Tile(16, 4096, 4),
    ("sm_80", torch.float32): Tile(16, 2048, 4),
    ("sm_90", torch.bfloat16): Tile(16, 4096, 4),
    ("sm_90", torch.float16): Tile(16, 4096, 4),
    ("sm_90", torch.float32): Tile(16, 4096, 8),
    ("gfx942", torch.bfloat16): Tile(16, 4096, 4),
    ("gfx942", torch.float16): Tile(16, 4096, 4),
    ("gfx942", torch.float32): Tile(16, 4096, 4),
}
"""(kind of GPU, dtype of x) -> tile, for requests whose tokens fit in one such chunk."""

LONG = SHORT | {
    ("sm_80", torch.bfloat16): Tile(32, 4096, 8),
    ("sm_80", torch.float16): Tile(32, 4096, 8),
    ("sm_90", torch.bfloat16): Tile(64, 4096, 8),
    ("sm_90", torch.float16): Tile(32, 4096, 8),
    ("gfx942", torch.bfloat16): Tile(32, 4096, 4),
    ("gfx942", torch.float16): Tile(32, 4096, 4),
}
"""The same for all other requests; where it is the same tile, one launch takes all. At the usual 64 x 128 of a head
bf16 compiles without spilling; 8192 elements on sm_90 spill with Triton 3.6 to 3.8. Nothing is measured yet."""

PRECISION = {"sm_80": ("tf32", "tf32x3"), "sm_90": ("tf32", "tf32x3"), "gfx942": ("tf32", "ieee")}
"""How matrices of fp32 are multiplied, where x has 16 bits and where it has 32. bf16 is multiplied as it is, or what
meets it is split into two of it."""

NO_LIMIT = 2**31 - 1
"""More tokens than any request has."""


def refusals(
    x,
    dt,
    A,
    B,
    C,
    states,
    *,
    chunk_size,
    query_start_loc,
    initial_slots,
    final_slots,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    dt_limit=(0.0, math.inf),
    is_limited=None,
    snapshot_tokens=None,
    snapshot_slots=None,
):
    """The reasons against this form for a call."""
    reasons = [
        f"needs {name} in float32, bfloat16 or float16, got {tensor.dtype}"
        for name, tensor in (("x", x), ("states", states))
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16)
    ]
    if states.shape[-1] > MAX_STATE_SIZE:
        reasons.append(f"needs a state of at most {MAX_STATE_SIZE} per dim, got {states.shape[-1]}")
    if states.shape[-1] > 1 and states.stride(-1) != 1:
        reasons.append(f"needs states contiguous over their last dimension, got stride {states.stride(-1)}")
    return reasons


def ssd_scan(
    x,
    dt,
    A,
    B,
    C,
    states,
    *,
    chunk_size,
    query_start_loc,
    initial_slots,
    final_slots,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    dt_limit=(0.0, math.inf),
    is_limited=None,
    snapshot_tokens=None,
    snapshot_slots=None,
):
    """See `kvgroups.ops.ssd_scan`. `chunk_size` changes nothing here: chunks are as long as a tile has them."""
    (num_tokens, num_heads, head_dim), (_, num_groups, state_size) = x.shape, B.shape
    num_reqs = len(initial_slots)
    output = x.new_empty(x.shape, dtype=torch.float32)
    if not output.numel():
        return output
    x, B, C, z = (
        tensor if tensor is None or tensor.stride(2) == 1 else tensor.contiguous()
        for tensor in (tensor if tensor is None else tensor.detach() for tensor in (x, B, C, z))
    )
    A, D, dt_bias = (
        tensor if tensor is None else tensor.detach().contiguous() for tensor in (A, D, dt_bias)
    )
    snapshots, slots, num_snapshots, num_halvings = sorted_snapshots(snapshot_tokens, snapshot_slots, x)
    unit, strides = in_units(head_dim, (x, 0, 1), *([] if z is None else [(z, 0, 1)]))
    state_unit, state_strides = in_units(state_size, (states, 0, 1, 2), (B, 0, 1), (C, 0, 1))
    steps = x.new_empty(num_heads, num_tokens, dtype=torch.float32)
    grid = (triton.cdiv(num_tokens, STEP_TILE[0]), triton.cdiv(num_heads, STEP_TILE[1]))
    _step_kernel[grid](
        steps,
        dt.detach(),
        dt_bias,
        is_limited,
        query_start_loc,
        num_tokens,
        num_reqs,
        num_reqs.bit_length(),
        num_heads,
        *dt.stride(),
        *map(float, dt_limit),
        HAS_SOFTPLUS=dt_softplus,
        TOKENS=STEP_TILE[0],
        HEADS=STEP_TILE[1],
    )
    kind = _kind_of_gpu()
    short, long = (table[kind, x.dtype] for table in (SHORT, LONG))
    # Each request is taken by one of two launches: which, only the device knows.
    launches = [(short, 1, NO_LIMIT if long == short else short.steps)]
    if long != short and num_tokens > short.steps:
        launches.append((long, short.steps + 1, NO_LIMIT))
    padded_state_size = max(16, triton.next_power_of_2(state_size))
    for tile, least_tokens, most_tokens in launches:
        rows = max(16, min(triton.next_power_of_2(head_dim), MAX_ROWS, tile.elements // padded_state_size))
        _scan_kernel[(num_heads * triton.cdiv(head_dim, rows), num_reqs + (tile is short))](
            output,
            x,
            steps,
            A,
            B,
            C,
            states,
            D,
            z,
            query_start_loc,
            initial_slots,
            final_slots,
            snapshots,
            slots,
            num_snapshots,
            num_halvings,
            num_tokens,
            num_reqs,
            num_heads,
            num_heads // num_groups,
            *(*strides, 0, 0)[:4],
            *state_strides,
            HEAD_DIM=head_dim,
            STATE_SIZE=state_size,
            PADDED_STATE_SIZE=padded_state_size,
            UNIT=unit,
            STATE_UNIT=state_unit,
            ROWS=rows,
            STEPS=tile.steps,
            LEAST_TOKENS=least_tokens,
            MOST_TOKENS=most_tokens,
            CLEARED=CLEARED_TOKENS,
            PRECISION=PRECISION[kind][x.element_size() == 4],
            IS_SPLIT=x.dtype == torch.bfloat16,
            UPCAST=INTERPRETED and x.dtype == torch.bfloat16,
            num_warps=tile.warps,
            num_stages=1,
        )
    return output


def _kind_of_gpu():
    """The key of the tables for the running GPU. The interpreter takes any; these make its loops short."""
    if INTERPRETED:
        return "sm_90"
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return "gfx942"
    return "sm_90" if target.arch >= 90 else "sm_80"


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_reqs", "num_halvings", "num_heads", "token_stride", "head_stride", "least", "greatest",
    ],
    do_not_specialize_on_alignment=["is_limited", "query_start_loc"],
)  # fmt: skip
def _step_kernel(
    steps,  # (heads, tokens), float32, contiguous: a head's steps side by side
    dt,  # (tokens, heads)
    dt_bias,  # (heads,) or None
    is_limited,  # (requests,) or None
    query_start_loc,  # (requests + 1,)
    num_tokens,
    num_reqs,
    num_halvings,
    num_heads,
    token_stride,
    head_stride,
    least,
    greatest,
    HAS_SOFTPLUS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    is_head = head < num_heads
    request = request_of(token, query_start_loc, num_reqs, num_halvings)
    is_step = (request < num_reqs)[:, None] & is_head[None, :]
    step = tl.load(
        dt + (token * token_stride)[:, None] + (head * head_stride)[None, :], mask=is_step, other=0.0
    ).to(tl.float32)
    if dt_bias is not None:
        step += tl.load(dt_bias + head, mask=is_head, other=0.0).to(tl.float32)[None, :]
    if HAS_SOFTPLUS:
        step = softplus(step)
    limited = tl.maximum(step, least, propagate_nan=tl.PropagateNan.ALL)
    limited = tl.minimum(limited, greatest, propagate_nan=tl.PropagateNan.ALL)
    if is_limited is not None:
        is_free = tl.load(is_limited + request, mask=request < num_reqs, other=0) == 0
        limited = tl.where(is_free[:, None], step, limited)
    tl.store(steps + (head * num_tokens)[None, :] + token[:, None], limited, mask=is_step)


@triton.jit(
    do_not_specialize=[
        "num_snapshots", "num_halvings", "num_tokens", "num_reqs", "num_heads", "heads_per_group", "x_token_stride",
        "x_head_stride", "z_token_stride", "z_head_stride", "slot_stride", "head_stride", "row_stride",
        "b_token_stride", "b_group_stride", "c_token_stride", "c_group_stride",
    ],
    do_not_specialize_on_alignment=[
        "query_start_loc", "initial_slots", "final_slots", "snapshot_tokens", "snapshot_slots",
    ],
)  # fmt: skip
def _scan_kernel(
    output,  # (tokens, heads, HEAD_DIM), contiguous
    x,  # (tokens, heads, HEAD_DIM), contiguous over the dim, and so z
    steps,  # (heads, tokens), contiguous
    A,  # (heads,), and so D, which may be None
    B,  # (tokens, groups, STATE_SIZE), contiguous over the state, and so C
    C,
    states,  # (slots, heads, HEAD_DIM, STATE_SIZE), contiguous over the state
    D,
    z,
    query_start_loc,  # (requests + 1,)
    initial_slots,  # (requests,), and so final_slots
    final_slots,
    snapshot_tokens,  # (snapshots,), sorted, and their slots
    snapshot_slots,
    num_snapshots,
    num_halvings,
    num_tokens,
    num_reqs,
    num_heads,
    heads_per_group,
    x_token_stride,  # these four in units of UNIT elements
    x_head_stride,
    z_token_stride,
    z_head_stride,
    slot_stride,  # these seven in units of STATE_UNIT elements
    head_stride,
    row_stride,
    b_token_stride,
    b_group_stride,
    c_token_stride,
    c_group_stride,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    PADDED_STATE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    STATE_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    LEAST_TOKENS: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    CLEARED: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    p = tl.program_id(0) // num_heads * ROWS + tl.arange(0, ROWS)
    is_p = p < HEAD_DIM
    start = tl.load(query_start_loc + request).to(tl.int64)
    if request == num_reqs:
        for begin in range(start, num_tokens, CLEARED):
            token = begin + tl.arange(0, CLEARED)
            tl.store(
                output + ((token * num_heads + head) * HEAD_DIM)[:, None] + p[None, :],
                tl.full([CLEARED, ROWS], 0.0, tl.float32),
                mask=(token < num_tokens)[:, None] & is_p[None, :],
            )
        return
    stop = tl.load(query_start_loc + request + 1).to(tl.int64)
    if (stop - start < LEAST_TOKENS) | (stop - start > MOST_TOKENS):
        return
    initial_slot = tl.load(initial_slots + request).to(tl.int64)
    final_slot = tl.load(final_slots + request).to(tl.int64)
    first = num_below(snapshot_tokens, num_snapshots, num_halvings, start)
    num_kept = num_below(snapshot_tokens, num_snapshots, num_halvings, stop) - first

    group = head // heads_per_group
    x += head * x_head_stride * UNIT
    steps += head * num_tokens
    B += group * b_group_stride * STATE_UNIT
    C += group * c_group_stride * STATE_UNIT
    states += head * head_stride * STATE_UNIT
    output += head * HEAD_DIM
    a = tl.load(A + head).to(tl.float32)
    skip = 0.0
    if D is not None:
        skip = tl.load(D + head).to(tl.float32)
    if z is not None:
        z += head * z_head_stride * UNIT
    n = tl.arange(0, PADDED_STATE_SIZE)
    is_n = n < STATE_SIZE
    cell = (p.to(tl.int64) * row_stride * STATE_UNIT)[None, :] + n[:, None]
    num_read = tl.where(initial_slot != NULL, HEAD_DIM, 0)
    state = tl.load(
        states + initial_slot * slot_stride * STATE_UNIT + cell, mask=(p < num_read)[None, :] & is_n[:, None], other=0.0
    ).to(tl.float32)

    begin = start
    for segment in range(num_kept + 1):
        end = segment_end(segment, first, num_kept, stop, snapshot_tokens)
        num_chunks = (end - begin + STEPS - 1) // STEPS
        # Addresses are computed anew in each turn: kept, they would take more registers than there are.
        for _ in tl.range(0, num_chunks, disable_licm=True):
            state = _chunk(
                state, begin, end, output, x, steps, B, C, z, a, skip, p, n, is_p, is_n,
                num_heads, x_token_stride, z_token_stride, b_token_stride, c_token_stride,
                D is not None, HEAD_DIM, UNIT, STATE_UNIT, STEPS, PRECISION, IS_SPLIT, UPCAST,
            )  # fmt: skip
            begin += STEPS
        slot = segment_slot(segment, first, num_kept, final_slot, snapshot_slots)
        num_written = tl.where(slot != NULL, HEAD_DIM, 0)
        tl.debug_barrier()  # the final slot may be the initial one: it has been read by now
        tl.store(
            states + slot * slot_stride * STATE_UNIT + cell,
            state.to(states.dtype.element_ty),
            mask=(p < num_written)[None, :] & is_n[:, None],
        )
        begin = end


@triton.jit
def _chunk(
    state, begin, end, output, x, steps, B, C, z, a, skip, p, n, is_p, is_n,
    num_heads, x_token_stride, z_token_stride, b_token_stride, c_token_stride,
    HAS_D: tl.constexpr, HEAD_DIM: tl.constexpr, UNIT: tl.constexpr,
    STATE_UNIT: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr, IS_SPLIT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Write the outputs of up to STEPS tokens from `begin` on, and return the state (n, p) after them.

    Steps from `end` on have no size: they leave the state as it is.
    """
    t = tl.arange(0, STEPS)
    is_token = t < end - begin
    step = tl.load(steps + begin + t, mask=is_token, other=0.0)

    # Log decays summed from the chunk's start reach hundreds, and what counts are small differences of them: they
    # are summed in fp64 and kept as two fp32, whose differences are as exact as the result.
    sums = tl.cumsum((step * a).to(tl.float64), 0)
    high = sums.to(tl.float32)
    low = (sums - high.to(tl.float64)).to(tl.float32)
    last = t == STEPS - 1
    last_high = tl.sum(tl.where(last, high, 0.0), 0)
    last_low = tl.sum(tl.where(last, low, 0.0), 0)

    is_x = is_token[:, None] & is_p[None, :]
    is_state = is_token[:, None] & is_n[None, :]
    x += begin * x_token_stride * UNIT
    B += begin * b_token_stride * STATE_UNIT
    C += begin * c_token_stride * STATE_UNIT
    new = tl.load(x + ((t * x_token_stride * UNIT)[:, None] + p[None, :]), mask=is_x, other=0.0)
    b = tl.load(B + ((t * b_token_stride * STATE_UNIT)[:, None] + n[None, :]), mask=is_state, other=0.0)
    c = tl.load(C + ((t * c_token_stride * STATE_UNIT)[:, None] + n[None, :]), mask=is_state, other=0.0)
    new32 = new.to(tl.float32)
    if not IS_SPLIT or UPCAST:
        new, b, c = new32, b.to(tl.float32), c.to(tl.float32)

    result = _dot(c, state, None, False, IS_SPLIT, UPCAST, PRECISION)
    result *= tl.exp(high + low)[:, None]
    # From the end of step s to the end of step t; a later step is not seen.
    decay = tl.exp((high[:, None] - high[None, :]) + (low[:, None] - low[None, :]))
    scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    scores = tl.where(t[:, None] >= t[None, :], scores * decay * step[None, :], 0.0)
    result = _dot(scores, new, result, True, IS_SPLIT, UPCAST, PRECISION)

    left = step * tl.exp((last_high - high) + (last_low - low))
    state *= tl.exp(last_high + last_low)
    state = _dot(tl.trans(b), new32 * left[:, None], state, False, IS_SPLIT, UPCAST, PRECISION)

    if HAS_D:
        result += skip * new32
    if z is not None:
        z += begin * z_token_stride * UNIT
        gate = tl.load(z + ((t * z_token_stride * UNIT)[:, None] + p[None, :]), mask=is_x, other=0.0).to(tl.float32)
        result *= gate / (1 + tl.exp(-gate))
    output += begin * num_heads * HEAD_DIM
    tl.store(output + ((t * num_heads * HEAD_DIM)[:, None] + p[None, :]), result, mask=is_x)
    return state


@triton.jit
def _dot(
    a, b, total, SPLITS_A: tl.constexpr, IS_SPLIT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """a @ b + total, of which one is in fp32 and the other as it came.

    Where that is bf16 the fp32 one is split into two bf16: as fast as tf32, and six bits more exact.
    """
    if not IS_SPLIT:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    elif SPLITS_A:
        high, low = _split(a, UPCAST)
        total = tl.dot(high, b, tl.dot(low, b, total))
    else:
        high, low = _split(b, UPCAST)
        total = tl.dot(a, high, tl.dot(a, low, total))
    return total


@triton.jit
def _split(x, UPCAST: tl.constexpr):
    """Two bf16 numbers whose sum is x up to 16 bits."""
    high = x.to(tl.bfloat16)
    low = (x - high.to(tl.float32)).to(tl.bfloat16)
    if UPCAST:
        high, low = high.to(tl.float32), low.to(tl.float32)
    return high, low
