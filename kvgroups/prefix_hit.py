"""How much of a prompt is cached, and why it is not more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvgroups.prefix_tree import Node


@dataclass(frozen=True)
class Limit:
    """One reason why a hit is not longer."""

    group: str | None
    """The KV-cache group; None where the prompt's own tokens are the reason."""
    wanted: int
    """Tokens that would have been reused, were it not for this."""
    num_tokens: int
    """Tokens that can be."""
    reason: str

    def __str__(self) -> str:
        who = "prompt" if self.group is None else f"group {self.group!r}"
        return f"{who}: {self.num_tokens} of {self.wanted} tokens, {self.reason}"


@dataclass(frozen=True)
class PrefixHit:
    """How much of a prompt is cached in all groups at once, and what kept it from being more."""

    num_tokens: int
    """Tokens that need not be computed; at most all but the last."""
    num_prompt_tokens: int
    """Tokens that were asked about."""
    blocks: Mapping[str, Mapping[int, int]]
    """Group -> column -> block id: what a query after `num_tokens` tokens sees. A state group's one entry is the
    snapshot, to be copied and never written."""
    limits: tuple[Limit, ...] = ()
    """What made it shorter, in turn; empty if all tokens but the last few, fewer than a unit, are served."""
    branch_point: int | None = None
    """The longest prefix that was seen before and cannot be resumed: worth a retention point, now that it is seen
    for the second time. None if all of it is served."""
    node: Node | None = field(default=None, repr=False, compare=False)
    """Where the prefix ends in the tree."""

    @property
    def limited_by(self) -> str | None:
        """The group that has the last word; None if it is the prompt itself: new tokens, or none left."""
        return self.limits[-1].group if self.limits else None

    def explain(self) -> str:
        """The hit and its limits, a line each."""
        head = f"{self.num_tokens} of {self.num_prompt_tokens} tokens are cached"
        return "\n  ".join([head, *map(str, self.limits)])


@dataclass
class PrefixStats:
    """What the cache did since it was made."""

    num_queries: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_filed_blocks: int = 0
    num_evicted_blocks: int = 0
    num_skipped_snapshots: int = 0
    """Snapshots that found no room."""
    limited_by: Counter[str] = field(default_factory=Counter)
    """Group -> queries in which it had the last word on the hit."""
