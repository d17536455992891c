"""Copy blocks: a program copies a run of one block's bytes, in the widest words that fit them."""

import torch
import triton
import triton.language as tl

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.strides import in_units

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

NULL: tl.constexpr = tl.constexpr(NULL_BLOCK_ID)

WORDS_PER_PROGRAM = 2048


def copy_blocks(blocks, sources, targets):
    """See `kvgroups.ops.copy_blocks`."""
    if not blocks.numel() or not len(sources):
        return
    words = _in_words(blocks)
    size = words.shape[1]
    unit, (block_stride,) = in_units(size, (words, 0))
    grid = (triton.cdiv(size, WORDS_PER_PROGRAM), len(sources))
    _copy_kernel[grid](words, sources, targets, size, block_stride, UNIT=unit, TILE=WORDS_PER_PROGRAM)


def _in_words(blocks):
    """The blocks as int64, or the widest integer in which size, stride and place of a block are whole numbers."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if not any(number % dtype.itemsize for number in (blocks.shape[1], blocks.stride(0), blocks.data_ptr())):
            return blocks.view(dtype)
    return blocks


# Which blocks are copied, and how many, changes from step to step.
@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])
def _copy_kernel(
    words,  # (blocks, size), contiguous inside a block
    sources,  # (copies,)
    targets,  # (copies,)
    size,
    block_stride,  # in units of UNIT words
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    copy = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    source = tl.load(sources + copy).to(tl.int64)
    target = tl.load(targets + copy).to(tl.int64)
    num_read = tl.where(source != NULL, size, 0)
    num_written = tl.where(target != NULL, size, 0)
    values = tl.load(words + source * block_stride * UNIT + word, mask=word < num_read, other=0)
    tl.store(words + target * block_stride * UNIT + word, values, mask=word < num_written)
