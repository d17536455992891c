"""Three request traces, made from a seed: what arrives when, and how long it is. Time is counted in engine steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

CONTEXT = 131_072
"""Tokens of the longest request in any trace; less where the model takes less."""


@dataclass(frozen=True)
class Job:
    """One request."""

    arrival: int
    """The step at which it arrives."""
    prompt_len: int
    answer_len: int
    prefix: int | None = None
    """Which shared beginning its prompt has; None for one of its own."""
    prefix_len: int = 0
    """Tokens of that beginning."""
    speaker: int = 0
    """Jobs of one speaker go on from what was said before: their tokens are the same as far as both reach."""

    def token_ids(self) -> np.ndarray:
        """(prompt_len + answer_len,), int64: stand-ins that are equal where the texts would be."""
        ids = np.arange(self.prompt_len + self.answer_len, dtype=np.int64)
        ids[: self.prefix_len] += (1 + (self.prefix or 0)) * CONTEXT
        ids[self.prefix_len :] += (1000 + self.speaker) * CONTEXT
        return ids


def chat(rng: random.Random, context: int) -> list[Job]:
    """48 conversations of 2 to 6 turns on 4 system prompts; each turn's prompt is all that was said before."""
    systems = [min(context // 4, rng.randint(300, 1500)) for _ in range(4)]
    jobs = []
    for speaker in range(48):
        prefix = rng.randrange(len(systems))
        history, arrival = systems[prefix], rng.randrange(600)
        for _ in range(rng.randint(2, 6)):
            message, answer = _log_normal(rng, 60, 1.0), _log_normal(rng, 150, 0.7)
            if history + message + answer > context:
                break
            jobs.append(Job(arrival, history + message, answer, prefix, systems[prefix], speaker))
            history += message + answer
            arrival += answer + rng.randint(30, 200)  # the reader reads, and writes the next message
    return jobs


def documents(rng: random.Random, context: int) -> list[Job]:
    """24 long prompts, from an eighth of the context up to all of it but the answer."""
    jobs = []
    for speaker in range(24):
        answer = rng.randint(100, 500)
        longest = context - answer
        arrival = rng.randrange(600)
        jobs.append(Job(arrival, round(_log_uniform(rng, longest / 8, longest)), answer, speaker=speaker))
    return jobs


def bursts(rng: random.Random, context: int) -> list[Job]:
    """Six waves of 40 requests of 16 to 2,000 tokens, each wave within 10 steps, and quiet in between."""
    return [
        Job(
            wave * 250 + rng.randrange(10),
            min(round(_log_uniform(rng, 16, 2000)), context // 2),
            round(_log_uniform(rng, 16, 300)),
            speaker=40 * wave + index,
        )
        for wave in range(6)
        for index in range(40)
    ]


TRACES: dict[str, Callable[[random.Random, int], list[Job]]] = {
    "chat": chat,
    "documents": documents,
    "bursts": bursts,
}


def make_trace(name: str, context: int, seed: int) -> list[Job]:
    """The jobs of a trace in the order of their arrival; the same for the same arguments.

    Args:
        name: one of `TRACES`.
        context: tokens that a request may have, prompt and answer together.
        seed: of all that is random.
    """
    jobs = TRACES[name](random.Random(f"{name} {seed}"), context)
    return sorted(jobs, key=lambda job: job.arrival)


def _log_normal(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), sigma)))


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))
