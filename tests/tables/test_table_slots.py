"""Slots as a table gives them: the worked numbers, padding, preemption, context parallelism."""

import pytest
import torch

from kvgroups.block_table import BlockTable
from kvgroups.errors import ShapeError
from kvgroups.geometry import BatchGeometry


def table_with(row: int, block_ids: list[int], *, block_size: int = 16, **options) -> BlockTable:
    table = BlockTable(max_num_reqs=4, max_model_len=2048, block_size=block_size, **options)
    table.append_row(row, block_ids)
    table.commit()
    return table


def slots(table: BlockTable, row: int, query_len: int, num_computed: int, **padding) -> list[int]:
    geometry = BatchGeometry.build([row], [query_len], [num_computed], **padding)
    mapping = table.compute_slot_mapping(geometry)
    assert mapping.dtype == torch.int64
    return mapping.tolist()


def test_token_34_has_slot_82_and_token_35_slot_83():
    table = table_with(2, [7, 1023, 5])
    assert slots(table, 2, query_len=35, num_computed=0) == [
        *range(7 * 16, 7 * 16 + 16),
        *range(1023 * 16, 1023 * 16 + 16),
        80,
        81,
        82,
    ]
    assert slots(table, 2, query_len=1, num_computed=35) == [83]


def test_token_48_needs_a_fourth_block():
    table = table_with(2, [7, 1023, 5])
    assert slots(table, 2, query_len=1, num_computed=47) == [5 * 16 + 15]
    with pytest.raises(ShapeError, match="row 2 has 3 blocks of 16 tokens, expected 4 for 49 tokens"):
        slots(table, 2, query_len=1, num_computed=48)
    table.append_row(2, [30])
    table.commit()
    assert slots(table, 2, query_len=1, num_computed=48) == [480]


def test_a_chunk_of_500_after_1000_tokens_starts_in_the_middle_of_block_62():
    block_ids = [3 * i + 1 for i in range(94)]  # 1500 tokens: 93 full blocks and 12 tokens
    chunk = slots(table_with(0, block_ids), 0, query_len=500, num_computed=1000)

    assert chunk[:8] == [block_ids[62] * 16 + offset for offset in range(8, 16)]
    assert chunk[8] == block_ids[63] * 16
    assert chunk[-1] == block_ids[93] * 16 + 11
    with pytest.raises(ShapeError, match="expected 94 for 1500 tokens"):
        slots(table_with(0, block_ids[:93]), 0, query_len=500, num_computed=1000)


def test_a_preempted_request_that_returns_to_other_blocks_gets_other_slots():
    table = table_with(1, [7, 1023, 5])
    before = slots(table, 1, query_len=40, num_computed=0)
    table.clear_row(1)
    table.add_row(3, [2, 9, 4])
    table.commit()
    after = slots(table, 3, query_len=40, num_computed=0)
    assert not set(before) & set(after)
    assert [slot % 16 for slot in after] == [slot % 16 for slot in before]


def test_a_moved_request_keeps_its_slots():
    table = table_with(1, [7, 1023, 5])
    before = slots(table, 1, query_len=40, num_computed=0)
    table.move_row(1, 0)
    table.commit()
    assert slots(table, 0, query_len=40, num_computed=0) == before


def test_a_token_in_a_null_block_has_no_slot():
    table = table_with(0, [0, 0, 5])
    assert slots(table, 0, query_len=35, num_computed=0) == [-1] * 32 + [80, 81, 82]


def test_padded_tokens_have_slot_minus_one_also_beside_padded_requests():
    table = table_with(0, [3])
    padded = slots(table, 0, query_len=2, num_computed=0, num_padded_reqs=3, num_padded_tokens=5)
    assert padded == [48, 49, -1, -1, -1]


def test_an_empty_batch_has_only_padding():
    table = table_with(0, [3])
    assert table.compute_slot_mapping(BatchGeometry.build([], [], [])).shape == (0,)
    padded = BatchGeometry.build([], [], [], num_padded_reqs=2, num_padded_tokens=2)
    assert table.compute_slot_mapping(padded).tolist() == [-1, -1]


def test_a_token_table_is_the_token_to_slot_map():
    table = table_with(0, [9, 4, 7], block_size=1, slot_mapping="token")
    assert slots(table, 0, query_len=3, num_computed=0) == [9, 4, 7]


def test_a_ring_reuses_its_blocks_and_stores_only_its_last_tokens():
    table = table_with(0, [6, 3], block_size=4, slot_mapping="ring", ring_blocks=2)
    # 11 tokens in a ring of 8: the first 3 would share slots with the last 3.
    assert slots(table, 0, query_len=11, num_computed=0) == [-1, -1, -1, 27, 12, 13, 14, 15, 24, 25, 26]
    assert slots(table, 0, query_len=1, num_computed=1000) == [6 * 4]  # block 250 of the row, 250 % 2 = 0
    with pytest.raises(ShapeError, match="has 1 blocks of 4 tokens, expected 2"):
        slots(table_with(0, [6], block_size=4, slot_mapping="ring", ring_blocks=2), 0, 5, 0)


def test_a_state_group_has_no_slots():
    assert slots(table_with(0, [6], slot_mapping="none"), 0, query_len=2, num_computed=0) == [-1, -1]


def test_a_request_without_tokens_needs_no_block():
    table = table_with(0, [3])
    geometry = BatchGeometry.build([0, 1], [1, 0], [0, 50])
    assert table.compute_slot_mapping(geometry).tolist() == [48]


@pytest.mark.parametrize(("world_size", "interleave"), [(2, 1), (2, 4), (4, 2), (3, 16)])
def test_context_parallel_ranks_cover_every_token_once(world_size, interleave):
    num_tokens, block_ids = 150, [7, 2, 9, 4, 11]
    owners: dict[int, list[tuple[int, int]]] = {position: [] for position in range(num_tokens)}
    for rank in range(world_size):
        table = table_with(0, block_ids, cp_world_size=world_size, cp_rank=rank, cp_interleave=interleave)
        for position, slot in enumerate(slots(table, 0, query_len=num_tokens, num_computed=0)):
            if slot != -1:
                owners[position].append((rank, slot))

    assert all(len(owner) == 1 for owner in owners.values())
    places = [owner[0] for owner in owners.values()]
    assert len(set(places)) == num_tokens  # no two tokens in one place of one rank
    for position, (rank, slot) in enumerate(places):
        offset = position % (16 * world_size)
        assert (offset // interleave) % world_size == rank
        assert slot // 16 == block_ids[position // (16 * world_size)]


def test_context_parallel_offsets_of_two_ranks_by_hand():
    # B = 4, two ranks in turns of 2: a block spans 8 tokens, 0 1 4 5 on rank 0 and 2 3 6 7 on rank 1.
    of_rank = [
        slots(
            table_with(0, [5], block_size=4, cp_world_size=2, cp_rank=rank, cp_interleave=2),
            0,
            query_len=8,
            num_computed=0,
        )
        for rank in (0, 1)
    ]
    assert of_rank == [[20, 21, -1, -1, 22, 23, -1, -1], [-1, -1, 20, 21, -1, -1, 22, 23]]
