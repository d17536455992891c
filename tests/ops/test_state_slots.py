"""State slot 0 is the zero state: read as zeros, never looked at, never written."""

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import ShapeError

SHAPES = [(5,), (3, 4), (2, 3, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_gather_reads_each_request_s_slot(shape, dtype, backend, nan_arena):
    _, states = nan_arena(6, *shape, dtype=dtype)
    states[4], states[2] = 4.0, 2.0
    gathered = ops.gather_states(states, torch.tensor([2, 0, 4, 0], dtype=torch.int32), backend=backend)
    assert gathered.dtype == dtype and gathered.is_contiguous()
    assert [row.unique().tolist() for row in gathered] == [[2], [0], [4], [0]]


@pytest.mark.parametrize("shape", SHAPES)
def test_scatter_touches_its_slots_only(shape, backend, nan_arena, assert_same_bits):
    arena, states = nan_arena(6, *shape)
    values = torch.arange(1.0, 5.0).view(-1, *[1] * len(shape)).expand(4, *shape)
    expected = arena.clone()
    size = torch.Size(shape).numel()
    expected[5, 3 : 3 + size], expected[3, 3 : 3 + size] = 1.0, 3.0
    ops.scatter_states(states, torch.tensor([5, 0, 3, 0], dtype=torch.int32), values, backend=backend)
    assert_same_bits(arena, expected)


def test_what_is_gathered_is_a_copy(backend):
    """A snapshot is read-only: a step that updates its state in place must not reach the slot."""
    states = torch.ones(3, 2)
    ops.gather_states(states, torch.tensor([1, 2]), backend=backend).fill_(9.0)
    assert (states == 1).all()


def test_no_gradient_flows_into_the_states(backend):
    states = torch.zeros(3, 2)
    values = torch.ones(1, 2, requires_grad=True)
    ops.scatter_states(states, torch.tensor([1]), values, backend=backend)
    assert not states.requires_grad and states[1].tolist() == [1, 1]


def test_empty_batch(backend):
    states, none = torch.ones(3, 2), torch.zeros(0, dtype=torch.int32)
    assert ops.gather_states(states, none, backend=backend).shape == (0, 2)
    ops.scatter_states(states, none, torch.zeros(0, 2), backend=backend)
    assert (states == 1).all()


def test_values_of_another_dtype_are_refused():
    """Recurrent states stay in fp32 in 16-bit models: a silent cast would hide that they were not."""
    with pytest.raises(ShapeError, match=r"values: expected \(1, 2\) float32 on cpu, got \(1, 2\) bfloat16"):
        ops.scatter_states(torch.ones(3, 2), torch.tensor([1]), torch.ones(1, 2, dtype=torch.bfloat16))
