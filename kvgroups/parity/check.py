"""Run the same prompts through eager Hugging Face and through kvgroups, and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from kvgroups.errors import UnsupportedCallError
from kvgroups.parity.bench import Bench
from kvgroups.parity.conditions import conditions
from kvgroups.parity.prompts import make_prompts
from kvgroups.parity.report import GroupSummary, ParityReport
from kvgroups.parity.speed import measure_speed
from kvgroups.parity.workloads import WORKLOADS, Workload, make_plan
from kvgroups.patching import Patch, patch, unpatch
from kvgroups.specs import GroupConfig, KVGroupsConfig
from kvgroups.specs.model_kind import check_model

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
        workloads: names out of `kvgroups.parity.WORKLOADS`; None for all. What does not apply to the model, or
            cannot run here, is skipped, and the report says why.
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
    check_model(model)
    chosen = _choose(workloads)
    if max_new_tokens < 1:
        raise UnsupportedCallError(f"max_new_tokens: got {max_new_tokens}; must be at least 1")
    asked = make_prompts(model, prompts, tokenizer, seed)
    with _as_found(model, config) as installed, _quiet_model(model), _threads(model):
        plan = make_plan(installed.context.config, asked, max_new_tokens, seed, max_prompt_len)
        bench = Bench(model, plan, installed)
        results = []
        for done, workload in enumerate(chosen):
            if progress is not None:
                progress(workload.name, done, len(chosen))
            results.append(bench.run(workload))
        return ParityReport(
            model=name or model.config.model_type,
            architecture=type(model).__name__,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            conditions=conditions(model, seed),
            groups=tuple(_summary(group) for group in installed.context.config.groups),
            eager_gap=bench.judge.gap,
            workloads=tuple(results),
            speed=measure_speed(bench) if speed else None,
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
    """A patch of our own, taken off for now, with the options of the one in force, which comes back in the end."""
    found = model.__dict__.get("_kvgroups")
    options: dict[str, Any] = {}
    if found is not None:
        found.remove()
        config = config or found.context.config
        options = {"fused": found.is_fused, "backend": found.backend}
    try:
        ours = patch(model, config, **options).__dict__["_kvgroups"]
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
