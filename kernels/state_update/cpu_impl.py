"""One token per request through the recurrence in C++: each state is read and written once, where it lies.

For fp32 only: in 16 bits the torch form rounds where transformers does, so that a model decodes to the same tokens.
"""

from struct import Struct

import torch

from kvgroups.kernels.cpu_library import cpu_library

CALL = Struct("48q")
"""`UpdateCall` in cpu.h."""


def refusals(states, slots, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False):
    """The reasons against this form for a call."""
    named = {"states": states, "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    reasons = [
        f"needs {name} in float32, got {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in given.items()
        if tensor.dtype != torch.float32
    ]
    for name in ("states", "B", "C"):
        if named[name].stride(-1) != 1 and named[name].shape[-1] > 1:
            reasons.append(f"needs {name} contiguous over its last dimension, got stride {named[name].stride(-1)}")
    if A.stride(-1) not in (0, 1) and A.shape[-1] > 1:
        reasons.append(f"needs A contiguous or expanded over its last dimension, got stride {A.stride(-1)}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for name, tensor in given.items() if name != "states"):
        reasons.append("computes no gradients: call it under torch.no_grad()")
    return reasons


def selective_state_update(states, slots, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False):
    """See `kvgroups.ops.selective_state_update`."""
    library, slots, is_mamba1 = cpu_library(), slots.contiguous(), x.dim() == 2
    output = torch.empty(x.shape)
    num_reqs, *inner = x.shape
    num_heads, head_dim = (1, *inner) if is_mamba1 else inner
    state_strides = states.stride()[:-1]
    call = CALL.pack(
        states.data_ptr(),
        *((state_strides[0], 0, state_strides[1]) if is_mamba1 else state_strides),
        *(slots.data_ptr(), slots.dtype == torch.int64, output.data_ptr()),
        *(field for tensor in (x, dt, z) for field in _floats(tensor, 1 if is_mamba1 else None)),
        *_floats(A, 0 if is_mamba1 else None),
        *(field for tensor in (B, C) for field in _floats(tensor, 1 if is_mamba1 else None)),
        *(field for tensor in (D, dt_bias) for field in _floats(tensor, 0 if is_mamba1 else None)),
        *(num_reqs, len(states), num_heads, 1 if is_mamba1 else B.shape[1], head_dim, states.shape[-1], dt_softplus),
        *(torch.get_num_threads(), library.isa),
    )
    if library.functions.kvgroups_state_update(call):
        raise IndexError(
            f"slots: expected slots from 0 to {len(states) - 1}, got {int(slots.min())} to {int(slots.max())}."
        )
    return output


def _floats(tensor, missing_dim):
    """`Floats3` in cpu.h: Mamba-1 has no dimension of heads or groups, which goes in at `missing_dim`."""
    if tensor is None:
        return 0, 0, 0, 0
    strides = list(tensor.stride())
    if missing_dim is not None:
        strides.insert(missing_dim, 0)
    return tensor.data_ptr(), *strides, *[0] * (3 - len(strides))
