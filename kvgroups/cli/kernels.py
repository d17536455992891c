"""`kvgroups kernels`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Annotated, Any

import typer

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def kernels(
    target: Annotated[list[str], typer.Option(help=f"One of {', '.join(TARGETS)}. Repeat it for more.")] = ["sm_90"],  # noqa: B006
    every: Annotated[bool, typer.Option("--all", help="Every dtype, head dim and option, not only the usual.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compile the Triton kernels for GPUs that need not be there, and print what they take.

    Exit code 1: a kernel spills, takes more shared memory than the target has, lacks what it should have, or
    would be compiled again for another batch.
    """
    from importlib.util import find_spec

    from kvgroups.cli.errors import UsageError, usage_errors

    with usage_errors():
        unknown = [name for name in target if name not in TARGETS]
        if unknown:
            raise UsageError(f"--target: expected one of {', '.join(TARGETS)}, got {unknown[0]}.")
        if find_spec("triton") is None:
            raise UsageError("kernels: needs the package triton, which is not installed. pip install triton")
        reports = []
        for name in dict.fromkeys(target):
            typer.echo(f"compiling for {name}: a minute or so, {'ten' if every else 'two'} on a busy machine", err=True)
            reports.append(compile_for(name, every))
    if as_json:
        typer.echo(json.dumps({"reports": reports}, indent=2))
    else:
        _print_tables(reports)
    raise typer.Exit(1 if any(report["problems"] for report in reports) else 0)


def compile_for(target: str, every: bool = False) -> dict[str, Any]:
    """The report of one target, made in a process of its own: Triton compiles for one target, or interprets.

    It imports what this process does: without -P the folder that it starts in would come first, and a clone that lies
    there under the name kvgroups would hide the package.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvgroups.testing.compile_report", target, *(["--all"] if every else [])],
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": path},
    )
    if done.returncode:
        raise RuntimeError(f"kernels: the compilation for {target} ended with exit code {done.returncode}; see above.")
    return json.loads(done.stdout)


def _print_tables(reports: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from kvgroups.cli.output import result_console

    console = result_console()
    for report in reports:
        table = Table(box=None, padding=(0, 1, 0, 0), title_justify="left", title=report["target"])
        for heading in ("kernel", "case"):
            table.add_column(heading, overflow="fold")
        for heading in ("warps", "stages", "regs", "spilled", "shared", "matrix", "loads"):
            table.add_column(heading, justify="right")
        for each in report["kernels"]:
            table.add_row(
                _name(each["kernel"]),
                each["case"],
                *(str(each["settings"][name]) for name in ("warps", "stages")),
                *(str(each[name]) for name in ("registers", "spilled_bytes", "shared_bytes", "matrix_instructions")),
                _loads(each),
            )
        if not console.is_terminal:  # a row is a line, for whatever reads it
            unlimited = console.options.update(max_width=1000)
            console.width = max(console.width, console.measure(table, options=unlimited).maximum)
        console.print(table)
        for problem in report["problems"]:
            console.print(f"problem: {problem}")
    num_problems = sum(len(report["problems"]) for report in reports)
    console.print(
        "Compiled ahead of time, and run nowhere. regs: of a thread; spilled, shared: bytes; matrix: instructions; "
        "loads: bits of a thread's load from global memory x how many, in the loop over keys where there is one. "
        f"{num_problems or 'No'} problem{'' if num_problems == 1 else 's'}."
    )


def _name(kernel: str) -> str:
    """`causal_conv1d.keep` of `causal_conv1d._keep_kernel`; the operation alone where its kernel bears its name."""
    operation, _, function = kernel.partition(".")
    name = function.strip("_").removesuffix("_kernel")
    return operation if name == operation else f"{operation}.{name}"


def _loads(kernel: dict[str, Any]) -> str:
    """`128x16 32x4`: of the leanest loop with matrix instructions, or else of the whole kernel."""
    loads = min(kernel["loop_loads"], key=lambda each: sum(each.values()), default=kernel["loads"])
    return " ".join(f"{bits}x{count}" for bits, count in loads.items()) or "none"
