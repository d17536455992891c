"""How many bytes are held, by which KV-cache group and by which request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupUsage:
    """One group's memory at one moment. Live, cached and free blocks and waste are what it has leased."""

    name: str
    block_bytes: int
    """Bytes of one block, all layers of the group."""
    num_used: int
    """Blocks that at least one request owns: live ones."""
    num_cached: int
    """Blocks that nobody owns and a later request may find."""
    num_free: int
    """Blocks of its slabs that hold nothing."""
    num_leased_slabs: int
    """Slabs that are leased to the group."""
    leased_bytes: int
    """Bytes of those slabs."""
    peak_held_bytes: int
    """The most bytes of live blocks at once since the manager was made or `reset_peak` was called."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the leased slabs."""
        return self.num_used + self.num_cached + self.num_free

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that requests own."""
        return self.num_used * self.block_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of the blocks that nobody owns and a later request may find."""
        return self.num_cached * self.block_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the leased blocks that hold nothing."""
        return self.num_free * self.block_bytes

    @property
    def waste_bytes(self) -> int:
        """Leased bytes that are in no block: what alignment adds."""
        return self.leased_bytes - self.num_blocks * self.block_bytes


@dataclass(frozen=True)
class RequestUsage:
    """One request's memory at one moment."""

    row: int
    """Its row in its tables."""
    num_tokens: int
    """Tokens that it has computed."""
    held_bytes: Mapping[str, int]
    """Group -> bytes of the blocks in its row, and of its checkpoint. Shared blocks count for each that holds
    them, so requests may add up to more than is held."""
    shared_bytes: Mapping[str, int]
    """Group -> bytes of those that other requests hold too."""


@dataclass(frozen=True)
class Usage:
    """All groups' memory at one moment."""

    groups: tuple[GroupUsage, ...]
    requests: tuple[RequestUsage, ...]
    """Live requests, in no order."""
    allocated_bytes: int
    """Bytes taken from the device: the arena, the null slab included."""
    peak_held_bytes: int
    """The most bytes that requests have owned at once since the manager was made or `reset_peak` was called."""
    copied_bytes: int = 0
    """Bytes that forks have copied since the manager was made: partial tails and running states."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that requests own, over all groups."""
        return sum(group.held_bytes for group in self.groups)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the blocks that nobody owns and a later request may find, over all groups."""
        return sum(group.cached_bytes for group in self.groups)

    @property
    def leased_bytes(self) -> int:
        """Bytes of all leased slabs."""
        return sum(group.leased_bytes for group in self.groups)

    @property
    def waste_bytes(self) -> int:
        """Leased bytes that are in no block, over all groups."""
        return sum(group.waste_bytes for group in self.groups)
