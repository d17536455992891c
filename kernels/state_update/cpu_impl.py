"""One token per request through the recurrence in C++: each state is read and written once, where it lies.

For Mamba-2 in fp32. In 16 bits the torch form rounds where transformers does, so that a model decodes to the same
tokens; and the states of Mamba-1 are so small that the torch form is as fast.
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
    reasons = [] if x.dim() == 3 else ["needs the heads of Mamba-2, got the channels of Mamba-1"]
    reasons += [
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
    library, slots = cpu_library(), slots.contiguous()
    output = torch.empty(x.shape)
    num_reqs, num_heads, head_dim = x.shape
    call = CALL.pack(
        states.data_ptr(),
        *states.stride()[:-1],
        *(slots.data_ptr(), slots.dtype == torch.int64, output.data_ptr()),
        *(field for tensor in (x, dt, z, A, B, C, D, dt_bias) for field in _floats(tensor)),
        *(num_reqs, len(states), num_heads, B.shape[1], head_dim, states.shape[-1], dt_softplus),
        *(torch.get_num_threads(), library.isa),
    )
    if library.run("state_update", call):
        raise IndexError(
            f"slots: expected slots from 0 to {len(states) - 1}, got {int(slots.min())} to {int(slots.max())}."
        )
    return output


def _floats(tensor):
    """`Floats3` in cpu.h."""
    if tensor is None:
        return 0, 0, 0, 0
    return tensor.data_ptr(), *tensor.stride(), *[0] * (3 - tensor.dim())
