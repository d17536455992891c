"""How many bytes are held, and by which KV-cache group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupUsage:
    """One group's memory at one moment."""

    name: str
    block_bytes: int
    """Bytes of one block, all layers of the group."""
    num_used: int
    """Blocks that at least one request owns."""
    num_blocks: int
    """Blocks that there are bytes for, the null block not counted."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that requests own."""
        return self.num_used * self.block_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the group has taken from the device, the null block included."""
        return (self.num_blocks + 1) * self.block_bytes


@dataclass(frozen=True)
class Usage:
    """All groups' memory at one moment."""

    groups: tuple[GroupUsage, ...]
    peak_held_bytes: int
    """The most bytes that requests have owned at once since the manager was made or `reset_peak` was called."""
    copied_bytes: int = 0
    """Bytes that forks have copied since the manager was made: partial tails and running states."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that requests own, over all groups."""
        return sum(group.held_bytes for group in self.groups)

    @property
    def allocated_bytes(self) -> int:
        """Bytes taken from the device, over all groups."""
        return sum(group.allocated_bytes for group in self.groups)
