"""BlockTable: the verbs against a slow model of lists, the worked numbers, and what a commit moves."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgroups.block_table import BlockTable
from kvgroups.errors import KVGroupsError, ShapeError, SpecError
from kvgroups.geometry import BatchGeometry


def small_table(**options) -> BlockTable:
    return BlockTable(max_num_reqs=4, max_model_len=128, block_size=16, **options)


def filled(*rows: list[int]) -> BlockTable:
    table = small_table()
    for row, block_ids in enumerate(rows):
        table.add_row(row, block_ids)
    table.commit()
    return table


def contents(table: BlockTable) -> list[list[int]]:
    return [table.table[row, :count].tolist() for row, count in enumerate(table.num_blocks_per_row)]


def assert_sound(table: BlockTable) -> None:
    """Every tail is null, and after a commit the device has the same table."""
    for row, count in enumerate(table.num_blocks_per_row):
        assert not table.table[row, count:].any(), f"row {row} has a stale tail: {table.table[row]}"
    table.commit()
    assert table.device_table.tolist() == table.table.tolist()


# One block for each of several rows


def test_a_block_for_each_of_several_rows_is_what_one_append_each_does():
    together, apart = filled([1, 2], [3], [], [0, 4]), filled([1, 2], [3], [], [0, 4])
    together.append_each([3, 0, 2], [7, 8, 9])
    for row, block_id in ((3, 7), (0, 8), (2, 9)):
        apart.append_row(row, [block_id])
    assert contents(together) == contents(apart) == [[1, 2, 8], [3], [9], [0, 4, 7]]
    assert together.commit() == apart.commit() == 3 * 12
    assert_sound(together)


@pytest.mark.parametrize(
    ("rows", "block_ids", "message"),
    [
        ([0, 4], [5, 6], "a row from 0 to 3, got 4"),
        ([0, -1], [5, 6], "a row from 0 to 3, got -1"),
        ([0, 2], [5, -1], "block ids from 0 to"),
        ([0, 2], [5, 2**31], "block ids from 0 to"),
        ([0, 1], [5, 6], "row 1 would have 9 blocks of 16 tokens"),
    ],
)
def test_one_wrong_row_of_several_changes_none(rows, block_ids, message):
    table = filled([1], list(range(1, 9)), [], [])
    before = contents(table)
    with pytest.raises(ShapeError, match=message):
        table.append_each(rows, block_ids)
    assert contents(table) == before
    assert not table.has_uncommitted_changes


# Shape


@pytest.mark.parametrize(
    ("block_size", "max_model_len", "width"),
    [
        (16, 1, 8),
        (16, 128, 8),
        (16, 129, 16),
        (48, 128, 8),
        (48, 48 * 8 + 1, 16),
        (128, 128, 1),
        (128, 129, 2),
        (256, 257, 2),
        (1, 100, 128),
        (3, 100, 128),  # gcd(3, 128) = 1
    ],
)
def test_a_row_spans_a_multiple_of_128_tokens(block_size, max_model_len, width):
    table = BlockTable(1, max_model_len, block_size)
    assert table.width == width
    assert table.width * block_size % 128 == 0
    assert table.width * block_size >= max_model_len


def test_a_ring_is_as_wide_as_it_has_blocks_and_a_state_needs_one_entry():
    assert BlockTable(1, 1_000_000, 16, slot_mapping="ring", ring_blocks=5).width == 5
    assert BlockTable(1, 1_000_000, 16, slot_mapping="none").width == 1
    assert BlockTable(1, 1000, 1, slot_mapping="token").width == 1024


def test_context_parallel_ranks_share_the_width():
    assert BlockTable(1, 32_768, 16, cp_world_size=4, cp_rank=3).width == 32_768 // 64


@pytest.mark.parametrize(("max_model_len", "mebibytes"), [(32 * 1024, 2), (1024 * 1024, 64)])
def test_bytes_of_256_rows_in_blocks_of_16(max_model_len, mebibytes):
    assert BlockTable(256, max_model_len, 16, device="meta").nbytes == mebibytes * 2**20


def test_a_state_group_takes_any_context_parallel_interleave():
    assert BlockTable(4, 128, 1, slot_mapping="none", cp_world_size=2, cp_interleave=16).width == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slot_mapping": "pages"}, "'pages'"),
        ({"slot_mapping": "ring"}, "ring_blocks >= 1"),
        ({"ring_blocks": 3}, "0 otherwise"),
        ({"slot_mapping": "token"}, "block_size 1"),
        ({"cp_world_size": 2, "cp_rank": 2}, "cp_rank from 0 to 1"),
        ({"cp_world_size": 2, "cp_interleave": 5}, "divide block_size 16"),
        ({"cp_world_size": 0}, "cp_world_size >= 1"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(SpecError, match=message):
        small_table(**options)


# Verbs


def test_append_adds_at_the_end():
    table = filled([7], [1])
    table.append_row(0, [1023, 5])
    table.append_row(0, [])
    assert contents(table) == [[7, 1023, 5], [1], [], []]


def test_add_replaces_and_clears_what_the_longer_row_left():
    table = filled([7, 8, 9])
    table.add_row(0, [4])
    assert table.table[0].tolist() == [4, 0, 0, 0, 0, 0, 0, 0]


def test_copy_leaves_the_source_and_clears_the_longer_target():
    table = filled([7, 8], [1, 2, 3])
    table.copy_row(0, 1)
    assert contents(table)[:2] == [[7, 8], [7, 8]]
    assert_sound(table)


def test_move_clears_the_vacated_row():
    table = filled([7, 8], [1, 2, 3])
    table.move_row(0, 1)
    assert contents(table)[:2] == [[], [7, 8]]
    assert table.table[0].tolist() == [0] * 8
    assert_sound(table)


def test_swap_exchanges_rows_of_different_length():
    table = filled([7, 8, 9], [1])
    table.swap_row(0, 1)
    assert contents(table)[:2] == [[1], [7, 8, 9]]
    assert_sound(table)


@pytest.mark.parametrize("verb", ["copy_row", "move_row", "swap_row"])
def test_a_row_onto_itself_is_unchanged(verb):
    table = filled([7, 8])
    getattr(table, verb)(0, 0)
    assert contents(table)[0] == [7, 8]


def test_truncate_clears_the_tail():
    table = filled([7, 8, 9])
    table.truncate_row(0, 1)
    assert table.table[0].tolist() == [7, 0, 0, 0, 0, 0, 0, 0]
    assert table.num_blocks_per_row[0] == 1


def test_null_range_keeps_the_count():
    table = filled([7, 8, 9, 10])
    table.null_range(0, 0, 2)
    assert contents(table)[0] == [0, 0, 9, 10]


def test_clear_empties_the_row():
    table = filled([7, 8, 9])
    table.clear_row(0)
    assert contents(table)[0] == []
    assert_sound(table)


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        pytest.param("append_row", (4, [1]), "row from 0 to 3, got 4", id="row past the end"),
        pytest.param("append_row", (-1, [1]), "got -1", id="row -1 is no last row"),
        pytest.param("append_row", (0, [5, -1]), "-1 is for slots only", id="pad slot as block"),
        pytest.param("append_row", (0, [2**31]), "block ids from 0", id="id leaves int32"),
        pytest.param("append_row", (0, [1.0]), "integers", id="float ids"),
        pytest.param("append_row", (0, [1] * 6), "max_model_len=128", id="longer than the model"),
        pytest.param("add_row", (0, [1] * 9), "max_model_len=128", id="replacement longer than the model"),
        pytest.param("add_row", (1, [-2]), "block ids from 0", id="negative id"),
        pytest.param("copy_row", (0, 4), "got 4", id="copy to no row"),
        pytest.param("move_row", (0, -1), "got -1", id="move to no row"),
        pytest.param("swap_row", (9, 0), "got 9", id="swap with no row"),
        pytest.param("truncate_row", (0, 4), "from 0 to 3", id="truncate to more"),
        pytest.param("truncate_row", (0, -1), "from 0 to 3", id="truncate to less than nothing"),
        pytest.param("null_range", (0, 2, 4), "<= 3", id="null past the row"),
        pytest.param("null_range", (0, 2, 1), "start 2", id="null backwards"),
        pytest.param("clear_row", (4,), "got 4", id="clear no row"),
    ],
)
def test_a_refused_verb_changes_nothing(verb, arguments, message):
    table = filled([7, 8, 9], [1])
    before = table.table.copy(), table.num_blocks_per_row.copy()
    with pytest.raises(ShapeError, match=message):
        getattr(table, verb)(*arguments)
    assert np.array_equal(table.table, before[0]) and np.array_equal(table.num_blocks_per_row, before[1])
    assert not table.has_uncommitted_changes


def test_only_verbs_write():
    table = filled([7])
    with pytest.raises(ValueError, match="read-only"):
        table.table[0, 0] = 3


def test_a_deep_copy_is_a_table_of_its_own():
    table = filled([7])
    fork = copy.deepcopy(table)
    fork.append_row(0, [8])
    fork.commit()
    assert contents(fork)[0] == [7, 8] and fork.device_table[0, 1] == 8
    assert contents(table)[0] == [7] and table.device_table[0, 1] == 0


# The verbs against lists

ROWS = st.integers(0, 3)
IDS = st.lists(st.integers(0, 9), max_size=8)
STEPS = st.one_of(
    st.tuples(st.just("append_row"), ROWS, IDS),
    st.tuples(st.just("add_row"), ROWS, IDS),
    st.tuples(st.sampled_from(["copy_row", "move_row", "swap_row"]), ROWS, ROWS),
    st.tuples(st.just("truncate_row"), ROWS, st.integers(0, 8)),
    st.tuples(st.just("null_range"), ROWS, st.integers(0, 8), st.integers(0, 8)),
    st.tuples(st.just("clear_row"), ROWS),
    st.tuples(st.just("commit")),
)


def apply_to_lists(rows: list[list[int]], verb: str, *arguments) -> bool:
    """The verb on a list per row. False where a table of 8 blocks a row must refuse."""
    match verb, *arguments:
        case "append_row", row, ids:
            if len(rows[row]) + len(ids) > 8:
                return False
            rows[row] = rows[row] + ids
        case "add_row", row, ids:
            rows[row] = list(ids)
        case "copy_row", source, target:
            rows[target] = list(rows[source])
        case "move_row", source, target:
            moved, rows[source] = rows[source], []
            rows[target] = moved
        case "swap_row", a, b:
            rows[a], rows[b] = rows[b], rows[a]
        case "truncate_row", row, num_blocks:
            if num_blocks > len(rows[row]):
                return False
            rows[row] = rows[row][:num_blocks]
        case "null_range", row, start, stop:
            if not start <= stop <= len(rows[row]):
                return False
            rows[row] = [0 if start <= i < stop else block for i, block in enumerate(rows[row])]
        case "clear_row", row:
            rows[row] = []
    return True


@settings(deadline=None, max_examples=150)
@given(st.lists(STEPS, max_size=25))
def test_any_sequence_of_verbs_agrees_with_lists(steps):
    table, rows = small_table(), [[], [], [], []]
    for step in steps:
        if apply_to_lists(rows, *step):
            getattr(table, step[0])(*step[1:])
        else:
            with pytest.raises(ShapeError):
                getattr(table, step[0])(*step[1:])
        assert contents(table) == rows
    assert_sound(table)
    assert table.commit() == 0


# Commit


def test_commit_moves_12_bytes_for_each_new_block_and_nothing_twice():
    table = small_table()
    assert table.commit() == 0
    table.append_row(0, [7, 1023])
    table.append_row(2, [5])
    assert table.commit() == 3 * 12
    assert table.commit() == 0
    assert table.committed_bytes == 36


def test_committed_bytes_do_not_grow_with_max_model_len():
    moved = {}
    for max_model_len in (1024, 1024 * 1024):
        table = BlockTable(8, max_model_len, 16)
        table.append_row(3, range(1, 51))
        table.commit()
        table.append_row(3, [60])
        moved[max_model_len] = table.commit()
    assert moved == {1024: 12, 1024 * 1024: 12}


def test_nulling_a_growing_prefix_moves_only_the_newly_null_block():
    table = small_table()
    table.append_row(0, [1, 2, 3, 4, 5, 6])
    table.null_range(0, 0, 3)
    table.commit()
    table.null_range(0, 0, 4)
    assert table.commit() == 12


def test_the_device_sees_nothing_before_the_commit():
    table = small_table()
    table.append_row(1, [7])
    assert table.has_uncommitted_changes and not table.device_table.any()
    table.commit()
    assert not table.has_uncommitted_changes and table.device_table[1, 0] == 7


def test_a_table_with_uncommitted_changes_cannot_be_read():
    table = small_table()
    table.append_row(0, [7])
    geometry = BatchGeometry.build([0], [1], [0])
    for read in (table.gather, table.compute_slot_mapping):
        with pytest.raises(KVGroupsError, match=r"commit\(\)"):
            read(geometry)


# Gather


def test_gather_gives_the_rows_of_the_step_and_null_rows_for_padding():
    table = filled([7, 8], [1, 2, 3], [4])
    geometry = BatchGeometry.build([2, 0], [1, 1], [5, 20], num_padded_reqs=4)
    gathered = table.gather(geometry)
    assert gathered.dtype == torch.int32
    assert gathered.tolist() == [[4] + [0] * 7, [7, 8] + [0] * 6, [0] * 8, [0] * 8]


def test_gather_of_an_empty_batch_is_only_padding():
    assert filled([7]).gather(BatchGeometry.build([], [], [], num_padded_reqs=2)).tolist() == [[0] * 8] * 2
    assert filled([7]).gather(BatchGeometry.build([], [], [])).shape == (0, 8)


def test_a_state_slot_is_column_zero_and_padding_reads_the_zero_state():
    table = small_table(slot_mapping="none")
    table.add_row(3, [6])
    table.commit()
    assert table.gather(BatchGeometry.build([3], [1], [0], num_padded_reqs=3))[:, 0].tolist() == [6, 0, 0]


def test_a_geometry_of_more_rows_than_the_table_is_refused():
    with pytest.raises(ShapeError, match="got 4"):
        filled([7]).gather(BatchGeometry.build([4], [1], [0]))


def test_replace_block_changes_one_place_and_commits_one_entry():
    table = BlockTable(2, 64, 16)
    table.add_row(1, [5, 6, 7])
    table.commit()
    table.replace_block(1, 1, 9)
    assert table.table[1].tolist()[:4] == [5, 9, 7, 0]
    assert table.commit() == 12
    for row, column, block_id in ((2, 0, 9), (1, 3, 9), (1, -1, 9), (1, 0, -1), (1, 0, 2**31)):
        with pytest.raises(ShapeError):
            table.replace_block(row, column, block_id)
    assert table.table[1].tolist()[:4] == [5, 9, 7, 0]


def test_null_each_is_null_range_of_one_block_in_each_row():
    table, other = BlockTable(4, 64, 4), BlockTable(4, 64, 4)
    for each in (table, other):
        for row in (0, 1, 3):
            each.add_row(row, [row + 5, row + 9, row + 13])
        each.commit()
    table.null_each([3, 0], [1, 2])
    other.null_range(3, 1, 2)
    other.null_range(0, 2, 3)
    assert table.table.tolist() == other.table.tolist()
    assert table.commit() == other.commit() == 2 * 12
    assert table.device_table.tolist() == other.device_table.tolist()
    table.null_each([3], [1])
    assert table.commit() == 0  # it was null already
    for rows, columns in (([4], [0]), ([-1], [0]), ([0, 1], [0, 3]), ([0, 2], [0, 0]), ([1], [-1])):
        with pytest.raises(ShapeError):
            table.null_each(rows, columns)
    assert table.table.tolist() == other.table.tolist()
