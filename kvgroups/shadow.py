"""What every slot of a KV-cache group ought to hold: a number for each token that was ever computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvgroups.constants import NULL_BLOCK_ID, PAD_SLOT_ID
from kvgroups.specs import GroupConfig

UNKNOWN = 0
"""The number of a slot that holds nothing: its block is free, or was not written yet."""


class Shadow:
    """One group's slots beside the real ones, each with the number of the token whose K and V, or state, it holds.

    Numbers follow what is written and copied and know nothing of tables, so a table that leads to the wrong slot
    leads to a number that its request does not have.

    Args:
        group: the group's config.
        ring_blocks: R of a ring group, 0 otherwise.
    """

    def __init__(self, group: GroupConfig, ring_blocks: int) -> None:
        self.group = group
        self.ring_blocks = ring_blocks
        self._numbers = np.full((0, group.block_size), UNKNOWN, dtype=np.int64)

    def block(self, block_id: int) -> np.ndarray:
        """(block_size,), int64: the numbers of a block's slots."""
        self._extend(block_id)
        return self._numbers[block_id]

    def copy(self, source: int, target: int) -> None:
        """A block is copied to another."""
        self.block(target)[:] = self.block(source)

    def forget(self, block_ids: Sequence[int] | np.ndarray) -> None:
        """Blocks are free: they hold nothing."""
        if len(block_ids):
            self._extend(int(np.max(block_ids)))
            self._numbers[block_ids] = UNKNOWN

    def read(self, slots: np.ndarray) -> np.ndarray:
        """(n,), int64: the numbers at slots >= 0."""
        self._extend(int(slots.max(initial=0)) // self.group.block_size)
        return self._numbers.reshape(-1)[slots]

    def write(self, slots: np.ndarray, numbers: np.ndarray) -> None:
        """Tokens are written to slots; those with slot -1 are not."""
        is_written = slots != PAD_SLOT_ID
        self._extend(int(slots.max(initial=0)) // self.group.block_size)
        self._numbers.reshape(-1)[slots[is_written]] = numbers[is_written]

    def slots(self, blocks: np.ndarray, positions: np.ndarray, num_tokens: int) -> np.ndarray:
        """(n,), int64: where positions of a request lie, by the definition of the group's slot mapping.

        Args:
            blocks: (num_blocks,), the request's row.
            positions: (n,), each below `num_tokens`.
            num_tokens: tokens of the request; a ring has room for the last of them only.

        Returns:
            Slots; -1 for a position in the null block, behind the row, or that a ring has passed.
        """
        columns = positions // self.group.block_size
        if self.ring_blocks:
            columns = columns % self.ring_blocks
        padded = np.append(blocks, NULL_BLOCK_ID)  # what lies behind the row
        block_ids = padded[np.minimum(columns, len(blocks))]
        slots = block_ids.astype(np.int64) * self.group.block_size + positions % self.group.block_size
        is_stored = block_ids != NULL_BLOCK_ID
        if self.ring_blocks:
            is_stored &= positions >= num_tokens - self.ring_blocks * self.group.block_size
        return np.where(is_stored, slots, PAD_SLOT_ID)

    def _extend(self, block_id: int) -> None:
        had = len(self._numbers)
        if block_id >= had:
            longer = np.full((max(block_id + 1, 2 * had, 64), self.group.block_size), UNKNOWN, dtype=np.int64)
            longer[:had] = self._numbers
            self._numbers = longer
