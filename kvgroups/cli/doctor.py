"""`kvgroups doctor`."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

ON_DEMAND = "only if it is asked for by name"
"""The reason against a backend that would work and that `auto` does not take."""

PACKAGES = ("torch", "transformers", "triton", "numpy", "pydantic")


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Print what kvgroups runs on here, and which backend each operation takes, and why the others do not.

    What is named holds for every call on this machine; a call may still be refused for its shape or dtype, and
    then goes to the next backend.
    """
    found = diagnose()
    typer.echo(json.dumps(found, indent=2)) if as_json else _print(found)


def diagnose() -> dict[str, Any]:
    """What `--json` prints: versions, threads, CPU kernels, GPUs, and by device and operation the backends."""
    import os
    import platform

    import torch

    from kvgroups import __version__
    from kvgroups.ops import dispatch

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return {
        "versions": {"kvgroups": __version__, "python": platform.python_version(), **_versions()},
        "platform": platform.platform(),
        "threads": {"torch": torch.get_num_threads(), "logical_cores": os.cpu_count()},
        "cpu_kernels": dispatch.cpu_kernels(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "operations": {
            device: {name: _backends(dispatch.choices(name, torch.device(device))) for name in dispatch.FORMS}
            for device in dict.fromkeys(device.partition(":")[0] for device in devices)
        },
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _backends(choices: dict[str, list[str]]) -> dict[str, Any]:
    """What `auto` takes, what it goes on to if that refuses a call, and the reasons against the others."""
    takes, *then = [name for name, reasons in choices.items() if not reasons]
    return {"takes": takes, "then": then, "against": {name: reasons for name, reasons in choices.items() if reasons}}


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    from kvgroups.cli.output import result_console

    console = result_console()
    versions = ", ".join(f"{name} {number or 'not installed'}" for name, number in found["versions"].items())
    kernels, threads = found["cpu_kernels"], found["threads"]
    if kernels["isa"]:
        team = "PyTorch's threads" if kernels["has_torch_threads"] else "threads of their own"
        built = f"built, running {kernels['isa']}, on {team}"
        if kernels["long_prompts_in_torch"]:
            built += f"; long prompts in {', '.join(kernels['long_prompts_in_torch'])} take the torch form"
    else:
        built = f"none: {kernels['reason']}"
    lines = {
        "versions": versions,
        "platform": found["platform"],
        "threads": f"{threads['torch']}, of {threads['logical_cores']} logical cores",
        "CPU kernels": built,
        "GPUs": ", ".join(found["gpus"]) or "none",
    }
    facts = Table.grid(padding=(0, 2))
    for name, line in lines.items():
        facts.add_row(name, line)
    console.print(facts)
    for device, operations in found["operations"].items():
        console.print(_table(device, operations))
        console.print("takes: what auto runs; or else: where a call goes that this refuses; if asked for: by name only")
        reasons = {
            f"{name}: {'; '.join(against)}"
            for backends in operations.values()
            for name, against in backends["against"].items()
            if against != [ON_DEMAND]
        }
        for reason in sorted(reasons):
            console.print(reason, style="dim")


def _table(device: str, operations: dict[str, Any]) -> Any:
    """What each operation takes on a device; why not the others is the same for many, and told once."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), title=f"\non {device}", title_justify="left")
    for heading in ("operation", "takes", "or else", "if asked for", "not here"):
        table.add_column(heading)
    for name, backends in operations.items():
        against = backends["against"]
        asked = [each for each, reasons in against.items() if reasons == [ON_DEMAND]]
        absent = [each for each in against if each not in asked]
        table.add_row(name, backends["takes"], *(", ".join(each) for each in (backends["then"], asked, absent)))
    return table
