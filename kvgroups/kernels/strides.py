"""Strides as the Triton kernels take them."""

from math import gcd

from torch import Tensor


def in_units(width: int, *operands: tuple[Tensor, *tuple[int, ...]]) -> tuple[int, list[int]]:
    """Strides in units of the largest power of two up to 16 that divides them and `width`.

    A kernel multiplies them by the unit, which it knows when it is compiled: then the compiler loads whole
    vectors, and learns nothing else about strides. Handed over as they are, they would make it compile again
    for a batch whose strides have other divisors, or are 1.

    Args:
        width: elements of the contiguous dimension.
        operands: a tensor and the dimensions whose strides are wanted, any number of times.

    Returns:
        The unit in elements, and the strides in it, in order. A dimension of one index has stride 0: there
        torch allows any number, and the unit would follow it.

    Example: three tokens of two heads of 24 elements, cut out of rows of 100.
        >>> import torch
        >>> tokens = torch.empty(3, 100)[:, :48].view(3, 2, 24)
        >>> in_units(24, (tokens, 0, 1))
        (4, [25, 6])
    """
    strides = [
        tensor.stride(dim) if tensor.shape[dim] > 1 else 0 for tensor, *dims in operands for dim in dims
    ]
    unit = gcd(16, width, *strides)
    return unit, [stride // unit for stride in strides]
