"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

import torch

from kvgroups.kernels.compile_case import CompileCase, int32

BF16 = torch.bfloat16


def update_mamba1(batch):
    from kvgroups.kernels.state_update import triton_impl

    x = torch.empty(batch.requests, 1024, dtype=BF16)
    projected = torch.empty(batch.requests, 64, dtype=BF16)
    triton_impl.selective_state_update(
        torch.empty(8, 1024, 16),
        int32(batch.requests),
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


def update_mamba2(batch):
    from kvgroups.kernels.state_update import triton_impl

    projected = torch.empty(batch.requests, 24 * 64 + 2 * 2 * 128, dtype=BF16)
    b_and_c = projected[:, 24 * 64 :].view(batch.requests, 2, 2, 128)
    per_head = torch.empty(24)[:, None].expand(24, 64)
    triton_impl.selective_state_update(
        torch.empty(8, 24, 64, 128),
        int32(batch.requests),
        projected[:, : 24 * 64].view(batch.requests, 24, 64),
        torch.empty(batch.requests, 24, dtype=BF16)[:, :, None].expand(batch.requests, 24, 64),
        per_head[:, :, None].expand(24, 64, 128),
        b_and_c[:, 0],
        b_and_c[:, 1],
        D=per_head,
        dt_bias=per_head,
        dt_softplus=True,
    )


CASES = [
    CompileCase("Mamba-1, 1024 channels of 16", update_mamba1),
    CompileCase("Mamba-2, 24 heads of 64 by 128", update_mamba2),
]
