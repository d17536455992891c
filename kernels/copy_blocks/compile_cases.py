"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

import torch

from kvgroups.kernels.compile_case import CompileCase, int32


def copy(batch):
    from kvgroups.kernels.copy_blocks import triton_impl

    blocks = torch.empty(8, 3 * 4096, dtype=torch.uint8)[:, : 2 * 4096]
    triton_impl.copy_blocks(blocks, int32(batch.requests), int32(batch.requests))


CASES = [CompileCase("blocks of 8 KiB", copy)]
