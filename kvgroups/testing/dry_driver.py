"""Compile Triton kernels for a GPU that is not there.

A stand-in for Triton's GPU driver: it names a target, loads nothing and launches nothing. The library's own
wrappers then run on CPU tensors and compile exactly what they would launch, with the same specialisation on
dtypes, strides and alignment, and Triton refuses a kernel that asks for more shared memory than the target has.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from kvgroups.testing.machine_code import MachineCode, read

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
    """`operation.function`."""
    settings: dict[str, int]
    """Its constants that are numbers, and its warps and stages."""
    shared_bytes: int
    """Shared memory of a thread block."""
    code: MachineCode


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
        operation = fn.module.split(".")[-2]  # kvgroups.kernels.<operation>.triton_impl
        compilations.append(
            Compilation(
                kernel=f"{operation}.{fn.name}",
                settings=_settings(fn.jit_function.arg_names, compile),
                shared_bytes=compiled.metadata.shared,
                code=read(compiled.asm),
            )
        )

    triton.knobs.runtime.jit_post_compile_hook = note
    triton.runtime.driver.set_active(_DryDriver(*TARGETS[target]))
    return compilations


_MULTIPROCESSORS = 132
"""Of a large GPU: kernels that split their work ask."""


class _DryDriver:
    """What Triton asks of a driver between a call and its launch."""

    def __init__(self, target: GPUTarget, max_shared_bytes: int) -> None:
        properties = {
            "max_shared_mem": max_shared_bytes,
            "multiprocessor_count": _MULTIPROCESSORS,
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


def _settings(names: list[str], compile: dict[str, Any]) -> dict[str, int]:
    """The constants of a specialisation that are numbers, by the names of its arguments."""
    constants = {names[place]: value for (place, *_), value in compile["constants"].items()}
    return {name: value for name, value in constants.items() if type(value) is int} | {
        "warps": compile["num_warps"],
        "stages": compile["num_stages"],
    }
