"""Where a prefix can be resumed later: the points at which windows keep their tail and states a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field

from kvgroups.specs.base import SpecModel


class RetentionPolicy(SpecModel):
    """Which lengths of a request are kept as retention points.

    Full attention can be resumed wherever its blocks reach. A window can be resumed only where its last tokens
    were kept, and a state only where it was copied, so these points are chosen: one snapshot can weigh as much as
    10,000 tokens of attention. All points lie on a grid, the *unit*: the least common multiple of the groups'
    block sizes and snapshot intervals. Prefill chunks end at them.

    Example: a prompt of 1,000 tokens on a grid of 256; an earlier prompt shared its first 600.
        >>> policy = RetentionPolicy()
        >>> policy.prompt_points(prompt_len=1000, unit=256)
        (768,)
        >>> policy.prompt_points(prompt_len=1000, unit=256, branch_point=512)
        (512, 768)
        >>> policy.surplus([512, 768, 1024])  # the answer's point takes the place of the prompt's
        [768]
    """

    at_prompt_end: bool = True
    """The last grid point that leaves at least one token of the prompt, so that the same prompt can use it."""
    at_answer_end: bool = True
    """The last grid point of the answer: every one that it passes takes the place of the one before."""
    at_branches: bool = True
    """Where a prompt parts from an earlier one: the last grid point that both share, when it is seen the second
    time. That is how a system prompt comes to be kept without anyone naming it."""
    every: int | None = Field(default=None, ge=1)
    """Also every so many tokens, rounded up to the grid."""
    max_points: int | None = Field(default=2, ge=1)
    """Points that one request leaves behind; None for all of them."""
    max_share: float = Field(default=0.5, gt=0, le=1)
    """The part of a capped arena that snapshots may take together."""

    @classmethod
    def none(cls) -> Self:
        """Keep no points: windows and states are resumed only from what happens to be left."""
        return cls(at_prompt_end=False, at_answer_end=False, at_branches=False)

    @classmethod
    def every_tokens(cls, num_tokens: int) -> Self:
        """Keep a point every `num_tokens` tokens, all of them, beside the usual ones."""
        return cls(every=num_tokens, max_points=None)

    def prompt_points(
        self, prompt_len: int, unit: int, num_hit_tokens: int = 0, branch_point: int | None = None
    ) -> tuple[int, ...]:
        """The lengths at which the prefill of a prompt stops to keep a point, in ascending order.

        Args:
            prompt_len: tokens of the prompt.
            unit: tokens between two grid points.
            num_hit_tokens: tokens that a prefix hit serves; points up to there exist already.
            branch_point: where the prompt parts from an earlier one, on the grid; None if it does not.
        """
        # At most prompt_len - 1: the last token is always computed, so a point at the very end would serve
        # longer prompts only. (The answer's first point can be there.)
        last = (prompt_len - 1) // unit * unit
        wanted = []
        if self.at_branches and branch_point is not None:
            wanted.append(branch_point)
        if self.at_prompt_end:
            wanted.append(last)
        if self.every is not None:
            step = self._step(unit)
            wanted += range(step, last + 1, step)
        points = [point for point in dict.fromkeys(wanted) if num_hit_tokens < point <= last]
        return tuple(sorted(points[: self.max_points]))

    def is_answer_point(self, num_tokens: int, prompt_len: int, unit: int) -> bool:
        """Whether to keep a point when the answer has come so far that `num_tokens` are computed in all."""
        if num_tokens < prompt_len or num_tokens % unit:
            return False
        return self.at_answer_end or (self.every is not None and num_tokens % self._step(unit) == 0)

    def surplus(self, points: Sequence[int]) -> list[int]:
        """Those of a request's points, in the order in which they were kept, that are given up again.

        The first ones and the latest stay: `[512, 768, 1024]` with two allowed gives up 768.
        """
        if self.max_points is None or len(points) <= self.max_points:
            return []
        return list(points[self.max_points - 1 : -1])

    def _step(self, unit: int) -> int:
        assert self.every is not None
        return -(-self.every // unit) * unit
