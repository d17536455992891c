"""Eviction: what saves least per byte goes first; among equals the least recently used, and the tail before the head."""

from __future__ import annotations

import pytest

from kvgroups.eviction import CachedBlock, EvictionPolicy, EvictionQueue

MIB = 1 << 20


def token_block(block_id: int, depth: int, last_used: int, saved: int = 16) -> CachedBlock:
    return CachedBlock("full", block_id, num_bytes=256, depth=depth, tokens_saved=saved, last_used=last_used)


def snapshot(block_id: int, depth: int, saved: int, last_used: int = 0) -> CachedBlock:
    return CachedBlock("state", block_id, 118 * MIB, depth, tokens_saved=saved, last_used=last_used)


def queue_of(*blocks: CachedBlock) -> EvictionQueue:
    queue = EvictionQueue()
    for block in blocks:
        queue.add(block)
    return queue


def order(queue: EvictionQueue, group: str) -> list[int]:
    return [block.block_id for block in queue.in_order(group)]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        pytest.param(
            [
                token_block(1, 16, last_used=5),
                token_block(2, 16, last_used=3),
                token_block(3, 16, last_used=4),
            ],
            [2, 3, 1],
            id="the least recently used first",
        ),
        pytest.param(
            [token_block(4, 16, 1), token_block(5, 32, 1), token_block(6, 48, 1)],
            [6, 5, 4],
            id="a request's tail before its head",
        ),
        pytest.param(
            [token_block(4, 16, 1), token_block(5, 32, 1), token_block(6, 16, 2), token_block(7, 32, 2)],
            [5, 4, 7, 6],
            id="an older request's head before a younger one's tail",
        ),
        pytest.param(
            [token_block(8, 48, 1, saved=32), token_block(9, 64, 2, saved=0)],
            [9, 8],
            id="a window's block that no point keeps before one that a point does, though it is younger",
        ),
    ],
)
def test_order_of_token_blocks(blocks, expected):
    queue = queue_of(*blocks)
    assert order(queue, "full") == expected
    for block_id in expected:
        block = queue.first("full")
        assert block.block_id == block_id
        queue.evict(block)
    assert queue.first("full") is None


def test_snapshots_go_by_the_tokens_that_they_save():
    queue = queue_of(snapshot(1, 4096, saved=4096), snapshot(2, 4352, saved=256, last_used=9))
    assert order(queue, "state") == [2, 1]


def test_bytes_count_across_groups():
    """118 MiB that save 256 tokens are missed less than 256 bytes that save 16."""
    policy = EvictionPolicy()
    assert policy.rank(snapshot(1, 256, saved=256)) < policy.rank(token_block(1, 16, last_used=0))


def test_what_is_never_asked_for_again_goes_in_the_end_however_much_it_saves():
    queue = queue_of(token_block(1, 4096, last_used=0, saved=64))
    for tick in range(1, 9):
        queue.add(token_block(2, 16, last_used=tick, saved=16))
        first = queue.first("full")
        queue.evict(first)
        if first.block_id == 1:
            break
    assert 4 <= tick <= 5  # it saves as much as four of the others


def test_a_block_that_has_an_owner_again_is_not_evicted_and_comes_back_as_the_youngest():
    first, second = token_block(1, 16, last_used=1), token_block(2, 16, last_used=2)
    queue = queue_of(first, second)
    queue.remove(first)
    assert (order(queue, "full"), queue.count("full"), first in queue) == ([2], 1, False)
    first.last_used = 3
    queue.add(first)
    assert order(queue, "full") == [2, 1]


def test_losses_are_known_block_by_block():
    """16 tokens saved by block 3, last used at tick 5; nothing is lost by giving up what is not there."""
    queue = queue_of(token_block(3, 16, last_used=5), token_block(1, 16, last_used=4))
    queue.remove(queue.first("full"))
    losses, ticks = queue.losses("full", 5)
    assert (losses.tolist(), ticks.tolist()) == ([0, 0, 0, 16, 0], [0, 0, 0, 5, 0])
    assert queue.losses("state", 2)[0].tolist() == [0, 0]


def test_a_block_that_comes_back_at_the_same_tick_is_there_once():
    block = token_block(1, 16, last_used=1)
    queue = queue_of(block, block)
    queue.remove(block)
    queue.add(block)
    assert order(queue, "full") == [1]
    queue.evict(queue.first("full"))
    assert queue.first("full") is None


def test_groups_have_queues_of_their_own():
    queue = queue_of(token_block(1, 16, 1), snapshot(1, 256, saved=256))
    queue.evict(queue.first("state"))
    assert (queue.count("state"), queue.count("full")) == (0, 1)
    assert queue.first("window") is None


def test_blocks_that_come_and_go_do_not_pile_up():
    block, other = token_block(1, 16, 1), token_block(2, 16, 1)
    queue = queue_of(other)
    for tick in range(10_000):
        block.last_used = tick
        queue.add(block)
    assert len(queue._heaps["full"]) < 100
    assert order(queue, "full") == [2, 1]


def test_another_policy_can_take_its_place():
    class MostRecentlyUsedFirst(EvictionPolicy):
        def rank(self, block):
            return 0.0, -block.last_used, 0

    queue = EvictionQueue(MostRecentlyUsedFirst())
    for block in (token_block(1, 16, 1), token_block(2, 16, 2)):
        queue.add(block)
    assert order(queue, "full") == [2, 1]
