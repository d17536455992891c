"""The bytes that a config grants to all KV-cache groups together, and the slabs that they are."""

from __future__ import annotations

import os

import torch

from kvgroups.errors import OutOfBlocksError
from kvgroups.sizes import exactly, in_units
from kvgroups.slab_plan import SlabPlan
from kvgroups.specs import KVGroupsConfig


def budget_bytes(config: KVGroupsConfig, device: torch.device) -> int | None:
    """Bytes of an arena that is taken at once and never grows; None for one that grows as needed.

    Args:
        config: its `memory` is bytes or a share of the device; blocks by group are no budget in bytes.
        device: whose memory a share is of; the machine's own for anything but a GPU.
    """
    memory = config.memory
    if memory is None or isinstance(memory, dict):
        return None
    if isinstance(memory, int):
        return memory
    if device.type == "cuda":
        return int(memory * torch.cuda.mem_get_info(device)[1])
    return int(memory * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def num_slabs_of(budget: int, plan: SlabPlan) -> int:
    """Whole slabs of a budget in bytes.

    Raises:
        OutOfBlocksError: if they cannot hold one block of each group.
    """
    num_slabs = budget // plan.slab_bytes
    needed = plan.num_slabs({group.name: 1 for group in plan.groups})
    if num_slabs < needed:
        raise OutOfBlocksError(
            f"memory: {exactly(budget)}, and one block of each group takes {exactly(needed * plan.slab_bytes)}, since "
            f"memory goes in slabs of {in_units(plan.slab_bytes)}: {needed} of them, an empty one for block 0 included; "
            "raise the config's `memory`, or choose smaller blocks"
        )
    return num_slabs
