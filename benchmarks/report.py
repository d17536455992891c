"""What every benchmark ends with: its conditions, a table and a JSON file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import kvgroups

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
"""Where JSON files go unless told otherwise."""


def conditions(**more: Any) -> dict[str, Any]:
    """Device, versions, commit and command; `more` is what else the numbers depend on."""
    return {
        "device": f"{_processor()}, {os.cpu_count()} logical cores; no model, no GPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "kvgroups": kvgroups.__version__,
        "commit": _commit(),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        **more,
    }


def write(path: Path, found: dict[str, Any], results: Any) -> None:
    """The results as JSON, with their conditions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"conditions": found, "results": results}, indent=1) + "\n", encoding="utf-8")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout, words to the left and numbers to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(columns):
        is_number = bool(rows) and rows[0][index][:1].isdigit()
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def tell(found: dict[str, Any]) -> None:
    """The conditions, on stdout."""
    _console().print("; ".join(f"{key} {value}" for key, value in found.items()), style="dim")


def _console() -> Console:
    return Console(width=120, highlight=False)


def _module() -> str:
    return f"benchmarks.{Path(sys.argv[0]).stem}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def _commit() -> str | None:
    """The commit, with a + if files that it tracks are changed; None outside a repository."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
