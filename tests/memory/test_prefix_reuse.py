"""Manager and prefix cache together: what is served, what stays findable, what is evicted, and that nothing leaks."""

from __future__ import annotations

import warnings

import pytest

from kvgroups.errors import KVGroupsError, OutOfBlocksError, ShapeError
from kvgroups.eviction import EvictionPolicy
from kvgroups.manager import Manager
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.retention import RetentionPolicy
from kvgroups.specs import FullAttentionSpec, GroupConfig, KVGroupsConfig

HYBRID = {"full": (4,), "window": (8, 4), "state": (1, 4)}
"""Everything at once: blocks of 4, a window of 8, and snapshots every 4 tokens."""

OTHER = range(1000, 1200)
"""Tokens that no other prompt has."""


# What is served


@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 5, 16], ids=lambda chunk: f"chunks of {chunk}")
@pytest.mark.parametrize("groups", [{"full": (4,)}, {"full": (16,), "window": (10, 4)}, HYBRID], ids=" ".join)
def test_a_prompt_is_computed_once(make_worker, groups, chunk):
    """Served is what lies before the last grid point that leaves a token to compute, and it reads as computed."""
    worker = make_worker(groups)
    unit = worker.manager.prefixes.unit
    assert worker.serve(0, range(40), chunk) == 0
    assert worker.serve(1, range(40), chunk) == 39 // unit * unit
    assert worker.serve(2, range(60), chunk) >= 39 // unit * unit
    assert worker.serve(3, OTHER[:40], chunk) == 0


@pytest.mark.parametrize("prompt_len", [15, 16, 17, 32, 33])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(make_worker, prompt_len):
    worker = make_worker(HYBRID)
    hits = [worker.serve(row, range(prompt_len)) for row in range(3)]
    assert hits == [0, (prompt_len - 1) // 4 * 4, (prompt_len - 1) // 4 * 4]


def test_requests_that_run_share_their_prefix_once(make_worker):
    worker = make_worker({"full": (4,)})
    requests = [worker.prefill(row, range(33)) for row in range(3)]
    assert [worker.row(request, "full")[:8] for request in requests] == [
        worker.row(requests[0], "full")[:8]
    ] * 3
    assert worker.num_used() == {"full": 9 + 1 + 1}
    worker.manager.check()


def test_a_window_that_begins_behind_a_hit_holds_its_tail_only(make_worker):
    """W = 8 on blocks of 4, 32 tokens from the hit: the query at 32 sees from 25 on."""
    worker = make_worker({"full": (4,), "window": (8, 4)})
    worker.serve(0, range(33))
    request = worker.manager.admit(worker.tables, 0, range(36))
    assert request.hit.num_tokens == 32
    assert worker.picture(request, "window") == "......xxx"  # and the block that the step writes
    worker.finish_step(request, range(36))
    worker.assert_reads(request, range(36))


@pytest.mark.parametrize("num_more", [1, 2, 3])
def test_a_snapshot_is_read_and_never_written(make_worker, num_more):
    """Prompts that add fewer tokens than a convolution is wide go on from one snapshot: it stays as it was."""
    worker = make_worker(HYBRID)
    worker.serve(0, range(13))
    (slot,) = worker.manager.prefixes.match(range(13)).blocks["state"].values()
    states = worker.manager.storage("state").layer(2)["recurrent"].numpy()
    before = states[slot].copy()
    prompts = [[*range(12), *OTHER[10 * n : 10 * n + num_more]] for n in range(3)]
    requests = [worker.begin(row, prompt) for row, prompt in enumerate(prompts)]
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.hit.num_tokens == 12
        assert worker.row(request, "state") != [slot]
        worker.assert_reads(request, prompt)
    assert (states[slot] == before).all()
    assert worker.serve(7, range(13)) == 12


def test_an_extra_key_keeps_requests_apart(make_worker):
    worker = make_worker(HYBRID)
    for extra in (None, "adapter", ("adapter", 7)):
        assert worker.serve(0, range(20), extra=extra) == 0
        assert worker.serve(0, range(20), extra=extra) == 16


def test_a_ring_says_that_it_cannot_be_shared(make_bench):
    bench = make_bench({"full": (4,), "ring": (8, 4)})
    request = bench.manager.admit(bench.tables, 0, range(16))
    bench.manager.advance([request], [16])
    bench.manager.file(request, range(16))
    bench.manager.free(request)
    hit = bench.manager.match_prefix(range(17))
    assert (hit.num_tokens, bench.manager.usage().cached_bytes) == (0, 0)
    assert (hit.limited_by, hit.limits[-1].wanted) == ("ring", 16)
    assert "a ring is overwritten in place and cannot be shared" in hit.explain()


# Retention points


@pytest.mark.parametrize("num_unique", [3, 5, 9, 21])
def test_a_shared_system_prompt_is_served_from_the_third_request_on(make_worker, num_unique):
    """The first leaves a snapshot at its own end, the second where they part, and every later one is served."""
    worker = make_worker(HYBRID)
    prompts = [[*range(16), *OTHER[40 * n : 40 * n + num_unique]] for n in range(4)]
    hits = [worker.serve(0, prompt) for prompt in prompts]
    assert hits[2:] == [16, 16]
    assert hits[:2] == [0, 16 if num_unique < 5 else 0]


def test_prefill_stops_at_the_points_that_it_keeps(make_worker):
    worker = make_worker(HYBRID)
    worker.serve(0, [*range(16), *OTHER[:20]])
    request = worker.begin(0, [*range(16), *OTHER[50:70]])
    assert request.hit.branch_point == 16
    assert (request.stops, request.num_computed_tokens) == ((16, 32), 16)
    assert worker.manager.next_step(request) == 16
    assert worker.manager.next_step(request, 5) == 5


def test_an_answer_is_resumed_at_its_last_grid_point(make_worker):
    """A conversation: every turn is served all of the turns before, up to the grid."""
    worker = make_worker(HYBRID)
    history: list[int] = []
    for turn in range(5):
        prompt = [*history, *range(100 * turn, 100 * turn + 7)]
        history = [*prompt, *range(100 * turn + 50, 100 * turn + 59)]
        request = worker.prefill(0, prompt)
        assert request.hit.num_tokens == max(0, len(prompt) - 7) // 4 * 4
        worker.decode(request, history, len(prompt))
        worker.assert_reads(request, history)
        worker.manager.free(request)
        worker.manager.check()


def test_a_request_leaves_two_points_by_default(make_worker):
    worker = make_worker(HYBRID)
    request = worker.prefill(0, range(10))
    worker.decode(request, range(40), 10)
    assert sorted(request.points) == [8, 40]
    worker.manager.free(request)
    assert [block.depth for block in worker.manager.prefixes.idle_blocks("state")] == [8, 40]
    assert worker.manager.pool("state").num_cached == 2


def test_a_point_that_others_have_used_is_not_given_up(make_worker):
    worker = make_worker(HYBRID)
    request = worker.prefill(0, range(10))
    worker.decode(request, range(13), 10)
    assert sorted(request.points) == [8, 12]
    assert worker.serve(1, range(13)) == 12
    worker.decode(request, range(16), 13)
    assert sorted(request.points) == [8, 16]
    assert sorted(block.depth for block in worker.manager.prefixes.idle_blocks("state")) == [8, 12, 16]


def test_without_retention_points_states_cannot_be_resumed_and_full_attention_can(make_worker):
    worker = make_worker({"full": (4,), "state": (1, 4)}, retention=RetentionPolicy.none())
    worker.serve(0, range(20))
    hit = worker.manager.match_prefix(range(20))
    assert (hit.num_tokens, hit.limited_by) == (0, "state")
    full = make_worker({"full": (4,)}, retention=RetentionPolicy.none())
    full.serve(0, range(20))
    assert full.serve(0, range(20)) == 16


def test_points_at_every_so_many_tokens(make_worker):
    worker = make_worker(HYBRID, retention=RetentionPolicy.every_tokens(8))
    worker.serve(0, range(30))
    for parts_at, expected in [(30, 28), (27, 24), (23, 16), (9, 8), (7, 0)]:
        hit = worker.manager.match_prefix([*range(parts_at), *OTHER])
        assert hit.num_tokens == expected


def test_a_snapshot_that_finds_no_room_is_skipped_and_counted(make_worker):
    """Two state slots in all: one is the running state's, one the first snapshot's; both requests run on."""
    worker = make_worker(HYBRID, memory={"full": 20, "window": 20, "state": 2})
    first = worker.prefill(0, range(20))
    second = worker.prefill(1, OTHER[:20])  # its running state takes the slot of the first one's snapshot
    assert worker.manager.prefix_stats.num_skipped_snapshots >= 1
    for request, tokens in ((first, range(20)), (second, OTHER[:20])):
        worker.assert_reads(request, tokens)
    worker.manager.check()


def test_snapshots_stay_under_their_share_of_a_capped_arena(make_worker):
    """A share of 3 of 32 slabs of 1 KiB is 12 snapshots of 256 bytes; the 13th takes the place of an older one."""
    policy = RetentionPolicy(max_share=3 / 32)
    worker = make_worker(HYBRID, retention=policy, memory=32 * 1024)
    assert worker.manager.plan.slab_bytes == 1024
    for n in range(20):
        worker.serve(0, OTHER[n : n + 6])
        assert worker.manager.pool("state").num_cached <= 12
    assert worker.manager.pool("state").num_cached == 12
    assert worker.serve(0, OTHER[19 : 19 + 6]) == 4
    assert worker.manager.match_prefix(OTHER[0:6]).num_tokens == 0


# What stays, and what goes


def test_freed_blocks_stay_findable_until_their_bytes_are_needed(make_worker):
    worker = make_worker({"full": (4,)}, memory={"full": 10})
    worker.serve(0, range(24))
    usage = worker.manager.usage().groups[0]
    assert (usage.num_used, usage.num_cached) == (0, 6)
    assert usage.cached_bytes == 6 * usage.block_bytes
    worker.serve(0, OTHER[:16])  # four are free: nothing is evicted
    assert worker.manager.prefix_stats.num_evicted_blocks == 0
    worker.serve(0, OTHER[100:108])  # two are needed: the tail of the least recently used
    assert worker.manager.prefix_stats.num_evicted_blocks == 2
    assert worker.manager.match_prefix(OTHER[:17]).num_tokens == 16
    assert worker.serve(0, range(24)) == 16


def test_blocks_that_nobody_can_find_go_before_those_that_someone_can(make_bench):
    bench = make_bench({"full": (4,)}, memory={"full": 8})
    kept, lost = bench.open(0, 16), bench.open(1, 16)
    bench.manager.file(kept, range(16))
    bench.manager.free(kept)
    bench.manager.free(lost)
    bench.open(0, 16)
    assert bench.manager.match_prefix(range(17)).num_tokens == 16
    bench.open(1, 16)
    assert bench.manager.match_prefix(range(17)).num_tokens == 0
    bench.manager.check()


def test_memory_flows_from_what_is_cached_in_one_group_to_another(make_worker):
    """32 slabs: a long prompt's blocks fill them, and requests of another kind take them back, slab by slab."""
    worker = make_worker({"full": (4,), "window": (4, 4)}, memory=32 * 1024)
    worker.serve(0, range(120))
    worker.serve(0, OTHER[:120])
    for n in range(4):
        worker.prefill(n, OTHER[150 + n : 160 + n])
    assert worker.manager.usage().leased_bytes <= 31 * 1024
    worker.manager.check()


def test_a_run_is_made_of_cached_slabs(make_bench):
    """States take runs of 5 slabs, and 25 slabs are 4 runs beside the null slab's. Tokens that are cached all over the
    first of them make way for the fourth state."""
    bench = make_bench({"full": (4,), "state": (1280, 4)}, memory=25 * 1024)
    assert bench.manager.plan.run_slabs == 5
    first, second, third = bench.open(0, 4), bench.open(1, 4), bench.open(2, 8 * 16)
    bench.manager.file(third, range(8 * 16))
    bench.manager.free(third)
    assert bench.manager.slabs.owners[5:10] == ("full",) * 5
    bench.manager.set_checkpoints([first], [0])
    assert bench.manager.prefix_stats.num_evicted_blocks == 0
    bench.manager.set_checkpoints([second], [0])
    assert bench.manager.slabs.owners[5:10] == ("state",) * 5
    assert bench.manager.slabs.owners[1:5] == ("full",) * 4  # what is cached there is left
    assert bench.manager.pool("full").num_cached == 2 + 3 * 4
    bench.manager.check()


def test_a_slab_that_holds_less_of_worth_goes_first(make_bench):
    """Three slabs of four blocks: the oldest whole request, whose blocks are missed least, makes room."""
    bench = make_bench({"full": (4,)}, memory=4 * 1024)
    for n in range(3):
        request = bench.open(0, 16)
        bench.manager.file(request, range(100 * n, 100 * n + 16))
        bench.manager.free(request)
    bench.open(0, 16)
    hits = [bench.manager.match_prefix(range(100 * n, 100 * n + 17)).num_tokens for n in range(3)]
    assert hits == [0, 16, 16]


@pytest.mark.parametrize(
    ("interval", "is_kept"),
    [
        # Blocks of 4 tokens in 256 bytes save 16 tokens a KiB, and a snapshot has 5 KiB.
        pytest.param(64, False, id="64 tokens: 13 a KiB"),
        pytest.param(96, True, id="96 tokens: 19 a KiB"),
    ],
)
def test_a_snapshot_is_kept_for_the_tokens_that_it_saves_per_byte(make_worker, interval, is_kept):
    """A request leaves its blocks and a snapshot; another fills the arena, and then needs one slab more."""
    worker = make_worker({"full": (4,), "state": (1280, interval)}, memory=25 * 1024)
    worker.serve(0, range(interval + 1))
    assert worker.manager.match_prefix(range(interval + 1)).num_tokens == interval
    request = worker.open(0, 4)
    worker.step(request, 16 * worker.manager.slabs.num_free)
    assert (worker.manager.slabs.num_free, worker.manager.prefix_stats.num_evicted_blocks) == (0, 0)
    worker.step(request, 16)
    assert worker.manager.pool("state").num_cached == is_kept
    assert (worker.manager.pool("full").num_cached == interval // 4) == (not is_kept)
    worker.manager.check()


def test_another_order_of_eviction_can_take_its_place():
    class YoungestFirst(EvictionPolicy):
        def rank(self, block):
            return 0.0, -block.last_used, -block.depth

    group = GroupConfig(
        name="full",
        layers=[0],
        block_size=4,
        spec=FullAttentionSpec(num_kv_heads=1, head_dim=1, dtype="float32"),
    )
    config = KVGroupsConfig(groups=[group], memory={"full": 8}, max_model_len=64, max_num_reqs=2)
    manager, tables = (
        Manager(config, "cpu", eviction=YoungestFirst()),
        MultiGroupBlockTable.from_config(config),
    )
    for start in (0, 100):
        request = manager.admit(tables, 0, range(start, start + 16))
        manager.advance([request], [16])
        manager.file(request, range(start, start + 16))
        manager.free(request)
    manager.allocate([manager.open(tables, 0)], [16])
    assert manager.match_prefix(range(17)).num_tokens == 16
    assert manager.match_prefix(range(100, 117)).num_tokens == 0


def test_an_arena_that_grows_keeps_as_much_as_was_ever_held(make_worker):
    worker = make_worker({"full": (4,)})
    for n in range(12):
        worker.serve(0, OTHER[10 * n : 10 * n + 64])
    usage = worker.manager.usage()
    assert 0 < usage.cached_bytes <= 3 * usage.peak_held_bytes
    assert usage.allocated_bytes <= 6 * usage.peak_held_bytes


def test_a_cached_block_that_is_used_goes_last(make_worker):
    worker = make_worker({"full": (4,)}, memory={"full": 8})
    worker.serve(0, range(13))
    worker.serve(0, OTHER[:13])
    assert worker.serve(0, range(13)) == 12
    worker.serve(0, OTHER[50:63])
    assert worker.manager.match_prefix(range(13)).num_tokens == 12
    assert worker.manager.match_prefix(OTHER[:13]).num_tokens < 12


# Forks and rewinds


def test_a_fork_files_what_it_computes_itself(make_worker):
    worker = make_worker(HYBRID)
    request = worker.prefill(0, range(14))
    child = worker.manager.fork(request, worker.tables, 1)
    ends = [[*range(14), *OTHER[50 * n : 50 * n + 12]] for n in range(2)]
    for one, tokens in zip((request, child), ends, strict=True):
        worker.decode(one, tokens, 14)
    for one, tokens in zip((request, child), ends, strict=True):
        worker.assert_reads(one, tokens)
        worker.manager.free(one)
    for tokens in ends:
        assert worker.serve(0, [*tokens, 7]) == 24
    worker.manager.check()


def test_a_block_that_is_written_again_is_not_found_by_its_old_tokens(make_worker):
    worker = make_worker({"full": (4,)}, max_rewind=8)
    request = worker.prefill(0, range(12))
    assert worker.manager.match_prefix(range(13)).num_tokens == 12
    worker.manager.rewind(request, 3)
    assert worker.manager.match_prefix(range(13)).num_tokens == 8
    tokens = [*range(9), *OTHER[:7]]
    worker.manager.allocate([request], [7])
    worker.finish_step(request, tokens)
    worker.assert_reads(request, tokens)
    worker.manager.free(request)
    assert worker.serve(0, [*tokens, 0]) == 16
    assert worker.serve(0, range(13)) == 8


def test_a_shared_block_is_copied_before_a_rewound_request_writes_it(make_worker):
    worker = make_worker({"full": (4,)}, max_rewind=8)
    first = worker.prefill(0, range(13))
    second = worker.prefill(1, range(13))
    worker.manager.rewind(first, 3)
    worker.manager.allocate([first], [5])
    worker.finish_step(first, [*range(10), *OTHER[:5]])
    worker.assert_reads(second, range(13))
    worker.assert_reads(first, [*range(10), *OTHER[:5]])
    assert worker.serve(2, range(13)) == 12


# Nothing leaks, nothing is silent


def accounts(worker) -> tuple[object, ...]:
    usage = worker.manager.usage()
    return tuple((group.num_used, group.num_cached) for group in usage.groups), worker.snapshot()


def test_an_admission_that_fails_changes_nothing(make_worker):
    """The prefix fits, the rest does not: two hundred times, and nothing is taken, lost or evicted."""
    worker = make_worker(HYBRID, memory={"full": 12, "window": 12, "state": 4})
    worker.serve(0, range(17))
    running = [worker.prefill(0, OTHER[:20])]
    before = accounts(worker)
    for attempt in range(200):
        with pytest.raises(OutOfBlocksError, match="group 'full'"):
            worker.manager.admit(worker.tables, 1 + attempt % 5, [*range(16), *OTHER[100:140]])
        assert accounts(worker) == before
        worker.manager.check()
    worker.manager.free(running.pop())
    worker.manager.check()
    assert worker.serve(1, range(17)) == 16


def test_a_failed_admission_evicts_nothing_in_a_capped_arena(make_worker):
    worker = make_worker(HYBRID, memory=16 * 1024)
    worker.serve(0, range(40))
    before = accounts(worker)
    with pytest.raises(OutOfBlocksError):
        worker.manager.admit(worker.tables, 0, [*range(40), *OTHER, *OTHER])
    assert accounts(worker) == before
    assert worker.manager.match_prefix(range(41)).num_tokens >= 36


@pytest.mark.parametrize("stage", ["admitted", "first chunk", "prefilled", "decoding", "rewound", "forked"])
def test_a_request_that_is_cancelled_at_any_stage_leaves_nothing_owned(make_worker, stage):
    worker = make_worker(HYBRID, max_rewind=2)
    worker.serve(0, range(17))
    prompt = [*range(16), *OTHER[:20]]
    requests = [worker.manager.admit(worker.tables, 0, prompt, 3)]
    if stage != "admitted":
        worker.finish_step(requests[0], prompt)
    if stage in ("prefilled", "decoding", "rewound", "forked"):
        while count := worker.manager.next_step(requests[0]):
            worker.manager.allocate(requests, [count])
            worker.finish_step(requests[0], prompt)
    if stage in ("decoding", "rewound"):
        worker.manager.set_checkpoints(requests, [0])
        worker.decode(requests[0], [*prompt, 5], len(prompt))
    if stage == "rewound":
        worker.manager.rewind(requests[0], 1)
    if stage == "forked":
        requests.append(worker.manager.fork(requests[0], worker.tables, 1))
    for request in requests:
        worker.manager.check()
        worker.manager.free(request)
    worker.manager.check()
    assert set(worker.num_used().values()) == {0}
    usage = worker.manager.usage()
    for group in usage.groups:
        assert group.num_cached + group.num_free == group.num_blocks
    worker.manager.flush()
    worker.manager.check()
    assert worker.manager.usage().leased_bytes == 0


def test_a_flush_forgets_all_and_running_requests_go_on(make_worker):
    worker = make_worker(HYBRID)
    worker.serve(0, range(30))
    request = worker.prefill(0, range(20))
    worker.manager.flush()
    worker.manager.check()
    assert worker.manager.usage().cached_bytes == 0
    tokens = [*range(20), *OTHER[:12]]
    worker.decode(request, tokens, 20)  # built on what was computed before the flush
    worker.assert_reads(request, tokens)
    assert worker.manager.match_prefix(tokens).num_tokens == 0
    worker.manager.free(request)
    worker.manager.check()
    assert worker.serve(0, range(20)) == 0
    assert worker.serve(0, range(20)) == 16


def test_changed_parameters_are_warned_about_until_a_flush(make_worker):
    worker = make_worker({"full": (4,)})
    request = worker.manager.admit(worker.tables, 0, range(9), version=1)
    worker.finish_step(request, range(9))
    with pytest.warns(UserWarning, match="parameters changed"):
        worker.manager.match_prefix(range(9), version=2)
    worker.manager.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert worker.manager.match_prefix(range(9), version=3).num_tokens == 0


def test_a_request_explains_where_its_blocks_came_from(make_worker):
    worker = make_worker(HYBRID)
    worker.serve(0, range(14))
    request = worker.prefill(0, [*range(14), *OTHER[:20]])
    assert worker.manager.explain(request) == (
        "row 0: 34 tokens are computed\n"
        "  12 of 34 tokens are cached\n"
        "    prompt: 12 of 32 tokens, the tokens from 12 on are not cached\n"
        "  group 'full': 9 blocks, 3 of them from the hit, 0 shared with other requests, 8 findable\n"
        "  group 'window': 3 blocks, 0 of them from the hit, 0 shared with other requests, 2 findable; 6 out of sight\n"
        "  group 'state': 1 blocks, 0 of them from the hit, 0 shared with other requests, 0 findable\n"
        "  it keeps retention points at 32"
    )
    opened = worker.open(1, 3)
    assert "it was opened without a prompt" in worker.manager.explain(opened)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        pytest.param(
            lambda w, r: w.manager.admit(w.tables, 0, [1, 2, 3]), KVGroupsError, "row 0 belongs", id="a row in use"
        ),
        pytest.param(lambda w, r: w.manager.admit(w.tables, 9, [1]), ShapeError, "row", id="no such row"),
        pytest.param(lambda w, r: w.manager.admit(w.tables, 1, []), ShapeError, "at least one token", id="no prompt"),
        pytest.param(
            lambda w, r: w.manager.admit(w.tables, 1, range(600)), ShapeError, "max_model_len is 512", id="too long"
        ),
        pytest.param(lambda w, r: w.manager.file(r, range(3)), ShapeError, "the 20 tokens", id="too few tokens filed"),
        pytest.param(
            lambda w, r: (w.manager.allocate([r], [1]), w.manager.file(r, range(21))),
            KVGroupsError, "advance by what was allocated", id="filed in the middle of a step",
        ),
        pytest.param(
            lambda w, r: (w.manager.free(r), w.manager.file(r, range(20))), KVGroupsError, "was freed", id="freed"
        ),
        pytest.param(
            lambda w, r: (w.manager.free(r), w.manager.explain(r)), KVGroupsError, "was freed", id="explain a freed one"
        ),
    ],
)  # fmt: skip
def test_what_is_refused(make_worker, call, error, message):
    worker = make_worker(HYBRID)
    request = worker.prefill(0, range(20))
    with pytest.raises(error, match=message):
        call(worker, request)
    worker.manager.check()


# Held once


@pytest.mark.parametrize(
    ("groups", "num_tokens", "shared"),
    [
        pytest.param({"full": (4,)}, 18, {"full": 4}, id="full blocks, and not the tail of two tokens"),
        pytest.param({"full": (4,), "window": (8, 4)}, 18, {"full": 4, "window": 2}, id="what a window still has"),
        pytest.param({"full": (4,), "chunk": (8, 4)}, 22, {"full": 5, "chunk": 1}, id="of a chunk its own blocks"),
        pytest.param({"full": (8,), "state": (1, 16)}, 30, {"full": 3, "state": 0}, id="a running state is nobody else's"),
        pytest.param({"full": (16,)}, 15, {"full": 0}, id="no full block"),
    ],
)  # fmt: skip
def test_requests_that_compute_the_same_side_by_side_hold_it_once(make_worker, groups, num_tokens, shared):
    worker, tokens = make_worker(groups, sanitize=True), list(range(num_tokens))
    first = worker.manager.admit(worker.tables, 0, tokens, num_tokens)
    second = worker.manager.admit(worker.tables, 1, tokens, num_tokens)
    for request in (first, second):
        worker.finish_step(request, tokens)
    for request in (first, second):
        while count := worker.manager.next_step(request):
            worker.manager.allocate([request], [count])
            worker.finish_step(request, tokens)
    for name in groups:
        both = set(worker.row(first, name)) & set(worker.row(second, name)) - {0}
        assert len(both) == shared[name], name
    worker.manager.check()
    for request, more in ((first, 7), (second, 8)):
        worker.decode(request, [*tokens, *[more] * 9], num_tokens)
        worker.assert_reads(request, [*tokens, *[more] * 9])
    worker.manager.check()


def test_what_lies_behind_the_last_snapshot_is_held_once_too(make_worker):
    """A system prompt of 28 tokens, states resumed every 16: tokens 16 to 27 are computed again, and held once."""
    worker = make_worker({"full": (4,), "state": (1, 16)}, sanitize=True)
    system = list(range(28))
    for row in range(3):
        worker.prefill(row, [*system, 100 + row, 200 + row])
    third = worker.prefill(3, [*system, 50, 51])
    assert third.hit.num_tokens == 16
    assert worker.num_used()["full"] == 7 + 4  # 28 tokens once, and four tails
    worker.manager.check()


def test_going_back_into_a_block_that_came_to_be_shared_copies_it(make_worker):
    worker, tokens = make_worker({"full": (4,)}, sanitize=True), list(range(10))
    first, second = worker.prefill(0, tokens), worker.manager.admit(worker.tables, 1, [*tokens[:3], 9])
    worker.finish_step(second, [*tokens[:3], 9])
    worker.manager.rewind(second, 1)
    worker.decode(second, tokens[:8], 3)
    assert worker.row(second, "full") == worker.row(first, "full")[:2]
    worker.manager.rewind(second, 2)
    worker.decode(second, [*tokens[:6], 70, 71], 6)
    assert worker.row(second, "full")[0] == worker.row(first, "full")[0]
    assert worker.row(second, "full")[1] != worker.row(first, "full")[1]
    worker.assert_reads(first, tokens)
    worker.assert_reads(second, [*tokens[:6], 70, 71])
    worker.manager.check()


def test_a_forks_own_block_stays_where_it_is(make_worker):
    """Both forks hold a block of their parent's; one of them finds that it is filed elsewhere."""
    worker, tokens = make_worker({"full": (4,)}, sanitize=True), list(range(8))
    unfiled = worker.manager.open(worker.tables, 0)
    worker.manager.allocate([unfiled], [8])
    worker.write(unfiled, tokens, 8)
    worker.manager.advance([unfiled], [8])
    twin = worker.manager.fork(unfiled, worker.tables, 1)
    filed = worker.prefill(2, tokens)
    worker.manager.file(twin, tokens)
    assert worker.row(twin, "full") == worker.row(filed, "full")
    assert worker.row(unfiled, "full") != worker.row(filed, "full")
    for request in (unfiled, twin, filed):
        worker.assert_reads(request, tokens)
    worker.manager.check()
