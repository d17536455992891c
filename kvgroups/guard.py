"""One call of the manager at a time, also where Python's garbage collector makes one of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Guard(Generic[Item]):
    """A lock that a thread may enter again, and a queue for what is dropped while somebody is inside.

    The collector may run between any two lines, and what it collects may hold blocks: a finalizer that freed
    them there and then would change pools under the feet of the call that it interrupts. So it drops them here.
    They are given back at once if nobody is inside, else when the next call enters.

    Args:
        give_back: called for each item that was dropped, inside the lock.

    Example:
        >>> gone = []
        >>> guard = Guard(gone.append)
        >>> with guard:
        ...     guard.drop("a")
        ...     print(gone)
        []
        >>> guard.drop("b")
        >>> gone
        ['a', 'b']
    """

    def __init__(self, give_back: Callable[[Item], object]) -> None:
        self._give_back = give_back
        self._lock = threading.RLock()
        self._depth = 0
        self._dropped: deque[Item] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._give_back_dropped()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        self._lock.release()

    def drop(self, item: Item) -> None:
        """Have an item given back, now or by the next call. Never waits: a finalizer may interrupt whoever is inside."""
        self._dropped.append(item)
        if self._lock.acquire(blocking=False):
            try:
                if self._depth == 0:
                    with self:
                        pass
            finally:
                self._lock.release()

    def _give_back_dropped(self) -> None:
        while self._dropped:
            self._give_back(self._dropped.popleft())
