"""Making room in the arena: what is free first, then what is only cached and missed least, then more slabs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvgroups.arena import Arena
from kvgroups.errors import OutOfBlocksError
from kvgroups.group_manager import GroupManager
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


class Victim(NamedTuple):
    """Something that could be evicted; the one that compares lowest goes."""

    loss: float
    """Recomputation lost per byte that it makes room for."""
    tick: int
    """When any of it was last used."""
    leases: list[tuple[str, int]]
    """Groups and leases, all of whose blocks go; empty for the first blocks of `group`."""
    group: str = ""


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
        for name, count in need.items():
            num_gained = len(freed.get(name, _NOTHING)) - len(claimed.get(name, _NOTHING))
            self._check_cap(self._groups[name], count, num_gained)
        if not self._is_capped:
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
            name = max(need, key=lambda name: need[name] * self._plan.group(name).stride_bytes)
            raise OutOfBlocksError(
                f"group {name!r}: {need[name]} blocks are needed, with those of other groups {leases.num_slabs} slabs "
                f"and {leases.num_runs} runs of {self._plan.run_slabs}, and "
                f"{self._slabs.num_free + len(leases.returned)} of {self._slabs.num_slabs} slabs of "
                f"{self._plan.slab_bytes} bytes are free; give more memory or fewer requests"
            )

    def make(self, need: Mapping[str, int]) -> None:
        """Evict and grow until every group can allocate `need[name]` blocks, which `check` has found possible."""
        for name, count in need.items():
            pool = self._groups[name].pool
            if pool.max_blocks is not None:
                self._groups[name].evict_first(pool.num_used + pool.num_cached + count - pool.max_blocks)
        while missing := self._num_missing(leases := self._leases(need, {})):
            if self._is_capped or self._caches_more_than_was_held():
                if victim := self._victim(need, leases):
                    self._evict(victim, need)
                    continue
                assert not self._is_capped, "what was found to fit does not"
            size = max(self._slabs.num_slabs + missing, int(_GROWTH * self._slabs.num_slabs))
            self._slabs.grow(size)
            self._arena.grow(size)

    # Counting

    def _check_cap(self, group: GroupManager, count: int, num_gained: int) -> None:
        cap = group.pool.max_blocks
        if cap is None:
            return
        free = cap - group.pool.num_used + num_gained
        if count > free:
            raise OutOfBlocksError(
                f"group {group.name!r}: {count} blocks are needed and {free} of {cap} are free; "
                "give more memory or fewer requests"
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
        size = self._slabs.size_for(leases.num_slabs, num_runs, leases.returned)
        return size - self._slabs.num_slabs

    def _caches_more_than_was_held(self) -> bool:
        groups = self._groups.values()
        return sum(group.cached_bytes for group in groups) > sum(group.peak_held_bytes for group in groups)

    # Evicting

    def _victim(self, need: Mapping[str, int], leases: Leases) -> Victim | None:
        """What would be missed least, of all that would help."""
        victims = []
        for name, count in need.items():
            group = self._groups[name]
            if count > group.pool.num_free and (first := group.first_cached()) is not None:
                victims.append(Victim(*first, [], name))
        losses, ticks, leased = self._slab_losses()
        if self._num_missing(leases, num_runs=0):
            slabs = np.flatnonzero(np.isfinite(losses) & (leased >= 0))
            if len(slabs):
                # Equal sums may differ in their last bits: compare them as float32.
                slab = slabs[np.lexsort((ticks[slabs], losses[slabs].astype(np.float32)))[0]]
                victims.append(self._lease_victim([slab], losses, ticks, leased))
        else:
            length = self._plan.run_slabs
            num_whole = len(losses) // length * length
            by_run = losses[:num_whole].reshape(-1, length).sum(1)
            runs = np.flatnonzero(np.isfinite(by_run) & (leased[:num_whole].reshape(-1, length) >= 0).any(1))
            if len(runs):
                last_used = ticks[:num_whole].reshape(-1, length).max(1)
                run = runs[np.lexsort((last_used[runs], by_run[runs].astype(np.float32)))[0]]
                victims.append(
                    self._lease_victim(range(run * length, (run + 1) * length), losses, ticks, leased)
                )
        return min(victims, key=lambda victim: (np.float32(victim.loss), victim.tick), default=None)

    def _lease_victim(self, slabs, losses: np.ndarray, ticks: np.ndarray, leased: np.ndarray) -> Victim:
        slabs = np.asarray(slabs)
        names = list(self._groups)
        leases = []
        for slab in slabs[leased[slabs] >= 0].tolist():
            plan = self._groups[names[leased[slab]]].plan
            leases.append((plan.name, slab // plan.slabs_per_lease))
        return Victim(
            float(losses[slabs].sum()) / (len(slabs) * self._plan.slab_bytes),
            int(ticks[slabs].max()),
            list(dict.fromkeys(leases)),
        )

    def _slab_losses(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each slab: what evicting it would lose (infinite where a block is owned, 0 if it is free), when any of
        it was last used, and which group leases it, by number (-1 for none)."""
        num_slabs = self._slabs.num_slabs
        losses, ticks = np.zeros(num_slabs), np.zeros(num_slabs, dtype=np.int64)
        leased = np.full(num_slabs, -1)
        losses[0] = np.inf
        for number, group in enumerate(self._groups.values()):
            leases, lost, last_used = group.lease_losses()
            length = group.plan.slabs_per_lease
            slabs = (leases[:, None] * length + np.arange(length)).ravel()
            leased[slabs] = number
            losses[slabs] = np.repeat(lost / length, length)
            ticks[slabs] = np.repeat(last_used, length)
        return losses, ticks, leased

    def _evict(self, victim: Victim, need: Mapping[str, int]) -> None:
        if victim.group:
            group = self._groups[victim.group]
            group.evict_first(need[victim.group] - group.pool.num_free, max_loss=victim.loss)
        for name, lease in victim.leases:
            self._groups[name].evict_lease(lease)
