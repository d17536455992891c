"""Run the same prompts through eager Hugging Face and through kvgroups, and compare."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from kvgroups.errors import KVGroupsError, UnsupportedCallError
from kvgroups.parity.conditions import conditions
from kvgroups.parity.judge import Finding, Judge
from kvgroups.parity.oracle import Oracle
from kvgroups.parity.prompts import Prompts, make_prompts
from kvgroups.parity.report import GroupSummary, ParityReport, Speed, WorkloadResult
from kvgroups.parity.sides import EagerSide, PagedSide, Row, Side
from kvgroups.parity.workloads import WORKLOADS, Plan, Workload, make_plan
from kvgroups.patching import Patch, patch, unpatch
from kvgroups.specs import GroupConfig, KVGroupsConfig

SPEED_RUNS = 3
"""Runs of each side, one after the other in turn, whose median is the speed."""

SPEED_TOKENS = 16
"""Tokens that each row of the batch answers, at most, where the speed is measured."""

PROBE_LENGTHS = (48, 29, 13)
"""Tokens of the rows that eager's rounding is measured on."""

_TINY_PARAMETERS = 10_000_000
"""Models up to this size run on one thread: with more they spend their time waiting."""


def check_parity(
    model: PreTrainedModel,
    prompts: Any = None,
    *,
    tokenizer: Any = None,
    max_new_tokens: int = 32,
    config: KVGroupsConfig | None = None,
    workloads: Sequence[str] | None = None,
    seed: int = 0,
    name: str | None = None,
    max_prompt_len: int = 1024,
    speed: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> ParityReport:
    """Hold kvgroups against eager Hugging Face, token by token and logit by logit.

    Every workload runs on both sides. Each token that kvgroups chooses must be the choice of one uncached
    forward of the unpadded row, and its logits that forward's, within a small multiple of what rounding does
    to eager itself. Where eager's own cached path is off its uncached forward, the report says so.

    The model is left as it was found: patched or not, its training flags, its `generation_config`, and the
    random state of torch. Stop tokens are not obeyed, so that answers have one length.

    Args:
        model: a causal language model of transformers, on any device. A forward without a cache must work.
        prompts: texts (with `tokenizer`), lists of token ids, or a tensor (rows, tokens) int64. None: a text of
            our own if there is a tokenizer, seeded random token ids if not.
        tokenizer: makes token ids of texts; called as `tokenizer(text)["input_ids"]`.
        max_new_tokens: tokens of an answer; workloads about prompts answer with fewer.
        config: the groups to run on; None for those of `infer_config`, or of the patch that is in force.
        workloads: names out of `kvgroups.parity.WORKLOADS`; None for all.
        seed: of random prompts and sampling.
        name: what the report calls the model; None for its `model_type`.
        max_prompt_len: tokens of the longest prompt that is made up to be longer than a window.
        speed: whether to measure tokens per second.
        progress: called as `progress(workload name, workloads done, workloads in all)`.

    Returns:
        The report; `report.passed` is the verdict, `report.render()` a table.

    Raises:
        UnsupportedModelError: if the model has a layer that cannot be served.
        UnsupportedCallError: for prompts or workloads that cannot be run.
        SpecError: if `config` does not describe this model.

    Example:
        >>> from kvgroups.testing import tiny
        >>> report = check_parity(tiny("bamba"), workloads=["single"], max_new_tokens=8, speed=False)
        >>> report.passed, report.workload("single").tokens_agree
        (True, 8)
    """
    chosen = _choose(workloads)
    if max_new_tokens < 1:
        raise UnsupportedCallError(f"max_new_tokens: got {max_new_tokens}; must be at least 1")
    asked = make_prompts(model, prompts, tokenizer, seed)
    with _as_found(model, config) as installed, _quiet_model(model), _threads(model):
        plan = make_plan(installed.context.config, asked, max_new_tokens, seed, max_prompt_len)
        eager = EagerSide(model, asked.filler)
        paged = PagedSide(model, asked.filler, installed)
        judge = _make_judge(model, asked)
        results = []
        for done, workload in enumerate(chosen):
            if progress is not None:
                progress(workload.name, done, len(chosen))
            results.append(_run(workload, plan, paged, eager, judge))
        return ParityReport(
            model=name or model.config.model_type,
            architecture=type(model).__name__,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            conditions=conditions(model, seed),
            groups=tuple(_summary(group) for group in installed.context.config.groups),
            eager_gap=judge.gap,
            workloads=tuple(results),
            speed=_measure_speed(paged, eager, plan) if speed else None,
        )


def _choose(workloads: Sequence[str] | None) -> list[Workload]:
    if workloads is None:
        return [*WORKLOADS.values()]
    unknown = [name for name in workloads if name not in WORKLOADS]
    if unknown or not workloads:
        raise UnsupportedCallError(
            f"workloads: got {', '.join(map(repr, unknown)) or 'none'}; choose from {', '.join(WORKLOADS)}"
        )
    return [workload for workload in WORKLOADS.values() if workload.name in workloads]


@contextmanager
def _as_found(model: PreTrainedModel, config: KVGroupsConfig | None) -> Iterator[Patch]:
    """A patch of our own, taken off for now; the one that was in force comes back in the end."""
    found = model.__dict__.get("_kvgroups")
    if found is not None:
        found.remove()
        config = config or found.context.config
    try:
        ours = patch(model, config).__dict__["_kvgroups"]
        ours.remove()
        yield ours
    finally:
        unpatch(model)
        if found is not None:
            found.install()


@contextmanager
def _quiet_model(model: PreTrainedModel) -> Iterator[None]:
    """No dropout, no stop tokens or penalties of the model's own, and the caller's random state untouched."""
    training = [module for module in model.modules() if module.training]
    generation_config = model.generation_config
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        model.eval()
        model.generation_config = GenerationConfig()
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        model.generation_config = generation_config
        for module in training:
            module.training = True


@contextmanager
def _threads(model: PreTrainedModel) -> Iterator[None]:
    threads = torch.get_num_threads()
    if sum(parameter.numel() for parameter in model.parameters()) <= _TINY_PARAMETERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _make_judge(model: PreTrainedModel, prompts: Prompts) -> Judge:
    probes = []
    for length in PROBE_LENGTHS:
        prompt = prompts.long(length)
        probes.append(Row(prompt, answer=prompt[-1:], logits=torch.empty(0), pieces=(length,)))
    return Judge(Oracle(model), probes, model.dtype)


def _run(workload: Workload, plan: Plan, paged: PagedSide, eager: EagerSide, judge: Judge) -> WorkloadResult:
    ours, our_error, seconds = _answers(workload, plan, paged)
    theirs, their_error, eager_seconds = _answers(workload, plan, eager)
    if ours is None:
        finding = Finding(failures=[f"kvgroups fails: {our_error}"])
    else:
        finding = judge.judge(ours, theirs, is_sampled=workload.is_sampled)
    if their_error is not None:
        finding.remarks.append(f"eager fails: {their_error}")
    held = paged.held_bytes()
    if held:
        finding.failures.append(f"{held} bytes are still held after the workload")
    try:
        paged.manager.check()
    except KVGroupsError as error:
        finding.failures.append(str(error))
    return WorkloadResult(
        name=workload.name,
        description=workload.describe(plan),
        outcome="failed" if finding.failures else "passed",
        rows=len(ours or ()),
        tokens=finding.tokens,
        tokens_agree=finding.tokens_agree,
        near_ties=finding.near_ties,
        eager_tokens_agree=finding.eager_tokens_agree,
        reference=finding.reference,
        max_logit_difference=None if ours is None else finding.difference,
        eager_logit_difference=finding.eager_difference,
        tolerance=judge.tolerance,
        kv_bytes=paged.kv_bytes,
        eager_kv_bytes=None if theirs is None else eager.kv_bytes,
        seconds=seconds,
        eager_seconds=eager_seconds,
        cached_gap=finding.cached_gap,
        failures=tuple(finding.failures),
        remarks=tuple(finding.remarks),
    )


def _answers(workload: Workload, plan: Plan, side: Side) -> tuple[list[Row] | None, str | None, float]:
    """One side's answers, or what went wrong, in one line; and the wall time."""
    start = time.perf_counter()
    try:
        with side.running():
            rows, error = workload.run(side, plan), None
    except Exception as failure:  # a side that fails is a finding, and the other workloads still run
        rows, error = None, f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    return rows, error, time.perf_counter() - start


def _measure_speed(paged: Side, eager: Side, plan: Plan) -> Speed | None:
    prompts, num_new = next(plan.batches()), min(plan.num_new, SPEED_TOKENS)
    wall: dict[Side, list[float]] = {paged: [], eager: []}
    cpu: dict[Side, list[float]] = {paged: [], eager: []}
    try:
        for _ in range(SPEED_RUNS):
            for side in (paged, eager):
                with side.running():
                    began, began_cpu = time.perf_counter(), time.process_time()
                    side.generate(prompts, num_new)
                    wall[side].append(time.perf_counter() - began)
                    cpu[side].append(time.process_time() - began_cpu)
    except Exception:  # it failed as a workload too, where the reason is told
        return None
    tokens = len(prompts) * num_new
    return Speed(
        rows=len(prompts),
        tokens=tokens,
        runs=SPEED_RUNS,
        tokens_per_second=tokens / statistics.median(wall[paged]),
        eager_tokens_per_second=tokens / statistics.median(wall[eager]),
        cpu_seconds=statistics.median(cpu[paged]),
        eager_cpu_seconds=statistics.median(cpu[eager]),
    )


def _summary(group: GroupConfig) -> GroupSummary:
    span = getattr(group.spec, "sliding_window", None) or getattr(group.spec, "chunk_size", None)
    return GroupSummary(
        name=group.name,
        kind=group.spec.kind,
        layers=group.layers,
        span=span,
        block_size=group.block_size,
        slot_mapping=group.slot_mapping,
        block_bytes=group.block_bytes,
    )
