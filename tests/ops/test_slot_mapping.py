"""Which slot a token gets, as truth tables."""

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import ShapeError


def slots_of(
    table_rows, batch, *, block_size, mode="paged", ring=0, backend="auto", padded=None, **context_parallel
):
    """Slots of one group. `batch` is a list of (table row, positions of this step)."""
    rows = torch.tensor([row for row, _ in batch], dtype=torch.int32)
    starts = torch.tensor([0, *(len(positions) for _, positions in batch)], dtype=torch.int32).cumsum(0)
    seq_lens = [positions[-1] + 1 if len(positions) else 0 for _, positions in batch]
    return ops.slot_mapping(
        [torch.tensor(table_rows, dtype=torch.int32)],
        rows,
        starts.to(torch.int32),
        torch.tensor([position for _, positions in batch for position in positions], dtype=torch.int64),
        torch.tensor(seq_lens, dtype=torch.int32),
        block_sizes=[block_size],
        modes=[mode],
        ring_blocks=[ring],
        num_padded_tokens=padded,
        backend=backend,
        **context_parallel,
    )[0].tolist()


def test_35_tokens_in_blocks_of_16(backend):
    slots = slots_of([[7, 1023, 5]], [(0, range(36))], block_size=16, backend=backend)
    assert slots[0] == 7 * 16
    assert slots[15:17] == [7 * 16 + 15, 1023 * 16]
    assert slots[34] == 82  # 34 = 2 * 16 + 2, so offset 2 of block 5
    assert slots[35] == 83


def test_chunk_of_500_after_1000_tokens(backend):
    table = [list(range(100, 194))]  # 94 blocks hold 1,500 tokens
    slots = slots_of(table, [(0, range(1000, 1500))], block_size=16, backend=backend)
    assert slots[:8] == [162 * 16 + offset for offset in range(8, 16)]  # logical block 62, offsets 8 to 15
    assert slots[8] == 163 * 16  # token 1008 is the first of logical block 63
    assert slots[-1] == 193 * 16 + 1499 % 16


def test_same_tokens_in_other_blocks_get_other_slots(backend):
    """A preempted request comes back to whatever blocks are free: slots follow the table, not the request."""
    before = slots_of([[3, 4]], [(0, range(6))], block_size=4, backend=backend)
    after = slots_of([[9, 2]], [(0, range(6))], block_size=4, backend=backend)
    assert before == [12, 13, 14, 15, 16, 17]
    assert after == [36, 37, 38, 39, 8, 9]


def test_row_order_is_the_batch_s_not_the_table_s(backend):
    table = [[1, 0], [2, 0], [3, 0]]
    slots = slots_of(table, [(2, [0, 1]), (0, [3]), (1, [2])], block_size=4, backend=backend)
    assert slots == [12, 13, 7, 10]


def test_ring_keeps_the_last_blocks_of_the_row(backend):
    # R * B = 6: of tokens 4..12 the last six, 7..12, have a slot; block of position p is (p // 3) % 2.
    slots = slots_of([[5, 8]], [(0, range(4, 13))], block_size=3, mode="ring", ring=2, backend=backend)
    assert slots == [-1, -1, -1, 16, 17, 24, 25, 26, 15]  # 9..11 lie in block (9 // 3) % 2 = 1, 12 in block 0


def test_ring_decode_overwrites_the_oldest_slot(backend):
    slots = [
        slots_of([[5, 8]], [(0, [position])], block_size=3, mode="ring", ring=2, backend=backend)[0]
        for position in range(8)
    ]
    assert slots == [15, 16, 17, 24, 25, 26, 15, 16]


def test_token_mode_reads_the_slot_from_the_table(backend):
    assert slots_of([[9, 4, 7]], [(0, [0, 1, 2])], block_size=1, mode="token", backend=backend) == [9, 4, 7]


def test_state_groups_have_no_slots(backend):
    assert slots_of([[6]], [(0, [0, 1])], block_size=1, mode="none", backend=backend) == [-1, -1]


def test_token_behind_a_null_block_has_no_slot(backend):
    # Of a long prompt in a window group only the tail is stored: the first two blocks were never allocated.
    assert slots_of([[0, 0, 6]], [(0, range(6))], block_size=2, backend=backend) == [-1, -1, -1, -1, 12, 13]


def test_padding_is_a_suffix(backend):
    """Rows without tokens take nothing, and the tail is -1 whether or not the positions are padded too."""
    batch = [(1, [2, 3]), (0, [])]
    assert slots_of([[3], [4]], batch, block_size=4, padded=5, backend=backend) == [18, 19, -1, -1, -1]


def test_padded_positions_are_not_looked_up(backend):
    slots = ops.slot_mapping(
        [torch.tensor([[3]], dtype=torch.int32)],
        torch.tensor([0, 0]),
        torch.tensor([0, 1, 1]),
        torch.tensor([2, 10**6, -5]),  # far outside the table
        torch.tensor([3, 0]),
        block_sizes=[4],
        modes=["paged"],
        ring_blocks=[0],
        backend=backend,
    )
    assert slots.tolist() == [[14, -1, -1]]


@pytest.mark.parametrize("batch", [[], [(0, [])]], ids=["no requests", "a request without tokens"])
def test_empty_batch(batch, backend):
    assert slots_of([[3]], batch, block_size=4, padded=2, backend=backend) == [-1, -1]


def test_groups_share_one_geometry_and_nothing_else(backend):
    tables = [
        torch.tensor(rows, dtype=torch.int32) for rows in ([[1, 2]], [[7, 9, 4, 8, 0, 0]], [[5, 6]], [[3]])
    ]
    slots = ops.slot_mapping(
        tables,
        torch.tensor([0]),
        torch.tensor([0, 2]),
        torch.tensor([6, 7]),
        torch.tensor([8]),
        block_sizes=[4, 2, 2, 1],
        modes=["paged", "paged", "ring", "none"],
        ring_blocks=[0, 0, 2, 0],
        num_padded_tokens=3,
        backend=backend,
    )
    assert slots.tolist() == [[10, 11, -1], [16, 17, -1], [12, 13, -1], [-1, -1, -1]]
    assert slots.dtype == torch.int64


def test_slots_of_a_large_pool_do_not_overflow(backend):
    """A slot is int64: block 2**30 of 16 tokens is far beyond int32."""
    assert slots_of([[2**30]], [(0, [5])], block_size=16, backend=backend) == [2**34 + 5]


def test_context_parallel_interleave_by_hand(backend):
    # B = 4 on 2 ranks in runs of 2: the virtual block of 8 tokens goes 0 0 1 1 0 0 1 1.
    slots = {
        rank: slots_of(
            [[3, 5]],
            [(0, range(10))],
            block_size=4,
            backend=backend,
            cp_world_size=2,
            cp_rank=rank,
            cp_interleave=2,
        )
        for rank in (0, 1)
    }
    assert slots[0] == [12, 13, -1, -1, 14, 15, -1, -1, 20, 21]
    assert slots[1] == [-1, -1, 12, 13, -1, -1, 14, 15, -1, -1]


@pytest.mark.parametrize("mode, ring", [("paged", 0), ("ring", 2)])
@pytest.mark.parametrize("world, interleave", [(2, 1), (3, 2), (4, 4)])
def test_context_parallel_ranks_cover_every_token_once(world, interleave, mode, ring, backend):
    num_stored = 40 if mode == "paged" else min(40, ring * 4 * world)
    owners = [0] * 40
    for rank in range(world):
        slots = slots_of(
            [[3, 5, 2, 7, 1]],
            [(0, range(40))],
            block_size=4,
            mode=mode,
            ring=ring,
            backend=backend,
            cp_world_size=world,
            cp_rank=rank,
            cp_interleave=interleave,
        )
        local = [slot for slot in slots if slot != -1]
        assert len(set(local)) == len(local), "two tokens of one rank share a slot"
        owners = [count + (slot != -1) for count, slot in zip(owners, slots, strict=True)]
    assert owners == [0] * (40 - num_stored) + [1] * num_stored


@pytest.mark.parametrize("seed", range(12))
def test_every_form_equals_the_reference(seed, backend):
    """Ragged batches over every mode at once, random tables with null entries, random padding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    num_reqs = int(draw(0, 5, 1))
    query_lens, computed = draw(0, 9, num_reqs), draw(0, 30, num_reqs)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)]).to(torch.int32)
    positions = [torch.arange(length) + done for length, done in zip(query_lens, computed, strict=True)]
    arguments = (
        [draw(0, 50, 6, 40).to(torch.int32) for _ in range(5)],
        torch.randperm(6, generator=generator)[:num_reqs].to(torch.int32),
        starts,
        torch.cat([torch.zeros(0, dtype=torch.int64), *positions]),
        (computed + query_lens).to(torch.int32),
    )
    settings = {
        "block_sizes": [4, 3, 16, 1, 1],
        "modes": ["paged", "ring", "paged", "token", "none"],
        "ring_blocks": [0, 2, 0, 0, 0],
        "num_padded_tokens": int(query_lens.sum()) + seed % 3,
    }
    expected = ops.slot_mapping(*arguments, **settings, backend="reference")
    assert torch.equal(ops.slot_mapping(*arguments, **settings, backend=backend), expected)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"modes": ["pages"]}, "modes[0]: expected one of paged, ring, token, none, got 'pages'"),
        ({"block_sizes": []}, "block_sizes: expected one per block table, 1, got 0"),
        ({"modes": ["ring"]}, "ring_blocks[0]: expected at least 1 in mode 'ring', got 0"),
        ({"modes": ["ring"], "ring_blocks": [3]}, "block_tables[0]: expected (*, >=3) int32"),
        ({"modes": ["token"]}, "block_sizes[0]: expected 1 in mode 'token', got 4"),
        ({"cp_world_size": 2, "cp_rank": 2}, "cp_rank: expected a rank below cp_world_size=2"),
        ({"cp_interleave": 3}, "cp_interleave: expected a divisor of block_sizes[0]=4, got 3"),
        ({"num_padded_tokens": 1}, "num_padded_tokens: expected at least the 2 of positions, got 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_contradict_each_other(change, words):
    settings = {"block_sizes": [4], "modes": ["paged"], "ring_blocks": [0], **change}
    table, rows, starts = torch.ones(1, 2, dtype=torch.int32), torch.tensor([0]), torch.tensor([0, 2])
    with pytest.raises(ShapeError) as refusal:
        ops.slot_mapping([table], rows, starts, torch.tensor([0, 1]), torch.tensor([2]), **settings)
    assert words in str(refusal.value)


def test_int64_table_is_refused_by_name():
    with pytest.raises(
        ShapeError, match=r"block_tables\[0\]: expected \(\*, \*\) int32 on cpu, got \(1, 2\) int64"
    ):
        ops.slot_mapping(
            [torch.ones(1, 2, dtype=torch.int64)],
            torch.tensor([0]),
            torch.tensor([0, 1]),
            torch.tensor([0]),
            torch.tensor([1]),
            block_sizes=[4],
            modes=["paged"],
            ring_blocks=[0],
        )
