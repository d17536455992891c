"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

import torch

from kvgroups.kernels.compile_case import CompileCase, int32


def update(batch):
    from kvgroups.kernels.table_update import triton_impl

    packed = int32(3 * batch.tokens)  # as BlockTable packs it: places, then block ids
    places, block_ids = packed[: 2 * batch.tokens].view(torch.int64), packed[2 * batch.tokens :]
    triton_impl.table_update(int32(8, 32), places, block_ids)


CASES = [CompileCase("changed entries", update)]
