"""What a wheel carries, and that every way to install and to run finds one `kvgroups`, and all of it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

LIBRARY = "kvgroups/kernels/_cpu.so"
HAS_KERNELS = sysconfig.get_platform() in ("linux-x86_64", "linux-aarch64")
"""Whether there are CPU kernels for this machine, if it has a compiler."""

WHERE = """
import importlib, json, sys
print(json.dumps({name: importlib.import_module(name).__file__ for name in sys.argv[1:]}))
"""
"""Imports the packages that it is given and prints the file of each."""

STAND_IN_KERNELS = """
__version__ = "0.18.5"  # in the range that transformers imports

class Made:
    "What a call made: a value, or a decorator that leaves what it decorates as it is."
    def __call__(self, decorated): return decorated
    def __or__(self, other): return self

class Name(Made):
    "Every name of the package: a class, a decorator factory or an enum."
    def __getattr__(self, name): return Made()
    def __call__(self, *args, **kwargs): return Made()

def __getattr__(name): return Name()
"""

WAITING_COMPILER = """#!{python}
# Compiles nothing, and fails unless another one runs beside it within five seconds.
import pathlib, sys, time
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).touch()
started = pathlib.Path({folder!r}, str(time.monotonic_ns()))
started.touch()
deadline = time.monotonic() + 5
while "-c" in sys.argv and len([*started.parent.iterdir()]) < 2:
    if time.monotonic() > deadline:
        sys.exit("alone")
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def packages(root: Path) -> list[str]:
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]


@pytest.fixture(scope="module")
def checkout(copy_checkout: Callable[[], Path]) -> Path:
    """A checkout to run from, with a test that says where pytest finds kvgroups."""
    folder = copy_checkout()
    (folder / "tests" / "test_where.py").write_text(
        "import importlib, pathlib, tomllib\n"
        "ROOT = pathlib.Path(__file__).parents[1]\n"
        "def test_kvgroups_is_the_checkout():\n"
        "    table = tomllib.loads((ROOT / 'pyproject.toml').read_text())['tool']['setuptools']\n"
        "    for name in table['packages']:\n"
        "        assert pathlib.Path(importlib.import_module(name).__file__).is_relative_to(ROOT)\n"
    )
    return folder


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def plain(make_environment: Callable[..., Path], wheel: Path) -> Path:
    """The python of an environment with the wheel installed."""
    return make_environment(wheel)


@pytest.fixture(scope="module")
def editable(make_environment: Callable[..., Path], checkout: Path) -> Path:
    """The python of an environment with the checkout installed editable."""
    return make_environment("-e", checkout)


@pytest.fixture(scope="module")
def bare(make_environment: Callable[..., Path]) -> Path:
    """The python of an environment with the dependencies only."""
    return make_environment()


def stand_in(python: Path) -> Path:
    """Puts a stand-in for Hugging Face's `kernels` distribution into the environment; returns its folder."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    metadata = site / "kernels-0.18.5.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.5\n")
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text(STAND_IN_KERNELS)
    return site / "kernels"


def assert_found_under(folder: Path, files: str, packages: list[str]) -> None:
    """`files` is what WHERE printed for all packages."""
    found = json.loads(files)
    assert sorted(found) == sorted(packages)
    assert not {name: file for name, file in found.items() if not Path(file).is_relative_to(folder)}


def test_wheel_carries_kvgroups_and_nothing_else(wheel: Path, packages: list[str], root: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"kvgroups", "kvgroups-0.1.0.dist-info"}
    assets = {file.relative_to(root).as_posix() for file in (root / "kvgroups" / "assets").rglob("*.*")}
    presets = {f"kvgroups/specs/presets/{file.name}" for file in (root / "specs" / "presets").glob("*.json")}
    data = {name for name in names if name.startswith("kvgroups/") and not name.endswith(".py")}
    is_built = LIBRARY in data
    assert is_built == (shutil.which("g++", path=os.defpath) is not None and HAS_KERNELS)
    data.discard(LIBRARY)
    assert data == {"kvgroups/py.typed", *presets, *(name for name in assets if not name.endswith((".py", ".pyc")))}
    tops = ("kvgroups", "specs", "kernels", "model_adapters")
    sources = [file for top in tops for file in (root / top).rglob("*.py")]
    assert len([name for name in names if name.endswith(".py")]) == len(sources)
    assert {f"{package.replace('.', '/')}/__init__.py" for package in packages} <= set(names)


@pytest.mark.skipif(not HAS_KERNELS, reason="there are no CPU kernels for this machine")
def test_a_wheel_with_the_library_belongs_to_a_platform_and_to_no_python(wheel: Path):
    if LIBRARY not in zipfile.ZipFile(wheel).namelist():
        pytest.skip("there is no C++ compiler here")
    assert wheel.name.startswith("kvgroups-0.1.0-py3-none-linux_")


def test_without_a_compiler_the_wheel_is_for_every_platform_and_works(
    copy_checkout: Callable[[], Path],
    build_wheel: Callable[..., Path],
    make_environment: Callable[..., Path],
    elsewhere: Path,
    run: Callable[..., str],
):
    wheel = build_wheel(copy_checkout(), CC="/no/compiler", CXX="/no/compiler")
    assert wheel.name == "kvgroups-0.1.0-py3-none-any.whl"
    assert LIBRARY not in zipfile.ZipFile(wheel).namelist()
    python = make_environment(wheel)
    why = "from kvgroups.kernels.cpu_library import cpu_library; print(cpu_library().reason)"
    assert "install kvgroups with a C++ compiler" in run(python, "-c", why, cwd=elsewhere)


@pytest.mark.skipif(not HAS_KERNELS, reason="there are no CPU kernels for this machine")
@pytest.mark.parametrize("num_compilers", [1, 2])
def test_sources_are_compiled_side_by_side(
    num_compilers: int, copy_checkout: Callable[[], Path], tmp_path: Path, run: Callable[..., str]
):
    """And where a compiler fails, the build goes on without the library, and without one from before."""
    compiler, started = tmp_path / "compiler", tmp_path / "started"
    started.mkdir()
    compiler.write_text(WAITING_COMPILER.format(python=sys.executable, folder=str(started)))
    compiler.chmod(0o755)
    checkout = copy_checkout()
    built = checkout / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / LIBRARY
    for older in (checkout / LIBRARY, built):
        older.parent.mkdir(parents=True, exist_ok=True)
        older.touch()
    build = (sys.executable, "setup.py", "-q", "build_ext", "--inplace", "-j", num_compilers)
    run(*build, cwd=checkout, CC=str(compiler), CXX=str(compiler))
    assert (checkout / LIBRARY).exists() == built.exists() == (num_compilers > 1)


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["plain", "editable"])
def test_an_install_with_a_compiler_has_the_kernels(
    installed: str, wheel: Path, elsewhere: Path, request: pytest.FixtureRequest, run: Callable[..., str]
):
    if LIBRARY not in zipfile.ZipFile(wheel).namelist():
        pytest.skip("there is no C++ compiler here, or there are no CPU kernels for this machine")
    python = request.getfixturevalue(installed)
    isa = "from kvgroups.kernels.cpu_library import cpu_library; print(cpu_library().isa, cpu_library().reason)"
    assert run(python, "-c", isa, cwd=elsewhere).split() in (["1"], ["2"], ["3"])


@pytest.mark.slow
def test_sdist_carries_the_tests_and_gives_the_same_wheel(
    sdist: Path, wheel: Path, build_wheel: Callable[..., Path]
):
    with tarfile.open(sdist) as archive:
        carried = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"LICENSE", "Makefile", "constraints.txt", ".ci/run", "tests/packaging/test_wheel.py"}
    assert needed <= carried
    again = build_wheel(sdist)
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_plain_install_from_elsewhere(
    plain: Path, elsewhere: Path, packages: list[str], run: Callable[..., str]
):
    files = run(plain, "-c", WHERE, *packages, cwd=elsewhere)
    assert_found_under(plain.parents[1], files, packages)


def test_checkout_wins_over_a_plain_install_beside_it(
    plain: Path, checkout: Path, packages: list[str], run: Callable[..., str]
):
    """`python -c`, like `python -m pytest`, looks in the current folder first: no package may be torn."""
    files = run(plain, "-c", WHERE, *packages, cwd=checkout)
    assert_found_under(checkout, files, packages)


@pytest.mark.slow
def test_checkout_with_nothing_installed(
    bare: Path, checkout: Path, packages: list[str], run: Callable[..., str]
):
    files = run(bare, "-c", WHERE, *packages, cwd=checkout)
    assert_found_under(checkout, files, packages)


@pytest.mark.slow
def test_editable_install_from_elsewhere(
    editable: Path, checkout: Path, elsewhere: Path, packages: list[str], run: Callable[..., str]
):
    files = run(editable, "-c", WHERE, *packages, cwd=elsewhere)
    assert_found_under(checkout, files, packages)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["-P"]], ids=["python -m pytest", "pytest"])
@pytest.mark.parametrize("installed", ["bare", "plain", "editable"])
def test_pytest_finds_the_checkout(
    installed: str,
    flags: list[str],
    checkout: Path,
    request: pytest.FixtureRequest,
    run: Callable[..., str],
):
    """`-P` keeps the current folder off the path, as the `pytest` script does."""
    python = request.getfixturevalue(installed)
    run(python, *flags, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_where.py", cwd=checkout)


@pytest.mark.slow
def test_command_line_is_installed(plain: Path, elsewhere: Path, run: Callable[..., str]):
    assert "--json" in run(plain.with_name("kvgroups"), "parity", "--help", cwd=elsewhere)


@pytest.mark.slow
@pytest.mark.parametrize("cwd", ["elsewhere", "checkout"])
def test_kernels_of_hugging_face_stay_apart_from_ours(
    cwd: str,
    make_environment: Callable[..., Path],
    wheel: Path,
    request: pytest.FixtureRequest,
    run: Callable[..., str],
):
    """transformers imports the `kernels` distribution, and our folder `kernels/` does not take its place."""
    python = make_environment(wheel)
    theirs = stand_in(python)
    files = run(
        python,
        "-c",
        "import transformers.models.gemma3.modeling_gemma3\n" + WHERE,
        "kernels",
        "kvgroups.kernels.paged_attention",
        cwd=request.getfixturevalue(cwd),
    )
    found = json.loads(files)
    assert Path(found["kernels"]) == theirs / "__init__.py"
    assert not Path(found["kvgroups.kernels.paged_attention"]).is_relative_to(theirs)


@pytest.mark.slow
def test_transformers_imports_beside_our_folder_of_that_name(
    bare: Path, checkout: Path, run: Callable[..., str]
):
    """With no `kernels` distribution, a bare folder of that name on the path reads as absent."""
    check = (
        "import transformers.models.gemma3.modeling_gemma3, kvgroups.kernels.paged_attention\n"
        "from transformers.utils import is_kernels_available; assert not is_kernels_available()"
    )
    run(bare, "-c", check, cwd=checkout)
