"""Kernels on the CPU beside what PyTorch does on dense tensors that are ready-made: ratios of time, 1.0 is equal.

    python -m benchmarks.cpu_kernels                       # everything, on as many threads as PyTorch has
    python -m benchmarks.cpu_kernels decode --threads 1    # one table

    # what a processor with no more than AVX2 would run
    KVGROUPS_CPU_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.cpu_kernels

decode    one query a request over blocks in random order, against `scaled_dot_product_attention` over contiguous K and
          V with the query heads of a KV head packed as rows (its fastest form), for each backend
prefill   a prompt without history, and a chunk on a history, against the same on dense K and V
states    one token through Mamba-1, Mamba-2 and their convolutions in place on slots, against the torch code of
          transformers on dense states

decode also has `products`: attention written as two matrix products and a softmax, which on some processors PyTorch computes
faster in 16 bits than its own attention.

The forms of a row take turns, and each number is the quotient of two medians over the rounds. `wall` is by the clock,
`cpu` by the CPU time of all threads. Where others use the machine as well, trust `cpu`, on one thread only: a team of
threads that waits for one of its own spins. Two layers take turns within a form, so that K and V are not all in the
innermost caches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.report import conditions, show, tell, write
from kvgroups import ops
from kvgroups.ops import dispatch

LAYERS = 2
BLOCK_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEADS = {"8/2 x 64": (8, 2, 64), "32/8 x 128": (32, 8, 128), "4/1 x 256": (4, 1, 256), "12/12 x 64": (12, 12, 64)}
"""Query heads / KV heads x head_dim."""

Case = dict[str, Callable[[], Any]]
"""Forms by name; `dense` is what the others are divided by."""


def measure(case: Case, rounds: int) -> dict[str, dict[str, float]]:
    """Form -> wall and cpu over those of `dense`, and microseconds of a layer."""
    repeats, times = {}, {name: [] for name in case}
    for name, form in case.items():
        form()
        start = time.perf_counter()
        form()
        repeats[name] = max(1, int(0.01 / (time.perf_counter() - start)))
    for _ in range(rounds):
        for name, form in case.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(repeats[name]):
                form()
            spent = time.perf_counter() - wall, time.process_time() - cpu
            times[name].append([seconds / repeats[name] / LAYERS for seconds in spent])
    medians = {name: [statistics.median(each) for each in zip(*spent, strict=True)] for name, spent in times.items()}
    return {
        name: {
            "wall": wall / medians["dense"][0],
            "cpu": cpu / medians["dense"][1],
            "wall_us": wall * 1e6,
            "cpu_us": cpu * 1e6,
        }
        for name, (wall, cpu) in medians.items()
    }


def each_layer(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    def run() -> None:
        for call in calls:
            call()

    return run


def backends(operation: str) -> list[str]:
    """The forms of an operation that a CPU may be given."""
    return [name for name in ("cpu", "torch") if dispatch.choices(operation, torch.device("cpu")).get(name) == []]


def attention_case(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    batch: int,
    computed: int,
    queries: int,
    window: int | None = None,
) -> Case:
    """`queries` tokens a request on `computed` ones in blocks."""
    num_heads, num_kv_heads, dim = heads
    total, width = computed + queries, -(-(computed + queries) // BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    calls: dict[str, list[Callable[[], Any]]] = {"dense": []}
    for _ in range(LAYERS):
        query = randn(batch * queries, num_heads, dim)
        key, value = randn(batch * queries, num_kv_heads, dim), randn(batch * queries, num_kv_heads, dim)
        pages = randn(2, batch * width + 1, num_kv_heads, BLOCK_SIZE, dim)
        table = (torch.randperm(batch * width, generator=generator) + 1).int().view(batch, width)
        options = {
            "query_start_loc": torch.arange(0, batch * queries + 1, queries, dtype=torch.int32),
            "num_computed_tokens": torch.full((batch,), computed, dtype=torch.int32),
            "scale": dim**-0.5,
            "window": window,
        }
        operands = (query, key, value, pages[0], pages[1], table) if computed else (query, key, value, None, None, None)
        for backend in backends("paged_attention"):
            calls.setdefault(backend, []).append(
                lambda operands=operands, options=options, backend=backend: ops.paged_attention(
                    *operands, **options, backend=backend
                )
            )
        seen = total if window is None or queries > 1 else min(total, window)
        dense = randn(2, batch, num_kv_heads, seen, dim)
        calls["dense"].append(_dense(query.view(batch, queries, num_kv_heads, -1, dim), *dense, computed, window))
        if queries == 1:
            calls.setdefault("products", []).append(_products(query.view(batch, num_kv_heads, -1, dim), *dense))
    return {name: each_layer(layers) for name, layers in calls.items()}


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, computed: int, window: int | None
) -> Callable[[], Any]:
    """PyTorch's attention of query (b, t, h, g, d) over key and value (b, h, n, d); a mask is ready-made."""
    b, t, h, g, d = query.shape
    if t == 1:
        packed = query.reshape(b, h, g, d)
        return lambda: F.scaled_dot_product_attention(packed, key, value)
    query = query.permute(0, 2, 3, 1, 4).reshape(b * h, g, t, d)
    key, value = (each.flatten(0, 1)[:, None].expand(-1, g, -1, -1) for each in (key, value))
    if not computed and window is None:
        return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)
    at, query_at = torch.arange(computed + t), torch.arange(computed, computed + t)[:, None]
    mask = (at <= query_at) & (at > query_at - (window or computed + t))
    return lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def _products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[[], Any]:
    """The same of query (b, h, g, d), without PyTorch's attention."""
    scale = query.shape[-1] ** -0.5
    return lambda: ((query @ key.mT) * scale).softmax(-1) @ value


def decode_cases(quick: bool) -> Iterator[tuple[tuple[str, ...], Case]]:
    batches, contexts = ((1,), (256,)) if quick else ((1, 4, 32), (256, 1024, 8192))
    for name, dtype in DTYPES.items():
        for heads in [*HEADS][: 1 if quick else None]:
            for batch in batches:
                for context in contexts:
                    if batch * context <= 32768:
                        case = attention_case(HEADS[heads], dtype, batch=batch, computed=context, queries=1)
                        yield (name, heads, f"{batch} x {context}"), case


def prefill_cases(quick: bool) -> Iterator[tuple[tuple[str, ...], Case]]:
    shapes = ((0, 64, None),) if quick else (
        (0, 64, None), (0, 1024, None), (0, 1024, 256), (0, 2048, None), (1024, 64, None), (1024, 256, None),
        (1024, 256, 256),
    )  # fmt: skip
    for name, dtype in DTYPES.items():
        for heads in [*HEADS][: 1 if quick else None]:
            for computed, queries, window in shapes:
                case = attention_case(
                    HEADS[heads], dtype, batch=1, computed=computed, queries=queries, window=window
                )
                what = f"{queries} on {computed}" + ("" if window is None else f", window {window}")
                yield (name, heads, what), case


def state_cases(quick: bool) -> Iterator[tuple[tuple[str, ...], Case]]:
    from transformers.models.mamba import modeling_mamba
    from transformers.models.mamba2 import modeling_mamba2

    shapes = {"mamba1 2048 x 16": (2048, 16), "mamba2 32 x 64 x 128": (32, 64, 128)}
    for name, dtype in DTYPES.items():
        for batch in (1,) if quick else (1, 8, 32):
            for what, shape in shapes.items():
                eager = (
                    modeling_mamba.mamba_selective_state_update
                    if len(shape) == 2
                    else modeling_mamba2.mamba2_selective_state_update
                )
                yield (name, what, f"batch {batch}"), update_case(shape, dtype, batch, eager)
            yield (name, "convolution 2048 x 4", f"batch {batch}"), convolution_case(
                2048, 4, dtype, batch, modeling_mamba.causal_conv1d_update
            )


def update_case(shape: tuple[int, ...], dtype: torch.dtype, batch: int, eager: Callable[..., Any]) -> Case:
    """One token through the recurrence; states are fp32, as transformers keeps them for both."""
    *inner, state_size = shape
    generator = torch.Generator().manual_seed(0)

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    calls: dict[str, list[Callable[[], Any]]] = {"dense": []}
    for _ in range(LAYERS):
        states = torch.randn(batch + 1, *shape, generator=generator)
        groups = [1] if len(shape) == 3 else []
        x, dt, b, c = randn(batch, *inner), randn(batch, *inner), *randn(2, batch, *groups, state_size)
        a, d, bias = -torch.rand(shape, generator=generator), randn(*inner), randn(*inner)
        if len(shape) == 3:  # one step size and one decay a head
            dt, bias = dt[..., :1].expand(batch, *inner), bias[:, :1].expand(*inner)
            a = a[:, :1, :1].expand(*shape)
        slots, options = torch.randperm(batch, generator=generator) + 1, {"D": d, "dt_bias": bias, "dt_softplus": True}
        dense = states[1:].clone()
        calls["dense"].append(
            lambda state=dense, x=x, dt=dt, a=a, b=b, c=c, options=options: eager(state, x, dt, a, b, c, **options)
        )
        for backend in backends("selective_state_update"):
            calls.setdefault(backend, []).append(
                lambda states=states, slots=slots, x=x, dt=dt, a=a, b=b, c=c, options=options, backend=backend: (
                    ops.selective_state_update(states, slots, x, dt, a, b, c, **options, backend=backend)
                )
            )
    return {name: each_layer(layers) for name, layers in calls.items()}


def convolution_case(
    channels: int, width: int, dtype: torch.dtype, batch: int, eager: Callable[..., Any]
) -> Case:
    """One token through a causal convolution."""
    generator = torch.Generator().manual_seed(0)

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    calls: dict[str, list[Callable[[], Any]]] = {"dense": []}
    for _ in range(LAYERS):
        states, x = randn(batch + 1, channels, width), randn(batch, channels)
        weight, bias = randn(channels, width), randn(channels)
        slots = torch.randperm(batch, generator=generator) + 1
        dense = states[1:].clone()
        calls["dense"].append(
            lambda state=dense, x=x[:, :, None], weight=weight, bias=bias: eager(x, state, weight, bias, "silu")
        )
        for backend in backends("causal_conv1d_update"):
            calls.setdefault(backend, []).append(
                lambda states=states, slots=slots, x=x, weight=weight, bias=bias, backend=backend: (
                    ops.causal_conv1d_update(x, states, slots, weight, bias, activation="silu", backend=backend)
                )
            )
    return {name: each_layer(layers) for name, layers in calls.items()}


TABLES: dict[str, Callable[[bool], Iterator[tuple[tuple[str, ...], Case]]]] = {
    "decode": decode_cases,
    "prefill": prefill_cases,
    "states": state_cases,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=[*TABLES], metavar="table", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one small shape of each, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the numbers and their conditions there too")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.tables) - set(TABLES)):
        parser.error(f"no table {', '.join(unknown)}; there are {', '.join(TABLES)}")
    torch.set_num_threads(options.threads)
    found = conditions(
        threads=options.threads,
        rounds=options.rounds,
        cpu_kernels=str(dispatch.cpu_kernels()["isa"]),
        torch_runs=torch.backends.cpu.get_cpu_capability(),
    )
    results: dict[str, list[dict[str, Any]]] = {}
    with torch.no_grad():
        for table in options.tables:
            results[table] = []
            for names, case in TABLES[table](options.quick):
                print(table, *names, file=sys.stderr, flush=True)
                results[table].append({"case": " ".join(names), "forms": measure(case, options.rounds)})
            rows = [
                (
                    row["case"],
                    form,
                    f"{times['wall']:.2f}",
                    f"{times['cpu']:.2f}",
                    f"{times['wall_us']:.0f}",
                    f"{row['forms']['dense']['wall_us']:.0f}",
                )
                for row in results[table]
                for form, times in row["forms"].items()
                if form != "dense"
            ]
            show(table, ("case", "form", "wall / dense", "cpu / dense", "us", "dense us"), rows)
    tell(found)
    if options.json:
        write(options.json, found, results)


if __name__ == "__main__":
    main()
