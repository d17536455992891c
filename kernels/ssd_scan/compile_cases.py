"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

from functools import partial

import torch

from kvgroups.kernels.compile_case import CompileCase, packed_slots

BF16 = torch.bfloat16


def scan(batch, dtype=BF16, head_dim=64, state_size=128):
    from kvgroups.kernels.ssd_scan import triton_impl

    heads, groups = 24, 2
    projected = torch.empty(batch.tokens, heads * head_dim + 2 * groups * state_size, dtype=dtype)
    b_and_c = projected[:, heads * head_dim :].view(batch.tokens, 2, groups, state_size)
    triton_impl.ssd_scan(
        projected[:, : heads * head_dim].view(batch.tokens, heads, head_dim),
        torch.empty(batch.tokens, heads, dtype=dtype),
        torch.empty(heads),
        b_and_c[:, 0],
        b_and_c[:, 1],
        torch.empty(8, heads, head_dim, state_size),
        chunk_size=256,
        D=torch.empty(heads),
        dt_bias=torch.empty(heads),
        dt_softplus=True,
        is_limited=torch.zeros(batch.requests, dtype=torch.bool),
        **packed_slots(batch),
    )


def case(name, *, may_spill=(), is_slow=True, **options):
    return CompileCase(
        name,
        partial(scan, **options),
        needs_matrix=True,
        without_matrix=("_step_kernel",),
        may_spill=may_spill,
        is_slow=is_slow,
    )


CASES = [
    case("24 heads of 64 by 128, bf16", is_slow=False),
    case("64 by 128, fp16", dtype=torch.float16),
    case("64 by 128, fp32", dtype=torch.float32, may_spill=("sm_80",)),
    case("64 by 64, bf16", state_size=64, may_spill=("sm_80",)),
    case("64 by 256, bf16", state_size=256, may_spill=("sm_80", "sm_90", "gfx942")),
    case("80 by 16, bf16", head_dim=80, state_size=16),
]
