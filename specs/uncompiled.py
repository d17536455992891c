"""Forwards over a cache and torch.compile: they run uncompiled, wherever the user has put a compiler.

What a step does depends on tables on the host, on threads and on which tensor an attention layer was handed: none of
that can be traced. So a compiled model steps out of its graph for as long as it runs over a cache of ours, and so do
layers that were compiled one by one. Everything else stays compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_uncompiled: list[Any] = []
"""The stances that were set, one for each forward that is running: the last to leave puts the user's back."""


@contextmanager
def uncompiled() -> Iterator[None]:
    """Have parts of the model that were compiled on their own run as they are written, while inside.

    torch has one stance for all threads, so what others compiled runs uncompiled meanwhile, too: slower, and the same.
    """
    import torch

    with _lock:
        if not _uncompiled:
            _uncompiled.append(torch.compiler.set_stance("force_eager"))
        else:
            _uncompiled.append(_uncompiled[0])
    try:
        yield
    finally:
        with _lock:
            stance = _uncompiled.pop()
            if not _uncompiled:
                stance.__exit__(None, None, None)
