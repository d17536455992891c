"""Changed entries reach the device's table, and no other entry moves."""

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import ShapeError


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def test_entries_land_at_their_places(backend):
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    ops.table_update(table, torch.tensor([6, 0, 11]), int32([50, 51, 0]), backend=backend)
    assert table.tolist() == [[51, 1, 2, 3], [4, 5, 50, 7], [8, 9, 10, 0]]


@pytest.mark.parametrize("num_entries", [1, 255, 256, 257, 600])
def test_any_number_of_entries(num_entries, backend):
    """Around the sizes at which a kernel takes one more program, in an order of places of no meaning."""
    generator = torch.Generator().manual_seed(num_entries)
    table = torch.randint(0, 1000, (20, 40), generator=generator, dtype=torch.int32)
    places = torch.randperm(800, generator=generator)[:num_entries]
    block_ids = torch.randint(1000, 2000, (num_entries,), generator=generator, dtype=torch.int32)
    expected = table.clone()
    expected.view(-1)[places] = block_ids
    ops.table_update(table, places, block_ids, backend=backend)
    assert torch.equal(table, expected)


def test_the_two_parts_of_one_transfer(backend):
    """A block table sends places and ids in one tensor, so the ids begin wherever the places end."""
    packed = torch.zeros(9, dtype=torch.int32)
    packed[:6].view(torch.int64)[:] = torch.tensor([1, 3, 2])
    packed[6:] = int32([7, 8, 9])
    table = torch.zeros(2, 2, dtype=torch.int32)
    ops.table_update(table, packed[:6].view(torch.int64), packed[6:], backend=backend)
    assert table.tolist() == [[0, 7], [9, 8]]


def test_nothing_changed(backend):
    table = torch.ones(2, 2, dtype=torch.int32)
    ops.table_update(table, torch.zeros(0, dtype=torch.int64), int32([]), backend=backend)
    assert (table == 1).all()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"places": int32([1])}, r"places: expected \(\*,\) int64 on cpu, got \(1,\) int32"),
        ({"block_ids": int32([1, 2])}, r"block_ids: expected \(1,\) int32 on cpu, got \(2,\) int32"),
        ({"table": torch.zeros(2, 2)}, r"table: expected \(\*, \*\) int32 on cpu, got \(2, 2\) float32"),
        ({"table": torch.zeros(2, 3, dtype=torch.int32).T}, r"table: expected a contiguous \(3, 2\)"),
    ],
)
def test_a_wrong_call_is_refused(change, words):
    arguments = {
        "table": torch.zeros(2, 2, dtype=torch.int32),
        "places": torch.tensor([1]),
        "block_ids": int32([1]),
    }
    ops.table_update(**arguments)
    with pytest.raises(ShapeError, match=words):
        ops.table_update(**{**arguments, **change})
