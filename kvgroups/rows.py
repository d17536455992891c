"""The rows of one cache: which request each sequence of the batch is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from kvgroups.manager import Manager, Request
from kvgroups.multi_group_block_table import MultiGroupBlockTable


class CacheRows:
    """One request for each row of a batch, or one for several rows that have seen the same tokens.

    Beams and samples of one prompt start as copies of it. As long as their tokens agree they are one request,
    computed once; when they part, full blocks stay shared and only the partial tail and the running state are
    copied. Reordering beams is then a matter of pointing rows at requests: a parent that is used once moves,
    one that is used twice is copied when its children part, and one that nobody uses is freed.

    Each verb is one call of the manager, whole or not at all, whatever interrupts it.

    Args:
        manager: hands out the blocks.
    """

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.requests: list[Request] = []
        """One entry a row; the same object where rows are still one."""
        self.tables: MultiGroupBlockTable | None = None

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_tokens(self) -> np.ndarray:
        """(batch,), int64: tokens of each row."""
        return np.array([request.num_computed_tokens for request in self.requests], dtype=np.int64)

    def distinct(self) -> tuple[list[int], list[int]]:
        """The first row of each request, and for each row the place of its request among those.

        Rows `[a, a, b, a]` give `[0, 2]` and `[0, 0, 1, 0]`.
        """
        places: dict[int, int] = {}
        of_row = [places.setdefault(id(request), len(places)) for request in self.requests]
        return [of_row.index(place) for place in range(len(places))], of_row

    def open(self, keys: Sequence[Hashable]) -> None:
        """Make one empty request for each distinct key, in tables of their own."""
        with self.manager.guard:
            self.tables = self._new_tables(len(keys))
            by_key: dict[Hashable, Request] = {}
            for row, key in enumerate(keys):
                if key not in by_key:
                    by_key[key] = self.manager.open(self.tables, row)
                self.requests.append(by_key[key])

    def part(self, keys: Sequence[Hashable]) -> None:
        """Fork requests until rows that share one have equal keys: what they are about to be fed.

        Raises:
            OutOfBlocksError: if a copy does not fit; the rows that have parted stay parted, which changes
                nothing that they hold.
        """
        if len(set(map(id, self.requests))) == len(self.requests):  # as in every step once they have parted
            return
        with self.manager.guard:
            kept: dict[int, dict[Hashable, Request]] = {}
            for row, (request, key) in enumerate(zip(list(self.requests), keys, strict=True)):
                children = kept.setdefault(id(request), {})
                if key not in children:
                    children[key] = request if not children else self._fork(request)
                self.requests[row] = children[key]

    def select(self, parents: Sequence[int]) -> None:
        """Row i goes on from what row `parents[i]` has; rows may be dropped and repeated."""
        with self.manager.guard:
            kept = [self.requests[parent] for parent in parents]
            dropped = {id(request): request for request in self.requests}
            for request in kept:
                dropped.pop(id(request), None)
            for request in dropped.values():
                self.manager.free(request)
            self.requests[:] = kept

    def rewind(self, counts: Sequence[int]) -> None:
        """Take every row back by so many tokens, all or none; rows that are one go back as one.

        Raises:
            KVGroupsError: if one of them cannot.
        """
        with self.manager.guard:
            steps = {id(request): (request, count) for request, count in zip(self.requests, counts, strict=True)}
            for request, count in steps.values():
                self.manager.check_rewind(request, count)
            for request, count in steps.values():
                self.manager.rewind(request, count)

    def copy_from(self, other: CacheRows) -> None:
        """Become a fork of `other`, row by row; rows that are one there are one here."""
        with self.manager.guard:
            if other.tables is None:
                return
            self.tables = self._new_tables(len(other))
            twins: dict[int, Request] = {}
            for request in other.requests:
                if id(request) not in twins:
                    twins[id(request)] = self._fork(request)
                self.requests.append(twins[id(request)])

    def close(self) -> None:
        """Give all blocks back."""
        with self.manager.guard:
            free_all(self.manager, self.requests)
            self.tables = None

    def _fork(self, request: Request) -> Request:
        return self.manager.fork(request, *self._free_row())

    def _free_row(self) -> tuple[MultiGroupBlockTable, int]:
        """A table row that no request has; the tables grow when there is none."""
        assert self.tables is not None
        taken = {request.row for request in self.requests}
        free = next((row for row in range(self.tables.max_num_reqs) if row not in taken), None)
        if free is None:
            free = self.tables.max_num_reqs
            self._grow_tables(2 * free)
        return self.tables, free

    def _grow_tables(self, max_num_reqs: int) -> None:
        larger = self._new_tables(max_num_reqs)
        for request in {id(r): r for r in self.requests}.values():
            self.manager.move(request, larger, request.row)
        self.tables = larger

    def _new_tables(self, max_num_reqs: int) -> MultiGroupBlockTable:
        return MultiGroupBlockTable.from_config(
            self.manager.config, max_num_reqs=max_num_reqs, device=self.manager.device
        )


def free_all(manager: Manager, requests: list[Request]) -> None:
    """Free every live request of a list, and empty the list."""
    for request in requests:
        if request.is_live:
            manager.free(request)
    requests.clear()


def drop_all(manager: Manager, requests: list[Request]) -> None:
    """The same for the finalizer of a cache, which may run in the middle of anything."""
    for request in requests:
        manager.drop(request)
