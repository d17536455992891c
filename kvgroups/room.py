"""Making room in the arena: what is free first, then what is only cached and missed least, then more slabs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvgroups.arena import Arena
from kvgroups.errors import OutOfBlocksError
from kvgroups.group_manager import GroupManager
from kvgroups.sizes import exactly
from kvgroups.slab_plan import SlabPlan
from kvgroups.slab_pool import SlabPool

_GROWTH = 1.5
"""An arena that must grow takes this many times its slabs, so that a long answer copies little."""

_NOTHING = np.zeros(0, dtype=np.int64)

Blocks = Mapping[str, np.ndarray]
"""Group -> (n,), int64: distinct block ids."""


class Leases(NamedTuple):
    """What groups would do to the slabs."""

    num_slabs: int
    """Slabs to lease."""
    num_runs: int
    """Runs to lease."""
    returned: list[int]
    """Slabs that go back before."""


class Room:
    """Sees to it that groups can allocate what they are about to.

    In two calls, so that nothing is taken from anyone unless all groups can be served: `check` counts and raises,
    `make` evicts and grows.

    An arena that may grow does so rather than evict, as long as less is cached than was ever held at once: what
    is worth keeping is bounded by what is worth running.

    Args:
        plan: how the arena is cut.
        slabs: its slabs.
        arena: its bytes.
        groups: the groups by name.
        is_capped: whether the arena keeps the size that it has.
    """

    def __init__(
        self,
        plan: SlabPlan,
        slabs: SlabPool,
        arena: Arena,
        groups: Mapping[str, GroupManager],
        is_capped: bool,
    ) -> None:
        self._plan = plan
        self._slabs = slabs
        self._arena = arena
        self._groups = groups
        self._is_capped = is_capped

    def check(
        self, need: Mapping[str, int], freed: Blocks | None = None, claimed: Blocks | None = None
    ) -> None:
        """Raise unless every group will be able to allocate `need[name]` blocks. Changes nothing.

        Args:
            need: group -> blocks.
            freed: blocks that their last owner will have given up by then.
            claimed: cached blocks that will have an owner, and so cannot be evicted.

        Raises:
            OutOfBlocksError: naming the group, the need and what there is.
        """
        freed, claimed = freed or {}, claimed or {}
        can_serve_themselves = True
        for name, count in need.items():
            group = self._groups[name]
            num_gained = len(freed.get(name, _NOTHING)) - len(claimed.get(name, _NOTHING))
            self._check_cap(group, count, num_gained)
            can_serve_themselves &= count <= group.pool.num_free + group.pool.num_cached + num_gained
        if can_serve_themselves or not self._is_capped:
            return
        free_soon = {name: self._groups[name].not_kept(blocks) for name, blocks in freed.items()}
        if not self._num_missing(self._leases(need, free_soon)):
            return
        # As if everything were evicted that will then be cached and not claimed.
        spare = {
            name: np.setdiff1d(
                np.union1d(group.cached_blocks(), freed.get(name, _NOTHING)), claimed.get(name, _NOTHING)
            )
            for name, group in self._groups.items()
        }
        leases = self._leases(need, spare)
        if self._num_missing(leases):
            raise OutOfBlocksError(self._what_is_missing(need, leases))

    def _what_is_missing(self, need: Mapping[str, int], leases: Leases) -> str:
        """What is needed, what there is and what would do, in bytes: slabs mean nothing to who sets `memory`."""
        name = max(need, key=lambda name: need[name] * self._plan.group(name).stride_bytes)
        slab_bytes, total = self._plan.slab_bytes, self._slabs.num_slabs
        needed = leases.num_slabs + leases.num_runs * self._plan.run_slabs
        free = self._slabs.num_free + len(leases.returned)
        pieces = f", not in pieces of {exactly(self._plan.run_slabs * slab_bytes)}" if needed <= free else ""
        there = f"of {exactly(total * slab_bytes)} there are {exactly(free * slab_bytes)} free{pieces}"
        enough = exactly((total + self._num_missing(leases)) * slab_bytes)
        return (
            f"memory: {exactly(needed * slab_bytes)} more are needed (group {name!r}: {need[name]} blocks), and {there}; "
            f"raise the config's `memory` to {enough}, close other caches, or pass fewer or shorter requests"
        )

    def make(self, need: Mapping[str, int]) -> None:
        """Evict and grow until every group can allocate `need[name]` blocks, which `check` has found possible."""
        for name, count in need.items():
            pool = self._groups[name].pool
            if pool.max_blocks is not None:
                self._groups[name].evict_first(pool.num_used + pool.num_cached + count - pool.max_blocks)
        while missing := self._num_missing(leases := self._leases(need, {})):
            if self._is_capped or self._caches_more_than_was_held():
                if self._evict(need, leases):
                    continue
                assert not self._is_capped, "what was found to fit does not"
            size = max(self._slabs.num_slabs + missing, int(_GROWTH * self._slabs.num_slabs))
            self._arena.grow(size)  # first: a device may have no memory left, and then nothing has changed
            self._slabs.grow(size)

    # Counting

    def _check_cap(self, group: GroupManager, count: int, num_gained: int) -> None:
        cap = group.pool.max_blocks
        if cap is None:
            return
        free = cap - group.pool.num_used + num_gained
        if count > free:
            raise OutOfBlocksError(
                f"group {group.name!r}: {count} blocks are needed and {free} of {cap} are free; "
                "raise the config's `memory`, or pass fewer requests"
            )

    def _leases(self, need: Mapping[str, int], freed: Blocks) -> Leases:
        num_slabs = num_runs = 0
        returned: list[int] = []
        for name in {**need, **freed}:
            group = self._groups[name]
            leases, slabs = group.pool.leases_for(need.get(name, 0), freed.get(name))
            returned += slabs
            if group.plan.is_run:
                num_runs += leases
            else:
                num_slabs += leases
        return Leases(num_slabs, num_runs, returned)

    def _num_missing(self, leases: Leases, num_runs: int | None = None) -> int:
        """Slabs by which the arena is too small for that."""
        if not leases.num_slabs and not leases.num_runs:
            return 0
        num_runs = leases.num_runs if num_runs is None else num_runs
        if not num_runs and leases.num_slabs <= self._slabs.num_free:
            return 0  # any free slab will do
        size = self._slabs.size_for(leases.num_slabs, num_runs, leases.returned)
        return size - self._slabs.num_slabs

    def _caches_more_than_was_held(self) -> bool:
        groups = self._groups.values()
        return sum(group.cached_bytes for group in groups) > sum(group.peak_held_bytes for group in groups)

    # Evicting

    def _evict(self, need: Mapping[str, int], leases: Leases) -> bool:
        """Give up what is missed least per byte, of all that would help; False if there is nothing.

        Either first blocks of a group that is short itself, or what lies in whole slabs, or in a run of them.
        """
        own = min(
            (
                (*first, name)
                for name, count in need.items()
                if count > self._groups[name].pool.num_free
                and (first := self._groups[name].first_cached()) is not None
            ),
            default=(np.inf, 0, None),
        )
        num_slabs = self._num_missing(leases, num_runs=0)
        areas, losses, ticks = self._areas(1 if num_slabs else self._plan.run_slabs)
        areas, losses, ticks = (part[: max(1, num_slabs)] for part in (areas, losses, ticks))
        if own[2] is not None and (not len(areas) or own[:2] <= (losses[0], ticks[0])):
            group = self._groups[own[2]]
            group.evict_first(need[own[2]] - group.pool.num_free, max_loss=own[0])
            return True
        for name, lease in self._leases_in(areas[losses <= own[0]]):
            self._groups[name].evict_lease(lease)
        return len(areas) > 0

    def _areas(self, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The aligned areas of so many slabs that hold something, and nothing that is owned: best to evict first.

        Returns:
            (n, length), int64, slabs; (n,), float32, recomputation lost per byte; (n,), int64, when any of it was
            last used.
        """
        num_slabs = self._slabs.num_slabs
        losses, ticks, is_leased = (
            np.zeros(num_slabs),
            np.zeros(num_slabs, dtype=np.int64),
            np.zeros(num_slabs, dtype=bool),
        )
        losses[0] = np.inf
        for group in self._groups.values():
            leases, lost, last_used = group.lease_losses()
            per_lease = group.plan.slabs_per_lease
            slabs = leases[:, None] * per_lease + np.arange(per_lease)
            is_leased[slabs] = True
            losses[slabs], ticks[slabs] = lost[:, None] / per_lease, last_used[:, None]
        areas = np.arange(num_slabs // length * length).reshape(-1, length)
        # Sums of equal numbers may differ in their last bits: as float32 they are equal again.
        loss = (losses[areas].sum(1) / (length * self._plan.slab_bytes)).astype(np.float32)
        tick = ticks[areas].max(1)
        usable = np.flatnonzero(np.isfinite(loss) & is_leased[areas].any(1))
        order = usable[np.lexsort((tick[usable], loss[usable]))]
        return areas[order], loss[order], tick[order]

    def _leases_in(self, areas: np.ndarray) -> list[tuple[str, int]]:
        """The groups and leases that these slabs belong to, each once."""
        owners = self._slabs.owners
        leases = [
            (owners[slab], slab // self._plan.group(owners[slab]).slabs_per_lease)
            for slab in areas.ravel().tolist()
            if owners[slab] is not None
        ]
        return list(dict.fromkeys(leases))
