"""Run every Triton wrapper with a dry driver and print what it compiled, as JSON. A process of its own.

    python tests/ops/compile_kernels.py sm_90 [--all]

Without `--all`: each kernel once, and attention in every tile for 16-bit models. With it: fp32 and fp16 too.
"""

import json
import sys
from dataclasses import asdict
from functools import partial

import torch

from kvgroups.kernels.causal_conv1d import triton_impl as causal_conv1d
from kvgroups.kernels.gather_kv import triton_impl as gather_kv
from kvgroups.kernels.merge_attention import triton_impl as merge_attention
from kvgroups.kernels.paged_attention import triton_impl as paged_attention
from kvgroups.kernels.slot_mapping import triton_impl as slot_mapping
from kvgroups.kernels.state_slots import triton_impl as state_slots
from kvgroups.kernels.state_update import triton_impl as state_update
from kvgroups.kernels.table_update import triton_impl as table_update
from kvgroups.kernels.write_kv import triton_impl as write_kv
from kvgroups.testing.dry_driver import compile_only

BF16 = torch.bfloat16


def int32(*sizes):
    return torch.zeros(*sizes, dtype=torch.int32)


def int64(*sizes):
    return torch.zeros(*sizes, dtype=torch.int64)


# One call of each operation. What is left open is the batch: its tokens and requests, and the KV-cache groups.


def map_slots(tokens, requests, groups):
    tables = [int32(8, 32) for _ in range(groups)]
    settings = {"block_sizes": [16] * groups, "modes": ["ring"] * groups, "ring_blocks": [4] * groups}
    slot_mapping.slot_mapping(
        tables, int32(requests), int32(requests + 1), int64(tokens), int32(requests), **settings
    )


def update_table(tokens, requests, groups):
    packed = int32(3 * tokens)  # as BlockTable packs it: places, then block ids
    table_update.table_update(int32(8, 32), packed[: 2 * tokens].view(torch.int64), packed[2 * tokens :])


def store(tokens, requests, groups, dtype=BF16, layout="HND", dim=128, dim_v=128):
    shapes = [(8, 4, 16, width) if layout == "HND" else (8, 16, 4, width) for width in (dim, dim_v)]
    write_kv.write_kv(
        heads_first(tokens, 4, dim, dtype),
        heads_first(tokens, 4, dim_v, dtype),
        *(torch.empty(*shape, dtype=dtype) for shape in shapes),
        int64(groups, tokens)[-1],
        layout=layout,
    )


def gather(tokens, requests, groups):
    cache = torch.empty(8, 4, 16, 96, dtype=BF16)
    gather_kv.gather_kv(
        cache, cache, int32(requests, 32), seq_lens=int32(requests), max_seq_len=tokens, layout="HND"
    )


def read_states(tokens, requests, groups):
    state_slots.gather_states(torch.empty(8, 4, 16, 16), int32(requests))


def write_states(tokens, requests, groups):
    state_slots.scatter_states(torch.empty(8, 4, 16, 16), int32(requests), torch.empty(requests, 4, 16, 16))


def convolve(tokens, requests, groups):
    causal_conv1d.causal_conv1d_update(
        torch.empty(requests, 1000, dtype=BF16),
        torch.empty(8, 1000, 4, dtype=BF16),
        int32(requests),
        torch.empty(1000, 4, dtype=BF16),
        torch.empty(1000, dtype=BF16),
        activation="silu",
    )


def update_mamba1(tokens, requests, groups):
    x, projected = torch.empty(requests, 1024, dtype=BF16), torch.empty(requests, 64, dtype=BF16)
    state_update.selective_state_update(
        torch.empty(8, 1024, 16),
        int32(requests),
        x,
        x,
        torch.empty(1024, 16),
        projected[:, :16],
        projected[:, 16:32],
        D=torch.empty(1024),
        z=x,
        dt_bias=torch.empty(1024),
        dt_softplus=True,
    )


def update_mamba2(tokens, requests, groups):
    projected = torch.empty(requests, 24 * 64 + 2 * 2 * 128, dtype=BF16)
    b_and_c = projected[:, 24 * 64 :].view(requests, 2, 2, 128)
    per_head = torch.empty(24)[:, None].expand(24, 64)
    state_update.selective_state_update(
        torch.empty(8, 24, 64, 128),
        int32(requests),
        projected[:, : 24 * 64].view(requests, 24, 64),
        torch.empty(requests, 24, dtype=BF16)[:, :, None].expand(requests, 24, 64),
        per_head[:, :, None].expand(24, 64, 128),
        b_and_c[:, 0],
        b_and_c[:, 1],
        D=per_head,
        dt_bias=per_head,
        dt_softplus=True,
    )


def attend(tokens, requests, groups, dtype=BF16, dim=128, dim_v=None, heads=8, has_history=True, **options):
    dim_v = dim if dim_v is None else dim_v
    pages = (
        torch.empty(8, 2, 16, dim, dtype=dtype),
        torch.empty(8, 2, 16, dim_v, dtype=dtype),
        int32(requests, 32),
    )
    paged_attention.paged_attention(
        heads_first(tokens, heads, dim, dtype),
        heads_first(tokens, 2, dim, dtype),
        heads_first(tokens, 2, dim_v, dtype),
        *(pages if has_history else (None, None, None)),
        query_start_loc=int32(requests + 1),
        num_computed_tokens=int32(requests),
        scale=1.0,
        **options,
    )


def merge(tokens, requests, groups):
    merge_attention.merge_attention(
        torch.empty(requests, tokens, 8, 128, dtype=BF16), torch.empty(requests, tokens, 8)
    )


def heads_first(tokens, heads, dim, dtype):
    """(tokens, heads, dim) as a rotary embedding leaves it: the stride between heads grows with the tokens."""
    return torch.empty(heads, tokens, dim, dtype=dtype).transpose(0, 1)


MANY, FEW = {"tokens": 100, "requests": 3, "groups": 4}, {"tokens": 3, "requests": 3, "groups": 4}


def attend_in_every_tile(*dtypes):
    return [
        (partial(attend, dtype=dtype, dim=dim), batch)
        for dtype in dtypes
        for _, dim in paged_attention.PREFILL
        if (dtype.itemsize, dim) in paged_attention.PREFILL
        for batch in (MANY, FEW)
    ]


CALLS = [
    *((call, MANY) for call in (map_slots, update_table, store, gather, read_states, write_states)),
    (merge, MANY),
    (partial(attend, return_lse=True), MANY),
    *((call, MANY) for call in (convolve, update_mamba1, update_mamba2)),
    (partial(store, layout="NHD", dim=80, dim_v=40, dtype=torch.float32), MANY),
    *attend_in_every_tile(BF16),
    (partial(attend, dtype=torch.float32), FEW),
    (partial(attend, has_history=False, dim=80, dim_v=64), MANY),
    (partial(attend, heads=14, softcap=50.0, sinks=torch.empty(14), window=64, ring_blocks=4), FEW),
]
SLOW_CALLS = [
    *attend_in_every_tile(torch.float32),
    *attend_in_every_tile(torch.float16),
    (partial(attend, heads=256), FEW),
]

OTHER_BATCHES = [
    {"tokens": 1, "requests": 1, "groups": 1},
    {"tokens": 16, "requests": 16, "groups": 2},
    {"tokens": 17, "requests": 32, "groups": 8},
    {"tokens": 48, "requests": 1, "groups": 1},
    {"tokens": 113, "requests": 5, "groups": 3},
    {"tokens": 4096, "requests": 255, "groups": 16},
]


def main(target, *flags):
    compilations = compile_only(target)
    for call, batch in CALLS + (SLOW_CALLS if "--all" in flags else []):
        call(**batch)
    report = [asdict(each) for each in compilations]
    for call in (map_slots, update_table, store, gather, read_states, write_states, convolve, attend, merge):
        for batch in OTHER_BATCHES:
            call(**batch)
    for call in (update_mamba1, update_mamba2):
        for batch in OTHER_BATCHES:
            call(**batch)
    recompiled = [each.kernel for each in compilations[len(report) :]]
    print(json.dumps({"kernels": report, "recompiled_for_another_batch": recompiled}))


if __name__ == "__main__":
    main(*sys.argv[1:])
