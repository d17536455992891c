"""Bytes as a person writes and reads them."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Bytes in "80GiB", "80 GB", "1.5TiB", "512MiB" or plain "1048576"; fractions of a byte are dropped.

    Raises:
        ValueError: saying what was expected, if the text is no size or is less than a byte. Who calls it says where
            the text stood.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("expected a size like 80GiB, 80GB, 512MiB or plain bytes")
    nbytes = int(Decimal(match[1]) * _UNITS[match[2].upper()])
    if nbytes < 1:
        raise ValueError("must be at least one byte")
    return nbytes


def in_units(nbytes: float) -> str:
    """`1536` -> "1.5 KiB": three or four digits and the largest unit that leaves one before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def exactly(nbytes: int) -> str:
    """`3073` -> "3073 bytes (3.001 KiB)": to be copied into a setting, and to be read."""
    return f"{nbytes} bytes ({in_units(nbytes)})" if nbytes >= 1024 else f"{nbytes} bytes"
