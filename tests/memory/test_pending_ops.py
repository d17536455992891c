"""PendingOps: what calls write down is done in that order, before the next forward, and a forward that came too early
is refused."""

from __future__ import annotations

import pytest
import torch

from kvgroups.errors import KVGroupsError
from kvgroups.manager import Manager
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.pending_ops import PendingOps

GROUPS = {"full": (16,), "ring": (10, 4), "state": ()}


def first_key(bench, request, group):
    return float(bench.manager.storage(group).layer(0)["key"][bench.row(request, group)[-1]].flatten()[0])


def test_calls_write_copies_down_and_move_no_bytes(make_bench):
    bench = make_bench(GROUPS)
    request = bench.open(0, 20)
    bench.open(1, 20)
    blocks = bench.manager.arena.bytes[bench.manager.arena.slab_bytes :].view(-1, 256)
    blocks[:] = torch.arange(len(blocks), dtype=torch.uint8)[:, None]  # another number in every block
    before = bench.manager.arena.bytes.clone()
    bench.manager.fork(request, bench.tables, 2)
    assert len(bench.manager.pending) == 1 + 3 + 1  # the tail, a ring's blocks and the state
    assert (bench.manager.arena.bytes[: len(before)] == before).all()
    assert bench.manager.usage().copied_bytes == 5 * 256
    bench.manager.drain()
    assert len(bench.manager.pending) == 0
    assert not torch.equal(bench.manager.arena.bytes[: len(before)], before)
    assert bench.manager.usage().copied_bytes == 5 * 256


def test_copies_of_copies_are_made_in_their_order(make_bench):
    """The tail goes from a to b to c, and a is handed out again, and copied to, before any of it is done."""
    bench = make_bench({"full": (16,)}, memory={"full": 5})
    first, other = bench.open(0, 5), bench.open(1, 5)
    keys = bench.manager.storage("full").layer(0)["key"]
    keys[bench.row(first, "full")], keys[bench.row(other, "full")] = 7.0, 8.0
    second = bench.manager.fork(first, bench.tables, 2)
    third = bench.manager.fork(second, bench.tables, 3)
    reused = bench.row(first, "full")
    bench.manager.free(first)
    fourth = bench.manager.fork(other, bench.tables, 0)
    fifth = bench.manager.fork(other, bench.tables, 4)
    assert reused[0] in (bench.row(fourth, "full") + bench.row(fifth, "full"))
    bench.manager.drain()
    assert [first_key(bench, request, "full") for request in (second, third, fourth, fifth)] == [7, 7, 8, 8]


def test_copies_in_one_group_go_together_until_one_needs_another():
    """6 to 9, then 9 to 4: the second reads what the first wrote. 1 to 6 would write what the first has yet to read."""
    calls = []

    class Recorder:
        def __init__(self, group):
            self.group = group

        def copy_blocks(self, sources, targets):
            calls.append((self.group, list(zip(sources, targets, strict=True))))

        def fill(self, block_ids, byte):
            calls.append((self.group, "poison", *block_ids))

    pending = PendingOps()
    for source, target in ((6, 9), (7, 3), (6, 2), (9, 4), (1, 6), (5, 6)):
        pending.copy("full", source, target)
    pending.copy("state", 9, 4)
    pending.poison("state", [9])
    pending.copy("state", 8, 9)
    pending.drain({group: Recorder(group) for group in ("full", "state")})
    assert calls == [
        ("full", [(6, 9), (7, 3), (6, 2)]),
        ("full", [(9, 4), (1, 6)]),
        ("full", [(5, 6)]),
        ("state", [(9, 4)]),
        ("state", "poison", 9),
        ("state", [(8, 9)]),
    ]
    assert (len(pending), pending.num_drained) == (0, 9)


def test_copies_that_wait_while_the_arena_grows_are_made_in_the_new_bytes(make_bench):
    bench = make_bench({"full": (16,)})
    request = bench.open(0, 5)
    bench.manager.storage("full").layer(0)["key"][bench.row(request, "full")] = 7.0
    twin = bench.manager.fork(request, bench.tables, 1)
    size = bench.manager.arena.nbytes
    bench.manager.allocate([bench.manager.open(bench.tables, 2)], [500])
    assert bench.manager.arena.nbytes > size
    bench.manager.drain()
    assert first_key(bench, twin, "full") == 7


@pytest.mark.parametrize("who", ["parent", "child"])
def test_a_forward_that_did_not_wait_is_refused(make_bench, who):
    bench = make_bench(GROUPS)
    request = bench.open(0, 20)
    twin = bench.manager.fork(request, bench.tables, 1)
    chosen = request if who == "parent" else twin
    bench.manager.allocate([chosen], [1])
    with pytest.raises(KVGroupsError, match=rf"row {chosen.row} .* 5 copies .* drain\(\)"):
        bench.manager.advance([chosen], [1])
    assert chosen.num_computed_tokens == 20
    bench.manager.drain()
    bench.manager.advance([chosen], [1])
    bench.manager.check()


def test_what_waits_for_others_does_not_hold_a_request_up(make_bench):
    """Another thread forks its own request while this one's forward runs."""
    bench = make_bench(GROUPS)
    request, other = bench.open(0, 20), bench.open(1, 20)
    bench.manager.allocate([request], [1])
    bench.manager.drain()
    bench.manager.fork(other, bench.tables, 2)
    bench.manager.advance([request], [1])
    assert request.num_computed_tokens == 21


def test_poison_is_nan_in_every_float_dtype(make_bench):
    bench = make_bench({"full": (16,)})
    request = bench.open(0, 40)
    row = bench.row(request, "full")
    keys = bench.manager.storage("full").layer(0)["key"]
    keys[row] = 1.0
    bench.manager.pending.poison("full", row[:1])
    bench.manager.drain()
    assert keys[row[0]].isnan().all() and (keys[row[1:]] == 1).all()


def test_an_arena_without_bytes_has_nothing_to_copy(make_bench):
    """Plans and benchmarks keep accounts on the meta device."""
    config = make_bench(GROUPS).config
    manager, tables = Manager(config, "meta"), MultiGroupBlockTable.from_config(config)
    request = manager.open(tables, 0)
    for _ in range(2):
        manager.allocate([request], [20])
        manager.drain()
        manager.advance([request], [20])
        manager.fork(request, tables, 1 + len(manager.usage().requests))
    manager.drain()
    assert not manager.pending
    manager.check()
