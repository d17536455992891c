"""What is run through two sides: each workload is a habit of callers, or an edge where caches go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvgroups.errors import UnsupportedCallError
from kvgroups.parity.prompts import Prompts
from kvgroups.parity.row import Row
from kvgroups.parity.sides import Side
from kvgroups.specs import ChunkedAttentionSpec, KVGroupsConfig, SlidingWindowSpec

_BATCH_SIZE = 8
"""Prompts of one padded batch at most; more are run in several."""

_SHORT_ANSWER = 12
"""New tokens where the prompt is what matters."""

_SMALL_WINDOW = 64
"""Up to this many tokens every edge of a window is tried; above, one prompt that is longer."""

_BEYOND_WINDOW = 190
"""Tokens by which the prompt exceeds a window that is not small: 700 or so for a window of 512."""

_NUM_BEAMS = 3

_NUM_DRAFTED = 4
"""Tokens that prompt lookup drafts at a time."""

_PHRASE, _REPEATS = 16, 3
"""Tokens that the prompt of the speculation repeats, and how often, so that there is something to look up."""

_INTERPRETED_PROMPT, _INTERPRETED_ANSWER = 12, 4
"""Tokens of the prompt and of the answer on the Triton kernels: their interpreter is slow."""


@dataclass(frozen=True)
class Plan:
    """What the workloads need to know of a model and of the caller's wishes."""

    prompts: Prompts
    num_new: int
    seed: int
    edge: int
    """The tokens around which prompts get long: the window, the chunk, or the block where there is neither."""
    edge_name: str
    """"window", "chunk" or "block"."""
    block_size: int
    """Tokens in the smallest block of a group that stores tokens; 4 where all groups are states."""
    long_lengths: tuple[int, ...]
    """Lengths of the long prompts."""
    chunk_sizes: tuple[int, ...]
    """Prefill chunks to cut the longest of them into."""
    batch_size: int
    max_prompt_len: int
    """Tokens of the longest prompt that may be made up."""

    @property
    def num_few(self) -> int:
        """New tokens where the prompt is what matters."""
        return min(self.num_new, _SHORT_ANSWER)

    def long(self, length: int) -> tuple[int, ...]:
        """A prompt of `length` tokens, or of as many as there may be."""
        return self.prompts.long(min(length, self.max_prompt_len))

    def batches(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        """The prompts in batches."""
        rows = self.prompts.rows
        for start in range(0, len(rows), self.batch_size):
            yield rows[start : start + self.batch_size]


def make_plan(config: KVGroupsConfig, prompts: Prompts, num_new: int, seed: int, max_prompt_len: int) -> Plan:
    """Lengths and chunk sizes that straddle this config's windows and blocks."""
    edge, edge_name = _edge(config)
    block_size = min((group.block_size for group in config.groups if not group.is_state), default=4)
    lengths: tuple[int, ...]
    chunks: tuple[int, ...]
    if edge <= _SMALL_WINDOW:
        lengths = (edge - 1, edge, edge + 1, 2 * edge + 3)
        chunks = (3, block_size, edge, edge + 1)
    else:
        lengths = (edge + _BEYOND_WINDOW,)
        chunks = (edge // 2 + 1, edge)
    longest = min(max_prompt_len, config.max_model_len - 1 - num_new)
    if longest < 1:
        raise UnsupportedCallError(
            f"max_new_tokens: {num_new} leave no room for a prompt in max_model_len {config.max_model_len}; "
            "lower the one or raise the other"
        )
    lengths = tuple(sorted({min(length, longest) for length in lengths if length > 0}))
    return Plan(
        prompts=prompts,
        num_new=num_new,
        seed=seed,
        edge=edge,
        edge_name=edge_name,
        block_size=block_size,
        long_lengths=lengths,
        chunk_sizes=tuple(sorted({size for size in chunks if 1 < size < lengths[-1]})) or (1,),
        batch_size=min(_BATCH_SIZE, config.max_num_reqs),
        max_prompt_len=longest,
    )


def _edge(config: KVGroupsConfig) -> tuple[int, str]:
    """The largest span of a group, or the largest block where no group has one."""
    spans = []
    for group in config.groups:
        if isinstance(group.spec, SlidingWindowSpec):
            spans.append((group.spec.sliding_window, "window"))
        elif isinstance(group.spec, ChunkedAttentionSpec):
            spans.append((group.spec.chunk_size, "chunk"))
    blocks = [(group.block_size, "block") for group in config.groups if not group.is_state]
    return max(spans or blocks, default=(16, "block"))


@dataclass(frozen=True)
class Workload:
    """One thing to run through two sides."""

    name: str
    describe: Callable[[Plan], str]
    run: Callable[[Side, Plan], list[Row]]
    """Runs one side and returns its answers, in an order that both sides share."""
    decoding: Literal["greedy", "sampled", "beams"] = "greedy"
    """How tokens are chosen. Greedy ones are judged by logits; the others must also be the ones that eager drew
    with the same seed, or found with as many beams."""
    ours: Literal["kvgroups", "triton"] = "kvgroups"
    """The side that is judged: kvgroups as it is, or on the Triton kernels."""
    other: Literal["eager", "generic", "torch"] = "eager"
    """The side that it is held against, beside eager's uncached forward."""
    is_mixed: bool = False
    """Whether an answer is fed partly token by token and partly several tokens at once."""
    run_uncached: Callable[[Side, Plan], list[Row]] | None = None
    """The same without a cache, where eager's own cached run may choose other tokens."""


def _single(side: Side, plan: Plan) -> list[Row]:
    return side.generate(plan.prompts.rows[:1], plan.num_new).rows


def _ragged(side: Side, plan: Plan) -> list[Row]:
    return [row for batch in plan.batches() for row in side.generate(batch, plan.num_new).rows]


def _left_padded(side: Side, plan: Plan) -> list[Row]:
    prompt = plan.prompts.rows[0]
    return side.generate([prompt], plan.num_few, width=len(prompt) + 5).rows


def _right_padded(side: Side, plan: Plan) -> list[Row]:
    return [row for batch in plan.batches() for row in side.decode_by_hand(batch, plan.num_few)]


def _long(side: Side, plan: Plan) -> list[Row]:
    prompts = [plan.prompts.long(length) for length in plan.long_lengths]
    return [row for prompt in prompts for row in side.generate([prompt], plan.num_few).rows]


def _chunks(side: Side, plan: Plan) -> list[Row]:
    prompt = plan.prompts.long(plan.long_lengths[-1])
    rows = []
    for size in plan.chunk_sizes:
        row = side.generate([prompt], plan.num_few, prefill_chunk_size=size).rows[0]
        pieces = (*(size for _ in range(len(prompt) // size)), len(prompt) % size)
        rows.append(replace(row, pieces=tuple(piece for piece in pieces if piece)))
    return rows


def _second_turn(side: Side, plan: Plan) -> list[Row]:
    first = side.generate(plan.prompts.rows[: min(2, plan.batch_size)], plan.num_few)
    added = [plan.prompts.long(5 + row)[row:] for row in range(len(first.rows))]
    return side.generate(added, plan.num_few, previous=first).rows


def _samples(side: Side, plan: Plan) -> list[Row]:
    torch.manual_seed(plan.seed)
    samples = min(2, plan.batch_size)
    prompts = plan.prompts.rows[: plan.batch_size // samples][:2]
    return side.generate(prompts, plan.num_few, do_sample=True, num_return_sequences=samples).rows


def _in_a_row(side: Side, plan: Plan) -> list[Row]:
    return [row for prompt in plan.prompts.rows for row in side.generate([prompt], plan.num_few).rows]


def _beams(side: Side, plan: Plan, *, use_cache: bool = True) -> list[Row]:
    num_beams = min(_NUM_BEAMS, plan.batch_size)
    prompts = plan.prompts.rows[: plan.batch_size // num_beams][:2]
    return side.beams(prompts, plan.num_few, num_beams, use_cache=use_cache)


def _uncached_beams(side: Side, plan: Plan) -> list[Row]:
    return _beams(side, plan, use_cache=False)


def _speculation(side: Side, plan: Plan) -> list[Row]:
    prompt = (plan.long(_PHRASE) * _REPEATS)[: plan.max_prompt_len]
    return side.speculate(prompt, plan.num_new, _NUM_DRAFTED)


def _few_ragged(side: Side, plan: Plan) -> list[Row]:
    return side.generate(next(plan.batches()), plan.num_few).rows


def _short(side: Side, plan: Plan) -> list[Row]:
    num_new = min(plan.num_new, _INTERPRETED_ANSWER)
    return side.generate([plan.long(_INTERPRETED_PROMPT)], num_new).rows


def _lengths(plan: Plan) -> str:
    """`15-17, 35 tokens (block 16)`."""
    *near, last = plan.long_lengths
    numbers = f"{near[0]}-{near[-1]}, {last}" if len(near) > 1 else ", ".join(map(str, plan.long_lengths))
    return f"{numbers} tokens ({plan.edge_name} {plan.edge})"


def _sizes(plan: Plan) -> str:
    return f"prefill by {', '.join(map(str, plan.chunk_sizes))}"


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("single", lambda plan: "single prompt", _single),
        Workload("ragged", lambda plan: "ragged batch, left-padded", _ragged),
        Workload("left-padded", lambda plan: "batch of one, left-padded", _left_padded),
        Workload("right-padded", lambda plan: "right-padded, by hand", _right_padded),
        Workload("long", _lengths, _long),
        Workload("chunks", _sizes, _chunks),
        Workload("second-turn", lambda plan: "second turn, same cache", _second_turn),
        Workload("samples", lambda plan: "samples, one seed", _samples, decoding="sampled"),
        Workload("in-a-row", lambda plan: "prompts one by one", _in_a_row),
        Workload("beams", lambda plan: "beam search", _beams, decoding="beams", run_uncached=_uncached_beams),
        Workload("speculation", lambda plan: f"prompt lookup by {_NUM_DRAFTED}", _speculation, is_mixed=True),
        Workload("fused", lambda plan: "fused against generic", _few_ragged, other="generic"),
        Workload("triton", lambda plan: "Triton against torch", _short, ours="triton", other="torch"),
    )
}
"""Every workload by name, in the order in which they run."""
