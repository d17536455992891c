"""One token per request through the recurrence, in three passes over the states.

Small states of all requests go together: gather, update, scatter. A large state is updated where it lies, since
copying it takes longer than the arithmetic.

The roundings are those of transformers' own torch functions, so that a 16-bit model decodes to the same
tokens: they differ between Mamba-1 and Mamba-2 in what is done in fp32.
"""

import torch
import torch.nn.functional as F

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.state_slots.torch_impl import gather_states, scatter_states

MIN_IN_PLACE = 1 << 15
"""Elements from which a state is large: from there on a copy costs more than a few launches."""


def selective_state_update(states, slots, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False):
    """See `kvgroups.ops.selective_state_update`."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, states.dtype), torch.float32)
    advance = _advance_mamba1 if x.dim() == 2 else _advance_mamba2
    if _is_updated_in_place(states, dtype):
        result = torch.empty_like(x)
        for request, slot in enumerate(slots.tolist()):
            if not 0 <= slot < len(states):
                raise IndexError(f"slot {slot} is out of bounds for {len(states)} slots")  # a slice would be empty
            one = slice(request, request + 1)
            state = (
                states[slot : slot + 1] if slot != NULL_BLOCK_ID else states.new_zeros(1, *states.shape[1:])
            )
            result[one] = advance(state, x[one], dt[one], A, B[one], C[one], dt_bias, dt_softplus)
    else:
        state = gather_states(states, slots).to(dtype)
        result = advance(state, x, dt, A, B, C, dt_bias, dt_softplus)
        scatter_states(states, slots, state.to(states.dtype))
    if D is not None:
        result = result + x * D
    if z is not None:
        result = result * F.silu(z)
    return result.to(x.dtype)


def _is_updated_in_place(states, dtype):
    """Whether slots are worked on directly: never where a gradient could follow into them."""
    is_large = states.shape[1:].numel() >= MIN_IN_PLACE
    return is_large and states.dtype == dtype and states.is_cpu and not torch.is_grad_enabled()


def _advance_mamba1(state, x, dt, A, B, C, dt_bias, dt_softplus):
    """One token on: update the states (requests, channels, N) in place, return (requests, channels)."""
    dt = _step_size(dt, dt_bias, dt_softplus).to(state.dtype)
    state.mul_(torch.exp(dt[..., None] * A.to(state.dtype)))
    state.addcmul_((dt * x.to(state.dtype))[..., None], B.to(state.dtype)[:, None])
    return torch.matmul(state.to(C.dtype), C[..., None]).squeeze(-1)


def _advance_mamba2(state, x, dt, A, B, C, dt_bias, dt_softplus):
    """One token on: update the states (requests, heads, P, N) in place, return (requests, heads, P)."""
    num_reqs, num_heads, head_dim = x.shape
    num_groups, shared = B.shape[1], num_heads // B.shape[1]
    dt = _step_size(_untied(dt), _untied(dt_bias), dt_softplus)[..., None]
    state.mul_(torch.exp(dt.to(state.dtype) * _untied(A).to(state.dtype)))
    entering = dt * B.repeat_interleave(shared, dim=1)[:, :, None]
    if entering.dtype == x.dtype == state.dtype:
        state.addcmul_(entering, x[..., None])
    else:
        state.add_(entering * x[..., None])  # rounded to the dtype of x first, as in transformers
    by_group = state.to(C.dtype).reshape(num_reqs, num_groups, shared * head_dim, C.shape[-1])
    return torch.matmul(by_group, C[..., None]).view(x.shape)


def _step_size(dt, dt_bias, dt_softplus):
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    return F.softplus(dt) if dt_softplus else dt


def _untied(tensor):
    """One of the values that `expand` repeats, in every dimension that it expanded.

    Mamba-2 has one decay per head, and callers expand it to (heads, P, N): P * N exponentials of one number.
    """
    if tensor is not None:
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor
