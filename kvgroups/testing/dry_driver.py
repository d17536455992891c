"""Compile Triton kernels for a GPU that is not there.

A stand-in for Triton's GPU driver: it names a target, loads nothing and launches nothing. The library's own
wrappers then run on CPU tensors and compile exactly what they would launch, with the same specialisation on
dtypes, strides and alignment, and Triton refuses a kernel that asks for more shared memory than the target has.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 166_912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232_448),
    "sm_100": (GPUTarget("cuda", 100, 32), 232_448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65_536),
}
"""Name -> target, and the shared memory in bytes that one of its thread blocks may have."""


@dataclass(frozen=True)
class Compilation:
    """One kernel in one specialisation, compiled for a target."""

    kernel: str
    shared_bytes: int
    """Shared memory of a thread block."""
    registers: int
    """32-bit registers of a thread."""
    spilled_bytes: int
    """What a thread keeps in memory for want of registers, as far as the compiler reports it."""


def compile_only(target: str) -> list[Compilation]:
    """From here on, make this process compile for `target` and launch nothing.

    Call it once, in a process of its own, before any kernel runs and without Triton's interpreter: Triton
    keeps what it has compiled, for one driver.

    Args:
        target: a key of `TARGETS`.

    Returns:
        A list to which every compilation from now on is appended.

    Raises:
        RuntimeError: if Triton interprets in this process.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("dry_driver: expected TRITON_INTERPRET unset when triton is imported, got it set.")
    compilations: list[Compilation] = []

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        kernel_cache, *_ = fn.jit_function.device_caches[compile["device"]]
        compiled = kernel_cache[compile["key"]]
        registers, spilled_bytes = _resources(compiled.asm)
        operation = fn.module.split(".")[-2]  # kvgroups.kernels.<operation>.triton_impl
        compilations.append(
            Compilation(f"{operation}.{fn.name}", compiled.metadata.shared, registers, spilled_bytes)
        )

    triton.knobs.runtime.jit_post_compile_hook = note
    triton.runtime.driver.set_active(_DryDriver(*TARGETS[target]))
    return compilations


class _DryDriver:
    """What Triton asks of a driver between a call and its launch."""

    def __init__(self, target: GPUTarget, max_shared_bytes: int) -> None:
        properties = {
            "max_shared_mem": max_shared_bytes,
            "multiprocessor_count": 1,
            "warpSize": target.warp_size,
        }
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.launcher_cls = lambda source, metadata: lambda *args: None
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            # module, function, registers, spills, threads that a thread block may have
            load_binary=lambda name, binary, shared, device: (None, None, 0, 0, 1024),
        )


def _resources(asm: dict[str, Any]) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as the vendor's own tools state them."""
    if "amdgcn" in asm:
        registers, spills = (
            int(re.search(rf"\.{name}:\s+(\d+)", asm["amdgcn"])[1])  # type: ignore[index]
            for name in ("vgpr_count", "vgpr_spill_count")
        )
        return registers, 4 * spills
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert found, f"cuobjdump speaks otherwise: {usage}"
    return int(found[1]), int(found[2]) + int(found[3])
