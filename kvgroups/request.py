"""A request that holds blocks: its row, how far it has been computed, and where it can go back to."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgroups.block_table import MultiGroupBlockTable
from kvgroups.eviction import CachedBlock
from kvgroups.prefix_hit import PrefixHit
from kvgroups.prefix_tree import Cursor, Extra


@dataclass(frozen=True)
class Checkpoint:
    """Where a request can be taken back to in its state groups."""

    num_tokens: int
    """Tokens that had been computed."""
    slots: dict[str, int]
    """State group -> the slot that holds the state after them; empty where there were none."""


@dataclass(eq=False)
class Request:
    """A request's row in its owner's tables, and how far it has been computed. Only the manager changes it."""

    tables: MultiGroupBlockTable
    row: int
    num_computed_tokens: int = 0
    num_allocated_tokens: int = 0
    """Tokens that `allocate` has provided for; more than are computed only while a step runs."""
    max_rewind: int = 0
    """Tokens that windows keep beyond what the next query sees, if more than the config's `max_rewind`."""
    checkpoint: Checkpoint | None = None
    num_released: dict[str, int] = field(default_factory=dict)
    """Group -> leading logical blocks that were given up as out of sight, and are null."""
    extra: Extra = None
    """What its cached values depend on beside its tokens."""
    hit: PrefixHit | None = None
    """What it was served when it was admitted."""
    num_prompt_tokens: int = 0
    """Tokens of its prompt; 0 if it was not admitted with one."""
    stops: tuple[int, ...] = ()
    """Lengths of its prompt at which a step ends, so that a retention point can be kept."""
    cursor: Cursor | None = None
    """How far it has been filed; None if it never was."""
    points: dict[int, list[CachedBlock]] = field(default_factory=dict)
    """Its retention points so far, each with what is kept there."""
    is_live: bool = True
