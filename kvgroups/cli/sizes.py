"""Sizes on the command line."""

from __future__ import annotations

from kvgroups import sizes
from kvgroups.cli.errors import UsageError


def parse_bytes(option: str, text: str) -> int:
    """What `kvgroups.sizes.parse_bytes` reads.

    Raises:
        UsageError: naming `option`, if the text is no size or is less than a byte.
    """
    try:
        return sizes.parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}") from None
