"""What the bytes have yet to follow of what the accounts say already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvgroups.storage import GroupStorage

POISON = 0xFF
"""A byte of a poisoned block: NaN in every float dtype."""


class _Copy(NamedTuple):
    group: str
    source: int
    target: int


class _Poison(NamedTuple):
    group: str
    block_ids: tuple[int, ...]


class PendingOps:
    """Copies of blocks, and in debug mode the poison of freed ones, in the order in which they were asked for.

    The manager's calls only write them down. Nobody but a forward writes to blocks, so what is done in that order
    before the next forward ends as if it had been done at once: a block that is freed and handed out again in the
    meantime is still copied from before it is copied to.

    Example: a tail is copied for a fork, and from there for a fork of the fork.
        >>> ops = PendingOps()
        >>> ops.copy("full", 6, 9)
        >>> ops.copy("full", 9, 4)
        >>> len(ops), ops.num_recorded, ops.num_drained
        (2, 2, 0)
    """

    def __init__(self) -> None:
        self._ops: list[_Copy | _Poison] = []
        self.num_drained = 0
        """Operations that have been done, of all that were ever written down."""

    def __len__(self) -> int:
        return len(self._ops)

    @property
    def num_recorded(self) -> int:
        """Operations that were ever written down."""
        return self.num_drained + len(self._ops)

    def copy(self, group: str, source: int, target: int) -> None:
        """Copy all layers' bytes of one block of a group to another."""
        self._ops.append(_Copy(group, source, target))

    def poison(self, group: str, block_ids: Sequence[int] | np.ndarray) -> None:
        """Overwrite blocks that nobody owns, so that whoever reads one computes NaN."""
        self._ops.append(_Poison(group, tuple(map(int, block_ids))))

    def drain(self, storages: Mapping[str, GroupStorage]) -> None:
        """Do everything, in order.

        Args:
            storages: the bytes of each group by name.
        """
        ops, self._ops = self._ops, []
        self.num_drained += len(ops)
        for first, *others in _batches(ops):
            if isinstance(first, _Poison):
                storages[first.group].fill(first.block_ids, POISON)
            else:
                copies = [first, *others]
                storages[first.group].copy_blocks([copy.source for copy in copies], [copy.target for copy in copies])


def _batches(ops: Sequence[_Copy | _Poison]) -> Iterator[list[Any]]:
    """Neighbours that are done at once: copies in one group of which none writes what another reads or writes."""
    batch: list[_Copy | _Poison] = []
    read: set[int] = set()
    written: set[int] = set()
    for op in ops:
        is_joined = (
            batch
            and isinstance(op, _Copy)
            and isinstance(batch[0], _Copy)
            and op.group == batch[0].group
            and op.source not in written
            and op.target not in written
            and op.target not in read
        )
        if batch and not is_joined:
            yield batch
            batch, read, written = [], set(), set()
        batch.append(op)
        if isinstance(op, _Copy):
            read.add(op.source)
            written.add(op.target)
    if batch:
        yield batch
