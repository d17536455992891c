"""Copies of the checkout, what is built from them, and environments to install that into. No network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_SOURCE = (".git", ".venv", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")


def run_command(*command: object, cwd: Path, status: int = 0, **environment: str) -> str:
    """What the command prints on stdout. Another exit status than `status` fails, and shows all it printed.

    The command gets a bare environment: no PYTHONPATH of the caller, and `cwd` for its home.
    """
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={"PATH": os.defpath, "HOME": str(cwd), "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == status, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="session")
def run() -> Callable[..., str]:
    return run_command


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout that is tested."""
    return ROOT


@pytest.fixture(scope="session")
def copy_checkout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Copies the checkout's sources: nothing is built, or left behind, in the checkout itself."""

    def copy() -> Path:
        folder = tmp_path_factory.mktemp("copy") / "checkout"
        return shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_SOURCE))

    return copy


@pytest.fixture(scope="session")
def build_wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds the wheel of a folder or of a source distribution."""

    def build(source: Path, **environment: str) -> Path:
        folder = tmp_path_factory.mktemp("wheel")
        run_command(*PIP, "wheel", *OFFLINE, "--wheel-dir", folder, source, cwd=folder, **environment)
        (wheel,) = folder.glob("*.whl")
        return wheel

    return build


@pytest.fixture(scope="session")
def wheel(copy_checkout: Callable[[], Path], build_wheel: Callable[..., Path]) -> Path:
    """The wheel of the checkout."""
    return build_wheel(copy_checkout())


@pytest.fixture(scope="session")
def sdist(copy_checkout: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of the checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    build = f"import setuptools.build_meta as backend; backend.build_sdist({str(folder)!r})"
    run_command(sys.executable, "-c", build, cwd=copy_checkout())
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="session")
def make_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes virtual environments: `make_environment("-e", folder)` is the python of one with that installed.

    The dependencies are those of the tests' own environment, on the path behind what is installed here. An
    editable kvgroups among them is not seen: its `.pth` file works in a site folder only.
    """

    def make(*requirement: object) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        run_command(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
        python = folder / "bin" / "python"
        (site,) = folder.glob("lib/python*/site-packages")
        dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (site / "dependencies.pth").write_text("\n".join(sorted(dependencies)))
        if requirement:
            run_command(*PIP, "--python", python, "install", *OFFLINE, *requirement, cwd=folder)
        return python

    return make
