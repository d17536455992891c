"""Where a step's metadata lies on the device: buffers that live as long as the tables and are written in place."""

from __future__ import annotations

import math

import numpy as np
import torch

_SMALLEST = 1024
"""Elements of a new buffer: a small batch never makes it grow."""


class StepBuffers:
    """Named buffers, of which each step takes the beginning.

    A buffer doubles until a step fits, and then keeps its address: a shape that was seen before is the same memory
    again. What a step was given is overwritten by the next one.

    Args:
        device: where they live.

    Example: five elements, then three of the same memory.
        >>> buffers = StepBuffers("cpu")
        >>> five = buffers.take("slots", (1, 5), torch.int64)
        >>> three = buffers.take("slots", (3,), torch.int64)
        >>> five.data_ptr() == three.data_ptr(), buffers.nbytes
        (True, 8192)
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The beginning of a buffer, contiguous in this shape, with what was there before.

        Args:
            name: the buffer; one name has one dtype.
            shape: of the result.
            dtype: of the result.
        """
        count = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            size = max(_SMALLEST, 1 << max(0, count - 1).bit_length())
            # A tensor that is made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                buffer = self._buffers[name] = torch.zeros(size, dtype=dtype, device=self.device)
        assert buffer.dtype == dtype, f"{name} is {buffer.dtype}, not {dtype}"
        return buffer[:count].view(shape)

    def load(self, name: str, array: np.ndarray) -> torch.Tensor:
        """Move an array into a buffer without waiting, to a GPU through pinned memory.

        Args:
            name: the buffer.
            array: (n,), moved as it is.
        """
        source = torch.from_numpy(array)
        target = self.take(name, array.shape, source.dtype)
        if self.device.type == "cuda":
            source = source.pin_memory()  # kept by the allocator until the copy is done
        return target.copy_(source, non_blocking=True)
