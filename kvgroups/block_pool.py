"""Who owns which block of one KV-cache group: free ones, owned ones, and how often each is shared."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.errors import KVGroupsError, OutOfBlocksError


class BlockPool:
    """The blocks of one group, by number; it moves no bytes.

    Block 0 is the null block and is never handed out. The lowest free block goes first, so that the blocks
    in use stay together and a pool that has grown can shrink again.

    Args:
        name: the group's name, for messages.

    Example:
        >>> pool = BlockPool("full")
        >>> pool.grow(4)  # the null block and three more
        >>> first, second = pool.allocate(2)
        >>> pool.share([first])
        >>> pool.free([first, second]), pool.num_free  # one owner of `first` is left
        ([2], 2)
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._references = np.zeros(1, dtype=np.int32)
        self._free: list[int] = []

    @property
    def num_blocks(self) -> int:
        """Blocks that there are, the null block included."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns, the null block not counted."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - 1 - self.num_free

    @property
    def references(self) -> np.ndarray:
        """(num_blocks,), int32: owners of each block. A read-only view."""
        view = self._references.view()
        view.setflags(write=False)
        return view

    def grow(self, num_blocks: int) -> None:
        """Have `num_blocks` blocks in all, the null block included; the ids in use stay valid."""
        added = range(self.num_blocks, num_blocks)
        self._references = np.concatenate((self._references, np.zeros(len(added), dtype=np.int32)))
        for block_id in added:
            heapq.heappush(self._free, block_id)

    def shrink(self) -> int:
        """Drop the free blocks above the highest one in use; return how many blocks there are now."""
        used = np.flatnonzero(self._references)
        keep = int(used[-1]) + 1 if len(used) else 1
        self._references = self._references[:keep].copy()
        self._free = [block_id for block_id in self._free if block_id < keep]
        heapq.heapify(self._free)
        return keep

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, lowest first, each with one owner.

        Raises:
            OutOfBlocksError: if fewer are free; nothing is taken.
        """
        if count > self.num_free:
            raise OutOfBlocksError(
                f"group {self.name!r}: {count} blocks are needed and {self.num_free} of {self.num_blocks - 1} are free"
            )
        block_ids = [heapq.heappop(self._free) for _ in range(count)]
        self._references[block_ids] = 1
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Give each block one more owner."""
        self._check_owned(block_ids)
        np.add.at(self._references, np.asarray(block_ids, dtype=np.int64), 1)

    def free(self, block_ids: Iterable[int]) -> list[int]:
        """Give up one ownership of each block; return the blocks that nobody owns any more.

        Null entries, as window tables hold them, are passed over.

        Raises:
            KVGroupsError: if a block has fewer owners than it is named times; nothing is freed.
        """
        owned = [int(block_id) for block_id in block_ids if block_id != NULL_BLOCK_ID]
        self._check_owned(owned)
        for block_id, count in Counter(owned).items():
            if count > self._references[block_id]:
                raise KVGroupsError(
                    f"group {self.name!r}: block {block_id} has {self._references[block_id]} owners, "
                    f"so it cannot be freed {count} times"
                )
        released = []
        for block_id in owned:
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                heapq.heappush(self._free, block_id)
                released.append(block_id)
        return released

    def _check_owned(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if not 0 < block_id < self.num_blocks or self._references[block_id] == 0:
                raise KVGroupsError(
                    f"group {self.name!r}: block {block_id} has no owner, so it can be neither freed nor shared"
                )
