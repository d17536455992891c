"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

import torch

from kvgroups.kernels.compile_case import CompileCase, int32


def gather(batch):
    from kvgroups.kernels.gather_kv import triton_impl

    cache = torch.empty(8, 4, 16, 96, dtype=torch.bfloat16)
    triton_impl.gather_kv(
        cache,
        cache,
        int32(batch.requests, 32),
        seq_lens=int32(batch.requests),
        max_seq_len=batch.tokens,
        layout="HND",
    )


CASES = [CompileCase("bf16, head dim 96", gather)]
