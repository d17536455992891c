"""Bytes that requests hold and that groups lease, against other ways to keep caches, on three request traces.

    python -m benchmarks.memory                       # all presets, all traces
    python -m benchmarks.memory bamba-9b --traces chat

No model runs: the real manager keeps accounts on the meta device. Every scheme sees the same live requests at
every step, and in the first two tables none of them shares prefixes. The columns, at the step where most is held and
on average:

    bound    tokens that the step's last queries see, and one state a live request
    held     bytes in blocks that requests own / bound
    less     the same without a request's first and last partial block and the chunk in flight; the target is 1.03
    leased   bytes of leased slabs / held; the target is 1.15
    eager    one tensor a layer, every row padded to the longest live one / held
    uniform  one page size for all layers, as vLLM's hybrid cache manager makes it / held
    fixed    a pool for each group as large as that group's own peak, known beforehand / held
    shared   the bound if a system prompt counted once for all who see it / bound

The third table runs the chat trace again with prefixes filed and found again, in an arena half as large again as what
was leased at the peak without that:

    hits     prompt tokens that were served from cached prefixes / prompt tokens
    held     bytes in blocks that requests own, shared ones once / the same without sharing, at the peaks
    less     held without partial blocks and chunk / the bound with system prompts counted once, at the peak
    cached   bytes that nobody owns and a later request may find / held, on average
    evicted  blocks that were given up for others / blocks that were filed
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.replay import MAX_RUNNING, STEP_TOKENS, Live, live_bytes, replay, uncounted_bytes
from benchmarks.report import RESULTS, conditions, show, tell, write
from benchmarks.traces import CONTEXT, TRACES, Job, make_trace
from kvgroups.manager import Manager
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.schemes import PaddedEager, UniformPage, blocks_held
from kvgroups.specs import KVGroupsConfig
from kvgroups.specs.presets import preset, preset_names

TARGETS = {"less": 1.03, "leased": 1.15}
"""What a ratio may be at the peak."""


def measure(config: KVGroupsConfig, jobs: Sequence[Job]) -> dict[str, Any]:
    """All schemes' bytes over a trace: at the step where most is held, and on average over the steps."""
    eager, uniform = PaddedEager(config), UniformPage.for_config(config)
    steps, group_peaks = [], dict.fromkeys((group.name for group in config.groups), 0)
    for manager, running in replay(config.model_copy(update={"memory": None}), jobs):
        usage = manager.usage()
        for group in usage.groups:
            group_peaks[group.name] = max(group_peaks[group.name], group.held_bytes)
        lengths = [live.total for live in running]
        steps.append(
            {
                "requests": len(running),
                "held": usage.held_bytes,
                "leased": usage.leased_bytes,
                "bound": live_bytes(config, running),
                "shared": live_bytes(config, running, share=True),
                "uncounted": uncounted_bytes(config, running),
                "eager": eager.bytes_for(lengths),
                "uniform": uniform.block_bytes
                * (1 + sum(_uniform_blocks(uniform, live) for live in running)),
            }
        )
    for step in steps:
        step["fixed"] = sum(group_peaks.values())
    peak = max(steps, key=lambda step: step["held"])
    mean = {key: statistics.fmean(step[key] for step in steps) for key in steps[0]}
    return {
        "steps": len(steps),
        "jobs": len(jobs),
        "peak": peak | _ratios(peak),
        "mean": mean | _ratios(mean),
        "peak_leased": max(step["leased"] for step in steps),
    }


def measure_sharing(config: KVGroupsConfig, jobs: Sequence[Job], apart: dict[str, Any]) -> dict[str, float]:
    """The trace with prefixes shared, against `apart`: what `measure` found of it without."""
    memory = int(1.5 * apart["peak_leased"])
    peak, cached, held = {"held": 0.0}, [], []
    for manager, running in replay(config.model_copy(update={"memory": memory}), jobs, share=True):
        usage = manager.usage()
        cached.append(usage.cached_bytes)
        held.append(usage.held_bytes)
        if usage.held_bytes > peak["held"]:
            peak = {
                "held": usage.held_bytes,
                "bound": live_bytes(config, running, share=True),
                "uncounted": uncounted_bytes(config, running),
            }
    stats = manager.prefix_stats
    return {
        "memory": memory,
        "hits": stats.num_hit_tokens / stats.num_query_tokens,
        "held": peak["held"] / apart["peak"]["held"],
        "less": (peak["held"] - peak["uncounted"]) / peak["bound"],
        "cached": statistics.fmean(cached) / statistics.fmean(held),
        "evicted": stats.num_evicted_blocks / max(1, stats.num_filed_blocks),
        "skipped_snapshots": stats.num_skipped_snapshots,
    }


def _uniform_blocks(uniform: UniformPage, live: Live) -> int:
    """Block ids of one request, its chunk in flight counted as ours is."""
    return sum(
        uniform.tables[name] * blocks_held(uniform.config, group, live.total, live.computed)
        for name, group in uniform.groups.items()
    )


def lone_request(name: str = "bamba-9b", memory: int = 2**30, prompt_len: int = 100) -> dict[str, int]:
    """What a short prompt alone leases of an arena, by group, in bytes."""
    config = preset(name).config.model_copy(
        update={"memory": memory, "max_model_len": 4096, "max_num_reqs": 8}
    )
    manager = Manager(config, "meta")
    tables = MultiGroupBlockTable.from_config(config, max_num_reqs=8, device="cpu")
    manager.allocate([manager.open(tables, 0)], [prompt_len])
    return {group.name: group.leased_bytes for group in manager.usage().groups}


def _ratios(step: dict[str, float]) -> dict[str, float]:
    return {
        "held/bound": step["held"] / step["bound"],
        "less/bound": (step["held"] - step["uncounted"]) / step["bound"],
        "shared/bound": step["shared"] / step["bound"],
        **{f"{key}/held": step[key] / step["held"] for key in ("leased", "eager", "uniform", "fixed")},
    }


def _rows(results: Sequence[dict[str, Any]], moment: str) -> list[list[str]]:
    return [
        [
            found["preset"],
            found["trace"],
            f"{found[moment]['requests']:.1f}",
            f"{found[moment]['bound'] / 2**30:.3f}",
            *(f"{found[moment][key]:.3f}" for key in ("held/bound", "less/bound", "leased/held")),
            *(
                f"{found[moment][key]:.2f}"
                for key in ("eager/held", "uniform/held", "fixed/held", "shared/bound")
            ),
        ]
        for found in results
    ]


def main() -> int:
    """Print the table, write the JSON; exit code 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("presets", nargs="*", help="all if none is named")
    parser.add_argument("--traces", nargs="+", choices=sorted(TRACES), default=list(TRACES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "memory.json")
    options = parser.parse_args()

    started, results, sharing, missed = time.monotonic(), [], [], []
    for name in options.presets or preset_names():
        config = preset(name).config
        for trace in options.traces:
            jobs = make_trace(trace, min(config.max_model_len, CONTEXT), options.seed)
            found = measure(config, jobs)
            results.append({"preset": name, "trace": trace, **found})
            if trace == "chat":
                sharing.append({"preset": name, **measure_sharing(config, jobs, found)})
                if sharing[-1]["less"] > TARGETS["less"]:
                    missed.append(f"{name} {trace}, shared: held {sharing[-1]['less']:.3f} of the bound")
            if found["peak"]["less/bound"] > TARGETS["less"]:
                missed.append(f"{name} {trace}: held {found['peak']['less/bound']:.3f} of the bound")
            if found["peak"]["leased/held"] > TARGETS["leased"]:
                missed.append(f"{name} {trace}: leased {found['peak']['leased/held']:.3f} of held")
    alone = lone_request()
    seconds = round(time.monotonic() - started, 1)
    setting = conditions(seed=options.seed, max_running=MAX_RUNNING, step_tokens=STEP_TOKENS, seconds=seconds)
    columns = ["preset", "trace", "requests", "bound GiB", "held", "less", "leased",
               "eager", "uniform", "fixed", "shared"]  # fmt: skip
    show("at the step where most is held", columns, _rows(results, "peak"))
    show("on average over the steps", columns, _rows(results, "mean"))
    ratios = ("hits", "held", "less", "cached", "evicted")
    if sharing:
        show(
            "chat with shared prefixes",
            ["preset", *ratios],
            [[each["preset"], *(f"{each[key]:.3f}" for key in ratios)] for each in sharing],
        )
    print(
        f"a prompt of 100 tokens alone in 1 GiB of bamba-9b leases {alone['state'] / 2**20:.1f} MiB for its state "
        f"and {alone['full'] / 2**20:.2f} MiB for tokens"
    )
    write(options.out, setting, {"traces": results, "sharing": sharing, "lone_request_leases": alone})
    print("\n".join(["targets missed:", *missed]) if missed else "all targets met")
    tell(setting)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
