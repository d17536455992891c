"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

import torch

from kvgroups.kernels.compile_case import CompileCase


def merge(batch):
    from kvgroups.kernels.merge_attention import triton_impl

    parts = torch.empty(batch.requests, batch.tokens, 8, 128, dtype=torch.bfloat16)
    triton_impl.merge_attention(parts, torch.empty(parts.shape[:3]))


CASES = [CompileCase("bf16, head dim 128", merge)]
