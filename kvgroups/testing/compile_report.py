"""Compile every Triton kernel for a GPU that is not there, and judge the result. A process of its own.

    python -m kvgroups.testing.compile_report sm_90 [--all]

It prints JSON: `{"target": ..., "kernels": [...], "problems": [...]}`. Without `--all` the slow cases are left out.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from typing import Any

from kvgroups import kernels
from kvgroups.kernels.compile_case import OTHER_BATCHES, CompileCase
from kvgroups.testing.dry_driver import TARGETS, Compilation, compile_only


def compile_cases() -> dict[str, list[CompileCase]]:
    """Operation -> its cases, for every folder of kernels that has some."""
    found = {}
    for folder in sorted(module.name for module in pkgutil.iter_modules(kernels.__path__) if module.ispkg):
        package = import_module(f"kvgroups.kernels.{folder}")
        if any(module.name == "compile_cases" for module in pkgutil.iter_modules(package.__path__)):
            found[folder] = import_module(f"kvgroups.kernels.{folder}.compile_cases").CASES
    return found


def report(target: str, *, every_case: bool = False) -> dict[str, Any]:
    """Compile all cases for a target.

    Args:
        target: a key of `dry_driver.TARGETS`.
        every_case: the slow ones too.

    Returns:
        `target`; `kernels`, one entry for each specialisation: operation, case, kernel, settings, shared_bytes
        and what `MachineCode` has; `problems`, one sentence each.
    """
    compilations = compile_only(target)
    entries, problems = [], []
    for operation, cases in compile_cases().items():
        chosen = [case for case in cases if every_case or not case.is_slow]
        for case in chosen:
            compilations.clear()
            case.call(case.batch)
            for each in compilations:
                entries.append({"operation": operation, "case": case.name, **_entry(each)})
                problems += [
                    f"{target}, {each.kernel}, {case.name}: {what}" for what in _problems(operation, case, each, target)
                ]
        compilations.clear()
        for case in chosen:
            for batch in OTHER_BATCHES if case.takes_any_batch else ():
                case.call(batch)
        problems += [
            f"{target}, {each.kernel}: compiled again for another batch, with {each.settings}"
            for each in compilations
        ]
    return {"target": target, "kernels": entries, "problems": problems}


def _entry(compilation: Compilation) -> dict[str, Any]:
    entry = asdict(compilation)
    return entry | entry.pop("code")


def _problems(operation: str, case: CompileCase, compilation: Compilation, target: str) -> Iterator[str]:
    code, (_, limit) = compilation.code, TARGETS[target]
    if compilation.shared_bytes > limit:
        yield f"takes {compilation.shared_bytes} bytes of shared memory, and {limit} is the limit"
    if code.spilled_bytes and target not in case.may_spill:
        yield f"spills {code.spilled_bytes} bytes a thread"
    home, _, kernel = compilation.kernel.rpartition(".")
    if home != operation:
        return  # a kernel that it borrows from another operation has no matrix products of its own
    if case.needs_matrix and kernel not in case.without_matrix and not code.matrix_instructions:
        yield "has no matrix instructions"
    if case.needs_wide_loads:
        if not code.loop_loads:
            yield "has no loop with matrix instructions"
        for loads in code.loop_loads:
            if max(loads, default=0) < 128:
                yield f"has a loop with matrix instructions whose widest load is of {max(loads, default=0)} bits"


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], every_case="--all" in sys.argv[2:])))
