"""How a command ends when what it was given cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

EXIT_USAGE = 2
"""The command was given something that it cannot use."""


class UsageError(Exception):
    """One sentence that a person can act on."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a wrong argument, config or model into one sentence on stderr and exit code 2."""
    from kvgroups.errors import KVGroupsError

    try:
        yield
    except (UsageError, KVGroupsError) as error:
        typer.echo(f"kvgroups: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(EXIT_USAGE) from None
