"""The scan of Mamba-1, one token at a time."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from einops import einsum

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.state_slots.reference import gather_states, scatter_states


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
    dtype = torch.promote_types(torch.promote_types(x.dtype, states.dtype), torch.float32)
    output = torch.zeros_like(x)
    initial_states = gather_states(states, initial_slots).to(dtype)
    for request, (start, stop) in enumerate(pairwise(query_start_loc.tolist())):
        state = initial_states[request]
        for token in range(start, stop):
            step = dt[token].to(dtype)
            if dt_bias is not None:
                step = step + dt_bias.to(dtype)
            if dt_softplus:
                step = F.softplus(step)
            decay = torch.exp(step[:, None] * A.to(dtype))
            entering = einsum(step * x[token].to(dtype), B[token].to(dtype), "channel, n -> channel n")
            state = decay * state + entering
            result = einsum(state, C[token].to(dtype), "channel n, n -> channel")
            if D is not None:
                result = result + D.to(dtype) * x[token].to(dtype)
            if z is not None:
                result = result * F.silu(z[token].to(dtype))
            output[token] = result
            if snapshot_tokens is not None:
                here = snapshot_slots[snapshot_tokens == token]
                scatter_states(states, here, state.expand(len(here), *state.shape).to(states.dtype))
        if start < stop and final_slots[request] != NULL_BLOCK_ID:
            states[final_slots[request]] = state.detach().to(states.dtype)
    return output
