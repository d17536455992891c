"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

import torch

from kvgroups.kernels.compile_case import CompileCase, int32, packed_slots

BF16 = torch.bfloat16


def update(batch):
    from kvgroups.kernels.causal_conv1d import triton_impl

    triton_impl.causal_conv1d_update(
        torch.empty(batch.requests, 1000, dtype=BF16),
        torch.empty(8, 1000, 4, dtype=BF16),
        int32(batch.requests),
        torch.empty(1000, 4, dtype=BF16),
        torch.empty(1000, dtype=BF16),
        activation="silu",
    )


def convolve(batch):
    from kvgroups.kernels.causal_conv1d import triton_impl

    projected = torch.empty(batch.tokens, 1024, dtype=BF16)
    triton_impl.causal_conv1d(
        projected[:, :1000],
        torch.empty(1000, 4, dtype=BF16),
        torch.empty(1000, dtype=BF16),
        torch.empty(8, 1000, 4, dtype=BF16),
        activation="silu",
        **packed_slots(batch),
    )


CASES = [
    CompileCase("single step, bf16, 1000 channels", update),
    CompileCase("packed tokens, bf16, 1000 channels", convolve),
]
