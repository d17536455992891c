"""mypy reads the installed wheel: in a checkout it does not follow the mapping, and says nothing about it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PLANTED = """
from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.specs import no_such_name

wrong: str = NULL_BLOCK_ID
"""
"""Two errors that nothing but reading `kvgroups.constants` and `kvgroups.specs` can show."""


@pytest.fixture
def python(wheel: Path, make_environment: Callable[..., Path]) -> Path:
    return make_environment(wheel)


@pytest.fixture
def mypy(python: Path, root: Path, run: Callable[..., str]) -> Callable[..., str]:
    """Runs mypy, with the project's settings, on what is installed in the environment."""
    command = [sys.executable, "-m", "mypy", "--config-file", root / "pyproject.toml"]

    def check(*what: str, status: int) -> str:
        return run(*command, "--python-executable", python, *what, cwd=python.parent, status=status)

    return check


def test_mypy_finds_no_error(mypy: Callable[..., str]):
    mypy("-p", "kvgroups", status=0)


def test_mypy_sees_an_error_in_a_mapped_package(mypy: Callable[..., str], python: Path):
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    (site / "kvgroups" / "specs" / "planted.py").write_text(PLANTED)
    found = mypy("-m", "kvgroups.specs.planted", status=1)
    assert 'Module "kvgroups.specs" has no attribute "no_such_name"' in found
    assert "Incompatible types in assignment" in found
