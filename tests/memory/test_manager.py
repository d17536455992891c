"""Manager: what each kind of group keeps of a request, and that every call is all or nothing."""

from __future__ import annotations

import threading

import pytest

from kvgroups.arena import Arena
from kvgroups.errors import KVGroupsError, OutOfBlocksError, ShapeError
from kvgroups.multi_group_block_table import MultiGroupBlockTable

ALL_KINDS = {"full": (16,), "window": (10, 4), "ring": (10, 4), "chunk": (8, 4), "state": ()}


# What a request keeps


@pytest.mark.parametrize(
    ("sizes", "max_rewind", "num_tokens", "picture"),
    [
        # The next query, at position 30, sees from 23 on: blocks 5 (20 to 23), 6 and 7.
        pytest.param((8, 4), 0, 30, ".....xxx", id="prompt longer than the window"),
        pytest.param((8, 4), 0, 31, "......xx", id="window begins on a block edge"),
        pytest.param((8, 4), 0, 32, "......xx", id="prompt ends on a block edge"),
        pytest.param((8, 4), 0, 7, "xx", id="prompt shorter than the window"),
        pytest.param((8, 4), 0, 11, ".xx", id="the first block is just out of sight"),
        pytest.param((8, 3), 0, 30, ".......xxx", id="block of 3"),
        pytest.param((8, 16), 0, 30, ".x", id="block larger than the window"),
        pytest.param((8, 4), 4, 30, "....xxxx", id="room to rewind by 4"),
        pytest.param((8, 4), 40, 30, "xxxxxxxx", id="room to rewind by more than there is"),
        pytest.param((1, 4), 0, 30, ".......x", id="window of one token keeps a block to write to"),
        pytest.param((1, 4), 0, 32, "........", id="window of one token on a block edge keeps nothing"),
    ],
)
def test_a_window_stores_what_the_next_query_sees(make_bench, sizes, max_rewind, num_tokens, picture):
    bench = make_bench({"window": sizes}, max_rewind=max_rewind)
    request = bench.open(0, num_tokens)
    assert bench.picture(request, "window") == picture
    assert bench.num_used() == {"window": picture.count("x")}
    bench.manager.check()


@pytest.mark.parametrize(
    ("group", "sizes", "pictures"),
    [
        # Each picture is the row while the token at 30, 31, 32, ... is computed.
        pytest.param(
            "window", (8, 4), [".....xxx", "......xx", "......xxx", "......xxx", "......xxx", ".......xx"],
            id="window: block 5 goes when the query at 31 does not see 23 any more",
        ),
        pytest.param("window", (1, 4), [".......x", ".......x", "........x", "........x"], id="window of one token"),
        pytest.param(
            "window", (8, 16), [".x", ".x", ".xx", ".xx", ".xx", ".xx", ".xx", ".xx", ".xx", "..x"],
            id="window on blocks of 16: block 1 goes with token 31, which the query at 39 does not see",
        ),
        pytest.param("chunk", (8, 4), ["......xx", "......xx", "........x", "........x"], id="a new chunk starts empty"),
        pytest.param(
            "chunk", (6, 4), [".......x", ".......x", ".......xx", ".......xx", ".......xx", ".......xx", ".........x"],
            id="chunk edge inside a block: 30 to 35 begin in the middle of block 7",
        ),
    ],
)  # fmt: skip
def test_decoding_releases_what_no_query_sees(make_bench, group, sizes, pictures):
    bench = make_bench({group: sizes})
    request = bench.open(0, 30)
    seen = []
    for _ in pictures:
        bench.step(request, 1)
        bench.manager.check()
        seen.append(bench.picture(request, group))
    assert seen == pictures


@pytest.mark.parametrize(
    ("sizes", "num_tokens", "picture"),
    [
        pytest.param((8, 4), 30, "......xx", id="the third chunk's blocks"),
        pytest.param((8, 4), 32, "........", id="prompt ends on a chunk edge"),
        pytest.param((8, 4), 33, "........x", id="first token of a chunk"),
        pytest.param((6, 4), 11, ".xx", id="chunk of 6 begins inside block 1"),
        pytest.param((6, 4), 12, "...", id="two chunks of 6 are three blocks of 4"),
        pytest.param((8, 16), 30, ".x", id="block larger than the chunk"),
    ],
)
def test_chunked_attention_stores_its_own_chunk(make_bench, sizes, num_tokens, picture):
    bench = make_bench({"chunk": sizes})
    assert bench.picture(bench.open(0, num_tokens), "chunk") == picture


def test_full_attention_stores_everything(make_bench):
    bench = make_bench({"full": (16,)})
    request = bench.open(0, 35)
    assert bench.row(request, "full") == [4, 5, 6]
    bench.step(request, 13)
    assert bench.row(request, "full") == [4, 5, 6]  # 48 tokens fill three blocks
    bench.step(request, 1)
    assert bench.row(request, "full") == [4, 5, 6, 7]


@pytest.mark.parametrize(("group", "row"), [("ring", [4, 5, 6]), ("state", [4])])
def test_rings_and_states_are_owned_for_life(make_bench, group, row):
    bench = make_bench({group: ALL_KINDS[group]})
    request = bench.open(0)
    assert bench.row(request, group) == []
    for count in (1, 2, 30, 1, 100):
        bench.step(request, count)
        assert bench.row(request, group) == row
    bench.manager.check()


def test_a_window_at_its_cap_decodes_for_ever(make_bench):
    """Blocks that fall out of sight serve the new tokens of the same call."""
    bench = make_bench({"window": (8, 4)}, memory={"window": 3})
    request = bench.open(0, 30)
    for _ in range(100):
        bench.step(request, 1)
    assert bench.row(request, "window")[-3:].count(0) == 0
    bench.manager.check()


def test_one_requests_released_blocks_serve_another(make_bench):
    bench = make_bench({"window": (8, 4)}, memory={"window": 5})
    a, b = bench.open(0, 30), bench.open(1, 15)  # 3 blocks, and 2
    with pytest.raises(OutOfBlocksError):
        bench.step(b, 5)
    bench.step(a, 1)
    bench.manager.allocate([b, a], [2, 1])  # b needs one more; a is in row 0 and gives up block 5
    assert [bench.picture(request, "window") for request in (a, b)] == ["......xx", "..xxx"]


def test_a_long_prefill_in_chunks_keeps_the_window_only(make_bench):
    bench = make_bench({"full": (16,), "window": (10, 4)})
    request = bench.open(0)
    for _ in range(20):
        bench.step(request, 16)
        bench.manager.check()
        assert bench.num_used()["window"] <= 6
    # The query at 304 sees from 295 on (blocks 73 to 75), the next one, at 320, from 311 on (77 to 79).
    assert bench.picture(request, "window") == 73 * "." + "xxx" + "." + "xxx"
    bench.manager.allocate([request], [0])
    assert bench.picture(request, "window") == 77 * "." + "xxx"


# All or nothing


def test_a_third_group_that_is_full_changes_nothing_in_the_first_two(make_bench):
    bench = make_bench(
        {"full": (16,), "window": (8, 4), "state": ()}, memory={"full": 9, "window": 9, "state": 1}
    )
    first = bench.open(0, 30)
    second = bench.open(1)
    before = bench.snapshot()
    with pytest.raises(OutOfBlocksError, match="group 'state': 1 blocks are needed and 0 of 1 are free"):
        # `first` would release a window block and take a full one.
        bench.manager.allocate([first, second], [10, 5])
    assert bench.snapshot() == before
    bench.manager.check()
    bench.step(first, 10)


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        pytest.param([1, -1], ShapeError, "num_new_tokens: expected 0 or more, got -1", id="negative count"),
        pytest.param([1, 65], ShapeError, "request of 65 tokens: max_model_len is 64", id="too long"),
        pytest.param([35, 1], ShapeError, "request of 65 tokens: max_model_len is 64", id="grown too long"),
        pytest.param([1], ShapeError, "one count for each of 2 requests, got 1", id="a count for one of two requests"),
    ],
)
def test_a_wrong_count_changes_nothing(make_bench, counts, error, message):
    bench = make_bench(ALL_KINDS, max_model_len=64)
    requests = [bench.open(0, 30), bench.open(1)]
    before = bench.snapshot()
    with pytest.raises(error, match=message):
        bench.manager.allocate(requests, counts)
    assert bench.snapshot() == before
    bench.manager.check()


def test_a_request_may_fill_max_model_len_to_the_last_token(make_bench):
    bench = make_bench(ALL_KINDS, max_model_len=61)
    bench.open(0, 61)
    bench.manager.check()


def test_no_tokens_take_no_blocks(make_bench):
    bench = make_bench(ALL_KINDS)
    bench.open(0, 0)
    assert sum(bench.num_used().values()) == 0
    bench.manager.check()


# Steps that fail


@pytest.mark.parametrize("num_tokens", [0, 13, 16, 30], ids=lambda n: f"after {n} tokens")
def test_cancel_gives_back_what_the_failed_step_took(make_bench, num_tokens):
    bench = make_bench(ALL_KINDS)
    request = bench.open(0, num_tokens)
    bench.manager.allocate([request], [0])  # what fell out of sight goes in any case
    before = bench.snapshot()
    bench.manager.allocate([request], [40])
    bench.manager.cancel([request])
    bench.manager.check()
    assert bench.snapshot() == before
    bench.step(request, 40)
    bench.manager.check()


def test_a_step_ends_before_the_next_begins(make_bench):
    bench = make_bench(ALL_KINDS)
    request = bench.open(0, 10)
    bench.manager.allocate([request], [5])
    with pytest.raises(KVGroupsError, match="row 0 has blocks for a step of 5 tokens, expected 0"):
        bench.manager.allocate([request], [5])
    with pytest.raises(KVGroupsError, match="row 0 has blocks for a step of 5 tokens, expected 3"):
        bench.manager.advance([request], [3])
    with pytest.raises(KVGroupsError, match="row 0 has blocks for a step of 5 tokens, expected 0"):
        bench.manager.fork(request, bench.tables, 1)
    bench.manager.advance([request], [5])
    assert request.num_computed_tokens == 15
    with pytest.raises(KVGroupsError, match="blocks for a step of 0 tokens, expected 1"):
        bench.manager.advance([request], [1])
    bench.manager.check()


# Requests


def test_a_freed_request_gives_everything_back_and_is_refused_from_then_on(make_bench):
    bench = make_bench(ALL_KINDS)
    request = bench.open(3, 30)
    bench.manager.free(request)
    assert sum(bench.num_used().values()) == 0
    assert not any(
        table.table.any() or table.num_blocks_per_row.any() for table in bench.tables.tables.values()
    )
    for call in (
        lambda: bench.manager.free(request),
        lambda: bench.manager.allocate([request], [1]),
        lambda: bench.manager.fork(request, bench.tables, 1),
    ):
        with pytest.raises(KVGroupsError, match="the request in row 3 was freed before"):
            call()
    bench.manager.check()


def test_a_row_has_one_request_at_a_time(make_bench):
    bench = make_bench(ALL_KINDS)
    request = bench.open(0)
    with pytest.raises(KVGroupsError, match="row 0 belongs to another request"):
        bench.manager.open(bench.tables, 0)
    with pytest.raises(ShapeError, match="a row from 0 to 7, got 8"):
        bench.manager.open(bench.tables, 8)
    bench.manager.free(request)
    bench.open(0, 5)
    other = MultiGroupBlockTable.from_config(bench.config)
    bench.manager.open(other, 0)  # another table's row
    bench.manager.check()


def test_a_moved_request_keeps_its_blocks(make_bench):
    bench = make_bench(ALL_KINDS)
    request, other = bench.open(0, 30), bench.open(1, 5)
    held = {name: bench.row(request, name) for name in ALL_KINDS}
    larger = MultiGroupBlockTable.from_config(bench.config, max_num_reqs=20)
    bench.manager.move(request, larger, 17)
    bench.manager.move(other, bench.tables, 0)  # into the row that became free
    bench.manager.check()
    assert {name: bench.row(request, name) for name in ALL_KINDS} == held
    bench.step(request, 10)
    for row in (0, 17):
        with pytest.raises(KVGroupsError, match=f"row {row} belongs to another request"):
            bench.manager.move(request, bench.tables if row == 0 else larger, row)
    bench.manager.check()


# Forks


def numbered(bench, request) -> dict[str, list[list[float]]]:
    """Write a number of its own into every block of a request, and return what the blocks hold."""
    for layer, group in enumerate(bench.config.groups):
        for block_id in bench.row(request, group.name):
            if block_id:
                for view in bench.manager.storage(group.name).layer(layer).values():
                    view[block_id] = 100 * layer + block_id
    return contents(bench, request)


def contents(bench, request) -> dict[str, list[list[float]]]:
    bench.manager.drain()
    return {
        group.name: [
            view[block_id].flatten().tolist()
            for block_id in bench.row(request, group.name)
            for view in bench.manager.storage(group.name).layer(layer).values()
        ]
        for layer, group in enumerate(bench.config.groups)
    }


@pytest.mark.parametrize(
    ("group", "num_tokens", "parent", "child"),
    [
        pytest.param("full", 40, [4, 5, 6], [4, 5, 7], id="full: the partial tail is copied"),
        pytest.param("full", 32, [4, 5], [4, 5], id="full: on a block edge nothing is copied"),
        pytest.param("full", 5, [4], [5], id="full: within the first block"),
        pytest.param("window", 30, [0, 0, 0, 0, 0, 4, 5, 6], [0, 0, 0, 0, 0, 4, 5, 7], id="window"),
        pytest.param("window", 32, 5 * [0] + [0, 4, 5], 5 * [0] + [0, 4, 5], id="window on a block edge"),
        pytest.param("ring", 40, [4, 5, 6], [7, 8, 9], id="ring: every block is written to again"),
        pytest.param("state", 40, [4], [5], id="state: the running state is written to again"),
        pytest.param("full", 0, [], [], id="nothing computed"),
    ],
)
def test_a_fork_shares_full_blocks_and_copies_the_rest(make_bench, group, num_tokens, parent, child):
    bench = make_bench({group: {"full": (16,), "window": (8, 4), "ring": (10, 4), "state": ()}[group]})
    request = bench.open(0, num_tokens)
    held = numbered(bench, request)
    twin = bench.manager.fork(request, bench.tables, 5)
    assert (bench.row(request, group), bench.row(twin, group)) == (parent, child)
    assert contents(bench, twin) == held
    assert twin.num_computed_tokens == num_tokens
    bench.manager.check()


@pytest.mark.parametrize("num_tokens", [30, 32], ids=["inside a block", "on a block edge"])
def test_a_fork_of_a_fork_outlives_both_parents(make_bench, num_tokens):
    bench = make_bench(ALL_KINDS)
    first = bench.open(0, num_tokens)
    held = numbered(bench, first)
    second = bench.manager.fork(first, bench.tables, 1)
    bench.manager.free(first)
    third = bench.manager.fork(second, bench.tables, 0)  # into the row that became free
    bench.manager.free(second)
    bench.manager.check()
    assert contents(bench, third) == held
    for request in (third, bench.open(1, 50)):
        bench.step(request, 20)
    bench.manager.check()


def test_forks_go_their_own_ways(make_bench):
    bench = make_bench(ALL_KINDS)
    parent = bench.open(0, 30)
    child = bench.manager.fork(parent, bench.tables, 1)
    for _ in range(20):
        bench.manager.allocate([parent, child], [1, 3])
        bench.manager.drain()
        bench.manager.advance([parent, child], [1, 3])
        bench.manager.check()
    assert bench.row(parent, "full")[0] == bench.row(child, "full")[0]
    for group in ALL_KINDS:
        own = set(bench.row(parent, group)) & set(bench.row(child, group)) - {0}
        assert own == (set(bench.row(parent, group)[:1]) if group == "full" else set()), group


def test_a_window_block_that_forks_share_is_free_when_both_have_passed_it(make_bench):
    bench = make_bench({"window": (8, 4)})
    parent = bench.open(0, 30)
    child = bench.manager.fork(parent, bench.tables, 1)
    shared = bench.row(parent, "window")[5]
    bench.step(parent, 1)
    bench.step(parent, 1)
    assert bench.manager.pool("window").references[shared] == 1
    bench.manager.allocate([child], [0])
    assert bench.manager.pool("window").references[shared] == 1  # the child's next query, at 30, sees it
    bench.step(child, 1)
    bench.manager.allocate([child], [0])
    assert bench.manager.pool("window").references[shared] == 0


@pytest.mark.parametrize(
    ("row", "memory", "message"),
    [
        pytest.param(1, {"full": 9, "window": 9, "state": 1}, "group 'state'", id="no room for the state"),
        pytest.param(0, None, "row 0 belongs to another request", id="a row in use"),
        pytest.param(8, None, "a row from 0 to 7, got 8", id="no such row"),
    ],
)
def test_a_fork_that_is_refused_changes_nothing(make_bench, row, memory, message):
    bench = make_bench({"full": (16,), "window": (8, 4), "state": ()}, memory=memory)
    request = bench.open(0, 30)
    before = bench.snapshot()
    with pytest.raises(KVGroupsError, match=message):
        bench.manager.fork(request, bench.tables, row)
    assert bench.snapshot() == before
    bench.manager.check()


# Memory


def test_pools_without_a_limit_grow_and_keep_what_they_hold(make_bench):
    bench = make_bench(ALL_KINDS)
    request = bench.open(0, 30)
    held = numbered(bench, request)
    bench.open(1, 500)
    assert contents(bench, request) == held


def test_a_growing_answer_moves_bytes_a_few_times_only(make_bench, monkeypatch):
    sizes = []
    grow = Arena.grow
    monkeypatch.setattr(Arena, "grow", lambda self, n: (sizes.append(n), grow(self, n))[1])
    bench = make_bench({"full": (1,)}, max_model_len=1024)
    request = bench.open(0)
    for _ in range(1024):
        bench.step(request, 1)
    assert len(sizes) < 20  # half as much again each time
    assert bench.manager.arena.num_slabs < 2 * 1024 / 4


def test_a_cap_in_blocks_is_the_groups_own(make_bench):
    bench = make_bench({"full": (16,), "window": (8, 4)}, memory={"full": 2, "window": 9})
    bench.open(0, 32)
    with pytest.raises(OutOfBlocksError, match="group 'full': 1 blocks are needed and 0 of 2 are free"):
        bench.open(1, 1)
    bench.manager.check()


def test_a_cap_in_bytes_is_kept_to_the_slab(make_bench):
    for memory, fits in ((3 * 1024, True), (3 * 1024 - 1, False)):
        bench = make_bench({"full": (16,)}, memory=memory)
        if fits:
            bench.open(0, 8 * 16)  # two slabs of four blocks, and the null slab
        else:
            with pytest.raises(
                OutOfBlocksError,
                match=r"memory: 2048 bytes \(2 KiB\) more are needed \(group 'full': 8 blocks\), and of 2048 bytes "
                r"\(2 KiB\) there are 1024 bytes \(1 KiB\) free; raise the config's `memory` to 3072 bytes \(3 KiB\), ",
            ):
                bench.open(0, 8 * 16)
        assert bench.manager.usage().allocated_bytes <= memory
        bench.manager.check()


def test_a_cap_that_cannot_hold_one_block_of_each_group_is_refused_at_once(make_bench):
    with pytest.raises(
        OutOfBlocksError,
        match=r"memory: 3071 bytes \(2.999 KiB\), and one block of each group takes 3072 bytes \(3 KiB\), "
        r"since memory goes in slabs of 1 KiB: 3 of them, an empty one for block 0 included; raise",
    ):
        make_bench({"full": (16,), "state": ()}, memory=3071)
    make_bench({"full": (16,), "state": ()}, memory=3072).open(0, 1)


def test_a_share_is_a_share_of_the_devices_memory(make_bench, monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2}.__getitem__)
    bench = make_bench({"full": (16,)}, memory=0.25)
    assert bench.manager.usage().allocated_bytes == 2048
    bench.open(0, 4 * 16)
    with pytest.raises(OutOfBlocksError, match=r"of 2048 bytes \(2 KiB\) there are 0 bytes free"):
        bench.open(1, 1)


def test_usage_counts_bytes_by_group_and_request_and_remembers_the_peak(make_bench):
    """Slabs of 1024 bytes: four blocks of tokens; a state of 5000 bytes is a block of 5120, a run of five."""
    bench = make_bench({"full": (16,), "state": (1250,)}, memory=16 * 1024)
    request = bench.open(0, 40)
    twin = bench.manager.fork(request, bench.tables, 3)
    usage = bench.manager.usage()
    assert usage.allocated_bytes == 16 * 1024
    full, state = usage.groups
    assert (full.num_used, full.num_cached, full.num_free, full.num_leased_slabs) == (4, 0, 0, 1)
    assert (full.held_bytes, full.free_bytes, full.leased_bytes, full.waste_bytes) == (1024, 0, 1024, 0)
    assert (state.num_used, state.num_free, state.num_leased_slabs) == (2, 0, 10)
    assert (state.held_bytes, state.leased_bytes, state.waste_bytes) == (10240, 10240, 0)
    assert (usage.held_bytes, usage.leased_bytes, usage.copied_bytes) == (11264, 11264, 256 + 5120)
    assert [(each.row, each.num_tokens, each.held_bytes, each.shared_bytes) for each in usage.requests] == [
        (0, 40, {"full": 768, "state": 5120}, {"full": 512, "state": 0}),
        (3, 40, {"full": 768, "state": 5120}, {"full": 512, "state": 0}),
    ]
    bench.manager.free(request)
    bench.manager.free(twin)
    usage = bench.manager.usage()
    assert (usage.held_bytes, usage.leased_bytes, usage.peak_held_bytes) == (0, 0, 11264)
    assert [group.peak_held_bytes for group in usage.groups] == [1024, 10240]
    bench.manager.reset_peak()
    assert bench.manager.usage().peak_held_bytes == 0
    assert usage.peak_held_bytes == 11264  # an account of one moment


# The checker has teeth


def plant_a_block_twice(bench, request):
    first, second, _ = bench.row(request, "full")
    bench.tables["full"].add_row(request.row, [first, second, first])


def plant_an_owner_too_many(bench, request):
    bench.manager.pool("full").share(bench.row(request, "full")[:1])


def plant_an_owner_too_few(bench, request):
    bench.manager.pool("full").free(bench.row(request, "full")[:1])


def plant_a_block_that_nobody_holds(bench, request):
    bench.manager.pool("full").allocate(1)


def plant_a_lost_free_block(bench, request):
    bench.manager.pool("full")._num_free -= 1


def plant_a_block_that_its_slab_does_not_count(bench, request):
    bench.manager.pool("full")._num_taken_in[1] = 2


def plant_a_slab_that_two_groups_use(bench, request):
    bench.manager.pool("window")._num_taken_in[1] = 0


def plant_a_slab_that_went_back_too_early(bench, request):
    bench.manager.slabs.release(bench.manager.plan.group("full"), 1)


def plant_a_lost_slab(bench, request):
    bench.manager.slabs._num_free_in_run[0] -= 1


def plant_an_arena_without_the_slabs_bytes(bench, request):
    bench.manager.slabs.grow(bench.manager.slabs.num_slabs + 1)


def plant_a_row_past_its_request(bench, request):
    bench.tables["full"].append_row(request.row, [0])


def plant_a_hole_in_the_window(bench, request):
    bench.manager.pool("window").free(bench.row(request, "window")[-2:-1])
    bench.tables["window"].null_range(request.row, 8, 9)


def plant_a_block_behind_the_window(bench, request):
    (block_id,) = bench.manager.pool("window").allocate(1)
    bench.tables["window"]._table[request.row, 5] = block_id


def plant_a_stale_tail(bench, request):
    bench.tables["full"]._table[request.row, 3] = 7


def plant_a_row_that_nobody_has(bench, request):
    bench.tables["window"]._table[5, 0] = 7


def plant_a_device_that_missed_a_commit(bench, request):
    bench.tables.commit()
    bench.tables["full"].device_table[request.row, 1] = 2


def plant_a_commit_that_is_thought_done(bench, request):
    bench.tables["full"]._dirty_stop[:] = 0


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (plant_a_block_twice, "group 'full': block 4 is in 2 rows and has 1 owners"),
        (plant_an_owner_too_many, "group 'full': block 4 is in 1 rows and has 2 owners"),
        (plant_an_owner_too_few, "group 'full': block 4 is in 1 rows and has 0 owners"),
        (plant_a_block_that_nobody_holds, "group 'full': block 7 is in 0 rows and has 1 owners"),
        (plant_a_lost_free_block, "group 'full': 3 owned, 0 cached and 0 free blocks, expected 4 in 1 leases"),
        (plant_a_block_that_its_slab_does_not_count, "group 'full': 3 blocks of slab 1 are taken, and 2 are counted"),
        (plant_a_slab_that_two_groups_use, "slab 1: used by group 'full' and by group 'window'"),
        (plant_a_slab_that_went_back_too_early, "slab 1: used by group 'full' and leased to group None"),
        (plant_a_lost_slab, "slabs: 0 have no owner and -1 are counted as free"),
        (plant_an_arena_without_the_slabs_bytes, "slabs: 4 in the accounts and bytes for 3"),
        (plant_a_row_past_its_request, "group 'full': row 2 has 4 blocks, expected 3 for 40 tokens"),
        (plant_a_hole_in_the_window, "group 'window': row 2 has the null block at column 8, .* after 40 tokens"),
        (plant_a_block_behind_the_window, "group 'window': row 2 still has blocks among the 8 that it gave up"),
        (plant_a_stale_tail, "group 'full': row 2 names blocks behind its 3 blocks"),
        (plant_a_row_that_nobody_has, "group 'window': row 5 names block 7, and no request has that row"),
        (plant_a_device_that_missed_a_commit, "group 'full': row 2, column 1: block 5 on the CPU and 2 on cpu"),
        (plant_a_commit_that_is_thought_done, "group 'full': row 2, column 0: block 4 on the CPU and 0 on cpu"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)  # fmt: skip
def test_check_sees_a_planted_fault(make_bench, plant, message):
    bench = make_bench({"full": (16,), "window": (8, 4)}, memory={"full": 9, "window": 9})
    request = bench.open(2, 40)
    bench.manager.allocate([request], [0])
    bench.manager.check()
    plant(bench, request)
    with pytest.raises(KVGroupsError, match=message):
        bench.manager.check()


def test_two_threads_share_one_manager(make_bench):
    bench = make_bench(ALL_KINDS)
    errors = []

    def run(seed: int) -> None:
        tables = MultiGroupBlockTable.from_config(bench.config)
        try:
            for turn in range(30):
                request = bench.manager.open(tables, 0)
                bench.step(request, 1 + (7 * turn + seed) % 40)
                child = bench.manager.fork(request, tables, 1)
                bench.step(child, 3)
                bench.manager.check()
                bench.manager.free(request)
                bench.manager.free(child)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sum(bench.num_used().values()) == 0
