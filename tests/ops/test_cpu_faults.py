"""The tests of the C++ forms have teeth: a library with one fault planted in its sources fails them.

A fault is one piece of text replaced in a copy of the sources. Only what it touches is compiled again, without
much optimisation; the tests run in a process of their own, on that library.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvgroups.kernels.cpu_library import cpu_library

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
RUN = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pytest
from kvgroups.kernels import cpu_library
cpu_library.PATH = Path(sys.argv[1])
assert cpu_library.cpu_library().functions, cpu_library.cpu_library().reason
sys.exit(pytest.main(["-q", "-x", "--tb=short", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""

ATTENTION = ("tests/ops/test_cpu_attention.py", "-k", "is_as_good_as_the_reference and float32")
ATTENTION_IN_TILES = ("tests/ops/test_cpu_attention.py", "-k", "tiles_and_spans")
ATTENTION_PARTLY_SEEN = ("tests/ops/test_cpu_attention.py", "-k", "do_not_see or tiles_and_spans")
WRITES = ("tests/ops/test_write_kv.py", "-k", "cpu")
CONVOLUTION = ("tests/ops/test_cpu_convolution.py", "tests/ops/test_causal_conv1d.py", "-k", "not scan and not sequence")
UPDATE = ("tests/ops/test_cpu_state_update.py",)

FAULTS = {
    "window one token too wide": (
        ATTENTION,
        "paged_attention/cpu.h",
        "position - call.window + 1 > first) first = position - call.window + 1",
        "position - call.window > first) first = position - call.window",
    ),
    "ring read as a table": (
        ATTENTION,
        "paged_attention/cpu_simd.cpp",
        "logical_block % call.ring_blocks : logical_block",
        "logical_block : logical_block",
    ),
    "sinks left out": (ATTENTION, "paged_attention/cpu_simd.cpp", "if (call.sinks) total +=", "if (false) total +="),
    "query heads interleaved": (
        ATTENTION,
        "paged_attention/cpu_simd.cpp",
        "(kv_head * shared + head) * call.query_strides.head",
        "(head * call.num_kv_heads + kv_head) * call.query_strides.head",
    ),
    "columns of transposed keys rotated": (
        ATTENTION_IN_TILES,
        "paged_attention/cpu_simd.cpp",
        "store(columns + (column + i) * TILE + key, square[i])",
        "store(columns + (column + i) * TILE + key, square[(i + 1) % WIDTH])",
    ),
    "columns of a pair exchanged": (
        ATTENTION_IN_TILES,
        "paged_attention/cpu_simd.cpp",
        "from_pair({joined(column), joined(column + WIDTH)}",
        "from_pair({joined(column + WIDTH), joined(column)}",
    ),
    "values shared by rows of which some see them": (
        ATTENTION_PARTLY_SEEN,
        "paged_attention/cpu_simd.cpp",
        "max(all.from, each[r].from), min(all.to, each[r].to)",
        "max(all.from, each[r].from), each[r].to",
    ),
    "values that one row alone sees left out": (
        ATTENTION_PARTLY_SEEN,
        "paged_attention/cpu_simd.cpp",
        "for (Range own : {before, after})",
        "for (Range own : {before})",
    ),
    "spans of a tile not joined": (
        ATTENTION_IN_TILES,
        "paged_attention/cpu.cpp",
        "for (int64_t i = 0; i < tile.num_spans; ++i) parts",
        "for (int64_t i = tile.num_spans - 1; i < tile.num_spans; ++i) parts",
    ),
    "null block written": (WRITES, "write_kv/cpu.cpp", "if (slot < call->block_size)", "if (slot < 0)"),
    "oldest input of the window taken": (
        CONVOLUTION,
        "causal_conv1d/cpu_simd.cpp",
        "states[channel * K + tap + 1]",
        "states[channel * K + tap]",
    ),
    "sum activated before it is rounded": (
        CONVOLUTION,
        "causal_conv1d/cpu_simd.cpp",
        "rounded<Element>(load(totals + channel) + load(scratch.bias + channel))",
        "load(totals + channel) + load(scratch.bias + channel)",
    ),
    "inputs of padding kept": (CONVOLUTION, "causal_conv1d/cpu_simd.cpp", "if (slot == 0) continue;", ""),
    "state of padding written": (UPDATE, "state_update/cpu.cpp", "if (slot == 0) continue;", ""),
    "what enters a state not rounded": (
        UPDATE,
        "state_update/cpu_simd.cpp",
        "rounded<Element>(load(rows.entering + column) * x)",
        "load(rows.entering + column) * x",
    ),
    "SSM group of the neighbour": (
        UPDATE,
        "state_update/cpu_simd.cpp",
        "rows.head / (call.num_heads / call.num_groups)",
        "rows.head % call.num_groups",
    ),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(cpu_library().functions is None, reason=cpu_library().reason or "it is there"),
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
]


class Builder:
    """Libraries from a copy of the sources; what has not changed is compiled once."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("kernels", "kvgroups/kernels/cpu"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__"))
        setup = runpy.run_path(str(ROOT / "setup.py"))
        self.units = setup["units"]()

    def build(self, name, changed=None):
        """The library; files in the folder of the one that has changed are compiled for it alone."""

        def compiled(number):
            source, _, flags = self.units[number]
            is_changed = changed is not None and Path(source).parent == changed.parent
            path = self.folder / f"{name if is_changed else 'right'}-{number}.o"
            if not path.exists():
                self._run(*flags, "-O1", "-c", source, "-o", path)
            return path

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, range(len(self.units))))
        library = self.folder / f"{name}.so"
        self._run("-shared", *objects, "-o", library, "-ldl", "-lpthread")
        return library

    def _run(self, *arguments):
        subprocess.run([COMPILER, *map(str, arguments)], cwd=self.folder, check=True, timeout=120)


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["setup.py", "--name"])  # its lists are wanted, and nothing built
        return Builder(tmp_path_factory.mktemp("sources"))


def run_tests(library, tests):
    """How pytest ended, and what it printed, on that library."""
    command = [sys.executable, "-c", RUN, str(library), *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("tests", [ATTENTION, ATTENTION_IN_TILES, WRITES, CONVOLUTION, UPDATE], ids=" ".join)
def test_what_is_built_from_the_sources_passes(tests, builder):
    code, printed = run_tests(builder.build("right"), tests)
    assert code == 0 and " passed" in printed, printed


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, builder):
    tests, name, old, new = FAULTS[fault]
    path = builder.folder / "kernels" / name
    source = path.read_text()
    assert source.count(old) == 1, f"expected {old!r} once in {name}"
    path.write_text(source.replace(old, new))
    try:
        library = builder.build(fault.replace(" ", "-"), Path("kernels") / name)
    finally:
        path.write_text(source)
    code, printed = run_tests(library, tests)
    assert code == 1 and re.search("^E +(AssertionError|assert )", printed, re.MULTILINE), printed
