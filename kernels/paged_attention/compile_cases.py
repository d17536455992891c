"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

from functools import partial

import torch

from kvgroups.kernels.compile_case import FEW, MANY, CompileCase, heads_first, int32

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


def attend(
    batch,
    dtype=BF16,
    dim=128,
    dim_v=None,
    heads=8,
    block_size=16,
    layout="HND",
    has_history=True,
    **options,
):
    from kvgroups.kernels.paged_attention import triton_impl

    dim_v = dim if dim_v is None else dim_v
    inner = (2, block_size) if layout == "HND" else (block_size, 2)
    pages = [torch.empty(8, *inner, width, dtype=dtype) for width in (dim, dim_v)]
    pages.append(int32(batch.requests, 32))
    triton_impl.paged_attention(
        heads_first(batch.tokens, heads, dim, dtype),
        heads_first(batch.tokens, 2, dim, dtype),
        heads_first(batch.tokens, 2, dim_v, dtype),
        *(pages if has_history else (None, None, None)),
        query_start_loc=int32(batch.requests + 1),
        num_computed_tokens=int32(batch.requests),
        scale=1.0,
        layout=layout,
        **options,
    )


def kinds(dtype, dim, **notes):
    """A prefill and a decode, each split over its keys and not."""
    name = f"{SHORT[dtype]}, head dim {dim}"
    fast = {"needs_matrix": dtype != FP32, "needs_wide_loads": dtype != FP32, **notes}
    call = partial(attend, dtype=dtype, dim=dim)
    return [
        CompileCase(f"prefill, {name}", partial(call, max_seq_len=100), MANY, **fast),
        CompileCase(f"decode, {name}", partial(call, max_seq_len=100), FEW, **fast),
        CompileCase(f"split prefill, {name}", partial(call, max_seq_len=8192), MANY, **fast),
        CompileCase(f"split decode, {name}", partial(call, max_seq_len=8192), FEW, **fast),
    ]


def usual(dtype, dim, **notes):
    """A prefill that is not split, and a decode that is."""
    prefill, _, _, decode = kinds(dtype, dim, takes_any_batch=False, **notes)
    return [prefill, decode]


def option(name, batch=FEW, is_slow=True, **options):
    call = partial(attend, max_seq_len=100, **options)
    return CompileCase(
        name, call, batch, needs_matrix=True, needs_wide_loads=True, is_slow=is_slow, takes_any_batch=False
    )


EVERYWHERE = ("sm_80", "sm_90", "sm_100", "gfx942")

CASES = [
    *kinds(BF16, 128),
    *usual(BF16, 64),
    *usual(BF16, 256),
    option("14 heads, softcap, sinks, ring, lse", is_slow=False, heads=14, softcap=50.0, sinks=torch.empty(14),
           window=64, ring_blocks=4, return_lse=True),
    *(case for dim in (32, 80, 96, 512) for case in usual(BF16, dim, is_slow=True)),
    *(case for dim in (64, 128, 256) for case in usual(FP16, dim, is_slow=True)),
    *(case for dim in (64, 128, 256) for case in usual(FP32, dim, is_slow=True)),
    *usual(FP32, 512, is_slow=True, may_spill=EVERYWHERE),
    *(option(f"blocks of {size}, {kind}", batch, block_size=size)
      for size in (1, 48, 64, 256) for kind, batch in (("prefill", MANY), ("decode", FEW))),
    option("fresh prompt, V narrower than K", MANY, has_history=False, dim=96, dim_v=64),
    option("NHD", MANY, layout="NHD"),
    option("a tile of 64 query heads", heads=128),
    option("a tile of 128 query heads", heads=256),
]  # fmt: skip
