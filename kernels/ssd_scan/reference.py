"""The scan of Mamba-2, one token at a time: the recurrence that the chunked form must equal."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from einops import einsum, repeat

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.state_slots.reference import gather_states, scatter_states


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
    """See `kvgroups.ops.ssd_scan`. A recurrence has no chunks: `chunk_size` changes nothing here."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, states.dtype), torch.float32)
    shared = x.shape[1] // B.shape[1]
    output = x.new_zeros(x.shape, dtype=dtype)
    initial_states = gather_states(states, initial_slots).to(dtype)
    for request, (start, stop) in enumerate(pairwise(query_start_loc.tolist())):
        state = initial_states[request]
        for token in range(start, stop):
            step = dt[token].to(dtype)
            if dt_bias is not None:
                step = step + dt_bias.to(dtype)
            if dt_softplus:
                step = F.softplus(step)
            if is_limited is None or is_limited[request]:
                step = step.clamp(*dt_limit)
            decay = torch.exp(step * A.to(dtype))
            b, c = (
                repeat(tensor[token].to(dtype), "group n -> (group shared) n", shared=shared)
                for tensor in (B, C)
            )
            entering = einsum(step, x[token].to(dtype), b, "head, head p, head n -> head p n")
            state = decay[:, None, None] * state + entering
            result = einsum(state, c, "head p n, head n -> head p")
            if D is not None:
                result = result + D.to(dtype)[:, None] * x[token].to(dtype)
            if z is not None:
                result = result * F.silu(z[token].to(dtype))
            output[token] = result
            if snapshot_tokens is not None:
                here = snapshot_slots[snapshot_tokens == token]
                scatter_states(states, here, state.expand(len(here), *state.shape).to(states.dtype))
        if start < stop and final_slots[request] != NULL_BLOCK_ID:
            states[final_slots[request]] = state.detach().to(states.dtype)
    return output
