"""The bytes behind one KV-cache group, and each layer's view of them."""

from __future__ import annotations

import torch

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.specs import GroupConfig


class GroupStorage:
    """One byte tensor (num_blocks, block_bytes), cut into views at one stride.

    A block holds one logical block of tokens, or one request's states, for all layers of the group. So a
    layer's K, V or state is a view whose first index is the block id and whose first stride is the block's
    size, whatever lies between.

    Args:
        group: the group's config.
        device: where the bytes live.
    """

    def __init__(self, group: GroupConfig, device: torch.device | str) -> None:
        self.group = group
        self.device = torch.device(device)
        self.block_bytes = group.block_bytes
        self._bytes = torch.empty((0, self.block_bytes), dtype=torch.uint8, device=self.device)
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        self.resize(1)

    @property
    def num_blocks(self) -> int:
        """Blocks that there are bytes for, the null block included."""
        return self._bytes.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated, the null block included."""
        return self._bytes.numel()

    def resize(self, num_blocks: int) -> None:
        """Have bytes for `num_blocks` blocks; what both sizes hold is kept, what is new is uninitialised.

        Views that were handed out before stay on the old bytes: take them anew.
        """
        old = self._bytes
        self._bytes = torch.empty((num_blocks, self.block_bytes), dtype=torch.uint8, device=self.device)
        kept = min(num_blocks, old.shape[0])
        self._bytes[:kept] = old[:kept]
        if kept == 0:
            self._bytes[NULL_BLOCK_ID] = 0
        self._views.clear()

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """The views of cache layer `index`: `{"key": ..., "value": ...}` or its states by name.

        Returns:
            Tensors (num_blocks, *shape) of the spec's dtype on the storage's device, strided: contiguous
            inside a block, `block_bytes` apart between blocks. They cannot be flattened over blocks.
        """
        if index not in self._views:
            self._views[index] = {
                name: self._view(offset, tensor.shape, getattr(torch, tensor.dtype))
                for name, (offset, tensor) in self.group.tensor_offsets()[index].items()
            }
        return self._views[index]

    def _view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        elements = self._bytes.view(-1).view(dtype)
        strides = torch.empty(shape, device="meta").stride()
        return elements.as_strided(
            (self.num_blocks, *shape),
            (self.block_bytes // dtype.itemsize, *strides),
            offset // dtype.itemsize,
        )

    def copy_block(self, source: int, target: int) -> None:
        """Copy all layers' bytes of one block to another."""
        self._bytes[target] = self._bytes[source]

    def fill(self, block_ids: list[int], byte: int) -> None:
        """Overwrite whole blocks; 0xFF reads as NaN in every float dtype. For tests."""
        self._bytes[block_ids] = byte
