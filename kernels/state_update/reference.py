"""One token through the recurrence of Mamba-1 or Mamba-2, one request at a time."""

import torch
import torch.nn.functional as F
from einops import reduce, repeat

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.state_slots.reference import gather_states


def selective_state_update(states, slots, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False):
    """See `kvgroups.ops.selective_state_update`."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, states.dtype), torch.float32)
    output = torch.zeros_like(x)
    for request, state in enumerate(gather_states(states, slots).to(dtype)):
        step, new = dt[request].to(dtype), x[request].to(dtype)
        if dt_bias is not None:
            step = step + dt_bias.to(dtype)
        if dt_softplus:
            step = F.softplus(step)
        b, c = B[request].to(dtype), C[request].to(dtype)
        if x.dim() == 3:
            shared = x.shape[1] // B.shape[1]
            b, c = (repeat(each, "group n -> (group shared) 1 n", shared=shared) for each in (b, c))
        state = torch.exp(step[..., None] * A.to(dtype)) * state + (step * new)[..., None] * b
        result = reduce(state * c, "... n -> ...", "sum")
        if D is not None:
            result = result + D.to(dtype) * new
        if z is not None:
            result = result * F.silu(z[request].to(dtype))
        output[request] = result
        if slots[request] != NULL_BLOCK_ID:
            states[slots[request]] = state.detach().to(states.dtype)
    return output
