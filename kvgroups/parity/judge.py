"""Whether kvgroups computed what the model computes: tokens, logits, and what eager did meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from kvgroups.parity.oracle import Oracle, max_difference
from kvgroups.parity.row import Row

TOLERANCE = 32.0
"""How many of eager's own gaps the logits may move.

The gap is what rounding alone does between eager's forwards of the same row in other shapes, on three rows.
Healthy models are off their reference by 1 to 5 gaps, tiny ones with large outliers by up to 9, and eager's
own cached decode by as much; on Gemma 3 270M both are off by 1. In float32 the tolerance comes to about 3e-5
of the largest logit. The smallest fault that the tests plant, 1e-2 in one state, is off by hundreds of gaps.
In bfloat16 it is a coarse guard, and tokens decide: a router that rounds to another expert moves logits by 20
gaps, in eager too.
"""

_LEAST_GAP = 2.0
"""Least gap that is believed, in units of the dtype's epsilon at the largest logit: forwards can agree to the
last bit by luck."""

_EXACT_DTYPES = (torch.float32, torch.float64)


@dataclass
class Finding:
    """What became of one workload."""

    tokens: int = 0
    tokens_agree: int = 0
    near_ties: int = 0
    eager_tokens_agree: int | None = None
    reference: Literal["uncached", "cached"] = "uncached"
    difference: float = 0.0
    allowed: float = 0.0
    eager_difference: float | None = None
    other_difference: float | None = None
    cached_gap: float | None = None
    failures: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class _Choices(NamedTuple):
    """A row's tokens beside a reference's choices, each (num_steps,)."""

    choice: torch.Tensor
    margin: torch.Tensor
    agrees: torch.Tensor
    near_tie: torch.Tensor
    wrong: torch.Tensor


class Judge:
    """Holds answers against the oracle.

    In float32 every token must be the reference's choice, or have the very same logit. In lower precision a token may
    differ where the reference's own margin between the two candidates is below eager's gap. In both, logits must stay
    within `tolerance` of the reference at every step.

    The reference is one uncached forward of the unpadded row. Some models floor a time step in prefill but not
    in decode, so that their cached decode is not their uncached forward, by design, and low precision rounds the
    two differently. So a row that does not fit the uncached forward may fit eager's plain cached decode of the
    unpadded row instead, tokens and logits. A prompt that reached the cache in pieces may do so only if eager
    takes pieces without an error of its own, which Mamba-1 models of transformers do not. Drafts reach the cache
    both ways, so such a model may then be off by the distance of the two references.

    Args:
        oracle: of the model.
        probes: rows that the gap is measured on, the longest first.
        dtype: that logits are computed in: the model's, or autocast's.
    """

    def __init__(self, oracle: Oracle, probes: Sequence[Row], dtype: torch.dtype) -> None:
        self.oracle = oracle
        self.probe = probes[0]
        scale = oracle.uncached(self.probe).nan_to_num(posinf=0, neginf=0).abs().max().item()
        # Logits reach us in float32, whatever the model computes in.
        epsilon = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        self.gap = max([_LEAST_GAP * epsilon * scale, *map(oracle.gap, probes)])
        self.is_exact = dtype in _EXACT_DTYPES
        self.tolerance = TOLERANCE * self.gap
        self._continues_exactly: bool | None = None

    def judge(
        self,
        ours: Sequence[Row],
        eager: Sequence[Row] | None,
        *,
        decoding: Literal["greedy", "sampled", "beams"] = "greedy",
        is_mixed: bool = False,
        uncached: Callable[[], Sequence[Row] | None] = lambda: None,
    ) -> Finding:
        """Compare one workload's answers.

        Args:
            ours: what kvgroups answered.
            eager: what eager answered to the same; None if it failed or did not run.
            decoding: "greedy" if every token must be the reference's choice, "sampled" if eager's draw is what
                they must equal, "beams" if eager's sequences and scores are.
            is_mixed: whether answers were fed one token at a time and several, as drafts are verified. Then a model
                whose decode is not its uncached forward by design may be as far off as those two are apart.
            uncached: runs eager without a cache; asked where its cached beams are not ours.
        """
        is_greedy = decoding == "greedy"
        finding = Finding(tokens=sum(len(row.answer) for row in ours))
        eager_is_off = self._watch_eager(finding, ours, eager)
        for index, row in enumerate(ours):
            reference, allowed = self._reference(finding, row, is_greedy, is_mixed)
            difference = max_difference(row.logits, reference)
            finding.difference = max(finding.difference, difference)
            finding.allowed = max(finding.allowed, allowed)
            if not difference <= allowed:
                finding.failures.append(f"row {index}: logits off by {difference:.1e}, allowed {allowed:.1e}")
            if is_greedy:
                self._compare_choices(finding, index, row, reference)
            elif decoding == "sampled":
                drawn = eager[index].answer if eager is not None and not eager_is_off else row.answer
                self._compare_samples(finding, index, row, drawn)
        if decoding == "beams":
            self._compare_beams(finding, ours, eager, uncached)
        # What a cached decode differs by design is told by `cached_gap`; more than that is another matter.
        if eager_is_off and (finding.eager_difference or 0.0) > 2 * (finding.cached_gap or 0.0):
            finding.remarks.append(eager_is_off)
        return finding

    def hold(self, finding: Finding, ours: Sequence[Row], others: Sequence[Row], name: str) -> None:
        """Compare with another way of kvgroups through the same model: tokens, and logits until they part.

        Args:
            finding: takes what is found.
            ours: what is judged.
            others: what the other way answered to the same.
            name: of the other way.
        """
        finding.other_difference = 0.0
        for index, (row, other) in enumerate(zip(ours, others, strict=True)):
            step = _parts_at(row, other)
            common = len(row.answer) if step is None else step + 1
            difference = max_difference(row.logits[:common], other.logits[:common])
            finding.other_difference = max(finding.other_difference, difference)
            if not difference <= self.tolerance:
                finding.failures.append(
                    f"row {index}: logits off those of {name} by {difference:.1e}, allowed {self.tolerance:.1e}"
                )
            if step is None:
                continue
            parting = f"row {index}: token {step} is {row.answer[step]}, {name} chooses {other.answer[step]}"
            # In low precision either may be the reference's choice at a near tie, which is judged above.
            (finding.failures if self.is_exact else finding.remarks).append(parting)

    def _reference(
        self, finding: Finding, row: Row, is_greedy: bool, is_mixed: bool
    ) -> tuple[torch.Tensor, float]:
        """The uncached forward, unless the row fits eager's cached decode and not it; and what it may be off."""

        def fits(logits: torch.Tensor, allowed: float) -> bool:
            is_close = max_difference(row.logits, logits) <= allowed
            return is_close and (not is_greedy or not bool(self._choices(row, logits).wrong.any()))

        allowed = self.tolerance
        uncached = self.oracle.uncached(row)
        if fits(uncached, allowed) or (len(row.pieces) > 1 and not self._may_continue()):
            return uncached, allowed
        try:
            cached = self.oracle.cached(row)
        except Exception:  # no cached decode to follow: the uncached forward stands
            return uncached, allowed
        gap = max_difference(cached, uncached)
        if is_mixed and gap > allowed:
            allowed += gap
        if not fits(cached, allowed):
            return uncached, self.tolerance
        finding.reference = "cached"
        finding.cached_gap = max(finding.cached_gap or 0.0, gap)
        return cached, allowed

    def _may_continue(self) -> bool:
        if self._continues_exactly is None:
            self._continues_exactly = self.oracle.continues_exactly(self.probe, self.tolerance)
        return self._continues_exactly

    def _choices(self, row: Row, reference: torch.Tensor) -> _Choices:
        chosen = torch.tensor(row.answer, device=reference.device)
        best, choice = reference.max(-1)
        margin = best - reference.gather(1, chosen[:, None])[:, 0]
        agrees = choice == chosen
        # Of candidates with one logit eager's own choice is the lower id, not the better one: a tie in any dtype.
        is_tied = margin == 0 if self.is_exact else margin < self.gap
        near_tie = ~agrees & is_tied
        return _Choices(choice, margin, agrees, near_tie, wrong=~agrees & ~near_tie)

    def _compare_choices(self, finding: Finding, index: int, row: Row, reference: torch.Tensor) -> None:
        choices = self._choices(row, reference)
        finding.tokens_agree += int(choices.agrees.sum())
        finding.near_ties += int(choices.near_tie.sum())
        if bool(choices.wrong.any()):
            step = int(choices.wrong.nonzero()[0])
            allowed = "0" if self.is_exact else f"less than {self.gap:.1e}"
            finding.failures.append(
                f"row {index}: token {step} is {row.answer[step]}, the reference chooses "
                f"{int(choices.choice[step])} by {choices.margin[step].item():.1e}, allowed {allowed}"
            )

    def _compare_samples(self, finding: Finding, index: int, row: Row, drawn: tuple[int, ...]) -> None:
        agrees = [ours == theirs for ours, theirs in zip(row.answer, drawn, strict=True)]
        finding.tokens_agree += sum(agrees)
        if all(agrees):
            return
        step = agrees.index(False)
        if self.is_exact:
            finding.failures.append(
                f"row {index}: sampled token {step} is {row.answer[step]}, eager draws {drawn[step]}"
            )
        else:  # a draw has no margin to measure; the logits that it was drawn from are held above
            finding.remarks.append(f"row {index}: eager draws another token {step} from logits as far off")

    def _compare_beams(
        self,
        finding: Finding,
        ours: Sequence[Row],
        eager: Sequence[Row] | None,
        uncached: Callable[[], Sequence[Row] | None],
    ) -> None:
        """Sequences and scores are those of eager's cached beams, or of its uncached ones where those differ."""

        def are_ours(beams: Sequence[Row] | None) -> bool:
            return beams is not None and all(
                row.answer == other.answer for row, other in zip(ours, beams, strict=True)
            )

        reference = eager
        if not are_ours(eager):
            without_cache = uncached()
            if without_cache is not None and (eager is None or are_ours(without_cache)):
                reference = without_cache
                finding.remarks.append(
                    "held against eager's beams without a cache, which its cached ones are not"
                )
        if reference is None:
            finding.failures.append("eager finds no beams to compare with, cached or not")
            return
        for index, (row, other) in enumerate(zip(ours, reference, strict=True)):
            step = _parts_at(row, other)
            finding.tokens_agree += sum(a == b for a, b in zip(row.answer, other.answer, strict=True))
            if step is not None:
                parting = f"beam {index}: token {step} is {row.answer[step]}, eager's is {other.answer[step]}"
                # Beams in low precision may part at any near tie of two scores; logits are held above.
                (finding.failures if self.is_exact else finding.remarks).append(parting)
            elif not _scores_agree(row.score, other.score, self.tolerance):
                finding.failures.append(f"beam {index}: score {row.score}, eager's is {other.score}")

    def _watch_eager(self, finding: Finding, ours: Sequence[Row], eager: Sequence[Row] | None) -> str | None:
        """Note how eager's own cached run did against the oracle, and say so if it is off it."""
        if eager is None:
            return None
        finding.eager_tokens_agree = 0
        finding.eager_difference = 0.0
        remark = None
        for index, (row, theirs) in enumerate(zip(ours, eager, strict=True)):
            finding.eager_tokens_agree += sum(a == b for a, b in zip(row.answer, theirs.answer, strict=True))
            if row.prompt != theirs.prompt:  # a second turn after other answers
                continue
            # Up to the step where tokens part, that step included, both sides have read the same tokens.
            parts_at = _parts_at(row, theirs)
            common = len(row.answer) if parts_at is None else parts_at + 1
            difference = max_difference(theirs.logits[:common], self.oracle.uncached(row)[:common])
            if difference > finding.eager_difference:
                finding.eager_difference = difference
                parts = "" if parts_at is None else f" and chooses another token {parts_at}"
                remark = f"eager's cached run is off its own uncached forward by {difference:.1e} in row {index}{parts}"
        return None if finding.eager_difference <= self.tolerance else remark


def _scores_agree(score: float | None, other: float | None, tolerance: float) -> bool:
    """Whether two rows have no score, or scores that are this close."""
    if score is None or other is None:
        return score is other
    return abs(score - other) <= tolerance


def _parts_at(row: Row, other: Row) -> int | None:
    """The first step at which two answers differ."""
    return next(
        (step for step, (a, b) in enumerate(zip(row.answer, other.answer, strict=True)) if a != b), None
    )
