"""Which cached block that nobody owns is given up first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Rank = tuple[float, int, int]
"""What blocks are sorted by, the lowest first: what a byte of the block is worth, when it was used, and what else
tells blocks apart. The first two also tell which slab goes first."""


@dataclass(eq=False)
class CachedBlock:
    """A block whose content is known: full, written, and never written again while it is known."""

    group: str
    """The KV-cache group."""
    block_id: int
    num_bytes: int
    """Bytes of the block, all layers of its group."""
    depth: int
    """Tokens of the prefix up to the block's end; for a snapshot, the tokens that its state has seen."""
    tokens_saved: int
    """Tokens that would have to be computed again if the block were gone."""
    last_used: int = 0
    """The tick at which its last owner let go; blocks that were given up together share one."""
    num_hits: int = 0
    """Hits that it served."""


_Entry = tuple[Rank, int, CachedBlock]
"""A block in a heap; the number tells entries of one rank apart."""


class EvictionPolicy:
    """Least recomputation lost per byte first; among equals least recently used, and a request's tail before its head.

    A block's rank is what it saves per byte, on top of a floor that rises to the rank of whatever is evicted. So
    a block that saves little goes soon, one that saves much stays longer, and everything that is not asked for
    goes in the end. Where all blocks save the same, as full attention's do, this is least recently used.

    To have another order, write a class with the same two methods and give it to the manager.

    Source: GreedyDual-Size (Cao and Irani, 1997, "Cost-Aware WWW Proxy Caching Algorithms"), with recomputed
    tokens as the cost; that a snapshot should be kept for the recomputation it saves per byte is Marconi's
    (Pan et al., 2024, section 4.2).

    Example: two blocks of one request, given up together: the second, behind the first, goes first.
        >>> policy = EvictionPolicy()
        >>> head = CachedBlock("full", 7, num_bytes=256, depth=16, tokens_saved=16, last_used=3)
        >>> tail = CachedBlock("full", 2, num_bytes=256, depth=32, tokens_saved=16, last_used=3)
        >>> policy.rank(tail) < policy.rank(head)
        True
    """

    def __init__(self) -> None:
        self._floor = 0.0

    def rank(self, block: CachedBlock) -> Rank:
        """Where a block stands, as of now. Asked when its last owner lets go, not again until it is used."""
        return self._floor + block.tokens_saved / block.num_bytes, block.last_used, -block.depth

    def on_evict(self, rank: Rank) -> None:
        """A block of this rank was given up to make room."""
        self._floor = max(self._floor, rank[0])


class EvictionQueue:
    """The cached blocks that nobody owns, each group's in the order in which they go.

    Args:
        policy: the order.
    """

    def __init__(self, policy: EvictionPolicy | None = None) -> None:
        self.policy = policy or EvictionPolicy()
        self._entries: dict[str, dict[int, _Entry]] = {}
        # Entries of blocks that left in the meantime stay in the heap and are passed over: see `_is_current`.
        self._heaps: dict[str, list[_Entry]] = {}
        self._num_added = 0
        self._worths: dict[str, np.ndarray] = {}
        self._ticks: dict[str, np.ndarray] = {}

    def __contains__(self, block: CachedBlock) -> bool:
        return block.block_id in self._entries.get(block.group, ())

    def count(self, group: str) -> int:
        """Blocks of a group that could be given up."""
        return len(self._entries.get(group, ()))

    def add(self, block: CachedBlock) -> None:
        """Its last owner has let go: rank it as of now. A block that is there already is ranked anew."""
        rank = self.policy.rank(block)
        entries, heap = self._entries.setdefault(block.group, {}), self._heaps.setdefault(block.group, [])
        self._num_added += 1
        entries[block.block_id] = (rank, self._num_added, block)
        self._extend(block.group, block.block_id + 1)
        self._worths[block.group][block.block_id] = rank[0] * block.num_bytes
        self._ticks[block.group][block.block_id] = rank[1]
        heapq.heappush(heap, entries[block.block_id])
        if len(heap) > 2 * len(entries) + 64:
            heap[:] = [entry for entry in heap if self._is_current(entry)]
            heapq.heapify(heap)

    def remove(self, block: CachedBlock) -> None:
        """It has an owner again, or its content is not known any more."""
        if self._entries.get(block.group, {}).pop(block.block_id, None) is not None:
            self._worths[block.group][block.block_id] = self._ticks[block.group][block.block_id] = 0

    def rank(self, block: CachedBlock) -> Rank:
        """What a block that is here is sorted by."""
        return self._entries[block.group][block.block_id][0]

    def losses(self, group: str, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """What giving up each block of a group would lose, and when it was last used.

        Returns:
            (num_blocks,), float64 and (num_blocks,), int64; 0 for blocks that are not here.
        """
        self._extend(group, num_blocks)
        return self._worths[group][:num_blocks], self._ticks[group][:num_blocks]

    def first(self, group: str) -> CachedBlock | None:
        """The block of a group that goes next."""
        heap = self._heaps.get(group, [])
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def evict(self, block: CachedBlock) -> None:
        """Give a block up to make room."""
        self.policy.on_evict(self.rank(block))
        self.remove(block)

    def in_order(self, group: str) -> Iterator[CachedBlock]:
        """A group's blocks as they would go, were nothing used in the meantime."""
        for _, _, block in sorted(self._entries.get(group, {}).values()):
            yield block

    def clear(self) -> None:
        """Forget all blocks."""
        self._entries.clear()
        self._heaps.clear()
        self._worths.clear()
        self._ticks.clear()

    def _extend(self, group: str, num_blocks: int) -> None:
        """Arrays of at least so many blocks, twice as many as before if more."""
        had = len(self._worths.get(group, ()))
        if had < num_blocks:
            size = max(num_blocks, 2 * had, 64)
            for arrays, dtype in ((self._worths, np.float64), (self._ticks, np.int64)):
                longer = np.zeros(size, dtype=dtype)
                longer[:had] = arrays.get(group, longer[:0])
                arrays[group] = longer

    def _is_current(self, entry: _Entry) -> bool:
        block = entry[2]
        return self._entries[block.group].get(block.block_id) is entry
