"""`kvgroups parity`, the main job."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from kvgroups.parity import ParityReport
    from kvgroups.specs import KVGroupsConfig


def parity(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Bundled models (--list), gemma-3-270m, folders, hub ids; none for the core ones."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every bundled model, and which are refused.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the names of the bundled models.")] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="A text file, one prompt a line.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    config: Annotated[
        Path | None, typer.Option(help="Groups to run on, YAML or JSON (see `kvgroups config`).")
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="Only this workload; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random weights, random prompts and sampling.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")
    ] = False,
    verbose: Annotated[bool, typer.Option(help="Show what other libraries warn about.")] = False,
) -> None:
    """Run the same prompts through eager Hugging Face and through kvgroups, and compare.

    Every token must be the choice of one uncached forward of the unpadded row, and every logit that forward's
    within a multiple of eager's own rounding. Exit code 0 if all models pass, 1 if one does not, 2 if something
    given cannot be used.
    """
    from kvgroups.cli.errors import UsageError, usage_errors

    with usage_errors():
        from kvgroups.cli.models import bundled_names, parse_dtype

        if names:
            typer.echo("\n".join(bundled_names(all=True)))
            return
        if every and models:
            raise UsageError("--all runs every bundled model; leave the names out, or leave --all out")
        chosen = models or bundled_names(all=every)
        request = _Request(
            load={"dtype": parse_dtype(dtype), "device": device, "seed": seed},
            check={
                "prompts": None if prompts is None else _read_prompts(prompts),
                "max_new_tokens": max_new_tokens,
                "config": None if config is None else _read_config(config),
                "workloads": workload,
                "seed": seed,
            },
            verbose=verbose,
        )
        outcome = _run(chosen, request, as_json)
    raise typer.Exit(outcome.exit_code(tolerates_refusals=every))


@dataclass
class _Request:
    load: dict[str, Any]
    check: dict[str, Any]
    verbose: bool


@dataclass
class _Outcome:
    reports: list[ParityReport] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    def exit_code(self, *, tolerates_refusals: bool) -> int:
        """A model that was asked for by name and is refused has not been proven."""
        failed = any(not report.passed for report in self.reports)
        return int(failed or (bool(self.refused) and not tolerates_refusals))

    def as_json(self) -> str:
        """One object: every report, and who was refused and why."""
        reports = [{"verdict": report.verdict, **report.model_dump(mode="json")} for report in self.reports]
        refused = [{"model": model, "verdict": "refused", "reason": reason} for model, reason in self.refused]
        passed = bool(reports) and all(report.passed for report in self.reports)
        return json.dumps({"passed": passed, "models": reports, "refused": refused}, indent=2)


def _run(models: list[str], request: _Request, as_json: bool) -> _Outcome:
    from contextlib import nullcontext

    from kvgroups.cli.output import quiet_stdout, result_console
    from kvgroups.parity.render import render_summary

    console = result_console()
    outcome = _Outcome()
    with nullcontext() if request.verbose else quiet_stdout():
        _check_all(models, request, outcome, None if as_json else console)
    if as_json:
        typer.echo(outcome.as_json())
    elif len(models) > 1:
        console.print(render_summary(outcome.reports, outcome.refused))
    return outcome


def _check_all(models: list[str], request: _Request, outcome: _Outcome, console: Console | None) -> None:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvgroups import check_parity
    from kvgroups.cli.errors import UsageError
    from kvgroups.cli.models import load_model
    from kvgroups.errors import UnsupportedModelError

    stderr = RichConsole(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    for name in models:
        with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bars:
            bar = bars.add_task(f"{name}: loading", total=None)

            def show(workload: str, done: int, total: int, bar: Any = bar, name: str = name) -> None:
                bars.update(bar, description=f"{name}: {workload}", completed=done, total=total)

            model, tokenizer = load_model(name, **request.load)
            if tokenizer is None and request.check["prompts"] is not None:
                raise UsageError(f"--prompts: {name} has no tokenizer; leave it out, and random token ids are asked")
            try:
                report = check_parity(model, tokenizer=tokenizer, name=name, progress=show, **request.check)
            except UnsupportedModelError as error:
                if len(models) == 1 and console is not None:
                    raise
                outcome.refused.append((name, str(error)))
                continue
        outcome.reports.append(report)
        if console is not None:
            console.print(report)


def _read_prompts(path: Path) -> list[str]:
    from kvgroups.cli.errors import UsageError

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--prompts {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--prompts {path}: is no text in UTF-8") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"--prompts {path}: holds no prompts; write one a line")
    return prompts


def _read_config(path: Path) -> KVGroupsConfig:
    from kvgroups.specs import KVGroupsConfig

    return KVGroupsConfig.load(path)
