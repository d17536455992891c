"""How far each kind of KV-cache group can serve a prefix from what is cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvgroups.prefix_tree import Node
from kvgroups.specs import AttentionSpec, GroupConfig, MambaSpec


class HitRule(Protocol):
    """One group's part in a hit. `nodes[i]` is the prefix of `(i + 1) * step` tokens, all of them known."""

    @property
    def name(self) -> str:
        """The group."""
        ...

    def longest(self, nodes: Sequence[Node], limit: int) -> tuple[int, str]:
        """The longest prefix up to `limit`, in tokens on the grid, that the group can serve, and why not `limit`."""
        ...

    def blocks(self, nodes: Sequence[Node], num_tokens: int) -> dict[int, int]:
        """Column -> block id of what the group needs to go on after `num_tokens` tokens."""
        ...


class TokenRule:
    """Full, windowed and chunked attention: every block that the next query sees must be there.

    Worked example, W = 10 on blocks of 4: the query at 32 sees from 23 on, so it needs the blocks 5 (20 to 23),
    6 and 7: the last ceil((W - 1) / 4) = 3. Full attention sees from 0 on. At the edge of a chunk a query sees
    nothing before it, and nothing is needed.
    """

    def __init__(self, group: GroupConfig, unit: int, step: int) -> None:
        assert isinstance(group.spec, AttentionSpec)
        self.name = group.name
        self.block_size = group.block_size
        self.num_bytes = group.block_bytes
        self.is_full = group.spec.kind == "full_attention"
        self._spec = group.spec
        self._unit = unit
        self._step = step

    def needed(self, num_tokens: int) -> range:
        """Columns that a query at position `num_tokens`, a multiple of the block size, sees."""
        return range(self._spec.first_visible(num_tokens) // self.block_size, num_tokens // self.block_size)

    def longest(self, nodes: Sequence[Node], limit: int) -> tuple[int, str]:
        num_tokens, reason = limit, ""
        while num_tokens:
            columns = self.needed(num_tokens)
            ends = zip(reversed(columns), reversed(self._ends(nodes, columns)), strict=True)
            missing = next((column for column, node in ends if self.name not in node.blocks), None)
            if missing is None:
                break
            start, stop = missing * self.block_size, (missing + 1) * self.block_size
            reason = reason or f"the block of tokens {start} to {stop - 1} is not cached"
            # Every length from the block's end to here needs it too; look before its start.
            num_tokens = start // self._unit * self._unit
        return num_tokens, reason

    def blocks(self, nodes: Sequence[Node], num_tokens: int) -> dict[int, int]:
        columns = self.needed(num_tokens)
        ends = zip(columns, self._ends(nodes, columns), strict=True)
        return {column: node.blocks[self.name].block_id for column, node in ends}

    def _ends(self, nodes: Sequence[Node], columns: range) -> Sequence[Node]:
        """The node at which each of these columns' blocks ends."""
        steps = self.block_size // self._step
        return nodes[(columns.start + 1) * steps - 1 : columns.stop * steps : steps]


class SnapshotRule:
    """States: a snapshot after exactly that many tokens."""

    def __init__(self, group: GroupConfig, unit: int, step: int) -> None:
        self.name = group.name
        self.num_bytes = group.block_bytes
        self._unit = unit
        self._step = step

    def longest(self, nodes: Sequence[Node], limit: int) -> tuple[int, str]:
        for num_tokens in range(limit, 0, -self._unit):
            if self.name in self._node(nodes, num_tokens).blocks:
                return num_tokens, f"the nearest snapshot is at {num_tokens}"
        return 0, "there is no snapshot"

    def blocks(self, nodes: Sequence[Node], num_tokens: int) -> dict[int, int]:
        return {0: self._node(nodes, num_tokens).blocks[self.name].block_id} if num_tokens else {}

    def _node(self, nodes: Sequence[Node], num_tokens: int) -> Node:
        return nodes[num_tokens // self._step - 1]


class RingRule:
    """A ring's blocks belong to one request for life: nothing of them can be served to another."""

    def __init__(self, group: GroupConfig) -> None:
        self.name = group.name

    def longest(self, nodes: Sequence[Node], limit: int) -> tuple[int, str]:
        return 0, "a ring is overwritten in place and cannot be shared; slot_mapping 'paged' can"

    def blocks(self, nodes: Sequence[Node], num_tokens: int) -> dict[int, int]:
        return {}


def hit_unit(group: GroupConfig) -> int:
    """Tokens between two lengths at which the group can be resumed."""
    return group.spec.snapshot_interval if isinstance(group.spec, MambaSpec) else group.block_size


def hit_rule(group: GroupConfig, unit: int, step: int) -> TokenRule | SnapshotRule | RingRule:
    """The rule for a group.

    Args:
        group: the group.
        unit: tokens between two lengths at which all groups together can be resumed.
        step: tokens of one node of the tree.
    """
    if group.is_state:
        return SnapshotRule(group, unit, step)
    if group.slot_mapping == "ring":
        return RingRule(group)
    return TokenRule(group, unit, step)
