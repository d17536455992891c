"""One token per request through the recurrence in C++: each state is read and written once, where it lies.

In 16 bits it rounds where the torch form, and with it transformers, rounds, so that a model decodes to the same
tokens.
"""

from struct import Struct

import torch

from kvgroups.kernels.cpu_library import cpu_library
from kvgroups.kernels.cpu_operand import ELEMENT_TYPES, operand

CALL = Struct("58q")
"""`UpdateCall` in cpu.h."""


def refusals(states, slots, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False):
    """The reasons against this form for a call."""
    named = {"x": x, "dt": dt, "A": A, "D": D, "dt_bias": dt_bias}
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    reasons = [
        f"needs {name} in float32, bfloat16 or float16, got {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in given.items()
        if tensor.dtype not in ELEMENT_TYPES
    ]
    reasons += [
        f"needs {name} in the dtype of x, got {str(given[name].dtype).removeprefix('torch.')}"
        for name in ("dt", "D")
        if name in given and given[name].dtype != x.dtype
    ]
    if states.dtype not in (torch.float32, x.dtype):
        reasons.append(f"needs states in float32 or the dtype of x, got {str(states.dtype).removeprefix('torch.')}")
    if states.stride(-1) != 1 and states.shape[-1] > 1:
        reasons.append(f"needs states contiguous over their last dimension, got stride {states.stride(-1)}")
    if torch.is_grad_enabled():
        given |= {"B": B, "C": C} | ({} if z is None else {"z": z})
        if any(tensor.requires_grad for tensor in given.values()):
            reasons.append("computes no gradients: call it under torch.no_grad()")
    return reasons


def selective_state_update(states, slots, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False):
    """See `kvgroups.ops.selective_state_update`."""
    library, slots = cpu_library(), slots.contiguous()
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_slots, *inner, state_size = states.shape
    slot_stride, *strides, _ = states.stride()
    has_heads = len(inner) == 2
    num_heads, head_dim = inner if has_heads else (1, *inner)
    head_stride, row_stride = strides if has_heads else (0, *strides)
    call = CALL.pack(
        *(states.data_ptr(), ELEMENT_TYPES[states.dtype], slot_stride, head_stride, row_stride),
        *(slots.data_ptr(), slots.dtype == torch.int64, output.data_ptr()),
        *operand(x),
        *operand(dt),
        *operand(z),
        *operand(A),
        *operand(B),
        *operand(C),
        *operand(D),
        *operand(dt_bias),
        *(has_heads, len(x), num_slots, num_heads, B.shape[1] if has_heads else 1, head_dim, state_size),
        *(dt_softplus, torch.get_num_threads(), library.isa),
    )
    if library.run("state_update", call):
        raise IndexError("slots holds a slot that states do not have")
    return output
