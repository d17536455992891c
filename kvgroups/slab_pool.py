"""Which slab of the arena is leased to which KV-cache group; it moves no bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvgroups.errors import OutOfBlocksError
from kvgroups.slab_plan import GroupPlan, SlabPlan

NULL_OWNER = "(null)"
"""Who has slab 0: it holds every token group's null block and is never leased."""

_GRANULE = 512
"""Slabs that are looked through together where there are no runs to give the arena a grain."""


class SlabPool:
    """The slabs of one arena, free or leased.

    Runs are leased from the high end. Slabs are leased from the low end, those beside the null slab and beside
    other leased slabs before those that would break up a run: so an arena that has room for what is asked has
    it also where it is needed, as long as runs and slabs come and go.

    Args:
        plan: how the arena is cut.
        num_slabs: slabs at first, the null slab included.

    Example:
        >>> from kvgroups.slab_plan import GroupPlan, SlabPlan
        >>> tokens, states = GroupPlan("full", 256, 256, 1, 4), GroupPlan("state", 4096, 4096, 4, 1)
        >>> slabs = SlabPool(SlabPlan(1024, 4, (tokens, states)), num_slabs=12)
        >>> slabs.lease(tokens), slabs.lease(tokens), slabs.lease(states)  # the run is slabs 8 to 11
        (1, 2, 2)
        >>> slabs.num_free
        5
    """

    def __init__(self, plan: SlabPlan, num_slabs: int = 1) -> None:
        self._has_runs = plan.run_slabs > 1
        self._run_slabs = plan.run_slabs if self._has_runs else _GRANULE
        self._owners: list[str | None] = []
        self._num_free_in_run = np.zeros(0, dtype=np.int32)
        self.grow(num_slabs)
        self._set_owner(0, 1, NULL_OWNER)

    @property
    def num_slabs(self) -> int:
        """Slabs that there are, the null slab included."""
        return len(self._owners)

    @property
    def num_free(self) -> int:
        """Slabs that are leased to nobody."""
        return int(self._num_free_in_run.sum())

    def num_leasable(self, plan: GroupPlan) -> int:
        """Leases that a group could take one after the other as things are."""
        return int((self._num_free_in_run == self._run_slabs).sum()) if plan.is_run else self.num_free

    @property
    def owners(self) -> tuple[str | None, ...]:
        """The group that has each slab, by name; None for a free one, `NULL_OWNER` for slab 0."""
        return tuple(self._owners)

    def free_slabs(self) -> list[int]:
        """The slabs that are leased to nobody, in ascending order."""
        return [slab for slab, owner in enumerate(self._owners) if owner is None]

    def grow(self, num_slabs: int) -> None:
        """Have `num_slabs` slabs in all; leases stay where they are."""
        before = self.num_slabs
        self._owners += [None] * (num_slabs - before)
        self._num_free_in_run = self._grown(self._num_free_in_run, before, num_slabs)

    def lease(self, plan: GroupPlan, after: int = 0) -> int:
        """Lease one slab or one run to a group.

        Args:
            plan: how the group cuts what it leases.
            after: a slab that the group has; the first free one behind it is wanted, so that a long request's
                blocks follow one another.

        Returns:
            The lease: the slab, or the run's first slab divided by a run's length.

        Raises:
            OutOfBlocksError: if there is none.
        """
        lease = self._highest_run() if plan.is_run else self._next_slab(after)
        if lease is None:
            kind = f"run of {plan.slabs_per_lease} slabs" if plan.is_run else "slab"
            raise OutOfBlocksError(
                f"group {plan.name!r}: a {kind} is needed, and of {self.num_slabs} slabs {self.num_free} are free"
            )
        self._set_owner(lease * plan.slabs_per_lease, (lease + 1) * plan.slabs_per_lease, plan.name)
        return lease

    def release(self, plan: GroupPlan, lease: int) -> None:
        """Give a lease back."""
        self._set_owner(lease * plan.slabs_per_lease, (lease + 1) * plan.slabs_per_lease, None)

    def release_all(self, plan: GroupPlan, leases: Sequence[int]) -> None:
        """Give several leases back, each once: a long request ends with thousands."""
        length = plan.slabs_per_lease
        for lease in leases:
            self._owners[lease * length : (lease + 1) * length] = [None] * length
        if leases:
            starts = np.array(leases, dtype=np.int64) * length
            np.add.at(self._num_free_in_run, starts // self._run_slabs, length)

    def size_for(self, num_slabs: int, num_runs: int, returned: Sequence[int] = ()) -> int:
        """Slabs that the arena must have so that so many slabs and runs can be leased, in any order.

        Args:
            num_slabs: slabs to lease.
            num_runs: runs to lease.
            returned: slabs that are leased now and will have been given back by then.

        Returns:
            `self.num_slabs` if they can be leased as things are; more if the arena has to grow first.
        """
        free = self._num_free_in_run.copy()
        np.add.at(free, np.asarray(returned, dtype=np.int64) // self._run_slabs, 1)
        size, length = self.num_slabs, self._run_slabs
        missing = num_slabs - int(free.sum()) + (num_runs * length if num_runs else 0)
        target = size + max(0, missing)
        while True:
            free = self._grown(free, size, target)
            size = target
            is_whole = free == length
            broken = -(-max(0, num_slabs - int(free[~is_whole].sum())) // length)
            if int(is_whole.sum()) - broken >= num_runs:
                return size
            target += length - target % length  # the run that the end of the arena cuts off

    def _next_slab(self, after: int) -> int | None:
        """The first free slab behind `after`, or else the lowest; whole runs are left alone if any other will do."""
        free, length, behind = self._num_free_in_run, self._run_slabs, after + 1
        is_free = behind % length > 0 and behind < self.num_slabs and self._owners[behind] is None
        if is_free and not (self._has_runs and free[behind // length] == length):
            return behind  # as a long request goes on, most often: no need to look at all runs
        usable = free > 0
        if self._has_runs and (broken := usable & (free < length)).any():
            usable = broken
        if not usable.any():
            return None
        run = after // length
        if usable[run] and None in (rest := self._owners[after + 1 : (run + 1) * length]):
            return after + 1 + rest.index(None)
        higher = usable[run + 1 :]
        run = run + 1 + int(higher.argmax()) if higher.any() else int(usable.argmax())
        return self._owners.index(None, run * length)

    def _highest_run(self) -> int | None:
        whole = np.flatnonzero(self._num_free_in_run == self._run_slabs)
        return int(whole[-1]) if len(whole) else None

    def _set_owner(self, start: int, stop: int, owner: str | None) -> None:
        self._owners[start:stop] = [owner] * (stop - start)
        # One slab lies in one run, and a run is one: what is leased or released never straddles two.
        self._num_free_in_run[start // self._run_slabs] += (stop - start) * (1 if owner is None else -1)

    def _grown(self, free: np.ndarray, before: int, after: int) -> np.ndarray:
        """Free slabs in each run, (ceil(after / length),), when slabs `before` to `after - 1` are added."""
        length = self._run_slabs
        starts = length * np.arange(-(-after // length))
        added = np.clip(after - starts, 0, length) - np.clip(before - starts, 0, length)
        added[: len(free)] += free
        return added.astype(np.int32)


def slabs_of(plan: GroupPlan, leases: Iterable[int]) -> list[int]:
    """The slabs of some leases of one group."""
    length = plan.slabs_per_lease
    return [slab for lease in leases for slab in range(lease * length, (lease + 1) * length)]
