"""The live requests of one manager, and what their calls must be about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvgroups.errors import KVGroupsError, ShapeError
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.request import Request


class Roster:
    """Requests from `open`, `admit` or `fork` until `free`, in that order."""

    def __init__(self) -> None:
        self._requests: dict[Request, None] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def add(self, request: Request) -> None:
        """A request is live."""
        self._requests[request] = None

    def remove(self, request: Request) -> None:
        """A request is gone."""
        request.is_live = False
        del self._requests[request]

    def check(self, requests: Sequence[Request], counts: Sequence[int] | None = None) -> None:
        """Raise unless these are requests of this roster, each once, with a count each.

        Raises:
            KVGroupsError: a request that was freed, is another manager's, or is named twice.
            ShapeError: more or fewer counts than requests.
        """
        if counts is not None and len(counts) != len(requests):
            raise ShapeError(f"expected one count for each of {len(requests)} requests, got {len(counts)}")
        named = set(requests)
        if len(named) == len(requests) and named <= self._requests.keys():
            return
        for request in requests:
            if not isinstance(request, Request):
                raise KVGroupsError(f"request: expected what open, admit or fork has returned, got {request!r}")
            request.check_live()
            if request not in self:
                raise KVGroupsError(
                    f"the request in row {request.row} belongs to another manager; give it to the one that opened it"
                )
        raise KVGroupsError("requests: one of them is named twice; give each once, with all of its tokens")

    def check_vacant(self, tables: MultiGroupBlockTable, row: int) -> None:
        """Raise unless a row can be given to a request.

        Raises:
            ShapeError: the tables have no such row.
            KVGroupsError: another request has it.
        """
        for table in tables.tables.values():
            table.check_rows(row)
        if any(request.tables is tables and request.row == row for request in self):
            raise KVGroupsError(
                f"row {row} belongs to another request; free that first, or take an empty row"
            )
