"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

from functools import partial

import torch

from kvgroups.kernels.compile_case import CompileCase, packed_slots

BF16 = torch.bfloat16


def scan(batch, dtype=BF16):
    from kvgroups.kernels.selective_scan import triton_impl

    x, projected = (torch.empty(batch.tokens, width, dtype=dtype) for width in (1024, 64))
    triton_impl.selective_scan(
        x,
        x,
        torch.empty(1024, 16),
        projected[:, :16],
        projected[:, 16:32],
        torch.empty(8, 1024, 16),
        D=torch.empty(1024),
        z=x,
        dt_bias=torch.empty(1024),
        dt_softplus=True,
        **packed_slots(batch),
    )


CASES = [
    CompileCase("1024 channels of 16, bf16", scan, may_spill=("sm_80",)),
    CompileCase("1024 channels of 16, fp16", partial(scan, dtype=torch.float16), is_slow=True, may_spill=("sm_80",)),
    CompileCase("1024 channels of 16, fp32", partial(scan, dtype=torch.float32), is_slow=True),
]
