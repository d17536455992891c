"""Copies of whole blocks: what is copied, what is zeroed, and every byte that is not touched."""

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import ShapeError


def arena(block_bytes, stride, offset=0, num_blocks=7):
    """Random bytes, and the group's blocks in them: the rest of each stride belongs to others."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(1, 256, (offset + num_blocks * stride,), generator=generator, dtype=torch.uint8)
    return memory, memory.as_strided((num_blocks, block_bytes), (stride, 1), offset)


SHAPES = {
    "a slab's blocks": (512, 512, 0),
    "shorter than their stride": (768, 1024, 256),
    "longer than a program": (20_000, 20_480, 0),
    "not of whole words": (37, 41, 3),
    "of words of four bytes": (36, 44, 4),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_blocks_are_copied_and_nothing_else_is(dtype, shape, backend):
    memory, blocks = arena(*SHAPES[shape])
    expected = memory.clone()
    theirs = expected.as_strided(blocks.shape, blocks.stride(), blocks.storage_offset())
    theirs[4], theirs[2], theirs[6] = blocks[1], blocks[3], 0
    sources = torch.tensor([1, 3, 0, 5, 0], dtype=dtype)
    targets = torch.tensor([4, 2, 6, 0, 0], dtype=dtype)
    ops.copy_blocks(blocks, sources, targets, backend=backend)
    assert torch.equal(memory, expected)


def test_one_source_for_many_targets(backend):
    _, blocks = arena(64, 64)
    tail = blocks[3].clone()
    ops.copy_blocks(blocks, torch.tensor([3, 3, 3]), torch.tensor([1, 2, 5]), backend=backend)
    assert (blocks[[1, 2, 3, 5]] == tail).all()


def test_all_layers_of_a_block_go_in_one_call(backend):
    """Two layers' K and V and a state in another dtype, as a group lays them out in its block."""
    memory = torch.zeros(5 * 256, dtype=torch.uint8)
    layers = [
        memory.view(dtype).as_strided((5, 8), (256 // dtype.itemsize, 1), offset // dtype.itemsize)
        for dtype, offset in ((torch.bfloat16, 0), (torch.bfloat16, 16), (torch.float32, 64), (torch.float32, 96))
    ]
    for layer in layers:
        layer[2] = torch.randn(8, generator=torch.Generator().manual_seed(0)).to(layer.dtype)
    blocks = memory.as_strided((5, 128), (256, 1))
    ops.copy_blocks(blocks, torch.tensor([2]), torch.tensor([4]), backend=backend)
    assert all(torch.equal(layer[4], layer[2]) and layer[4].any() for layer in layers)


def test_nothing_to_copy(backend):
    memory, blocks = arena(64, 64)
    before, none = memory.clone(), torch.zeros(0, dtype=torch.int32)
    ops.copy_blocks(blocks, none, none, backend=backend)
    assert torch.equal(memory, before)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"blocks": torch.zeros(3, 8)}, r"blocks: expected \(\*, \*\) uint8 on cpu, got \(3, 8\) float32"),
        ({"blocks": torch.zeros(8, 3, dtype=torch.uint8).t()}, r"blocks: expected blocks contiguous inside, got strides"),
        ({"sources": torch.tensor([1, 2])}, r"sources: expected \(1,\) int32 or int64"),
        ({"targets": torch.tensor([1.0])}, r"targets: expected \(\*,\) int32 or int64 on cpu, got \(1,\) float32"),
    ],
)
def test_a_wrong_call_is_refused(changed, message):
    arguments = {
        "blocks": torch.zeros(3, 8, dtype=torch.uint8), "sources": torch.tensor([1]), "targets": torch.tensor([2])
    }  # fmt: skip
    ops.copy_blocks(**arguments)
    with pytest.raises(ShapeError, match=message):
        ops.copy_blocks(**arguments | changed)
