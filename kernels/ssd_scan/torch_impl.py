"""The scan of Mamba-2 in chunks: attention inside a chunk, a recurrence from chunk to chunk.

Shapes in this file: r requests, t and s time steps of a chunk, h heads, g SSM groups, k heads per SSM group,
p dim of a head, n state per dim.

Each request is cut into its own chunks, so that none holds tokens of two. Requests of like length go together:
a request of one token does not pay for a chunk of 64. Past its end a request repeats its last token, and what
comes of it is left out: nothing looks ahead.

Everything behind the step sizes is in fp32, as in transformers' own torch function. Start locations and slots are
read once, with `.tolist()`: on a GPU that is a device-to-host sync.
"""

import math
from collections import defaultdict
from itertools import pairwise

import torch
import torch.nn.functional as F

from kvgroups.kernels.state_slots.ragged import Ragged, kept_states, write_states
from kvgroups.kernels.state_slots.torch_impl import gather_states

MAX_CHUNK = 64
"""Longest chunk. The work per token inside a chunk grows with its length: beyond this it outgrows the work on
the states, at the usual 64 x 128 of a head."""


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
    """See `kvgroups.ops.ssd_scan`."""
    starts = query_start_loc.tolist()
    num_tokens = starts[-1]
    dtype = torch.promote_types(torch.promote_types(x.dtype, states.dtype), torch.float32)
    dt = _step_size(dt[:num_tokens], dt_bias, dt_softplus)
    dt = _limit(dt, dt_limit, is_limited, query_start_loc).to(dtype)

    kept = kept_states(starts, final_slots, snapshot_tokens, snapshot_slots)
    initial_states = gather_states(states, initial_slots).to(dtype)
    output = x.new_zeros(num_tokens, *x.shape[1:], dtype=dtype)
    for num_steps, requests in _by_chunk_size(starts, min(chunk_size, MAX_CHUNK)).items():
        ragged = Ragged(starts, requests, kept, x.device)
        state = initial_states[ragged.requests]
        for rectangle in ragged.rectangles(lambda num_rows, num_steps=num_steps: num_steps):
            tokens, is_token = rectangle.tokens, rectangle.is_token
            chunk = _Chunk(x, dt, A.to(dtype), B, C, tokens, state[: len(tokens)])
            output[tokens[is_token]] = chunk.output()[is_token]
            num_running = rectangle.num_running
            after = chunk.states_after(
                [*range(num_running), *rectangle.kept_rows],
                [*[num_steps - 1] * num_running, *rectangle.kept_steps],
            )
            state = after[:num_running]
            write_states(states, rectangle.kept_slots, after[num_running:])

    if D is not None:
        output = output + D.to(dtype)[:, None] * x[:num_tokens].to(dtype)
    if z is not None:
        output = output * F.silu(z[:num_tokens].to(dtype))
    return F.pad(output, (0, 0, 0, 0, 0, len(x) - num_tokens))


class _Chunk:
    """One chunk of several requests, and the states that they bring to it."""

    def __init__(self, x, dt, A, B, C, tokens, state):
        dtype, num_groups = dt.dtype, B.shape[1]
        dt = dt[tokens]
        self.state = state.unflatten(1, (num_groups, -1))  # (r, g, k, p, n)
        self.inputs = (x[tokens].to(dtype) * dt[..., None]).unflatten(2, (num_groups, -1))  # (r, s, g, k, p)
        self.B, self.C = B[tokens].to(dtype), C[tokens].to(dtype)  # (r, s, g, n) and (r, t, g, n)

        # Sums over segments as differences of sums from the start: in fp64, since those may be much larger.
        sums = (A * dt).double().cumsum(1).transpose(1, 2).unflatten(1, (num_groups, -1))  # (r, g, k, t)
        is_future = torch.ones(sums.shape[-1], sums.shape[-1], dtype=torch.bool, device=x.device).triu(1)
        segments = (sums[..., :, None] - sums[..., None, :]).to(dtype).masked_fill_(is_future, -math.inf)
        self.decay = segments.exp_()  # (r, g, k, t, s): from the end of step s to the end of step t
        self.decay_of_state = sums.to(dtype).exp_()  # (r, g, k, t)

    def output(self):
        """(r, t, h, p): what each step sees of the steps of its chunk, and of the state before it."""
        scores = torch.einsum("rtgn,rsgn->rgts", self.C, self.B)[:, :, None] * self.decay
        inside = torch.einsum("rgkts,rsgkp->rtgkp", scores, self.inputs)
        before = torch.einsum("rtgn,rgkpn->rtgkp", self.C, self.state)
        return (inside + before * self.decay_of_state.permute(0, 3, 1, 2)[..., None]).flatten(2, 3)

    def states_after(self, rows, steps):
        """(len(rows), h, p, n): the state of each row after that step of the chunk."""
        weights = self.decay[rows, :, :, steps].permute(0, 3, 1, 2)[..., None]  # (rows, s, g, k, 1)
        entered = torch.einsum("rsgkp,rsgn->rgkpn", self.inputs[rows] * weights, self.B[rows])
        kept = self.state[rows] * self.decay_of_state[rows, :, :, steps][..., None, None]
        return entered.add_(kept).flatten(1, 2)


def _by_chunk_size(starts, max_chunk_size):
    """Requests that have tokens, by the chunk size they take: a power of two for those of one short chunk."""
    requests = defaultdict(list)
    for request, (start, stop) in enumerate(pairwise(starts)):
        if start < stop:
            requests[min(max_chunk_size, 1 << (stop - start - 1).bit_length())].append(request)
    return requests


def _step_size(dt, dt_bias, dt_softplus):
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    return F.softplus(dt) if dt_softplus else dt


def _limit(dt, dt_limit, is_limited, query_start_loc):
    """Clamp the step sizes of the requests that are limited."""
    limited = dt.clamp(*dt_limit)
    if is_limited is None:
        return limited
    is_limited_token = is_limited.repeat_interleave(query_start_loc.diff(), output_size=len(dt))
    return torch.where(is_limited_token[:, None], limited, dt)
