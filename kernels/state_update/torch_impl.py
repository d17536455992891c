"""One token per request through the recurrence: gather, three passes over the states, scatter.

Shapes in this file: r requests, h heads, g SSM groups, p dim of a head, n state per dim. Mamba-1 is the case
of one SSM group and heads of one dim.

The roundings are those of transformers' own torch functions, so that a 16-bit model decodes to the same
tokens: the two forms differ in where they go to fp32.
"""

import torch
import torch.nn.functional as F

from kvgroups.kernels.state_slots.torch_impl import gather_states, scatter_states


def selective_state_update(states, slots, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False):
    """See `kvgroups.ops.selective_state_update`."""
    if x.dim() == 2:
        return _update_channels(states, slots, x, dt, A, B, C, D, z, dt_bias, dt_softplus)
    dtype = torch.promote_types(torch.promote_types(x.dtype, states.dtype), torch.float32)
    state = gather_states(states, slots).to(dtype)
    num_reqs, num_heads, head_dim = x.shape
    num_groups, shared = B.shape[1], num_heads // B.shape[1]

    dt = _step_size(_untied(dt), _untied(dt_bias), dt_softplus)[..., None]
    state.mul_(torch.exp(dt.to(dtype) * _untied(A).to(dtype)))
    entering = dt * B.repeat_interleave(shared, dim=1)[:, :, None]
    state.add_(entering * x[..., None])
    scatter_states(states, slots, state.to(states.dtype))

    by_group = state.to(C.dtype).view(num_reqs, num_groups, shared * head_dim, -1)
    result = torch.matmul(by_group, C[..., None]).view(x.shape)
    return _finish(result, x, D, z)


def _update_channels(states, slots, x, dt, A, B, C, D, z, dt_bias, dt_softplus):
    """Mamba-1."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, states.dtype), torch.float32)
    state = gather_states(states, slots).to(dtype)
    dt = _step_size(dt, dt_bias, dt_softplus).to(dtype)
    state.mul_(torch.exp(dt[..., None] * A.to(dtype)))
    state.addcmul_((dt * x.to(dtype))[..., None], B.to(dtype)[:, None])
    scatter_states(states, slots, state.to(states.dtype))
    result = torch.matmul(state.to(C.dtype), C[..., None]).squeeze(-1)
    return _finish(result, x, D, z)


def _step_size(dt, dt_bias, dt_softplus):
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    return F.softplus(dt) if dt_softplus else dt


def _finish(result, x, D, z):
    """Add the skip connection, gate, and return to the dtype of x."""
    if D is not None:
        result = result + x * D
    if z is not None:
        result = result * F.silu(z)
    return result.to(x.dtype)


def _untied(tensor):
    """One of each value that `expand` repeats.

    Mamba-2 has one decay per head, and callers expand it to (heads, p, n): p * n exponentials of one number.
    """
    if tensor is not None:
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor
