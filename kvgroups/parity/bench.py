"""One model on the bench: its sides, its judge, and workloads run one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel

from kvgroups import ops
from kvgroups.errors import BackendUnavailableError, KVGroupsError
from kvgroups.parity.conditions import computing_dtype
from kvgroups.parity.judge import Finding, Judge
from kvgroups.parity.oracle import Oracle
from kvgroups.parity.report import WorkloadResult
from kvgroups.parity.row import Row
from kvgroups.parity.sides import EagerSide, PagedSide, Side
from kvgroups.parity.workloads import Plan, Workload
from kvgroups.patching import Patch, patch, unpatch

PROBE_LENGTHS = (48, 29, 13)
"""Tokens of the rows that eager's rounding is measured on."""

_PATCH_OPTIONS: dict[str, dict[str, Any]] = {
    "generic": {"fused": False},
    "torch": {"backend": "torch"},
    "triton": {"backend": "triton"},
}
"""What the sides that hold kvgroups against itself change about the patch that is judged."""


class _Answers(NamedTuple):
    """What one side gave: rows, or what went wrong in one line, and what it took."""

    rows: list[Row] | None
    error: str | None
    seconds: float
    kv_bytes: int
    counts: dict[str, int]


_NOTHING = _Answers(None, None, 0.0, 0, {})


class Bench:
    """Runs workloads on one model.

    Args:
        model: in eval mode, not patched.
        plan: of its workloads.
        installed: the patch that is judged, taken off.
    """

    def __init__(self, model: PreTrainedModel, plan: Plan, installed: Patch) -> None:
        self.model = model
        self.plan = plan
        self.context = installed.context
        self._options: dict[str, Any] = {"fused": installed.is_fused, "backend": installed.backend}
        filler = plan.prompts.filler
        self._sides: dict[str, Side] = {
            "kvgroups": PagedSide(model, filler, installed),
            "eager": EagerSide(model, filler),
        }
        probes = []
        for length in PROBE_LENGTHS:
            prompt = plan.prompts.long(length)
            probes.append(Row(prompt, answer=prompt[-1:], logits=torch.empty(0), pieces=(length,)))
        self.judge = Judge(Oracle(model), probes, computing_dtype(model))

    def side(self, name: str) -> Side:
        """The way through the model called `name`, made when it is first asked for."""
        if name not in self._sides:
            patch(self.model, self.context.config, **{**self._options, **_PATCH_OPTIONS[name]})
            made: Patch = self.model.__dict__["_kvgroups"]
            unpatch(self.model)
            self._sides[name] = PagedSide(self.model, self.plan.prompts.filler, made)
        return self._sides[name]

    def run(self, workload: Workload) -> WorkloadResult:
        """Run a workload on its two sides and judge it, or say why it is skipped."""
        reason = self._why_not(workload)
        if reason is not None:
            return self._result(workload, "skipped", Finding(remarks=[reason]))
        side, other = self.side(workload.ours), self.side(workload.other)
        ours = _run(side, workload.run, self.plan)
        others = _run(other, workload.run, self.plan)
        if side.refusal is not None:
            finding = _judge_refusal(side, other)
        elif ours.rows is None:
            finding = Finding(failures=[f"kvgroups fails: {ours.error}"])
        else:
            finding = self._judge(workload, ours.rows, others)
            if other.refusal is not None:
                finding.remarks.append(
                    "held against plain greedy search: transformers refuses drafts on this model"
                )
        for name, one in ((workload.ours, side), (workload.other, other)):
            if isinstance(one, PagedSide):
                finding.failures += _leaks(one, "" if name == "kvgroups" else f"{name}: ")
        return self._result(workload, "failed" if finding.failures else "passed", finding, ours, others)

    def _why_not(self, workload: Workload) -> str | None:
        """The reason why a workload does not apply or cannot run here."""
        if workload.other == "generic" and not self.context.mixers:
            return "no state layer of this model runs fused"
        return _why_no_triton(self.model.device) if workload.ours == "triton" else None

    def _judge(self, workload: Workload, rows: list[Row], others: _Answers) -> Finding:
        def uncached() -> list[Row] | None:
            return workload.run_uncached and _run(self.side("eager"), workload.run_uncached, self.plan).rows

        is_eager = workload.other == "eager"
        eager = others.rows if is_eager else None
        finding = self.judge.judge(
            rows, eager, decoding=workload.decoding, is_mixed=workload.is_mixed, uncached=uncached
        )
        if is_eager and others.error is not None:
            finding.remarks.append(f"eager fails: {others.error}")
        elif others.rows is None:
            finding.failures.append(f"{workload.other} fails: {others.error}")
        elif not is_eager:
            self.judge.hold(finding, rows, others.rows, workload.other)
        return finding

    def _result(
        self,
        workload: Workload,
        outcome: Literal["passed", "failed", "skipped"],
        finding: Finding,
        ours: _Answers = _NOTHING,
        others: _Answers = _NOTHING,
    ) -> WorkloadResult:
        return WorkloadResult(
            name=workload.name,
            description=workload.describe(self.plan),
            outcome=outcome,
            other=workload.other,
            rows=len(ours.rows or ()),
            tokens=finding.tokens,
            tokens_agree=finding.tokens_agree,
            near_ties=finding.near_ties,
            eager_tokens_agree=finding.eager_tokens_agree,
            reference=finding.reference,
            max_logit_difference=finding.difference if ours.rows else None,
            eager_logit_difference=finding.eager_difference,
            other_logit_difference=finding.other_difference,
            tolerance=finding.allowed or self.judge.tolerance,
            kv_bytes=ours.kv_bytes,
            eager_kv_bytes=others.kv_bytes if workload.other == "eager" and others.rows else None,
            seconds=ours.seconds,
            other_seconds=others.seconds,
            counts=ours.counts,
            other_counts=others.counts,
            cached_gap=finding.cached_gap,
            failures=tuple(finding.failures),
            remarks=tuple(finding.remarks),
        )


def _run(side: Side, run: Callable[[Side, Plan], list[Row]], plan: Plan) -> _Answers:
    start = time.perf_counter()
    try:
        with side.running():
            rows, error = run(side, plan), None
    except Exception as failure:  # a side that fails is a finding, and the other workloads still run
        rows, error = None, f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    return _Answers(rows, error, time.perf_counter() - start, side.kv_bytes, dict(side.counts))


def _judge_refusal(side: Side, other: Side) -> Finding:
    """Drafts that cannot be taken back may be refused where transformers refuses them too."""
    if other.refusal is None:
        return Finding(failures=[f"kvgroups refuses what transformers does not: {side.refusal}"])
    return Finding(remarks=[f"refused, as transformers does: {side.refusal}"])


def _leaks(side: PagedSide, name: str) -> list[str]:
    """What is still held after a workload, and tables that no longer add up."""
    leaks = []
    if held := side.held_bytes():
        leaks.append(f"{name}{held} bytes are still held after the workload")
    try:
        side.manager.check()
    except KVGroupsError as error:
        leaks.append(f"{name}{error}")
    return leaks


def _why_no_triton(device: torch.device) -> str | None:
    """Ask the smallest kernel."""
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    place = torch.zeros(1, dtype=torch.int64, device=device)
    try:
        ops.table_update(table, place, table[0], backend="triton")
    except BackendUnavailableError as error:
        if "not installed" in str(error):
            return "needs the package triton"
        return "no GPU; TRITON_INTERPRET=1 kvgroups parity MODEL --workload triton runs it"
    return None
