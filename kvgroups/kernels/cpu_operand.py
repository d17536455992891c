"""Tensors as the C++ kernels take them: packed into the structs of cpu/operand.h."""

from __future__ import annotations

import torch
from torch import Tensor

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`ElementType` in cpu/operand.h."""


def operand(tensor: Tensor | None) -> tuple[int, ...]:
    """Five numbers for `Operand`: a tensor of at most three dimensions, or None. Kept alive by the caller.

    Its last dimension is `Operand`'s last; those that it lacks come first, with stride 0.
    """
    if tensor is None:
        return 0, 0, 0, 0, 0
    strides = tensor.stride()
    return tensor.data_ptr(), ELEMENT_TYPES[tensor.dtype], *(0,) * (3 - len(strides)), *strides
