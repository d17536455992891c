"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

from functools import partial

import torch

from kvgroups.kernels.compile_case import FEW, MANY, CompileCase, heads_first, int32

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


def attend(batch, dtype=BF16, dim=128, dim_v=None, heads=8, has_history=True, **options):
    from kvgroups.kernels.paged_attention import triton_impl

    dim_v = dim if dim_v is None else dim_v
    pages = (
        torch.empty(8, 2, 16, dim, dtype=dtype),
        torch.empty(8, 2, 16, dim_v, dtype=dtype),
        int32(batch.requests, 32),
    )
    triton_impl.paged_attention(
        heads_first(batch.tokens, heads, dim, dtype),
        heads_first(batch.tokens, 2, dim, dtype),
        heads_first(batch.tokens, 2, dim_v, dtype),
        *(pages if has_history else (None, None, None)),
        query_start_loc=int32(batch.requests + 1),
        num_computed_tokens=int32(batch.requests),
        scale=1.0,
        **options,
    )


def in_both_tiles(dtype, dim, **notes):
    name = f"{SHORT[dtype]}, head dim {dim}"
    fast = {"needs_matrix": dtype != FP32, "needs_wide_loads": dtype != FP32, **notes}
    return [
        CompileCase(f"prefill, {name}", partial(attend, dtype=dtype, dim=dim), MANY, **fast),
        CompileCase(f"decode, {name}", partial(attend, dtype=dtype, dim=dim), FEW, **fast),
    ]


CASES = [
    *(case for dim in (64, 128, 256) for case in in_both_tiles(BF16, dim)),
    *(case for dtype in (FP16, FP32) for dim in (64, 128, 256) for case in in_both_tiles(dtype, dim, is_slow=True)),
]
