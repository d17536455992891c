"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

from functools import partial

import torch

from kvgroups.kernels.compile_case import CompileCase, heads_first, int64


def write(batch, dtype=torch.bfloat16, layout="HND", dim=128, dim_v=128):
    from kvgroups.kernels.write_kv import triton_impl

    shapes = [(8, 4, 16, width) if layout == "HND" else (8, 16, 4, width) for width in (dim, dim_v)]
    key_cache, value_cache = (torch.empty(*shape, dtype=dtype) for shape in shapes)
    triton_impl.write_kv(
        heads_first(batch.tokens, 4, dim, dtype),
        heads_first(batch.tokens, 4, dim_v, dtype),
        key_cache,
        value_cache,
        int64(batch.groups, batch.tokens)[-1],
        layout=layout,
    )


CASES = [
    CompileCase("bf16, head dim 128, HND", write),
    CompileCase("fp32, head dims 80 and 40, NHD", partial(write, layout="NHD", dim=80, dim_v=40, dtype=torch.float32)),
]
