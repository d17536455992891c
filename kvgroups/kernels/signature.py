"""What the tensors of a call are, apart from what is in them, and where they lie.

Both are asked for in every call of an operation, so they are read in C++ where PyTorch has an interface for that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from functools import cache
from struct import Struct

from torch import Tensor
from torch.nn import Parameter

from kvgroups.kernels.cpu_library import cpu_library

ADDRESS_BYTES = 8


def addresses(*tensors: Tensor | None) -> bytes:
    """Where tensors lie, packed as C++ takes pointers: 0 for None. They are kept alive by the caller."""
    return Struct(f"{len(tensors)}Q").pack(*(0 if tensor is None else tensor.data_ptr() for tensor in tensors))


def signature(tensors: tuple[Tensor | None, ...]) -> tuple[Hashable, bytes | None]:
    """Equal for calls whose tensors have the same shapes, strides, dtypes and devices; and their `addresses`, if known."""
    describe = _describe()
    if describe is not None and (described := describe(tensors, len(tensors))):
        split = ADDRESS_BYTES * len(tensors)
        return described[split:], described[:split]
    # What is no tensor is no error here: the checks of the call refuse it by name.
    return tuple(_described(given) if isinstance(given, Tensor) else type(given) for given in tensors), None


def _described(tensor: Tensor) -> Hashable:
    """With who runs PyTorch's operations: a class that does so itself need not have memory, as fake tensors have none."""
    where = tensor.device, tensor.layout, type(tensor).__torch_dispatch__
    return tensor.shape, tensor.stride(), tensor.dtype, *where


@cache
def _describe() -> Callable[[tuple[Tensor | None, ...], int], bytes] | None:
    """`kvgroups_describe` in cpu/signature.cpp, or None if it was not built or PyTorch lacks its counterpart."""
    library, capsule = cpu_library(), getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if library.functions is None or capsule is None:
        return None
    pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_in.restype, pointer_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    exchange = ctypes.c_void_p(pointer_in(capsule, b"dlpack_exchange_api"))
    if not library.functions.kvgroups_can_describe(exchange):
        return None
    locked = ctypes.PyDLL(library.functions._name)  # it calls Python, so it keeps Python's lock, which CDLL gives up
    found = locked.kvgroups_describe
    found.restype = ctypes.py_object
    found.argtypes = [ctypes.py_object, ctypes.c_int64, ctypes.c_char_p]
    known = Struct("4Q").pack(id(None), id(Tensor), id(Parameter), exchange.value)
    return lambda tensors, count: found(tensors, count, known)
