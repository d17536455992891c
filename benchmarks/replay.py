"""Runs a trace through the real manager, step by step like an engine, without a model: accounts, and no bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.traces import Job
from kvgroups.manager import Manager, Request
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.specs import GroupConfig, KVGroupsConfig, MambaSpec

MAX_RUNNING = 64
"""Requests that are resident at once."""

STEP_TOKENS = 2048
"""Tokens of one step: first one for each request that decodes, then chunks of prompts, first come first served."""


@dataclass(eq=False)
class Live:
    """A resident request, and the step it is in."""

    job: Job
    request: Request
    computed: int = 0
    """Tokens before the step."""
    total: int = 0
    """Tokens after it."""
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False)
    """Its tokens, where prefixes are shared."""


def replay(
    config: KVGroupsConfig, jobs: Sequence[Job], *, share: bool = False
) -> Iterator[tuple[Manager, list[Live]]]:
    """Run all jobs to their end; yields the manager and who is resident while each step runs.

    The arena is on the meta device. It grows where `config.memory` is None, so that nothing is refused.

    Args:
        config: the groups, and the memory.
        jobs: in the order of their arrival.
        share: whether prefixes are filed and found again.
    """
    longest = max(job.prompt_len + job.answer_len for job in jobs)
    config = config.model_copy(update={"max_num_reqs": MAX_RUNNING, "max_model_len": longest})
    manager = Manager(config, "meta")
    tables = MultiGroupBlockTable.from_config(config, max_num_reqs=MAX_RUNNING, device="cpu")
    waiting, rows, running = deque(jobs), list(range(MAX_RUNNING)), list[Live]()
    step = 0
    while waiting or running:
        budget = STEP_TOKENS - sum(live.total >= live.job.prompt_len for live in running)
        for live in running:
            live.computed, left = live.total, live.job.prompt_len - live.total
            count = 1 if left <= 0 else min(left, budget)
            if share and left > 0:
                count = manager.next_step(live.request, count)  # a chunk ends where a prefix may be resumed
            budget -= count if left > 0 else 0
            live.total += count
        requests = [live.request for live in running]
        manager.allocate(requests, [live.total - live.computed for live in running])
        while budget > 0 and rows and waiting and waiting[0].arrival <= step:
            running.append(_admitted(waiting.popleft(), manager, tables, rows.pop(), budget, share))
            budget -= running[-1].total - running[-1].computed
        step += 1
        if not running:
            continue
        manager.drain()
        yield manager, running
        manager.advance([live.request for live in running], [live.total - live.computed for live in running])
        for live in running if share else ():
            manager.file(live.request, live.token_ids[: live.total])
        for live in [live for live in running if live.total >= live.job.prompt_len + live.job.answer_len]:
            manager.free(live.request)
            rows.append(live.request.row)
            running.remove(live)


def _admitted(
    job: Job, manager: Manager, tables: MultiGroupBlockTable, row: int, budget: int, share: bool
) -> Live:
    """A request in its first step: up to `budget` tokens of its prompt, behind what a prefix hit serves."""
    if not share:
        request = manager.open(tables, row)
        manager.allocate([request], [min(job.prompt_len, budget)])
        return Live(job, request, 0, min(job.prompt_len, budget))
    ids = job.token_ids()
    request = manager.admit(tables, row, ids[: job.prompt_len], budget)
    return Live(job, request, request.num_computed_tokens, request.num_allocated_tokens, ids)


def live_bytes(config: KVGroupsConfig, running: Sequence[Live], *, share: bool = False) -> int:
    """The bound: tokens that the step's last query of each request sees, and one state a request.

    Args:
        share: count tokens of a shared beginning once for all requests that see them.
    """
    return sum(
        _state_bytes(group, len(running))
        if isinstance(group.spec, MambaSpec)
        else group.bytes_per_token * _seen(group, running, share)
        for group in config.groups
    )


def uncounted_bytes(config: KVGroupsConfig, running: Sequence[Live]) -> int:
    """What the target leaves out: the rest of a request's first and last block, and the tokens of a chunk in flight.

    While a chunk is computed, a window holds what the chunk's first token sees beside what the next query will.
    """
    nbytes = 0
    for group in config.groups:
        spec, size = group.spec, group.block_size
        if isinstance(spec, MambaSpec):
            continue
        for live in running:
            before, after = spec.first_visible(live.computed), spec.first_visible(live.total)
            seen = live.total - spec.first_visible(live.total - 1)
            kept = max(0, live.computed - before) + live.total - max(live.computed, min(after, live.total))
            edges = -live.total % size + before % size
            if after > live.computed:  # the chunk is longer than the window: it has a first block of its own
                edges += -live.computed % size + after % size
            nbytes += (max(0, kept - seen) + edges) * group.bytes_per_token
    return nbytes


def _state_bytes(group: GroupConfig, count: int) -> int:
    assert isinstance(group.spec, MambaSpec)
    return count * group.spec.bytes_per_request * len(group.layers)


def _seen(group: GroupConfig, running: Sequence[Live], share: bool) -> int:
    assert not isinstance(group.spec, MambaSpec)
    total = 0
    shared: dict[int, list[tuple[int, int]]] = {}
    for live in running:
        first = group.spec.first_visible(live.total - 1)
        if share and live.job.prefix is not None:
            end = min(live.total, live.job.prefix_len)
            if first < end:
                shared.setdefault(live.job.prefix, []).append((first, end))
                first = end
        total += live.total - first
    for intervals in shared.values():
        reached = 0
        for first, end in sorted(intervals):
            total += max(0, end - max(first, reached))
            reached = max(reached, end)
    return total
