"""BlockPool: slab 0 is never cut, the fullest slab serves first, an empty one goes back, and every owner counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgroups.block_pool import BlockPool
from kvgroups.errors import KVGroupsError, OutOfBlocksError
from kvgroups.slab_plan import GroupPlan, SlabPlan
from kvgroups.slab_pool import SlabPool

FULL = GroupPlan("full", 256, 256, slabs_per_lease=1, blocks_per_lease=4)
WINDOW = GroupPlan("window", 512, 512, slabs_per_lease=1, blocks_per_lease=2)
STATE = GroupPlan("state", 3072, 3072, slabs_per_lease=3, blocks_per_lease=1)


def slabs_of_four(num_slabs: int) -> SlabPool:
    """So many slabs beside the null slab, without runs."""
    return SlabPool(SlabPlan(1024, 1, (FULL, WINDOW)), num_slabs + 1)


def pool_of(num_slabs: int, max_blocks: int | None = None) -> BlockPool:
    """A pool called "full" that cuts slabs into four: slab 1 holds blocks 4 to 7, slab 2 blocks 8 to 11."""
    return BlockPool(FULL, slabs_of_four(num_slabs), max_blocks)


def pool_with(picture: str, num_slabs: int = 9) -> BlockPool:
    """A pool whose slabs from 1 on are as `xx.. x...` says: x for an owned block."""
    pool = pool_of(num_slabs)
    marks = picture.replace(" ", "")
    pool.allocate(len(marks))
    pool.free([4 + place for place, mark in enumerate(marks) if mark == "."])
    return pool


def state(pool: BlockPool) -> tuple[object, ...]:
    return pool.references.tolist(), pool.num_free, pool.num_used, pool.leases


def test_a_new_pool_has_nothing():
    pool = pool_of(0)
    assert (pool.num_blocks, pool.num_free, pool.num_used) == (0, 0, 0)
    with pytest.raises(
        OutOfBlocksError,
        match="group 'full': 1 blocks are needed, 0 are free in its slabs, and 0 of 1 slabs are free",
    ):
        pool.allocate(1)


def test_a_slab_is_leased_when_the_first_block_of_it_is_needed():
    pool = pool_of(2)
    assert pool.allocate(3) == [4, 5, 6]
    assert (pool.num_blocks, pool.num_used, pool.num_free, pool.leases) == (4, 3, 1, {1: 3})
    assert pool.allocate(3) == [7, 8, 9]
    assert (pool.num_blocks, pool.num_used, pool.num_free, pool.leases) == (8, 6, 2, {1: 4, 2: 2})


@pytest.mark.parametrize(
    ("slabs", "count", "after", "block_ids"),
    [
        pytest.param("xx.. xxx. x...", 1, 0, [11], id="the fullest slab"),
        pytest.param("xx.. xxx. x...", 3, 0, [11, 6, 7], id="then the next fullest"),
        pytest.param("xx.. xxx. x...", 7, 0, [11, 6, 7, 13, 14, 15, 16], id="then a fresh slab"),
        pytest.param("xxxx xxxx", 2, 0, [12, 13], id="a fresh slab where all are full"),
        pytest.param("xx.. .xx. xx..", 1, 0, [6], id="of equals the lowest"),
        pytest.param("xx.. .xx. xx..", 1, 10, [11], id="of equals the one that extends the request's run"),
        pytest.param("xx.. .xx. xx..", 2, 10, [11, 8], id="the rest of that slab after it"),
        pytest.param("xx.. .xx. xx..", 1, 9, [6], id="the block behind is taken"),
        pytest.param("x... x.x.", 1, 4, [9], id="a fuller slab before a longer run"),
        pytest.param(".x.. x.x.", 1, 8, [9], id="within the fullest slab the block behind"),
    ],
)
def test_which_block_goes_next(slabs, count, after, block_ids):
    assert pool_with(slabs).allocate(count, after=after) == block_ids


def test_a_slab_without_owned_blocks_serves_another_group():
    slabs = slabs_of_four(2)
    full, window = BlockPool(FULL, slabs), BlockPool(WINDOW, slabs)
    blocks = full.allocate(5)
    with pytest.raises(OutOfBlocksError):
        window.allocate(1)
    full.free(blocks[4:])
    assert window.allocate(1) == [4]  # slab 2 holds blocks 4 and 5 of 512 bytes
    assert slabs.owners == ("(null)", "full", "window")
    window.free([4])
    assert slabs.owners == ("(null)", "full", None)


def test_a_block_may_be_a_run_of_slabs():
    """Runs of 3 in 12 slabs: run 0 begins with the null slab, so block 0 has no bytes, and blocks 1 to 3 do."""
    slabs = SlabPool(SlabPlan(1024, 3, (FULL, STATE)), 12)
    full, state = BlockPool(FULL, slabs), BlockPool(STATE, slabs)
    assert state.allocate(2) == [3, 2]
    full.allocate(9)
    assert slabs.owners == ("(null)", "full", "full", "full", None, None, *6 * ["state"])
    with pytest.raises(
        OutOfBlocksError, match="group 'state': 1 blocks are needed, 0 are free in its slabs, and 2 of"
    ):
        state.allocate(1)
    state.free([3])
    assert state.allocate(1) == [3]


def test_nothing_is_taken_where_too_few_are_free():
    pool = pool_with("xxx. xxxx", num_slabs=3)
    before = state(pool)
    with pytest.raises(
        OutOfBlocksError, match="6 blocks are needed, 1 are free in its slabs, and 1 of 4 slabs are free"
    ):
        pool.allocate(6)
    assert state(pool) == before
    assert len(pool.allocate(5)) == 5


def test_a_cap_counts_owned_blocks():
    pool = pool_of(9, max_blocks=5)
    blocks = pool.allocate(4)
    with pytest.raises(OutOfBlocksError, match="group 'full': 2 blocks are needed and 1 of 5 are free"):
        pool.allocate(2)
    pool.free(blocks[:1])
    pool.allocate(2)


@pytest.mark.parametrize(
    ("slabs", "freed", "count", "leases", "returned"),
    [
        pytest.param("xx..", [], 2, 0, [], id="what is free is enough"),
        pytest.param("xx..", [], 3, 1, [], id="one more than is free"),
        pytest.param("xx..", [], 7, 2, [], id="one more than another slab holds"),
        pytest.param("xxxx", [5], 1, 0, [], id="what will be free counts"),
        pytest.param("xxxx xx..", [8, 9], 0, 0, [2], id="a slab that empties goes back"),
        pytest.param("xxxx xx..", [8, 9], 1, 1, [2], id="and may be leased again"),
        pytest.param("xxxx xx..", [4, 8, 9], 1, 0, [2], id="or is not needed"),
    ],
)
def test_what_allocating_would_do_to_the_slabs(slabs, freed, count, leases, returned):
    pool = pool_with(slabs)
    before = state(pool)
    assert pool.leases_for(count, np.array(freed, dtype=np.int64)) == (leases, returned)
    assert state(pool) == before


def test_a_shared_block_is_free_when_its_last_owner_lets_go():
    pool = pool_of(1)
    first, second, third = pool.allocate(3)
    pool.share([first, first])
    assert pool.references[first : third + 1].tolist() == [3, 1, 1]
    assert pool.free([first, second]) == [second]
    assert pool.free([first]) == []
    assert pool.free([first]) == [first]
    assert pool.free_blocks() == [first, second, 7]


def test_null_entries_of_a_windows_row_are_passed_over():
    pool = pool_of(1)
    first, second = pool.allocate(2)
    assert pool.free([0, 0, first, 0, second]) == [first, second]
    assert not pool.references.any()


@pytest.mark.parametrize(
    ("verb", "block_ids", "message"),
    [
        pytest.param("free", [4, 5], "block 5 has no owner", id="freed before"),
        pytest.param("free", [4, 4], "block 4 has 1 owners, so it cannot be freed 2 times", id="freed twice at once"),
        pytest.param("free", [4, 99], "block 99 has no owner", id="beyond the arena"),
        pytest.param("free", [4, 8], "block 8 has no owner", id="in a slab of nobody"),
        pytest.param("free", [4, -1], "block -1 has no owner", id="a pad slot for a block"),
        pytest.param("share", [4, 5], "block 5 has no owner", id="sharing a free block"),
        pytest.param("share", [4, 0], "block 0 has no owner", id="sharing the null block"),
    ],
)  # fmt: skip
def test_what_nobody_owns_is_neither_freed_nor_shared(verb, block_ids, message):
    pool = pool_of(3)
    pool.allocate(2)
    pool.free([5])
    before = state(pool)
    with pytest.raises(KVGroupsError, match=message):
        getattr(pool, verb)(block_ids)
    assert state(pool) == before


def test_growth_keeps_ids_and_owners():
    slabs = slabs_of_four(1)
    pool = BlockPool(FULL, slabs)
    pool.share(pool.allocate(4))
    slabs.grow(3)
    assert pool.allocate(2) == [8, 9]
    assert pool.references.tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 1, 1, 0, 0]


def test_references_can_be_read_only():
    with pytest.raises(ValueError, match="read-only"):
        pool_of(2).references[1] = 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_a_pool_leases_no_more_slabs_than_its_peak_fills(calls):
    """What admission relies on: a slab is leased only when all others are full, however blocks come and go."""
    pool, owned, peak = pool_of(200), [], 0
    for takes, number in calls:
        if takes:
            owned += pool.allocate(number % 7, after=owned[-1] if owned else 0)
        elif owned:
            pool.free([owned.pop(number * 7 % len(owned))])
        peak = max(peak, len(owned))
        assert sorted(owned) == [block for block, count in enumerate(pool.references.tolist()) if count]
        assert pool.num_used == len(owned) == sum(pool.leases.values())
        assert len(pool.free_blocks()) == pool.num_free
        assert len(pool.leases) <= FULL.num_leases(peak)
        assert all(pool.leases.values())


# Cached blocks: kept without an owner


def test_a_kept_block_is_cached_when_its_last_owner_lets_go():
    pool = pool_of(2)
    first, second, third = pool.allocate(3)
    pool.keep([first, second])
    pool.free([first, second, third])
    assert (pool.num_used, pool.num_cached, pool.num_free, pool.leases) == (0, 2, 2, {1: 2})
    assert pool.allocate(3) == [6, 7, 8]  # around the cached ones
    pool.share([first, first])
    assert (pool.num_used, pool.num_cached) == (4, 1)
    pool.free([first])
    assert (pool.num_used, pool.num_cached) == (4, 1)
    pool.free([first])
    assert (pool.num_used, pool.num_cached) == (3, 2)


def test_a_cached_block_is_free_once_it_is_dropped_and_its_slab_goes_back():
    pool = pool_of(1)
    blocks = pool.allocate(2)
    pool.keep(blocks)
    pool.free(blocks)
    pool.drop(blocks[:1])
    assert (pool.num_cached, pool.num_free, pool.leases) == (1, 3, {1: 1})
    pool.drop(blocks[1:])
    assert (pool.num_cached, pool.num_free, pool.leases) == (0, 0, {})


def test_a_block_that_is_dropped_while_it_is_owned_is_freed_as_any_other():
    pool = pool_of(1)
    blocks = pool.allocate(2)
    pool.keep(blocks)
    pool.drop(blocks)
    assert (pool.num_used, pool.num_cached) == (2, 0)
    assert pool.free(blocks) == blocks
    assert pool.leases == {}


def test_a_group_with_a_limit_counts_what_it_caches():
    pool = pool_of(3, max_blocks=5)
    blocks = pool.allocate(3)
    pool.keep(blocks)
    pool.free(blocks)
    with pytest.raises(OutOfBlocksError, match="3 blocks are needed and 2 of 5 are free"):
        pool.allocate(3)
    pool.drop(blocks[:1])
    assert len(pool.allocate(3)) == 3


@pytest.mark.parametrize(
    ("verb", "block_ids", "message"),
    [
        pytest.param("keep", [4, 6], "block 6 has no owner", id="keeping a free block"),
        pytest.param("keep", [4, 5], "block 5 has no owner", id="keeping a cached block"),
        pytest.param("free", [5], "block 5 has no owner", id="freeing a cached block"),
        pytest.param("drop", [5, 7], "block 7 has no owner and is not cached", id="dropping a free block"),
        pytest.param("share", [5, 7], "block 7 has no owner and is not cached", id="sharing a free block"),
    ],
)
def test_what_is_not_there_is_neither_kept_nor_dropped(verb, block_ids, message):
    pool = pool_of(2)
    _, cached = pool.allocate(2)
    pool.keep([cached])
    pool.free([cached])
    before = state(pool), pool.num_cached, pool.is_kept.tolist()
    with pytest.raises(KVGroupsError, match=message):
        getattr(pool, verb)(block_ids)
    assert (state(pool), pool.num_cached, pool.is_kept.tolist()) == before
