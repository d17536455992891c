"""One KV-cache group's bytes in the arena, and each layer's view of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvgroups import ops
from kvgroups.arena import Arena
from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.slab_plan import GroupPlan
from kvgroups.specs import GroupConfig


class GroupStorage:
    """The arena, seen as blocks of one group.

    A block holds one logical block of tokens, or one request's states, for all layers of the group. So a
    layer's K, V or state is a view whose first index is the block id and whose first stride is the plan's,
    whatever lies between. The view covers the whole arena: which of its blocks are the group's own, the block
    pool knows.

    Args:
        group: the group's config.
        plan: how the group cuts the arena.
        arena: the bytes, shared with the other groups.
    """

    def __init__(self, group: GroupConfig, plan: GroupPlan, arena: Arena) -> None:
        self.group = group
        self.plan = plan
        self._arena = arena
        self._viewed = arena.bytes
        self._views: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of this group's size in the whole arena, the null block included."""
        return self._arena.num_slabs // self.plan.slabs_per_lease * self.plan.blocks_per_lease

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """The views of cache layer `index`: `{"key": ..., "value": ...}` or its states by name.

        Returns:
            Tensors (num_blocks, *shape) of the spec's dtype on the arena's device, strided: contiguous inside a
            block, `stride_bytes` apart between blocks. They cannot be flattened over blocks. When the arena
            grows they stay on the old bytes: take them anew for each forward.
        """
        if self._viewed is not self._arena.bytes:
            self._viewed = self._arena.bytes
            self._views.clear()
        if index not in self._views:
            self._views[index] = {
                name: self._view(offset, tensor.shape, getattr(torch, tensor.dtype))
                for name, (offset, tensor) in self.group.tensor_offsets()[index].items()
            }
        return self._views[index]

    def _view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        strides = torch.empty(shape, device="meta").stride()
        with torch.inference_mode(False):  # a view is kept, and may be written outside of the mode that it is made in
            return self._arena.bytes.view(dtype).as_strided(
                (self.num_blocks, *shape),
                (self.plan.stride_bytes // dtype.itemsize, *strides),
                offset // dtype.itemsize,
            )

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy all layers' bytes of blocks to others, on a GPU in one launch. No target is a source or named twice."""
        if self._arena.device.type == "meta":
            return  # accounts only: there are no bytes
        blocks = self._arena.bytes.as_strided((self.num_blocks, self.plan.block_bytes), (self.plan.stride_bytes, 1))
        lists = torch.tensor([sources, targets], dtype=torch.int32).to(blocks.device)
        ops.copy_blocks(blocks, *lists)

    def fill(self, block_ids: Sequence[int], byte: int) -> None:
        """Overwrite whole blocks; 0xFF reads as NaN in every float dtype. For tests.

        The null block of a group of runs has no bytes of its own and is passed over.
        """
        for block_id in block_ids:
            if block_id != NULL_BLOCK_ID or not self.plan.is_run:
                self._block(block_id).fill_(byte)

    def _block(self, block_id: int) -> torch.Tensor:
        start = block_id * self.plan.stride_bytes
        return self._arena.bytes[start : start + self.plan.block_bytes]
