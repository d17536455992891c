"""BlockPool: block 0 is never handed out, the lowest free block goes first, and every owner counts."""

import pytest

from kvgroups.block_pool import BlockPool
from kvgroups.errors import KVGroupsError, OutOfBlocksError


def pool_of(num_blocks: int) -> BlockPool:
    """A pool called "full" with so many blocks to hand out."""
    pool = BlockPool("full")
    pool.grow(num_blocks + 1)
    return pool


def state(pool: BlockPool) -> tuple[list[int], int]:
    return pool.references.tolist(), pool.num_free


def test_a_new_pool_has_the_null_block_only():
    pool = BlockPool("full")
    assert (pool.num_blocks, pool.num_free, pool.num_used) == (1, 0, 0)
    with pytest.raises(OutOfBlocksError, match="group 'full': 1 blocks are needed and 0 of 0 are free"):
        pool.allocate(1)


def test_the_lowest_free_block_goes_first():
    pool = pool_of(5)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.free([1, 3]) == [1, 3]
    assert pool.allocate(3) == [1, 3, 4]
    assert (pool.num_used, pool.num_free) == (4, 1)


def test_nothing_is_taken_where_too_few_are_free():
    pool = pool_of(2)
    pool.allocate(1)
    before = state(pool)
    with pytest.raises(OutOfBlocksError, match="2 blocks are needed and 1 of 2 are free"):
        pool.allocate(2)
    assert state(pool) == before


def test_a_shared_block_is_free_when_its_last_owner_lets_go():
    pool = pool_of(3)
    first, second = pool.allocate(2)
    pool.share([first, first])
    assert pool.references.tolist() == [0, 3, 1, 0]
    assert pool.free([first, second]) == [second]
    assert pool.free([first]) == []
    assert pool.free([first]) == [first]
    assert pool.num_free == 3


def test_null_entries_of_a_windows_row_are_passed_over():
    pool = pool_of(2)
    first, second = pool.allocate(2)
    assert pool.free([0, 0, first, 0, second]) == [first, second]
    assert pool.references[0] == 0


@pytest.mark.parametrize(
    ("verb", "block_ids", "message"),
    [
        pytest.param("free", [1, 2], "block 2 has no owner", id="freed before"),
        pytest.param("free", [1, 1], "block 1 has 1 owners, so it cannot be freed 2 times", id="freed twice at once"),
        pytest.param("free", [1, 9], "block 9 has no owner", id="beyond the pool"),
        pytest.param("free", [1, -1], "block -1 has no owner", id="a pad slot for a block"),
        pytest.param("share", [1, 2], "block 2 has no owner", id="sharing a free block"),
        pytest.param("share", [1, 0], "block 0 has no owner", id="sharing the null block"),
    ],
)  # fmt: skip
def test_what_nobody_owns_is_neither_freed_nor_shared(verb, block_ids, message):
    pool = pool_of(3)
    pool.allocate(2)
    pool.free([2])
    before = state(pool)
    with pytest.raises(KVGroupsError, match=message):
        getattr(pool, verb)(block_ids)
    assert state(pool) == before


def test_growth_keeps_ids_and_owners():
    pool = pool_of(2)
    pool.share(pool.allocate(2))
    pool.grow(5)
    assert pool.references.tolist() == [0, 2, 2, 0, 0]
    assert pool.allocate(2) == [3, 4]
    pool.grow(3)  # growing to less is no shrinking
    assert pool.num_blocks == 5


def test_shrinking_drops_the_free_blocks_above_the_highest_in_use():
    pool = pool_of(6)
    blocks = pool.allocate(4)
    pool.free([blocks[0], blocks[3]])
    assert pool.shrink() == pool.num_blocks == 4
    assert pool.references.tolist() == [0, 0, 1, 1]
    assert pool.allocate(1) == [1]
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


def test_shrinking_an_idle_pool_leaves_the_null_block():
    pool = pool_of(6)
    pool.free(pool.allocate(6))
    assert pool.shrink() == 1
    assert state(pool) == ([0], 0)


def test_references_can_be_read_only():
    with pytest.raises(ValueError, match="read-only"):
        pool_of(2).references[1] = 1
