"""The convolution of one token per request in C++: each state is read, summed and moved on by one input.

For models whose inputs, weights and states have one dtype: all that transformers builds. Under autocast they
differ, and the torch form serves.
"""

from struct import Struct

import torch

from kvgroups.kernels.cpu_library import cpu_library
from kvgroups.kernels.cpu_operand import ELEMENT_TYPES, operand

CALL = Struct("27q")
"""`ConvolutionCall` in cpu.h."""


def refusals(x, states, slots, weight, bias, *, activation=None):
    """The reasons against this form for a call."""
    dtype, reasons = x.dtype, []
    if dtype not in ELEMENT_TYPES:
        reasons.append(f"needs float32, bfloat16 or float16, got {str(dtype).removeprefix('torch.')}")
    for name, tensor in (("states", states), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != dtype:
            got = str(tensor.dtype).removeprefix("torch.")
            reasons.append(f"needs {name} in the dtype of x, got {got}")
    width = states.shape[2]
    if states.stride()[1:] != (width, 1) and not states[:1].is_contiguous():
        reasons.append(f"needs states contiguous over channels and width, got strides {states.stride()[1:]}")
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        reasons.append("computes no gradients: call it under torch.no_grad()")
    return reasons


def causal_conv1d_update(x, states, slots, weight, bias, *, activation=None):
    """See `kvgroups.ops.causal_conv1d_update`."""
    library, slots = cpu_library(), slots.contiguous()
    num_slots, channels, width = states.shape
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    call = CALL.pack(
        *(states.data_ptr(), states.stride(0), slots.data_ptr(), slots.dtype == torch.int64, output.data_ptr()),
        *operand(x),
        *operand(weight),
        *operand(bias),
        *(len(x), num_slots, channels, width, activation is not None),
        *(torch.get_num_threads(), library.isa),
    )
    if library.run("causal_conv1d_update", call):
        raise IndexError("slots holds a slot that states do not have")
    return output
