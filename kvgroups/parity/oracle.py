"""Eager's own word on a row: one forward without a cache, and what rounding does to it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvgroups.parity.row import Row

_COPIES = 3
"""Batch size that the gap is measured over, beside a row alone."""

_EIGHTHS = (3, 5, 7)
"""Parts of a row that the gap is measured over, beside the whole, in eighths."""


class Oracle:
    """Teacher-forced logits of rows, from the unpatched model.

    Args:
        model: the model; a forward without our cache is the model's own, patched or not.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.parameters = set(inspect.signature(type(model).forward).parameters)
        self._uncached: dict[tuple[int, ...], list[tuple[tuple[int, ...], torch.Tensor]]] = {}

    def uncached(self, row: Row) -> torch.Tensor:
        """(len(row.answer), vocab_size), float32: logits of each step from one forward without a cache.

        Greedy workloads ask the same prompts again, so what was computed once is kept.
        """
        known = self._uncached.setdefault(row.prompt, [])
        for answer, logits in known:
            if answer[: len(row.answer)] == row.answer:
                return logits[: len(row.answer)]
        logits = self._forward([*row.prompt, *row.answer[:-1]], keep=len(row.answer))[0]
        known.append((row.answer, logits))
        return logits

    @torch.no_grad()
    def cached(self, row: Row) -> torch.Tensor:
        """The same through eager's own cache: the prompt in the row's pieces, then token by token."""
        tokens = torch.tensor([[*row.prompt, *row.answer[:-1]]], device=self.model.device)
        logits: list[torch.Tensor] = []
        cache: dict[str, Any] = {}
        start = 0
        for piece in (*row.pieces, *(1 for _ in row.answer[1:])):
            inputs = {"input_ids": tokens[:, start : start + piece], **cache}
            if "position_ids" in self.parameters:
                inputs["position_ids"] = torch.arange(start, start + piece, device=tokens.device)[None]
            output = self.model(**inputs, use_cache=True, return_dict=True)
            cache, start = {"cache": output.cache}, start + piece
            logits.append(output.logits[0, -1].float())
        return torch.stack(logits[len(row.pieces) - 1 :])

    def continues_exactly(self, row: Row, tolerance: float) -> bool:
        """Whether eager's cache takes a prompt in two pieces without changing what follows."""
        half = len(row.prompt) // 2
        if half < 2:
            return False
        split = Row(row.prompt, row.answer[:1], row.logits, (half, len(row.prompt) - half))
        try:
            return max_difference(self.cached(split), self.uncached(split)) <= tolerance
        except Exception:  # transformers refuses it for some models, each in its own way
            return False

    def gap(self, row: Row) -> float:
        """Largest logit difference between eager's uncached forwards of one row in other shapes.

        Alone against in a batch of copies, and against forwards that stop after part of the row: the same
        numbers in exact arithmetic, so the difference is what rounding does on this device in this dtype.
        """
        tokens = [*row.prompt, *row.answer]
        alone = self._forward(tokens)[0]
        gaps = [max_difference(each, alone) for each in self._forward(tokens, copies=_COPIES)]
        for length in {max(1, len(tokens) * eighths // 8) for eighths in _EIGHTHS}:
            gaps.append(max_difference(self._forward(tokens[:length])[0], alone[:length]))
        return max(gaps)

    @torch.no_grad()
    def _forward(self, tokens: Sequence[int], *, keep: int = 0, copies: int = 1) -> torch.Tensor:
        ids = torch.tensor([tokens], device=self.model.device).expand(copies, -1)
        kept = {"logits_to_keep": keep} if "logits_to_keep" in self.parameters else {}
        output = self.model(input_ids=ids, use_cache=False, return_dict=True, **kept)
        return output.logits[:, -keep:].float()


def max_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest absolute difference; equal infinities (masked entries of the vocabulary) differ by 0."""
    difference = torch.where(one == other, 0.0, (one - other).abs())
    return float("inf") if bool(difference.isnan().any()) else difference.max().item()
