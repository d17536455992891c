"""Microseconds and committed bytes of what the manager does between two forwards.

    python -m benchmarks.control_plane                  # 1 to 1,024 requests, contexts of 4K to 1M tokens
    python -m benchmarks.control_plane --requests 256 --contexts 4096 1048576

Three groups: full attention and a window of 1,024 tokens on blocks of 16, and a state. Requests of one context share
their past (they are forks, so a million tokens each is cheap to set up), stand at different places in their last
block, and own what they add. Operations, each with the commit of the tables:

    decode   one token for every request: allocate, commit, advance
    append   a chunk of 512 tokens for one request
    fork     one request becomes two
    release  a request with blocks of its own to the length of the context is freed
    match    a prompt of that length is looked up in the prefix cache, and found

Numbers are medians. Contexts take turns step by step, so that a slow moment of the machine hits all of them. CPU time
of the process stands beside wall time: far apart, something else ran. The arena is on the meta device: no bytes move
but those of the tables.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import RESULTS, conditions, show, tell, write
from kvgroups.manager import Manager, Request
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.specs import (
    FullAttentionSpec,
    GroupConfig,
    KVGroupsConfig,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
)

REQUESTS = (1, 16, 256, 1024)
CONTEXTS = (4_096, 65_536, 1_048_576)
MOST_ENTRIES = 2**25
"""Entries of the full group's table above which a combination is left out: 1,024 requests of 1M tokens are 256 MiB."""

TARGET_MS, TARGET_RATIO = 1.0, 1.2
"""Of a decode step of 256 requests: its milliseconds, and how much dearer the longest context may be."""

_CHUNK = 512
_SHAPE = {"num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


def config_for(context: int, num_requests: int) -> KVGroupsConfig:
    """Three groups, as a hybrid model with windows has them, with room to go on from `context` tokens."""
    state = StateTensor(name="recurrent", shape=(32, 64, 128), dtype="float32")
    return KVGroupsConfig(
        max_model_len=context + 65_536,
        max_num_reqs=num_requests + 1,
        groups=[
            GroupConfig(name="full", layers=[0, 1, 2, 3], spec=FullAttentionSpec(**_SHAPE)),
            GroupConfig(
                name="window", layers=range(4, 24), spec=SlidingWindowSpec(sliding_window=1024, **_SHAPE)
            ),
            GroupConfig(name="state", layers=range(24, 48), spec=MambaSpec(states=[state])),
        ],
    )


class Case:
    """Requests of one context, and a spare row beside them."""

    def __init__(self, context: int, num_requests: int) -> None:
        self.context = context
        config = config_for(context, num_requests)
        self.manager = Manager(config, "meta")
        self.tables = MultiGroupBlockTable.from_config(config, device="cpu")
        self.spare = num_requests
        self.token_ids = np.arange(context + 1)
        first = self._filed(0)
        self.requests = [
            first,
            *(self.manager.fork(first, self.tables, row) for row in range(1, num_requests)),
        ]
        self._step(self.requests, [index % 16 for index in range(num_requests)])

    def decode(self) -> int:
        """One token for every request."""
        return self._step(self.requests, [1] * len(self.requests))

    def append(self) -> int:
        """A chunk of a prompt for one request."""
        return self._step(self.requests[-1:], [_CHUNK])

    def fork(self) -> int:
        """The first request's twin, in the spare row."""
        self._twin = self.manager.fork(self.requests[0], self.tables, self.spare)
        self.manager.drain()
        return self.tables.commit()

    def release(self) -> int:
        """The request that `prepare_release` made is gone."""
        self.manager.free(self._alone)
        return self.tables.commit()

    def match(self) -> int:
        """How much of the first request's prompt is cached: all of it, on the grid of the retention points."""
        found = self.manager.match_prefix(self.token_ids).num_tokens
        assert self.context - 256 <= found <= self.context
        return 0

    def drop_twin(self) -> None:
        self.manager.free(self._twin)
        self.tables.commit()

    def prepare_release(self) -> None:
        self._alone = self._fresh(self.spare)

    def _fresh(self, row: int) -> Request:
        request = self.manager.open(self.tables, row)
        self._step([request], [self.context])
        return request

    def _filed(self, row: int) -> Request:
        """A request whose prefix can be found."""
        request = self.manager.admit(self.tables, row, self.token_ids[: self.context])
        while True:
            self.manager.drain()
            self.tables.commit()
            self.manager.advance([request], [request.num_allocated_tokens - request.num_computed_tokens])
            self.manager.file(request, self.token_ids)
            if not (count := self.manager.next_step(request)):
                return request
            self.manager.allocate([request], [count])

    def _step(self, requests: Sequence[Request], counts: Sequence[int]) -> int:
        self.manager.allocate(requests, counts)
        self.manager.drain()
        nbytes = self.tables.commit()
        self.manager.advance(requests, counts)
        return nbytes


def measure(num_requests: int, contexts: Sequence[int], steps: int) -> Iterator[dict[str, Any]]:
    """One result for each context and operation."""
    cases = [Case(context, num_requests) for context in contexts if fits(num_requests, context)]
    samples: dict[tuple[int, str], list[tuple[float, float, int]]] = defaultdict(list)
    gc.collect()
    gc.disable()  # a collection in the middle of a step is the benchmark's own
    try:
        for step in range(steps + 2):
            for case in cases[step % len(cases) :] + cases[: step % len(cases)]:
                sample = _timed(case.decode)
                if step >= 2:  # the first ones warm up
                    samples[case.context, "decode"].append(sample)
        for _ in range(max(3, steps // 8)):
            for case in cases:
                samples[case.context, "append"].append(_timed(case.append))
                samples[case.context, "fork"].append(_timed(case.fork))
                case.drop_twin()
                case.prepare_release()
                samples[case.context, "release"].append(_timed(case.release))
                samples[case.context, "match"].append(_timed(case.match))
    finally:
        gc.enable()
    for (context, operation), found in samples.items():
        wall, cpu, nbytes = zip(*found, strict=True)
        yield {
            "requests": num_requests,
            "context": context,
            "operation": operation,
            "wall_us": statistics.median(wall) * 1e6,
            "cpu_us": statistics.median(cpu) * 1e6,
            "worst_us": max(wall) * 1e6,
            "committed_bytes": statistics.fmean(nbytes),
            "samples": len(found),
        }


def fits(num_requests: int, context: int) -> bool:
    """Whether the combination is measured."""
    return num_requests * context // 16 <= MOST_ENTRIES


def _timed(operation: Callable[[], int]) -> tuple[float, float, int]:
    wall, cpu = time.perf_counter(), time.process_time()
    nbytes = operation()
    return time.perf_counter() - wall, time.process_time() - cpu, nbytes


def verdict(results: Sequence[dict[str, Any]]) -> list[str]:
    """What a decode step of 256 requests costs, against the targets; empty if it was not measured.

    In CPU time, which is what one core spends on it: wall time also has what else ran on the machine.
    """
    costs = {r["context"]: r["cpu_us"] for r in results if (r["requests"], r["operation"]) == (256, "decode")}
    if len(costs) < 2:
        return []
    shortest, longest = min(costs), max(costs)
    ratio, slowest = costs[longest] / costs[shortest], max(costs.values()) / 1000
    return [
        f"decode, 256 requests: {longest:,} tokens cost {ratio:.2f} times what {shortest:,} cost "
        f"(target {TARGET_RATIO}): {'met' if ratio <= TARGET_RATIO else 'MISSED'}",
        f"decode, 256 requests: {slowest:.2f} ms of CPU time at most (target {TARGET_MS}): "
        f"{'met' if slowest < TARGET_MS else 'MISSED'}",
    ]


def main() -> int:
    """Print the table, write the JSON; exit code 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--steps", type=int, default=64, help="decode steps that are measured")
    parser.add_argument("--out", type=Path, default=RESULTS / "control_plane.json")
    options = parser.parse_args()

    started = time.monotonic()
    results = [
        result for count in options.requests for result in measure(count, options.contexts, options.steps)
    ]
    setting = conditions(groups=3, steps=options.steps, seconds=round(time.monotonic() - started, 1))
    show(
        "between two forwards, medians",
        ["operation", "requests", "context", "wall us", "CPU us", "worst us", "bytes committed"],
        [
            [
                result["operation"],
                f"{result['requests']:,}",
                f"{result['context']:,}",
                *(f"{result[key]:,.0f}" for key in ("wall_us", "cpu_us", "worst_us", "committed_bytes")),
            ]
            for result in sorted(
                results, key=lambda r: (_ORDER.index(r["operation"]), r["requests"], r["context"])
            )
        ],
    )
    lines = verdict(results)
    print("\n".join(lines))
    tell(setting)
    write(options.out, setting, results)
    return int(any("MISSED" in line for line in lines))


_ORDER = ("decode", "append", "fork", "release", "match")

if __name__ == "__main__":
    sys.exit(main())
