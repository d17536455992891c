"""Tokens per second and CPU time, kvgroups against eager."""

from __future__ import annotations

import statistics
import time

from kvgroups.parity.bench import Bench
from kvgroups.parity.report import Speed
from kvgroups.parity.sides import Side

SPEED_RUNS = 3
"""Runs of each side, one after the other in turn, whose median is the speed."""

SPEED_TOKENS = 16
"""Tokens that each row of the batch answers, at most."""


def measure_speed(bench: Bench) -> Speed | None:
    """Both sides on the first batch of prompts; None if one of them fails."""
    prompts, num_new = next(bench.plan.batches()), min(bench.plan.num_new, SPEED_TOKENS)
    paged, eager = bench.side("kvgroups"), bench.side("eager")
    wall: dict[Side, list[float]] = {paged: [], eager: []}
    cpu: dict[Side, list[float]] = {paged: [], eager: []}
    try:
        for _ in range(SPEED_RUNS):
            for side in (paged, eager):
                with side.running():
                    began, began_cpu = time.perf_counter(), time.process_time()
                    side.generate(prompts, num_new)
                    wall[side].append(time.perf_counter() - began)
                    cpu[side].append(time.process_time() - began_cpu)
    except Exception:  # it failed as a workload too, where the reason is told
        return None
    tokens = len(prompts) * num_new
    return Speed(
        rows=len(prompts),
        tokens=tokens,
        runs=SPEED_RUNS,
        tokens_per_second=tokens / statistics.median(wall[paged]),
        eager_tokens_per_second=tokens / statistics.median(wall[eager]),
        cpu_seconds=statistics.median(cpu[paged]),
        eager_cpu_seconds=statistics.median(cpu[eager]),
    )
