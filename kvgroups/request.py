"""A request that holds blocks: its row, how far it has been computed, and where it can go back to."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgroups.errors import KVGroupsError, ShapeError
from kvgroups.eviction import CachedBlock
from kvgroups.multi_group_block_table import MultiGroupBlockTable
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
    num_written: int = 0
    """The most tokens that it had before it went back: a ring has lost what lies R blocks behind them."""
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
    num_ops: int = 0
    """Operations of the manager's `PendingOps` that must have been drained before its next forward."""

    def check_live(self) -> None:
        """Raise KVGroupsError if it was freed."""
        if not self.is_live:
            raise KVGroupsError(f"the request in row {self.row} was freed before; open a new one")

    def check_count(self, count: int, max_model_len: int) -> None:
        """Raise unless it can compute `count` more tokens: ShapeError, or KVGroupsError if it was freed."""
        self.check_live()
        if count < 0:
            raise ShapeError(f"num_new_tokens: expected 0 or more, got {count}")
        if self.num_computed_tokens + count > max_model_len:
            raise ShapeError(
                f"request of {self.num_computed_tokens + count} tokens: max_model_len is {max_model_len}; "
                "patch the model with a config whose max_model_len is larger"
            )

    def check_step(self, count: int) -> None:
        """Raise KVGroupsError unless it is in a step of `count` tokens; 0 for between two steps."""
        allocated = self.num_allocated_tokens - self.num_computed_tokens
        if allocated != count:
            raise KVGroupsError(
                f"the request in row {self.row} has blocks for a step of {allocated} tokens, expected {count}; "
                "advance by what was allocated, or cancel, before the next step"
            )
