"""Whether a workload can ever fit, told before anything of it is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvgroups.errors import OutOfBlocksError
from kvgroups.group_manager import GroupManager
from kvgroups.sizes import exactly
from kvgroups.slab_plan import SlabPlan
from kvgroups.slab_pool import SlabPool


class Admission:
    """Counts what requests will need at their peak, with the arithmetic that allocates.

    Args:
        plan: how the arena is cut.
        slabs: its slabs.
        groups: the groups by name.
        is_capped: whether the arena keeps the size that it has.
    """

    def __init__(
        self, plan: SlabPlan, slabs: SlabPool, groups: Mapping[str, GroupManager], is_capped: bool
    ) -> None:
        self._plan = plan
        self._slabs = slabs
        self._groups = groups
        self._is_capped = is_capped

    def check_fits(
        self,
        num_requests: int,
        prompt_len: int,
        max_len: int,
        chunk_size: int | None,
        padding: Sequence[int],
        num_shared: int,
        max_rewind: int,
    ) -> None:
        """Raise OutOfBlocksError unless requests like these fit an empty arena; see `Manager.check_fits`."""
        pads = Counter(padding or [0] * num_requests)
        need = {
            name: sum(
                count * group.demand.peak_blocks(prompt_len, max_len, chunk_size, pad, max_rewind)
                for pad, count in pads.items()
            )
            - num_shared * group.demand.num_shared_blocks(prompt_len - max(pads))
            for name, group in self._groups.items()
        }
        what = f"{num_requests} requests of up to {max_len} tokens need"
        for name, group in self._groups.items():
            cap = group.pool.max_blocks
            if cap is not None and need[name] > cap:
                raise OutOfBlocksError(
                    f"group {name!r}: {what} {need[name]} blocks of {group.config.block_size} tokens and there are "
                    f"{cap}; raise the config's `memory`, or pass fewer or shorter requests"
                )
        num_slabs = self._plan.num_slabs(need)
        if self._is_capped and num_slabs > self._slabs.num_slabs:
            largest = max(need, key=lambda name: need[name] * self._plan.group(name).stride_bytes)
            needed, there = (exactly(number * self._plan.slab_bytes) for number in (num_slabs, self._slabs.num_slabs))
            raise OutOfBlocksError(
                f"memory: {what} {needed} (group {largest!r}: {need[largest]} blocks) and there are {there}; raise the "
                "config's `memory`, or pass fewer or shorter requests"
            )
