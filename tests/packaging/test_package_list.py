"""The package list in pyproject.toml is by hand: here it is held against the folders on disk."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def setuptools_table(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_on_disk(root: Path) -> dict[str, str]:
    """Package name -> folder, as a source checkout imports it: every folder that holds an `__init__.py`."""
    homes = {"kvgroups": "kvgroups", "kvgroups.specs": "specs", "kvgroups.model_adapters": "model_adapters"}
    ops = {file.parent.name for file in root.glob("kernels/*/*.py")}
    homes |= {f"kvgroups.kernels.{op}": f"kernels/{op}" for op in ops}
    packages = {}
    for package, home in homes.items():
        for init in (root / home).rglob("__init__.py"):
            inside = init.parent.relative_to(root / home).parts
            packages[".".join([package, *inside])] = init.parent.relative_to(root).as_posix()
    return packages


def test_every_folder_with_code_is_in_the_package_list(root: Path, setuptools_table: dict):
    assert sorted(setuptools_table["packages"]) == sorted(packages_on_disk(root))


def test_packages_map_to_the_folders_they_lie_in(root: Path, setuptools_table: dict):
    mapping = setuptools_table["package-dir"]
    for package, folder in packages_on_disk(root).items():
        assert mapping.get(package, package.replace(".", "/")) == folder
    assert set(mapping) <= set(setuptools_table["packages"])


def test_no_module_lies_in_a_folder_without_init(root: Path):
    """Such a module imports in a checkout, and is missing from the wheel."""
    folders = set(packages_on_disk(root).values())
    for top in ("kvgroups", "specs", "kernels", "model_adapters"):
        for module in (root / top).rglob("*.py"):
            assert module.parent.relative_to(root).as_posix() in folders, f"{module} is in no package"


def test_kernels_is_a_bare_folder(root: Path):
    """With an `__init__.py`, or installed, it would be imported by transformers as Hugging Face's package."""
    assert not list((root / "kernels").glob("*.py"))


def test_tests_are_no_package_and_their_names_are_unique(root: Path):
    files = list((root / "tests").rglob("*.py"))
    assert not [file for file in files if file.name == "__init__.py"]
    assert not [folder for folder in (root / "tests").rglob("kernels") if folder.is_dir()]
    names = Counter(file.name for file in files if file.name != "conftest.py")
    assert not [name for name, count in names.items() if count > 1]
