"""The shared library of the CPU kernels: found, checked and loaded when a kernel is first asked for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("_cpu.so")
"""Where setup.py puts it, in a checkout and in a wheel."""

INTERFACE = 9
"""What `kvgroups_interface` in cpu/runtime.cpp returns where the arguments are those that Python passes."""

FUNCTIONS = tuple(
    f"kvgroups_{name}"
    for name in (
        *("interface", "isa", "has_openmp", "can_describe", "fast_matrix_types"),
        *("paged_attention", "write_kv", "causal_conv1d_update", "state_update"),
    )
)
"""What it exports that returns an int64."""

ISAS = {1: "neon", 2: "avx2", 3: "avx512"}
"""Instruction sets by their numbers in cpu/runtime.h."""

ISA_VARIABLE = "KVGROUPS_CPU_ISA"
"""The environment variable that asks for one of them in place of the best, to compare or to rule one out."""


@dataclass(frozen=True)
class CpuLibrary:
    """The library, or the reason why there is none."""

    functions: ctypes.CDLL | None = None
    isa: int = 0
    reason: str = ""
    has_openmp: bool = False
    """Whether its threads are those of PyTorch; if not, each call starts its own."""
    fast_matrix_types: int = 0
    """The 16-bit types of which PyTorch multiplies matrices fast here: bit n is `ElementType` n of cpu/operand.h."""

    def function(self, name: str) -> Callable[[bytes], int]:
        """`kvgroups_<name>`, which takes packed arguments. The library must be there."""
        assert self.functions is not None
        return getattr(self.functions, f"kvgroups_{name}")

    def run(self, name: str, call: bytes) -> int:
        """What `kvgroups_<name>` returns for packed arguments."""
        return self.function(name)(call)


@cache
def cpu_library() -> CpuLibrary:
    """Load the library once; every later call returns the same."""
    if not PATH.exists():
        return CpuLibrary(
            reason="needs the CPU kernels, which were not built: install kvgroups with a C++ compiler"
        )
    try:
        functions = ctypes.CDLL(str(PATH))
    except OSError as error:
        return CpuLibrary(reason=f"needs the CPU kernels, which cannot be loaded: {error}")
    for name in FUNCTIONS:
        if not hasattr(functions, name):
            return CpuLibrary(reason=_stale(f"lacks {name}"))
        getattr(functions, name).restype = ctypes.c_int64
    if (interface := functions.kvgroups_interface()) != INTERFACE:
        return CpuLibrary(reason=_stale(f"has interface {interface} and not {INTERFACE}"))
    isa = functions.kvgroups_isa()
    if isa not in ISAS:
        return CpuLibrary(reason="needs a processor with AVX2, FMA and F16C, or with NEON")
    if wanted := os.environ.get(ISA_VARIABLE):
        served = {ISAS[number]: number for number in isas_up_to(isa)}
        if wanted not in served:
            return CpuLibrary(reason=f"needs {ISA_VARIABLE} among {', '.join(served)} here, got {wanted!r}")
        isa = served[wanted]
    return CpuLibrary(
        functions,
        isa,
        has_openmp=bool(functions.kvgroups_has_openmp()),
        fast_matrix_types=functions.kvgroups_fast_matrix_types(),
    )


def isas_up_to(isa: int) -> list[int]:
    """The instruction sets of a processor of which that is the best."""
    return [number for number in ISAS if number <= isa and (ISAS[number] == "neon") == (ISAS[isa] == "neon")]


def _stale(what: str) -> str:
    return f"needs CPU kernels of this version, and {PATH.name} {what}: install kvgroups again"
