"""Who owns which block of one KV-cache group: free, cached and owned ones, and how often each is shared."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.errors import KVGroupsError, OutOfBlocksError
from kvgroups.slab_plan import GroupPlan
from kvgroups.slab_pool import SlabPool, slabs_of


class BlockPool:
    """The blocks of one group, by number, in the slabs that it leases; it moves no bytes.

    Blocks come from the fullest slab that has one free, so that others empty; a slab whose last block is given
    up goes back to the arena. Block 0, and whatever else slab 0 would hold, is never handed out.

    A block whose content is worth finding again is *kept*: without an owner it is cached, not free, and is
    handed out no more until it is dropped.

    Args:
        plan: how the group cuts its slabs; its name is used in messages.
        slabs: where slabs are leased; shared with the other groups.
        max_blocks: the most blocks that may be owned at once; None for as many as the slabs hold.

    Example:
        >>> from kvgroups.slab_plan import SlabPlan
        >>> plan = GroupPlan("full", block_bytes=256, stride_bytes=256, slabs_per_lease=1, blocks_per_lease=4)
        >>> pool = BlockPool(plan, SlabPool(SlabPlan(1024, 1, (plan,)), num_slabs=8))
        >>> first, second = pool.allocate(2)
        >>> first, second, pool.num_free  # slab 1 of 4 blocks is leased, and two of them are left
        (4, 5, 2)
        >>> pool.share([first])
        >>> pool.free([first, second])  # one owner of `first` is left
        [5]
    """

    def __init__(self, plan: GroupPlan, slabs: SlabPool, max_blocks: int | None = None) -> None:
        self.plan = plan
        self.max_blocks = max_blocks
        self.on_release: Callable[[np.ndarray], None] | None = None
        """Told of distinct blocks that have just become free."""
        self._slabs = slabs
        self._references = np.zeros(0, dtype=np.int32)
        self._is_kept = np.zeros(0, dtype=bool)
        self._num_taken_in: dict[int, int] = {}
        """Lease -> blocks of it that are owned or cached."""
        self._num_free = 0
        self._num_cached = 0
        self._open: list[tuple[int, int]] = []
        """A heap of `(free blocks, lease)`, the fullest first. An entry that no longer says how it is is stale."""
        self._extend_references()

    @property
    def num_blocks(self) -> int:
        """Blocks in the leased slabs: owned, cached or free."""
        return len(self._num_taken_in) * self.plan.blocks_per_lease

    @property
    def num_free(self) -> int:
        """Blocks of leased slabs that hold nothing: they are to be had without leasing another slab."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody owns and that are kept."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self._num_free - self._num_cached

    @property
    def references(self) -> np.ndarray:
        """(num_blocks of the whole arena,), int32: owners of each block. A read-only view.

        A block in a slab that is not leased to this group has none.
        """
        view = self._references.view()
        view.setflags(write=False)
        return view

    @property
    def is_kept(self) -> np.ndarray:
        """(num_blocks of the whole arena,), bool: whether a block is kept when its last owner lets go. Read-only."""
        view = self._is_kept.view()
        view.setflags(write=False)
        return view

    @property
    def leases(self) -> dict[int, int]:
        """Each lease, and how many of its blocks are owned or cached. A copy."""
        return dict(self._num_taken_in)

    def free_blocks(self) -> list[int]:
        """The free blocks of all leased slabs."""
        return [int(block_id) for lease in self._num_taken_in for block_id in self._free_in(lease)]

    def leases_for(self, count: int, freed: np.ndarray | None = None) -> tuple[int, list[int]]:
        """What allocating would do to the slabs.

        Args:
            count: blocks to allocate.
            freed: (n,), distinct blocks that will have become free before.

        Returns:
            Leases to take, and the slabs that will have gone back before they are taken.
        """
        freed = np.zeros(0, dtype=np.int64) if freed is None else freed
        num_free, emptied = self._num_free + len(freed), []
        if len(freed):
            leases, counts = np.unique(freed // self.plan.blocks_per_lease, return_counts=True)
            emptied = [
                lease
                for lease, n in zip(leases.tolist(), counts.tolist(), strict=True)
                if self._num_taken_in[lease] == n
            ]
            num_free -= len(emptied) * self.plan.blocks_per_lease
        return self.plan.num_leases(max(0, count - num_free)), slabs_of(self.plan, emptied)

    def allocate(self, count: int, after: int = NULL_BLOCK_ID) -> list[int]:
        """Take `count` free blocks, each with one owner, leasing slabs as needed.

        Args:
            count: blocks to take.
            after: the request's last block. Where the fullest slab has the block behind it, that comes first, and
                slabs are leased behind it, so that long requests are few intervals. Null for slabs as low as can be.

        Raises:
            OutOfBlocksError: if there are not so many; nothing is taken.
        """
        self._check_room(count)
        block_ids: list[int] = []
        goes_on, behind = after != NULL_BLOCK_ID, after
        while len(block_ids) < count:
            missing = count - len(block_ids)
            is_fresh = not self._num_free
            if is_fresh:
                block_ids += self._take_fresh(self._lease(behind), missing)
            else:
                block_ids += self._take(self._fullest(after), missing, after)
            after = block_ids[-1]
            if goes_on or is_fresh:
                behind = after
        return block_ids

    def share(self, block_ids: Sequence[int] | np.ndarray) -> None:
        """Give each block one more owner.

        Raises:
            KVGroupsError: if one of them is neither owned nor cached; nothing is shared.
        """
        ids, counts = self._taken(block_ids)
        self._num_cached -= int((self._references[ids] == 0).sum())
        self._references[ids] += counts

    def keep(self, block_ids: Sequence[int] | np.ndarray) -> None:
        """Cache these blocks, rather than free them, when their last owner lets go.

        Raises:
            KVGroupsError: if one of them has no owner; nothing is kept.
        """
        ids, _ = self._owned(block_ids)
        self._is_kept[ids] = True

    def drop(self, block_ids: Sequence[int] | np.ndarray) -> None:
        """Keep these blocks no more: those that nobody owns are free, and a slab of free ones goes back.

        Raises:
            KVGroupsError: if one of them is neither owned nor cached; nothing is dropped.
        """
        ids, _ = self._taken(block_ids)
        cached = ids[self._references[ids] == 0]
        self._is_kept[ids] = False
        self._num_cached -= len(cached)
        self._release(cached)

    def free(self, block_ids: Sequence[int] | np.ndarray) -> list[int]:
        """Give up one ownership of each block; return, ascending, the blocks that nobody owns any more.

        Those of them that are kept are cached from now on. Null entries, as window tables hold them, are passed
        over. A slab of free blocks goes back.

        Raises:
            KVGroupsError: if a block has fewer owners than it is named times; nothing is freed.
        """
        named = np.asarray(block_ids, dtype=np.int64)
        ids, counts = self._owned(named[named != NULL_BLOCK_ID])
        left = self._references[ids] - counts
        if len(left) and left.min() < 0:
            at = int(np.argmin(left))
            raise KVGroupsError(
                f"group {self.plan.name!r}: block {ids[at]} has {self._references[ids[at]]} owners, "
                f"so it cannot be freed {counts[at]} times"
            )
        self._references[ids] = left
        released = ids[left == 0]
        is_kept = self._is_kept[released]
        self._num_cached += int(is_kept.sum())
        self._release(released[~is_kept])
        return released.tolist()

    def _release(self, block_ids: np.ndarray) -> None:
        """Count distinct blocks as free."""
        if self.on_release is not None and len(block_ids):
            self.on_release(block_ids)
        self._num_free += len(block_ids)
        leases, numbers = np.unique(block_ids // self.plan.blocks_per_lease, return_counts=True)
        emptied = []
        for lease, number in zip(leases.tolist(), numbers.tolist(), strict=True):
            if left := self._num_taken_in[lease] - number:
                self._note(lease, left)
            else:
                emptied.append(lease)
        self._give_back(emptied)

    # Leases

    def _check_room(self, count: int) -> None:
        name, used = self.plan.name, self.num_used + self._num_cached
        if self.max_blocks is not None and used + count > self.max_blocks:
            raise OutOfBlocksError(
                f"group {name!r}: {count} blocks are needed and {self.max_blocks - used} of {self.max_blocks} are free"
            )
        if count > self._num_free:
            leases, _ = self.leases_for(count)
            if leases > self._slabs.num_leasable(self.plan):
                raise OutOfBlocksError(
                    f"group {name!r}: {count} blocks are needed, {self._num_free} are free in its slabs, and "
                    f"{self._slabs.num_free} of {self._slabs.num_slabs} slabs are free"
                )

    def _lease(self, after: int) -> int:
        lease = self._slabs.lease(self.plan, after // self.plan.blocks_per_lease)
        self._extend_references()
        self._num_taken_in[lease] = 0
        self._num_free += self.plan.blocks_per_lease
        return lease

    def _extend_references(self) -> None:
        """As many as the arena has blocks of this group's size: it may have grown."""
        missing = self._slabs.num_slabs // self.plan.slabs_per_lease * self.plan.blocks_per_lease
        missing -= len(self._references)
        if missing > 0:
            self._references = np.concatenate((self._references, np.zeros(missing, dtype=np.int32)))
            self._is_kept = np.concatenate((self._is_kept, np.zeros(missing, dtype=bool)))

    def _fullest(self, after: int) -> int:
        """The lease with the fewest free blocks; of equals, the one with the block behind `after`, or the lowest."""
        while not self._is_fresh(*self._open[0]):
            heapq.heappop(self._open)
        num_free, lease = self._open[0]
        wanted = (after + 1) // self.plan.blocks_per_lease
        extends = self._is_fresh(num_free, wanted) and self._is_free(after + 1)
        return wanted if extends else lease

    def _is_fresh(self, num_free: int, lease: int) -> bool:
        used = self._num_taken_in.get(lease)
        return used is not None and self.plan.blocks_per_lease - used == num_free

    def _take(self, lease: int, count: int, after: int) -> list[int]:
        free = self._free_in(lease)
        if free[0] <= after < free[-1]:  # turn the ring of them so that the one behind `after` comes first
            free = np.roll(free, -int(np.searchsorted(free, after + 1)))
        chosen = free[:count]
        self._references[chosen] = 1
        self._num_free -= len(chosen)
        self._note(lease, self._num_taken_in[lease] + len(chosen))
        return chosen.tolist()

    def _take_fresh(self, lease: int, count: int) -> list[int]:
        """The first blocks of a lease that was just taken, all of which are free."""
        start, count = lease * self.plan.blocks_per_lease, min(count, self.plan.blocks_per_lease)
        self._references[start : start + count] = 1
        self._num_free -= count
        self._note(lease, count)
        return list(range(start, start + count))

    def _free_in(self, lease: int) -> np.ndarray:
        start = lease * self.plan.blocks_per_lease
        return start + np.flatnonzero(self._is_free(slice(start, start + self.plan.blocks_per_lease)))

    def _is_free(self, which: int | slice) -> np.ndarray:
        return (self._references[which] == 0) & ~self._is_kept[which]

    def _note(self, lease: int, num_taken: int) -> None:
        """Set how many blocks of a lease are taken, at least one; one that is not full is open."""
        self._num_taken_in[lease] = num_taken
        num_free = self.plan.blocks_per_lease - num_taken
        if num_free:
            if len(self._open) > 4 * len(self._num_taken_in) + 16:
                self._open = [entry for entry in set(self._open) if self._is_fresh(*entry)]
                heapq.heapify(self._open)
            heapq.heappush(self._open, (num_free, lease))

    def _give_back(self, leases: Sequence[int]) -> None:
        """Return leases whose blocks are all free."""
        for lease in leases:
            del self._num_taken_in[lease]
        self._num_free -= len(leases) * self.plan.blocks_per_lease
        self._slabs.release_all(self.plan, leases)

    def _owned(self, block_ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The distinct blocks and how often each is named, or an error for one that nobody owns."""
        return self._known(block_ids, or_cached=False)

    def _taken(self, block_ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same, or an error for one that is neither owned nor cached."""
        return self._known(block_ids, or_cached=True)

    def _known(self, block_ids: Sequence[int] | np.ndarray, or_cached: bool) -> tuple[np.ndarray, np.ndarray]:
        ids, counts = np.unique(np.asarray(block_ids, dtype=np.int64), return_counts=True)
        is_known = (ids > 0) & (ids < len(self._references))
        known = ids[is_known]
        is_known[is_known] = (self._references[known] > 0) | (self._is_kept[known] & or_cached)
        if not is_known.all():
            raise KVGroupsError(
                f"group {self.plan.name!r}: block {ids[~is_known][0]} has no owner{' and is not cached' * or_cached}, "
                "so it can be neither freed nor shared"
            )
        return ids, counts
