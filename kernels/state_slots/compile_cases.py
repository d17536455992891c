"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

import torch

from kvgroups.kernels.compile_case import CompileCase, int32


def gather(batch):
    from kvgroups.kernels.state_slots import triton_impl

    triton_impl.gather_states(torch.empty(8, 4, 16, 16), int32(batch.requests))


def scatter(batch):
    from kvgroups.kernels.state_slots import triton_impl

    states, values = torch.empty(8, 4, 16, 16), torch.empty(batch.requests, 4, 16, 16)
    triton_impl.scatter_states(states, int32(batch.requests), values)


CASES = [CompileCase("gather", gather), CompileCase("scatter", scatter)]
