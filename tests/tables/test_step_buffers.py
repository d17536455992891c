"""A step's metadata lies in buffers that live as long as the tables: same shape, same memory, and nothing left over."""

import numpy as np
import pytest
import torch

from kvgroups.block_table import BlockTable
from kvgroups.geometry import BatchGeometry
from kvgroups.multi_group_block_table import MultiGroupBlockTable

SIZES = {"full": 16, "window": 4}


def filled_tables() -> MultiGroupBlockTable:
    """Rows 0 to 7, of 400 tokens each, and a state a row."""
    tables = {name: BlockTable(8, 4096, size) for name, size in SIZES.items()}
    tables["ring"] = BlockTable(8, 4096, 4, slot_mapping="ring", ring_blocks=3)
    tables["state"] = BlockTable(8, 4096, 1, slot_mapping="none")
    free = np.random.default_rng(0).permutation(np.arange(1, 4096))
    for row in range(8):
        for table in tables.values():
            count = min(table.width, -(-400 // table.block_size))
            taken, free = np.split(free, [count])
            table.add_row(row, taken)
    multi = MultiGroupBlockTable(tables)
    multi.commit()
    return multi


def step(tables, rows, query_lens, computed, **padded):
    geometry = BatchGeometry.build(rows, query_lens, computed, **padded)
    return geometry, tables.compute_slot_mapping(geometry), tables.gather(geometry)


def pointers(geometry, slots, rows):
    tensors = [*vars(geometry.tensors("cpu")).values(), *slots.values(), *rows.values()]
    return [tensor.data_ptr() for tensor in tensors]


def test_a_shape_that_was_seen_before_is_the_same_memory():
    tables = filled_tables()
    step(tables, list(range(8)), [100] * 8, [0] * 8)
    second = pointers(*step(tables, [5, 1], [3, 3], [60, 2]))
    size = tables.buffers.nbytes
    assert second == pointers(*step(tables, [2, 4], [2, 4], [9, 40]))
    assert tables.buffers.nbytes == size


def test_a_step_has_nothing_of_the_one_before():
    tables, fresh = filled_tables(), filled_tables()
    step(tables, list(range(8)), [40] * 8, [0] * 8)
    for case in (
        ([3], [1], [30], {"num_padded_reqs": 4, "num_padded_tokens": 7}),
        ([], [], [], {"num_padded_reqs": 2, "num_padded_tokens": 3}),
        ([6, 0, 2], [5, 0, 1], [11, 7, 390], {"num_padded_reqs": 5, "num_padded_tokens": 8}),
    ):
        *arguments, padded = case
        geometry, slots, rows = step(tables, *arguments, **padded)
        alone = BatchGeometry.build(*arguments, **padded)
        for name, table in fresh.tables.items():
            assert slots[name].tolist() == table.compute_slot_mapping(alone).tolist(), name
            assert rows[name].tolist() == table.gather(alone).tolist(), name
        for mine, other in zip(
            vars(geometry.tensors("cpu")).values(), vars(alone.tensors("cpu")).values(), strict=True
        ):
            assert mine.tolist() == other.tolist()


def test_a_geometry_whose_buffers_went_on_is_moved_anew():
    tables = filled_tables()
    first, _, _ = step(tables, [1, 2], [1, 1], [10, 20])
    before = [tensor.tolist() for tensor in vars(first.tensors("cpu")).values()]
    step(tables, [6, 7], [1, 1], [30, 40])
    assert [tensor.tolist() for tensor in vars(first.tensors("cpu")).values()] == before


@pytest.mark.parametrize(
    ("longest", "widths"),
    [
        pytest.param(1, {"full": 16, "window": 16}, id="a first token"),
        pytest.param(64, {"full": 16, "window": 16}, id="64 tokens in 16 blocks of 4"),
        pytest.param(65, {"full": 16, "window": 32}, id="one more"),
        pytest.param(400, {"full": 32, "window": 128}, id="400 tokens: 25 blocks of 16, 100 of 4"),
    ],
)
def test_rows_are_as_wide_as_the_step_needs(longest, widths):
    tables = filled_tables()
    _, _, rows = step(tables, [0, 1], [1, 1], [longest - 1, 0])
    assert {name: found.shape[1] for name, found in rows.items()} == {**widths, "ring": 3, "state": 1}
    for name, found in rows.items():
        width = found.shape[1]
        assert found.tolist() == tables[name].table[:2, :width].tolist()
        assert width * tables[name].block_size >= longest or name in ("ring", "state")


@pytest.mark.parametrize(("num_reqs", "num_tokens"), [(1, 1), (3, 7), (5, 11), (8, 64)])
def test_every_part_begins_where_aligned_kernels_can_read(num_reqs, num_tokens):
    tables = filled_tables()
    query_lens = [num_tokens - num_reqs + 1] + [1] * (num_reqs - 1)
    found = step(tables, list(range(num_reqs)), query_lens, [0] * num_reqs)
    assert {pointer % 16 for pointer in pointers(*found)} == {0}


def test_a_step_outside_of_inference_mode_follows_one_inside():
    tables = filled_tables()
    with torch.inference_mode():
        step(tables, [0, 1], [1, 1], [10, 20])
        tables.append_row(0, {"full": [9]})
        tables.commit()
    tables.append_row(1, {"full": [10]})
    tables.commit()
    _, slots, _ = step(tables, [0, 1], [1, 1], [10, 20])
    assert (slots["full"] >= 0).all()
