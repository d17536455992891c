"""Read and write recurrent states: a program copies a run of one request's state.

State slot 0 is never looked at, without leaving requests out: there is no sync and no shape that hangs on
the slots.
"""

import triton
import triton.language as tl

from kvgroups.constants import NULL_BLOCK_ID

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

NULL: tl.constexpr = tl.constexpr(NULL_BLOCK_ID)

ELEMENTS_PER_PROGRAM = 2048


def refusals(states, slots, *values):
    """The reasons against these forms for a call."""
    if states[:1].is_contiguous():
        return []
    return [
        f"needs each state contiguous within its slot, got shape {tuple(states.shape[1:])} with strides "
        f"{states.stride()[1:]}"
    ]


def gather_states(states, slots):
    """See `kvgroups.ops.gather_states`."""
    gathered = states.new_empty(len(slots), *states.shape[1:])
    size = states.shape[1:].numel()
    if gathered.numel():
        grid = (triton.cdiv(size, ELEMENTS_PER_PROGRAM), len(slots))
        _gather_kernel[grid](gathered, states, slots, size, states.stride(0), TILE=ELEMENTS_PER_PROGRAM)
    return gathered


def scatter_states(states, slots, values):
    """See `kvgroups.ops.scatter_states`."""
    size = states.shape[1:].numel()
    if values.numel():
        grid = (triton.cdiv(size, ELEMENTS_PER_PROGRAM), len(slots))
        values = values.detach().contiguous()
        _scatter_kernel[grid](states, slots, values, size, states.stride(0), TILE=ELEMENTS_PER_PROGRAM)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _gather_kernel(gathered, states, slots, size, slot_stride, TILE: tl.constexpr):
    request = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + request).to(tl.int64)
    num_read = tl.where(slot != NULL, size, 0)
    entries = tl.load(states + slot * slot_stride + element, mask=element < num_read, other=0)
    tl.store(gathered + request * size + element, entries, mask=element < size)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _scatter_kernel(states, slots, values, size, slot_stride, TILE: tl.constexpr):
    request = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + request).to(tl.int64)
    num_written = tl.where(slot != NULL, size, 0)
    entries = tl.load(values + request * size + element, mask=element < num_written, other=0)
    tl.store(states + slot * slot_stride + element, entries, mask=element < num_written)
