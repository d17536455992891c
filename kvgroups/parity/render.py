"""A parity report as tables for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvgroups.parity.report import GroupSummary, ParityReport, WorkloadResult

_KINDS = {
    "full_attention": "full attention",
    "sliding_window": "window of {span}",
    "chunked_attention": "chunks of {span}",
    "mamba": "state",
}


def render_report(report: ParityReport) -> RenderableType:
    """One model: its groups, its workloads, the verdict and both speeds."""
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(report.model, style="bold")
    conditions = report.conditions
    size = f"{_count(report.parameters)} parameters"
    title.append(f"  {report.architecture}, {size}, {conditions.dtype} on {conditions.device}", style="dim")
    return Group(
        title,
        Padding(_groups(report.groups), (0, 0, 0, 2)),
        *([] if report.verdict == "skipped" else [_workloads(report)]),
        *_notes(report),
        _verdict(report),
        Text(),
    )


def render_summary(
    reports: Sequence[ParityReport], refused: Sequence[tuple[str, str]] = ()
) -> RenderableType:
    """All models, a line each, with the conditions below.

    Args:
        reports: one for each model that ran.
        refused: model and reason of those that kvgroups does not serve.
    """
    table = _table()
    table.add_column("model", overflow="fold")
    table.add_column("groups", overflow="fold")
    for heading in ("tokens", "off by", "KV peak", "eager", "tok/s", "eager"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for report in reports:
        table.add_row(
            Text(report.model, style="bold"),
            ", ".join(group.name for group in report.groups),
            _all_tokens(report),
            _number(max((w.max_logit_difference or 0.0 for w in report.workloads), default=None)),
            *map(_bytes, _largest(report)),
            "-" if report.speed is None else f"{report.speed.tokens_per_second:.0f}",
            "-" if report.speed is None else f"{report.speed.eager_tokens_per_second:.0f}",
            _word(report.verdict),
        )
    for model, _ in refused:
        table.add_row(Text(model, style="bold"), *[""] * 7, Text("refused", style="yellow"))
    reasons = [Text(f"  {model} refused: {reason}", style="yellow") for model, reason in refused]
    parts: list[RenderableType] = [table, *reasons]
    if reports:
        parts.append(Text(_conditions(reports[0]), style="dim"))
    return Group(*parts)


def as_text(renderable: RenderableType, width: int) -> str:
    """What a terminal without colours shows."""
    buffer = StringIO()
    Console(file=buffer, width=width, color_system=None, force_terminal=False).print(renderable)
    return buffer.getvalue()


def _groups(groups: Sequence[GroupSummary]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    for group in groups:
        is_state = group.kind == "mamba"
        table.add_row(
            Text(group.name, style="cyan"),
            f"{'layers' if len(group.layers) > 1 else 'layer'} {_ranges(group.layers)}",
            _KINDS[group.kind].format(span=group.span),
            "one slot a request" if is_state else f"blocks of {group.block_size}, {group.slot_mapping}",
            f"{_bytes(group.block_bytes)} a {'slot' if is_state else 'block'}",
        )
    return table


def _workloads(report: ParityReport) -> Table:
    table = _table()
    table.add_column("workload", no_wrap=True)
    for heading in ("tokens", "off by", "eager", "KV peak", "eager", "s", "eager", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for workload in report.workloads:
        if workload.outcome == "skipped":  # told below
            continue
        table.add_row(
            workload.description,
            _agreement(workload),
            _number(workload.max_logit_difference),
            _eager_number(workload),
            _bytes(workload.kv_bytes),
            Text(_bytes(workload.eager_kv_bytes), style="dim"),
            _seconds(workload.seconds),
            Text(_seconds(workload.other_seconds) if workload.other == "eager" else "-", style="dim"),
            _word(workload.outcome),
        )
    return table


def _notes(report: ParityReport) -> list[RenderableType]:
    lines = []
    for workload in report.workloads:
        if workload.outcome == "skipped":
            lines.append(Text(f"{workload.name}: skipped, {'; '.join(workload.remarks)}", style="dim"))
            continue
        lines += [Text(f"{workload.name}: {failure}", style="red") for failure in workload.failures]
        notes = [*_counted(workload), *workload.remarks]
        lines += [Text(f"{workload.name}: {note}", style="dim") for note in notes]
    gaps = [workload.cached_gap for workload in report.workloads if workload.cached_gap is not None]
    if gaps:
        lines.append(
            Text(
                f"Eager's plain cached decode differs from its uncached forward, by {max(gaps):.1e} at most; "
                f"kvgroups follows the cached one, and is held against it in {len(gaps)} workloads.",
                style="dim",
            )
        )
    return [Padding(line, (0, 0, 0, 2)) for line in lines]


def _counted(workload: WorkloadResult) -> list[str]:
    """What a workload counted, in words."""
    counts, eager = workload.counts, workload.other_counts
    notes = []
    if "reorders" in counts:
        places = f"in {counts['swaps']} of {counts['reorders']} steps" if counts["swaps"] else "never"
        beside = f" against eager's {_bytes(eager['copied_bytes'])}" if "copied_bytes" in eager else ""
        notes.append(f"changed places {places}; {_bytes(counts['copied_bytes'])} copied{beside}")
    if "forwards" in counts and workload.tokens:
        taken = workload.tokens - counts["forwards"]
        notes.append(
            f"{workload.tokens} tokens in {counts['forwards']} forwards, {taken} of {counts['drafted']} drafted ones kept"
        )
    if workload.other_logit_difference is not None:
        notes.append(
            f"{_seconds(workload.seconds)} s against {_seconds(workload.other_seconds)} of the {workload.other} form, "
            f"logits {workload.other_logit_difference:.1e} apart at most"
        )
    return notes


def _verdict(report: ParityReport) -> Text:
    compared = [w for w in report.workloads if w.max_logit_difference is not None]
    worst = max(compared, key=lambda w: (w.max_logit_difference or 0.0) / w.tolerance, default=None)
    agree, tokens = (sum(getattr(w, key) for w in report.workloads) for key in ("tokens_agree", "tokens"))
    line = Text("  ")
    line.append_text(_word(report.verdict))
    if report.verdict == "skipped":
        line.append(": nothing was compared")
        return line
    line.append(f": {agree} of {tokens} tokens agree, logits off by ")
    if worst is None:
        line.append("-")
    else:
        line.append(f"{_number(worst.max_logit_difference)} at most, allowed {_number(worst.tolerance)}")
        if not report.conditions.is_exact:
            line.append(" (a coarse guard: tokens decide)")
    if ties := sum(w.near_ties for w in report.workloads):
        line.append(f", {ties} near ties")
    if (speed := report.speed) is not None:
        line.append(
            f"\n  {speed.tokens_per_second:.0f} tokens/s against eager's {speed.eager_tokens_per_second:.0f}, "
            f"{speed.cpu_seconds:.2f} against {speed.eager_cpu_seconds:.2f} s of CPU: "
            f"{speed.rows} rows, median of {speed.runs} runs",
            style="dim",
        )
    return line


def _conditions(report: ParityReport) -> str:
    c = report.conditions
    commit = f" ({c.commit})" if c.commit else ""
    return (
        f"{c.dtype} on {c.device}, threads {c.threads}, seed {c.seed}: kvgroups {c.kvgroups}{commit}, torch {c.torch}, "
        f"transformers {c.transformers}"
    )


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")


def _largest(report: ParityReport) -> tuple[int | None, int | None]:
    """Peak bytes of kvgroups and of eager in the workload that took eager most."""
    both = [
        (w.eager_kv_bytes, w.kv_bytes) for w in report.workloads if w.eager_kv_bytes is not None and w.tokens
    ]
    eager, ours = max(both, default=(None, None))
    return ours, eager


def _all_tokens(report: ParityReport) -> Text:
    if report.verdict == "skipped":
        return Text("-")
    agree, tokens = (sum(getattr(w, key) for w in report.workloads) for key in ("tokens_agree", "tokens"))
    return _tokens(agree, tokens)


def _agreement(workload: WorkloadResult) -> Text:
    if workload.passed and not workload.tokens:
        return Text("refused", style="yellow")
    return _tokens(workload.tokens_agree, workload.tokens)


def _tokens(agree: int, tokens: int) -> Text:
    if not tokens:
        return Text("fails", style="red")
    return Text(f"{agree}/{tokens}", style="green" if agree == tokens else "red")


def _word(outcome: str) -> Text:
    return Text(outcome, style={"passed": "bold green", "skipped": "bold yellow"}.get(outcome, "bold red"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _eager_number(workload: WorkloadResult) -> Text:
    value = workload.eager_logit_difference
    is_off = value is not None and not value <= workload.tolerance
    if workload.other == "eager" and workload.tokens and workload.eager_kv_bytes is None:
        return Text("fails", style="yellow")
    return Text(_number(value), style="yellow" if is_off else "dim")


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _bytes(value: int | None) -> str:
    if value is None:
        return "-"
    amount, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def _count(value: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(value)


def _ranges(numbers: Sequence[int]) -> str:
    """`(0, 1, 2, 5, 7, 8)` reads `0-2, 5, 7-8`; what takes too much room is counted instead."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return text if len(text) <= 24 else f"{runs[0][0]} to {runs[-1][-1]} ({len(numbers)} of them)"
