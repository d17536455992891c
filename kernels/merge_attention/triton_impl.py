"""Join attention over parts of a context: a program takes one query and head."""

import torch
import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

PARTS_AT_ONCE = 16


def refusals(outputs, lses):
    """The reasons against this form for a call."""
    served = (torch.float32, torch.bfloat16, torch.float16)
    reasons = []
    if outputs.dtype not in served:
        reasons.append(f"needs outputs in float32, bfloat16 or float16, got {outputs.dtype}")
    if lses.dtype != torch.float32:
        reasons.append(f"needs lses in float32, got {lses.dtype}")
    return reasons


def merge_attention(outputs, lses):
    """See `kvgroups.ops.merge_attention`."""
    outputs, lses = outputs.contiguous(), lses.contiguous()
    output, lse = outputs.new_empty(outputs.shape[1:]), lses.new_empty(lses.shape[1:])
    launch_merge(output, lse, outputs, lses)
    return output, lse


def launch_merge(output, lse, outputs, lses):
    """Merge contiguous parts into `output` and, unless it is None, `lse`."""
    num_parts, num_tokens, num_heads, dim_v = outputs.shape
    if not num_tokens * num_heads:
        return
    _merge_kernel[(num_tokens * num_heads,)](
        output,
        output if lse is None else lse,
        outputs,
        lses,
        num_parts,
        num_tokens * num_heads,
        DIM_V=dim_v,
        PADDED_DIM_V=triton.next_power_of_2(max(dim_v, 1)),
        PARTS=PARTS_AT_ONCE,
        HAS_LSE=lse is not None,
    )


@triton.jit(
    do_not_specialize=["num_parts", "num_queries"], do_not_specialize_on_alignment=["output", "lse", "lses"]
)
def _merge_kernel(
    output,  # (queries, DIM_V), all heads of all tokens
    lse,  # (queries,), if HAS_LSE
    outputs,  # (parts, queries, DIM_V)
    lses,  # (parts, queries)
    num_parts,
    num_queries,
    DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM_V)
    peak = float("-inf")
    total = 0.0
    merged = tl.full([PADDED_DIM_V], 0.0, tl.float32)
    for at in range(0, num_parts, PARTS):
        part = at + tl.arange(0, PARTS)
        row = part.to(tl.int64) * num_queries + query
        part_lse = tl.load(lses + row, mask=part < num_parts, other=float("-inf"))
        has_seen = part_lse > float("-inf")
        # An empty part may hold NaN: it is not loaded.
        entries = tl.load(
            outputs + row[:, None] * DIM_V + dim[None, :],
            mask=has_seen[:, None] & (dim < DIM_V)[None, :],
            other=0.0,
        ).to(tl.float32)
        new_peak = tl.maximum(peak, tl.max(part_lse, 0))
        # While nothing is seen the peak is -inf, and -inf - -inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp(part_lse - base)
        fade = tl.exp(peak - base)
        merged = merged * fade + tl.sum(entries * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        peak = new_peak
    merged = merged / tl.where(total > 0, total, 1.0)
    tl.store(output + query * DIM_V + dim, merged.to(output.dtype.element_ty), mask=dim < DIM_V)
    if HAS_LSE:
        tl.store(lse + query, peak + tl.log(tl.where(total > 0, total, 1.0)))
