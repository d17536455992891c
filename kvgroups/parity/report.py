"""What a parity check found, as frozen models that go to JSON and to a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from kvgroups.errors import KVGroupsError

if TYPE_CHECKING:
    from rich.console import RenderableType


class ParityError(KVGroupsError, AssertionError):
    """Tokens or logits changed; the message names model and workload."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Conditions(_Frozen):
    """Under which the numbers of a report were measured."""

    device: str
    """Where model and caches were: "cpu", or "cuda:0" and the card's name."""
    dtype: str
    """Of the weights, "float32"; "float32, bfloat16 autocast" where the check ran under autocast to a coarser one."""
    threads: int
    """Threads that torch used for one operation."""
    kvgroups: str
    """Version of kvgroups."""
    commit: str | None
    """Commit of the checkout that ran, with "+" if files were changed; None outside a checkout."""
    torch: str
    """Version of torch."""
    transformers: str
    """Version of transformers."""
    python: str
    """Version of Python."""
    seed: int
    """Seeds random prompts and sampling."""

    @property
    def is_exact(self) -> bool:
        """Whether nothing coarser than float32 computes, so that every token must be the reference's choice."""
        return self.dtype in ("float32", "float64")


class GroupSummary(_Frozen):
    """One KV-cache group that the model ran on."""

    name: str
    """What the config calls the group."""
    kind: str
    """Kind of its spec: "full_attention", "sliding_window", "chunked_attention" or "mamba"."""
    layers: tuple[int, ...]
    """Cache layers in the group."""
    span: int | None
    """Tokens of the window or the chunk; None for the other kinds."""
    block_size: int
    """Tokens in a block; 1 in a state group, whose block is one request's states."""
    slot_mapping: str
    """How a token finds its slot: "paged", "ring", "token" or "none"."""
    block_bytes: int
    """Bytes of one block, all layers."""


class WorkloadResult(_Frozen):
    """One workload, run through eager and through kvgroups.

    Logit differences are the largest absolute ones over all steps and the whole vocabulary, in float32.
    """

    name: str
    """Short name, as `check_parity(workloads=...)` takes it."""
    description: str
    """What was run."""
    outcome: Literal["passed", "failed", "skipped"]
    """Whether tokens and logits are those of the reference and all blocks came back; "skipped" if the workload
    does not apply to the model or cannot run here, and `remarks` say why."""
    other: Literal["eager", "generic", "torch"]
    """What ran beside kvgroups: eager Hugging Face, kvgroups with all state layers on the generic adapter, or
    kvgroups on the torch kernels."""
    rows: int
    """Answers compared."""
    tokens: int
    """New tokens of all rows."""
    tokens_agree: int
    """How many of them are the reference's choice; with sampling and beams, those equal to eager's."""
    near_ties: int
    """Tokens that differ although eager itself cannot tell the two candidates apart: in low precision those closer than
    its own rounding, in any those with equal logits."""
    eager_tokens_agree: int | None
    """How many tokens of eager's own cached run equal those of kvgroups; None if eager did not run or failed."""
    reference: Literal["uncached", "cached"]
    """What the logits were held against: one uncached forward of the unpadded row, or eager's cached decode
    of the unpadded row, for models whose prefill and decode compute different things."""
    max_logit_difference: float | None
    """Between kvgroups and the reference; None if kvgroups failed to run."""
    eager_logit_difference: float | None
    """Between eager's own cached run and its uncached forward, up to where tokens part; None if eager did not
    run or failed."""
    other_logit_difference: float | None
    """Between kvgroups and `other`, up to where tokens part; None where `other` is eager."""
    tolerance: float
    """What `max_logit_difference` may be at most: more than elsewhere where the model's prefill and decode differ
    by design and the workload mixes them."""
    kv_bytes: int
    """Bytes of the blocks that kvgroups held at the workload's peak."""
    eager_kv_bytes: int | None
    """Bytes of all tensors in eager's caches at their largest, measured on the tensors; None if eager did not
    run or failed."""
    seconds: float
    """Wall time of kvgroups, one run."""
    other_seconds: float
    """Wall time of `other`, one run."""
    counts: dict[str, int]
    """What kvgroups did, where a workload counts it: `reorders`, `swaps` and `copied_bytes` of beam search,
    `forwards` and `drafted` tokens of speculation."""
    other_counts: dict[str, int]
    """The same of `other`."""
    cached_gap: float | None
    """Where the reference is "cached": how far eager's plain cached decode is off its uncached forward."""
    failures: tuple[str, ...]
    """Why it failed; empty if it passed."""
    remarks: tuple[str, ...]
    """Where eager's cached run is not what eager computes without a cache, and other things worth knowing."""

    @property
    def passed(self) -> bool:
        """Whether the outcome is "passed"."""
        return self.outcome == "passed"


class Speed(_Frozen):
    """Both sides on the same ragged batch, medians of interleaved runs. Prompt processing is included."""

    rows: int
    """Prompts in the batch."""
    tokens: int
    """New tokens of one run, all rows."""
    runs: int
    """Runs of each side."""
    tokens_per_second: float
    """New tokens by wall time, kvgroups."""
    eager_tokens_per_second: float
    """New tokens by wall time, eager."""
    cpu_seconds: float
    """Process CPU time of one run, kvgroups."""
    eager_cpu_seconds: float
    """Process CPU time of one run, eager."""


class ParityReport(_Frozen):
    """What `check_parity` found for one model."""

    model: str
    """The model's name."""
    architecture: str
    """The model's class."""
    parameters: int
    """Weights, counted once."""
    conditions: Conditions
    """Under which all numbers were measured."""
    groups: tuple[GroupSummary, ...]
    """The KV-cache groups."""
    eager_gap: float
    """Largest logit difference between eager's own uncached forwards of one row in other batch sizes and
    lengths: what rounding alone does. The tolerance is a multiple of it, and in low precision a token may be
    another one where the reference prefers its own by less than it."""
    workloads: tuple[WorkloadResult, ...]
    """One result for each workload."""
    speed: Speed | None
    """Both speeds; None if a side could not run, or if it was not asked for."""

    @property
    def passed(self) -> bool:
        """Whether every workload that could run passed, and at least one did."""
        return self.verdict == "passed"

    @property
    def verdict(self) -> Literal["passed", "failed", "skipped"]:
        """The same as a word; "skipped" if no workload could run, so that nothing is proven."""
        outcomes = {workload.outcome for workload in self.workloads}
        return "failed" if "failed" in outcomes else "passed" if "passed" in outcomes else "skipped"

    def workload(self, name: str) -> WorkloadResult:
        """The result of the workload called `name`; KeyError if it was not asked for."""
        return {workload.name: workload for workload in self.workloads}[name]

    def raise_for_failure(self) -> None:
        """Do nothing if the check passed.

        Raises:
            ParityError: naming the model and each workload that failed, with what was seen; or those that were
                skipped, if no workload could run.
        """
        if self.passed:
            return
        unproven = ", ".join(
            f"{w.name} ({'; '.join(w.failures or w.remarks)})"
            for w in self.workloads
            if w.outcome == self.verdict
        )
        raise ParityError(
            f"{self.model}: kvgroups and eager part in {unproven}"
            if self.verdict == "failed"
            else f"{self.model}: nothing was compared: {unproven}"
        )

    def __str__(self) -> str:
        return self.render()

    def __rich__(self) -> RenderableType:
        from kvgroups.parity.render import render_report

        return render_report(self)

    def render(self, width: int = 100) -> str:
        """The report as plain text, `width` columns wide."""
        from kvgroups.parity.render import as_text

        return as_text(self, width)
