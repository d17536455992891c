"""Every module is imported under its public name, and the examples in its docstrings are run.

`pytest --doctest-modules` would import `specs/base.py` as `specs.base`, and its classes would exist twice.
"""

from __future__ import annotations

import doctest
import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
MODULES = [
    package if file.stem == "__init__" else f"{package}.{file.stem}"
    for package in SETUPTOOLS["packages"]
    for file in (ROOT / SETUPTOOLS["package-dir"].get(package, package.replace(".", "/"))).glob("*.py")
    if file.stem != "__main__"
]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_examples_of(module: str):
    failed, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert not failed, "the captured output shows which"
