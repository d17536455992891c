"""What the workloads ask: rows of token ids, and longer rows cut from the same text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvgroups.errors import UnsupportedCallError

ENGLISH = (
    "The library opened at nine, and by ten past the reading room was full.",
    "Water freezes at zero degrees, but",
    "A river does not carry the same water twice. What it keeps is its bed, its banks and its name, and "
    "these it keeps only because they change more slowly than the water does. Anyone who has mapped one knows",
    "To make bread you need flour, water, salt and time. First,",
)
"""Prompts for models with a tokenizer: four lengths, the shortest of a few tokens."""

_TEXT = """
The lighthouse had been dark for eleven years when the letter came. It was addressed to the keeper, and
since there was no keeper the postman left it on the step, under a stone, where Anna found it on her way to
the boats. She read it standing up. Then she read it again, sitting on the wall with her back to the wind,
because the second page said something that the first one had not prepared her for. Her brother was asking
for the lamp to be lit on the last night of October, at seven in the evening, for one hour, and he gave no
reason. Nobody had heard from him since spring. The harbour master, when she showed it to him, turned the
sheet over as if the reason might be on the back. "There is no oil," he said, "and the stair is gone above
the second landing." But he did not say no, and by the afternoon three people had offered her a rope. The
baker brought candles. The school lent its ladder and, with it, the caretaker, who had been born in the room
below the lamp and who said that the lens would still turn if somebody cleaned the salt out of the bearings.
They worked for nine days. On the tenth it rained so hard that the gutters of the tower ran over, and Anna
slept on the second landing with a bucket under the worst of the leaks. What she remembered later was the
sound: two notes, a high one from the bucket and a low one from the sea, which never quite agreed. On the
last night of October the whole village stood on the quay. At seven the lamp was lit. For a while nothing
happened at all. Then, far out, where the chart shows only depth, a second light answered it.
"""
"""Text that rows longer than a window are cut from."""

_RANDOM_LENGTHS = (11, 5, 18, 7)
"""Lengths of random prompts: on both sides of small windows and blocks."""

_RANDOM_POOL = 2048


@dataclass(frozen=True)
class Prompts:
    """Rows to ask, and what else is made of token ids."""

    rows: tuple[tuple[int, ...], ...]
    """The prompts, each at least one token."""
    pool: tuple[int, ...]
    """Tokens that longer rows are cut from, over and over."""
    filler: int
    """An ordinary token to pad with: the row of a padding token is zero, and zeros hide leaks."""

    def long(self, length: int) -> tuple[int, ...]:
        """A row of `length` tokens."""
        repeats = -(-length // len(self.pool))
        return (self.pool * repeats)[:length]


def make_prompts(model: PreTrainedModel, prompts: Any, tokenizer: Any, seed: int) -> Prompts:
    """Turn what the caller gave into rows of token ids.

    Args:
        model: tells the vocabulary's size.
        prompts: texts, lists of token ids, a tensor (rows, tokens) of ids, or None for a text of our own, or
            seeded random ids where there is no tokenizer.
        tokenizer: needed for texts.
        seed: of the random ids.

    Raises:
        UnsupportedCallError: no prompts, an empty one, a tokenizer that reads nothing in ours, texts
            without a tokenizer, or ids outside the vocabulary.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    if prompts is None and tokenizer is None:
        generator = torch.Generator().manual_seed(seed)
        pool = torch.randint(
            min(3, vocab_size - 1), vocab_size, (_RANDOM_POOL,), generator=generator
        ).tolist()
        rows, start = [], 0
        for length in _RANDOM_LENGTHS:
            rows.append(tuple(pool[start : start + length]))
            start += length
        return Prompts(tuple(rows), tuple(pool[start:]), filler=pool[start])
    given = _rows(ENGLISH if prompts is None else prompts, tokenizer)
    for index, row in enumerate(given):
        if not row and prompts is None:
            raise UnsupportedCallError(
                f"tokenizer: {type(tokenizer).__name__} reads no token in {ENGLISH[index][:40]!r}; leave it out, and random "
                "token ids are asked, or give prompts as token ids"
            )
        if not row:
            raise UnsupportedCallError(
                f"prompts: prompt {index} has no tokens; every prompt needs at least one"
            )
        if not 0 <= min(row) <= max(row) < vocab_size:
            raise UnsupportedCallError(
                f"prompts: prompt {index} has ids from {min(row)} to {max(row)} and the vocabulary has {vocab_size}"
            )
    if not given:
        raise UnsupportedCallError(
            "prompts: there are none; give at least one, or None for prompts of our own"
        )
    pool = _rows([_TEXT.replace("\n", " ").strip()], tokenizer)[0] if prompts is None else sum(given, ())
    return Prompts(given, pool, filler=given[0][-1])


def _rows(prompts: Any, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(prompts, torch.Tensor):
        prompts = prompts.tolist() if prompts.ndim == 2 else [prompts.tolist()]
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Iterable):
        raise UnsupportedCallError(
            f"prompts: expected texts, lists of token ids or a tensor, got {type(prompts).__name__}; a tokenizer goes into "
            "tokenizer=..."
        )
    return tuple(_ids(prompt, tokenizer) for prompt in prompts)


def _ids(prompt: str | Sequence[int], tokenizer: Any) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return tuple(int(token) for token in prompt)
    if tokenizer is None:
        raise UnsupportedCallError(f"prompts: {prompt[:40]!r} is text; pass the tokenizer too, or token ids")
    return tuple(tokenizer(prompt)["input_ids"])
