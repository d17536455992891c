"""`kvgroups version`."""

from __future__ import annotations

import typer


def version() -> None:
    """Print the versions of kvgroups and of what it runs on."""
    from importlib.metadata import version as installed

    from kvgroups import __version__

    others = [f"{name} {installed(name)}" for name in ("torch", "transformers")]
    typer.echo(", ".join([f"kvgroups {__version__}", *others]))
