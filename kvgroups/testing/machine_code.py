"""What a compiled kernel is made of, read from its machine code: registers, spills, loads, matrix instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import triton

_MATRIX = re.compile(r"HGMMA|HMMA|IMMA|QGMMA|UTCHMMA|v_mfma_|v_smfmac_")
_NVIDIA_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_NVIDIA_LOAD = re.compile(r"\b(?:LDGSTS|LDG)((?:\.\w+)*)")
_NVIDIA_BRANCH = re.compile(r"\bBRA (?:\w+, )?0x([0-9a-f]+)")
_AMD_LABEL = re.compile(r"^(\.LBB\w+):")
_AMD_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_(?:lds_)?(dwordx4|dwordx3|dwordx2|dword|\w+)")
_AMD_BRANCH = re.compile(r"\bs_c?branch\w* (\.LBB\w+)")


@dataclass(frozen=True)
class MachineCode:
    """A kernel as its vendor's own tools show it."""

    registers: int
    """32-bit registers of a thread."""
    spilled_bytes: int
    """What a thread keeps in memory for want of registers, as far as the compiler reports it."""
    matrix_instructions: int
    """Tensor-core or MFMA instructions in the text."""
    loads: dict[int, int] = field(default_factory=dict)
    """Bits of one thread's load from global memory -> how many such instructions the text has."""
    loop_loads: tuple[dict[int, int], ...] = ()
    """The same within each innermost loop that has matrix instructions: for attention, a loop over keys."""


def read(asm: dict[str, Any]) -> MachineCode:
    """Read a compiled kernel.

    Args:
        asm: `compiled.asm` of Triton, with a `cubin` or an `amdgcn`.
    """
    if "amdgcn" in asm:
        registers, spills = (
            int(re.search(rf"\.{name}:\s+(\d+)", asm["amdgcn"])[1])  # type: ignore[index]
            for name in ("vgpr_count", "vgpr_spill_count")
        )
        return _described(registers, 4 * spills, list(_amd(asm["amdgcn"])))
    usage = _cuobjdump(asm["cubin"], "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert found, f"cuobjdump speaks otherwise: {usage}"
    sass = list(_nvidia(_cuobjdump(asm["cubin"], "-sass")))
    return _described(int(found[1]), int(found[2]) + int(found[3]), sass)


@dataclass(frozen=True)
class _Instruction:
    """One instruction as far as it counts here."""

    place: int
    is_matrix: bool
    load_bits: int | None
    jumps_to: int | None


def _described(registers: int, spilled_bytes: int, code: list[_Instruction]) -> MachineCode:
    matrix = [each.place for each in code if each.is_matrix]
    spans = {
        (each.jumps_to, each.place) for each in code if each.jumps_to is not None and each.jumps_to < each.place
    }
    loops = sorted(
        (start, stop) for start, stop in spans if any(start <= place <= stop for place in matrix)
    )
    innermost = [
        (start, stop)
        for start, stop in loops
        if not any(other != (start, stop) and start <= other[0] and other[1] <= stop for other in loops)
    ]
    return MachineCode(
        registers=registers,
        spilled_bytes=spilled_bytes,
        matrix_instructions=len(matrix),
        loads=_loads(code),
        loop_loads=tuple(_loads(each for each in code if start <= each.place <= stop) for start, stop in innermost),
    )


def _loads(code: Iterable[_Instruction]) -> dict[int, int]:
    counts = Counter(each.load_bits for each in code if each.load_bits is not None)
    return dict(sorted(counts.items(), reverse=True))


def _nvidia(sass: str) -> Iterator[_Instruction]:
    for place, text in _NVIDIA_LINE.findall(sass):
        load, branch = _NVIDIA_LOAD.search(text), _NVIDIA_BRANCH.search(text)
        yield _Instruction(
            place=int(place, 16),
            is_matrix=bool(_MATRIX.search(text)),
            load_bits=_nvidia_bits(load[1]) if load else None,
            jumps_to=int(branch[1], 16) if branch else None,
        )


def _nvidia_bits(modifiers: str) -> int:
    """`.E.BYPASS.128` -> 128, `.E.U16` -> 16, `.E` -> 32. `.LTC128B` is about a cache."""
    widths = re.findall(r"\.[US]?(8|16|64|128)(?=\.|$)", modifiers)
    return int(widths[0]) if widths else 32


def _amd(text: str) -> Iterator[_Instruction]:
    lines = text.splitlines()
    labels = {found[1]: place for place, line in enumerate(lines) if (found := _AMD_LABEL.match(line))}
    widths = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "ushort": 16, "sshort": 16}
    for place, line in enumerate(lines):
        load, branch = _AMD_LOAD.search(line), _AMD_BRANCH.search(line)
        yield _Instruction(
            place=place,
            is_matrix=bool(_MATRIX.search(line)),
            load_bits=widths.get(load[1], 16 if "short" in load[1] else 8) if load else None,
            jumps_to=labels.get(branch[1]) if branch else None,
        )


def _cuobjdump(cubin: bytes, flag: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, flag, file.name], capture_output=True, text=True, check=True
        ).stdout
