"""One call of the manager at a time, whole: neither the garbage collector nor Ctrl-C comes in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Guard(Generic[Item]):
    """A lock that a thread may enter again, and what must wait until it is left.

    Ctrl-C raises between any two lines of the main thread, and half a call is worse than none: while the main
    thread is inside, the interrupt is noted, and it is raised where the outermost `with` ends.

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
        self._interrupts = _Interrupts()

    def __enter__(self) -> None:
        self._interrupts.hold()
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._give_back_dropped()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        self._lock.release()
        self._interrupts.let_go()

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


class _Interrupts:
    """SIGINT, held back while the main thread is inside; Python runs its handlers in no other."""

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._noted: tuple[int, FrameType | None] | None = None

    def hold(self) -> None:
        """Note interrupts from now on, instead of raising them."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0 and callable(handler := signal.getsignal(signal.SIGINT)):
            self._handler, self._noted = handler, None
            signal.signal(signal.SIGINT, self._note)
        self._depth += 1

    def let_go(self) -> None:
        """Undo one `hold`; after the last one, have what was noted handled as it would have been."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth or self._handler is None:
            return
        handler, self._handler = self._handler, None
        signal.signal(signal.SIGINT, handler)
        noted, self._noted = self._noted, None
        if noted is not None:
            handler(*noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = (number, frame)
