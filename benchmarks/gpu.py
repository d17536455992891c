"""What the Triton kernels do on a GPU, meant for under eight minutes. Correctness first: a wrong kernel is not timed.

    python -m benchmarks.gpu                       # writes benchmarks/results/gpu.json and gpu.md
    python -m benchmarks.gpu --only decode prefill
    python -m benchmarks.gpu --tiny                # in the interpreter: shows that the script runs, and measures nothing

    decode    attention of one token per request: share of the measured copy bandwidth, by the bytes of K and V
    prefill   TFLOP/s against torch's SDPA and FlexAttention, causal, on dense K and V
    states    single-step updates: share of the copy bandwidth, by the bytes of the states, read and written
    scans     packed prompts through the convolution and the scans of Mamba-1 and Mamba-2: tokens per second of one layer
    tables    slot mapping of three groups and the commit of changed entries, microseconds of device time
    generate  tokens per second of random models of real shapes against eager `generate`

Times are medians with a cold L2 cache. A case that does not fit in memory, or for which no time is left, is listed
as such and not left out in silence.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import kvgroups
from benchmarks.report import RESULTS, conditions, write
from kvgroups import ops

SECONDS = 7 * 60
"""No case begins after this."""

BLOCK = 16

Result = dict[str, Any]


class Bench:
    """Where and how long to measure."""

    def __init__(self, *, tiny: bool) -> None:
        self.tiny = tiny
        self.device = torch.device("cpu" if tiny else "cuda")
        self.dtype = torch.float32 if tiny else torch.bfloat16
        self.heads, self.kv_heads = (2, 1) if tiny else (32, 8)
        self.repeats = 1 if tiny else 20
        self.has_checked_attention = False
        self.deadline = time.perf_counter() + SECONDS
        self.cache = torch.empty(1 if tiny else 1 << 28, dtype=torch.uint8, device=self.device)
        self.copy_bytes_per_s = self._copy_bandwidth()

    def seconds(self, call: Callable[[], object]) -> float:
        """Median time of a call on the device, with a cold L2 cache."""
        call()
        times = []
        for _ in range(self.repeats):
            self.cache.zero_()
            times.append(self._once(call))
        return statistics.median(times)

    def _once(self, call: Callable[[], object]) -> float:
        if self.tiny:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1000

    def _copy_bandwidth(self) -> float:
        source = torch.empty(1 << (12 if self.tiny else 30), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))

    def why_not(self, needed_bytes: int) -> str | None:
        """Why a case is not measured."""
        if time.perf_counter() > self.deadline:
            return "no time left"
        if not self.tiny:
            torch.cuda.empty_cache()  # what torch keeps for itself does not count as free
            if needed_bytes > 0.8 * torch.cuda.mem_get_info()[0]:
                return "does not fit in memory"
        return None

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype or self.dtype, device=self.device)

    def int32(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=self.device)


def require(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Stop unless a kernel agrees with fp32 to within a few units of its dtype."""
    tolerance = 8 * torch.finfo(got.dtype).eps * float(expected.abs().max())
    error = float((got.float() - expected.float()).abs().max())
    if not error <= tolerance:
        raise SystemExit(f"{name}: off by {error:.3g}, allowed {tolerance:.3g}. A wrong kernel is not timed.")


def attention(bench: Bench, lengths: Sequence[int], computed: Sequence[int], dim: int) -> tuple[Any, dict[str, Any]]:
    """Operands and options of a step with `lengths` new tokens on `computed` old ones, blocks in random order."""
    tokens, width = sum(lengths), -(-max(computed) // BLOCK) + 1
    num_blocks = sum(-(-each // BLOCK) for each in computed) + 1
    table, free = torch.zeros(len(computed), width, dtype=torch.int32), torch.randperm(num_blocks - 1) + 1
    taken = 0
    for row, each in enumerate(computed):
        held = -(-each // BLOCK)
        table[row, :held] = free[taken : taken + held]
        taken += held
    pages = (bench.randn(num_blocks, bench.kv_heads, BLOCK, dim) for _ in range(2)) if max(computed) else (None, None)
    query, key, value = (bench.randn(tokens, heads, dim) for heads in (bench.heads, *[bench.kv_heads] * 2))
    options = {
        "query_start_loc": bench.int32([0, *torch.tensor(lengths).cumsum(0)]),
        "num_computed_tokens": bench.int32(computed),
        "scale": dim**-0.5,
        "max_query_len": max(lengths),
        "max_seq_len": max(map(sum, zip(lengths, computed, strict=True))),
    }
    return (query, key, value, *pages, table.to(bench.device) if max(computed) else None), options


def check_attention(bench: Bench) -> None:
    """Every head dim, full and in a window: prefill, chunk and decode, few programs and many. Once."""
    if bench.has_checked_attention:
        return
    bench.has_checked_attention = True
    for dim in (64,) if bench.tiny else (64, 128, 256):
        for window in (None, 20):
            for lengths, computed in (([1, 1], [40, 9]), ([1] * 64, [33] * 64), ([40, 5, 1], [0, 30, 700])):
                if bench.tiny:
                    lengths, computed = lengths[:3], [min(each, 40) for each in computed[:3]]
                operands, options = attention(bench, lengths, computed, dim)
                options["window"] = window
                exact = [
                    each.float() if torch.is_tensor(each) and each.is_floating_point() else each for each in operands
                ]
                expected = ops.paged_attention(*exact, **options, backend="torch")
                got = ops.paged_attention(*operands, **options, backend="triton")
                require(f"paged_attention, head dim {dim}, window {window}, {lengths[:3]} new", got, expected)


def decode(bench: Bench) -> Iterator[Result]:
    batches, contexts, dims = (1, 8, 64, 256), (1024, 8192, 65536), (64, 128, 256)
    if bench.tiny:
        batches, contexts, dims = (2,), (64,), (64,)
    check_attention(bench)
    for dim in dims:
        for context in contexts:
            for batch in batches:
                for window in (None, min(context, 1024) // 2 if bench.tiny else 1024):
                    case = {"head_dim": dim, "context": context, "batch": batch, "window": window}
                    token_bytes = 2 * bench.kv_heads * dim * torch.finfo(bench.dtype).bits // 8
                    reason = bench.why_not(batch * context * token_bytes)
                    if reason:
                        yield {**case, "left_out": reason}
                        continue
                    seconds = decode_seconds(bench, batch, context, dim, window)
                    rate = batch * min(context, window or context) * token_bytes / seconds
                    yield {**case, "us": seconds * 1e6, "share_of_copy": rate / bench.copy_bytes_per_s}


def decode_seconds(bench: Bench, batch: int, context: int, dim: int, window: int | None) -> float:
    """One step's attention. A function of its own, so that its pages are gone before the next case asks for room."""
    operands, options = attention(bench, [1] * batch, [context] * batch, dim)
    return bench.seconds(lambda: ops.paged_attention(*operands, **options, window=window, backend="triton"))


def prefill(bench: Bench) -> Iterator[Result]:
    shapes = [(4, 1024, 128), (4, 4096, 64), (4, 4096, 128), (4, 4096, 256), (1, 16384, 128)]
    if bench.tiny:
        shapes = [(1, 48, 64)]
    check_attention(bench)
    for batch, length, dim in shapes:
        case = {"batch": batch, "length": length, "head_dim": dim}
        reason = bench.why_not(8 * batch * length * 2 * (bench.heads + bench.kv_heads) * dim)
        if reason:
            yield {**case, "left_out": reason}
            continue
        operands, options = attention(bench, [length] * batch, [0] * batch, dim)
        q, k, v = (each.unflatten(0, (batch, length)).transpose(1, 2).contiguous() for each in operands[:3])
        calls = {
            "kvgroups": lambda operands=operands, options=options: ops.paged_attention(
                *operands, **options, backend="triton"
            ),
            "sdpa": lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ),
        }
        if not bench.tiny:
            calls["flex"] = flex(q, k, v)
        require("prefill", calls["kvgroups"](), calls["sdpa"]().transpose(1, 2).flatten(0, 1))
        operations = 2 * batch * bench.heads * dim * length * length
        yield {**case, **{f"{name}_tflops": operations / bench.seconds(call) / 1e12 for name, call in calls.items()}}


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], q.shape[2], device=q.device)
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def states(bench: Bench) -> Iterator[Result]:
    heads, width, state = (2, 16, 16) if bench.tiny else (128, 64, 128)
    for batch in (2,) if bench.tiny else (1, 64, 256):
        case = {"batch": batch, "state": f"{heads} x {width} x {state}"}
        reason = bench.why_not(2 * batch * heads * width * state * 4)
        if reason:
            yield {**case, "left_out": reason}
            continue
        held = bench.randn(batch + 1, heads, width, state, dtype=torch.float32)
        slots = bench.int32(range(1, batch + 1))
        x, dt = bench.randn(batch, heads, width), bench.randn(batch, heads)[:, :, None].expand(-1, -1, width)
        A = -bench.randn(heads, dtype=torch.float32).exp()[:, None, None].expand(-1, width, state)
        B, C = (bench.randn(batch, 1, state) for _ in range(2))

        def update(held=held, call=(slots, x, dt, A, B, C), backend="triton"):
            return ops.selective_state_update(held, *call, dt_softplus=True, backend=backend)

        exact = [each.float() if each.is_floating_point() else each for each in (slots, x, dt, A, B, C)]
        require("selective_state_update", update(held.clone()), update(held.clone(), exact, "torch"))
        seconds = bench.seconds(update)
        share = 2 * held[1:].nbytes / seconds / bench.copy_bytes_per_s
        yield {**case, "us": seconds * 1e6, "share_of_copy": share}


def scans(bench: Bench) -> Iterator[Result]:
    for lengths in ((19, 3),) if bench.tiny else ((4096,), (512,) * 8, (16_384,)):
        case = {"prompts": len(lengths), "tokens": sum(lengths)}
        reason = bench.why_not(sum(lengths) << 19)
        if reason:
            yield {**case, "left_out": reason}
            continue
        slots = bench.int32(range(1, len(lengths) + 1))
        starts = torch.cumsum(bench.int32([0, *lengths]), 0, dtype=torch.int32)
        step = {"query_start_loc": starts, "initial_slots": slots, "final_slots": slots}
        for operation, operands, states, own in scan_calls(bench, sum(lengths), len(lengths) + 1):
            options = step | own

            def scan(states=states, operands=operands, backend="triton", operation=operation, options=options):
                return getattr(ops, operation)(*operands, states, **options, backend=backend)

            exact = [each if each is None else each.float() for each in operands]
            ours, theirs = states.clone(), states.clone()
            require(operation, scan(ours).to(bench.dtype), scan(theirs, exact, "torch"))
            require(f"{operation}, states", ours[1:].to(bench.dtype), theirs[1:])
            seconds = bench.seconds(scan)
            yield {**case, "operation": operation, "us": seconds * 1e6, "tokens_per_s": sum(lengths) / seconds}


def scan_calls(bench: Bench, count: int, num_slots: int) -> Iterator[tuple[str, tuple[Any, ...], torch.Tensor, Result]]:
    """Name, operands, states and options of each operation on `count` packed tokens."""
    channels, heads, width, state = (32, 2, 16, 16) if bench.tiny else (8192, 128, 64, 128)
    x, dt = bench.randn(count, channels), bench.randn(count, channels)
    A = -bench.randn(channels, 16, dtype=torch.float32).exp()
    b, c = bench.randn(2, count, 16)
    b2, c2 = bench.randn(2, count, 1, state)
    by_head = x[:, : heads * width].view(count, heads, width)

    def held(*shape: int) -> torch.Tensor:
        return bench.randn(num_slots, *shape, dtype=torch.float32)

    yield "causal_conv1d", (x, bench.randn(channels, 4), None), held(channels, 4), {"activation": "silu"}
    yield "selective_scan", (x, dt, A, b, c), held(channels, 16), {"dt_softplus": True}
    options = {"chunk_size": 256, "dt_softplus": True}
    yield "ssd_scan", (by_head, dt[:, :heads], A[:heads, 0], b2, c2), held(heads, width, state), options


def tables(bench: Bench) -> Iterator[Result]:
    for requests in (2,) if bench.tiny else (8, 64, 256):
        width = 4 if bench.tiny else 4096
        held = [torch.randint(1, 99, (requests, width), dtype=torch.int32).to(bench.device) for _ in range(3)]
        rows, ends = bench.int32(range(requests)), bench.int32(range(1, requests + 1)) + 20
        step = (held, rows, bench.int32(range(requests + 1)), (ends - 1).long(), ends)
        settings = {"block_sizes": [16, 16, 32], "modes": ["paged", "ring", "paged"], "ring_blocks": [0, 4, 0]}
        places, blocks = rows.long() * width, rows + 1

        def slots(backend="triton", step=step, settings=settings):
            return ops.slot_mapping(*step, **settings, backend=backend)

        def commit(table=held[0], places=places, blocks=blocks):
            ops.table_update(table, places, blocks, backend="triton")

        require("slot_mapping", slots().double(), slots("torch").double())
        commit()
        require("table_update", held[0][:, 0].double(), blocks.double())
        yield {
            "requests": requests,
            "slot_mapping_us": bench.seconds(slots) * 1e6,
            "table_update_us": bench.seconds(commit) * 1e6,
        }


def generate(bench: Bench) -> Iterator[Result]:
    for name in ("gemma3_text", "bamba"):
        reason = bench.why_not(8 << 30)
        if reason:
            yield {"model": name, "left_out": reason}
            continue
        model = random_model(bench, name)
        for batch in (1,) if bench.tiny else (1, 32):
            prompts = torch.randint(3, 90, (batch, 8 if bench.tiny else 512), device=bench.device)
            new = 3 if bench.tiny else 64
            rates, tokens = {}, {}
            for side in ("eager", "kvgroups"):
                if side == "kvgroups":
                    kvgroups.patch(model, backend="auto")
                run = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
                model.generate(prompts, **run)
                started = time.perf_counter()
                tokens[side] = model.generate(prompts, **run)  # ends with its tokens on the host
                rates[f"{side}_tokens_per_s"] = batch * new / (time.perf_counter() - started)
            kvgroups.unpatch(model)
            alike = (tokens["eager"] == tokens["kvgroups"]).float().mean().item()
            yield {"model": name, "batch": batch, **rates, "tokens_alike": alike}


def random_model(bench: Bench, name: str) -> torch.nn.Module:
    """Gemma 3 1B's shape, or that of a Bamba of about a billion parameters; tiny ones where nothing is measured."""
    from kvgroups.testing import tiny

    if bench.tiny:
        return tiny(name)
    from transformers import AutoModelForCausalLM, BambaConfig, Gemma3TextConfig

    if name == "bamba":
        config = BambaConfig(hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4,
                             intermediate_size=8192, attn_layer_indices=[4, 12], mamba_n_heads=64)  # fmt: skip
    else:
        config = Gemma3TextConfig(hidden_size=1152, num_hidden_layers=26, num_attention_heads=4, head_dim=256,
                                  num_key_value_heads=1, intermediate_size=6912, sliding_window=512)  # fmt: skip
    with torch.device(bench.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


SECTIONS = {"decode": decode, "prefill": prefill, "states": states, "scans": scans, "tables": tables, "generate": generate}


def markdown(found: dict[str, Any], results: dict[str, list[Result]]) -> str:
    """One table for each section, and the conditions above them."""
    lines = ["; ".join(f"{key} {value}" for key, value in found.items()), ""]
    for name, rows in results.items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        lines += [f"## {name}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(_cell(row.get(column)) for column in columns)} |" for row in rows] + [""]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--tiny", action="store_true", help="sizes for Triton's interpreter; nothing is measured")
    parser.add_argument("--json", type=Path, help="a .md file is written beside it; results/gpu.json, but for --tiny")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("gpu: needs a GPU that torch can see. Without one, --tiny shows that the script runs.")
    if options.tiny:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel is first launched, and triton imported
    path = options.json or (None if options.tiny else RESULTS / "gpu.json")
    torch.manual_seed(0)
    with torch.no_grad():
        bench = Bench(tiny=options.tiny)
        results = {name: list(SECTIONS[name](bench)) for name in options.only}
    device = "cpu, tiny sizes: no measurement" if options.tiny else torch.cuda.get_device_name()
    found = conditions(
        device=device, dtype=str(bench.dtype), heads=f"{bench.heads}/{bench.kv_heads}", block_size=BLOCK,
        copy_gb_per_s=round(bench.copy_bytes_per_s / 1e9, 1),
    )  # fmt: skip
    text = markdown(found, results)
    if path:
        write(path, found, results)
        path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
