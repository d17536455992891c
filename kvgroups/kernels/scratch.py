"""Working memory that a thread keeps from one call to the next.

A fresh tensor of megabytes costs a page fault for every 4 KiB that is written into it, on the CPU often more than the
copy itself. So what a call copies together only to read it goes into memory that the thread still has from its last call.
"""

import threading

import torch

KEPT_BYTES = 64 << 20
"""What a thread keeps at most, a power of two. What is larger is allocated for its call and freed after it."""

CACHE_LINE = 64
"""Bytes."""

_kept = threading.local()


class Scratch:
    """One call's working memory, to be used in a `with` block: nothing taken from it may outlive the block.

    It grows to what a call needs, rounded up to a power of two, and ends with its thread. A call within the block of
    another finds nothing kept and takes memory of its own, so no two calls ever share a byte.

    Args:
        device: where the tensors are wanted. Anywhere but on the CPU they are fresh ones, since PyTorch keeps memory there.
        is_kept: False for fresh tensors on the CPU too, where autograd would hold them after the block.
    """

    def __init__(self, device, is_kept=True):
        self._device = device
        self._is_kept = is_kept and device.type == "cpu"
        self._bytes = None

    def __enter__(self):
        if self._is_kept:
            self._bytes = getattr(_kept, "bytes", None)
            _kept.bytes = None
        return self

    def __exit__(self, *_):
        if self._bytes is not None:
            _kept.bytes = self._bytes
        self._bytes = None

    def empty(self, dtype, *sizes):
        """Tensors of one dimension and `sizes` elements, with anything in them, each from the start of a cache line. The
        next call of this may hand out the same bytes."""
        unit, starts, stop = CACHE_LINE // dtype.itemsize, [], 0
        for size in sizes:
            starts.append(stop)
            stop += -(-size // unit) * unit
        num_bytes = stop * dtype.itemsize
        if not self._is_kept or num_bytes > KEPT_BYTES:
            return [torch.empty(size, dtype=dtype, device=self._device) for size in sizes]
        if self._bytes is None or self._bytes.shape[0] < num_bytes:
            self._bytes = None  # before the larger one is there
            self._bytes = _allocate(num_bytes)
        elements = self._bytes.view(dtype)
        return [elements.narrow(0, start, size) for start, size in zip(starts, sizes, strict=True)]


def _allocate(num_bytes):
    capacity = max(1 << 20, 1 << (num_bytes - 1).bit_length())
    with torch.inference_mode(False):  # a tensor made in inference mode may not be written outside of it
        return torch.empty(capacity, dtype=torch.uint8, device="cpu")
