"""Answers: what was asked, what was chosen, and from which logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One answer: what was asked, what was chosen, and the logits that it was chosen from."""

    prompt: tuple[int, ...]
    """Every token before the first new one, padding not among them."""
    answer: tuple[int, ...]
    """The new tokens."""
    logits: torch.Tensor
    """(len(answer), vocab_size), float32: raw logits of each step."""
    pieces: tuple[int, ...]
    """How the prompt reached the cache: tokens of each forward, in order."""
    score: float | None = None
    """Mean log-probability of the answer, where beam search gave it."""


@dataclass(frozen=True)
class Generated:
    """What one call of `generate` gave, padding included."""

    rows: list[Row]
    sequences: torch.Tensor
    """(rows, columns), int64: prompts and answers, left-padded."""
    mask: torch.Tensor
    """(rows, prompt columns), int64: 1 where a prompt token is real."""
    cache: Any
