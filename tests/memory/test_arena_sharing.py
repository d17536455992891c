"""Groups that share one capped arena: slabs move between them, whole, and fragments are few."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvgroups.errors import OutOfBlocksError
from kvgroups.manager import Manager
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.page_index import intervals
from kvgroups.specs.presets import preset

MIB = 1024 * 1024


def owners(bench) -> str:
    """The slabs by the first letter of their group: `0ff.w`."""
    marks = {None: ".", "(null)": "0"}
    return "".join(marks.get(owner, owner[0] if owner else "") for owner in bench.manager.slabs.owners)


def test_a_lone_short_request_holds_its_states_and_one_small_slab():
    """Bamba 9B on 1 GiB: one uniform page would give its 20 tokens a hundred megabytes."""
    config = preset("bamba-9b").config.model_copy(update={"memory": 1024 * MIB})
    manager = Manager(config, "meta")
    tables = MultiGroupBlockTable.from_config(config, max_num_reqs=1)
    request = manager.open(tables, 0)
    manager.allocate([request], [20])
    manager.advance([request], [20])
    usage = {group.name: group for group in manager.usage().groups}
    assert usage["state"].held_bytes == config.group("state").block_bytes == pytest.approx(118 * MIB, rel=0.01)
    assert usage["state"].leased_bytes == pytest.approx(usage["state"].held_bytes, rel=0.005)
    assert usage["full"].leased_bytes == 576 * 1024 < 8 * MIB
    assert manager.usage().allocated_bytes == pytest.approx(1024 * MIB, rel=0.01)
    manager.check()


def test_what_one_long_request_gave_back_serves_many_short_ones(make_bench):
    """Tokens and states in turn, in an arena that does not hold the peaks of both groups."""
    bench = make_bench({"full": (16,), "state": (1280,)}, memory=30 * 1024)
    long = bench.open(0, 31 * 16)
    assert owners(bench) == "0ffffffff" + 16 * "." + "sssss"
    bench.manager.free(long)
    assert owners(bench) == "0" + 29 * "."
    short = [bench.open(row, 5) for row in range(5)]
    assert owners(bench) == "0ff.." + 25 * "s"
    with pytest.raises(OutOfBlocksError, match="5120 bytes .*more are needed .* 30720 bytes .* are 2048 bytes .*free; r"):
        bench.open(5, 5)
    bench.manager.check()
    bench.manager.free(short[0])
    bench.step(short[1], 28 * 16 - 5)  # the last slabs beside the null slab, then those of the state that went
    assert owners(bench) == "0ffff" + 20 * "s" + "ffff."
    bench.manager.check()


def test_a_slab_that_one_group_gives_back_serves_another_in_the_same_call(make_bench):
    """At 32 tokens a chunk is over: its two slabs go back, and one of them holds the ninth block of 4 tokens."""
    bench = make_bench({"full": (4,), "chunk": (32, 4)}, memory=5 * 1024)
    request = bench.open(0, 31)
    bench.step(request, 1)
    assert owners(bench) == "0ffcc"
    bench.step(request, 1)
    assert owners(bench) == "0fffc"
    bench.manager.check()


def test_free_slabs_that_are_no_run_hold_no_state(make_bench):
    """One block of tokens is left where a run would be. Nothing is moved for it: the state waits."""
    bench = make_bench({"full": (16,), "state": (1280,)}, memory=15 * 1024)
    bench.open(0, 5)
    tokens = bench.manager.pool("full")
    blocks = tokens.allocate(5 * 4 - 1)  # slabs 2 to 5, and block 7 behind the request's own
    assert owners(bench) == "0fffff...." + "sssss"
    tokens.free(blocks[:15])
    assert owners(bench) == "0f...f...." + "sssss"
    want = r"5120 bytes .*\(group 'state': 1 blocks\), .* 7168 bytes \(7 KiB\) free, not in pieces of 5120 bytes"
    with pytest.raises(OutOfBlocksError, match=want):
        bench.open(1, 5)
    tokens.free(blocks[15:])
    assert owners(bench) == "0f........" + "sssss"
    bench.open(2, 5)
    assert owners(bench) == "0f...sssss" + "sssss"


def test_a_million_tokens_on_an_idle_arena_are_a_handful_of_intervals():
    config = preset("gemma-3-27b").config.model_copy(
        update={"max_model_len": 2**20, "max_num_reqs": 1, "memory": None}
    )
    manager = Manager(config, "meta")
    tables = MultiGroupBlockTable.from_config(config)
    request = manager.open(tables, 0)
    for _ in range(128):
        manager.allocate([request], [8192])
        manager.advance([request], [8192])
    table = tables["full"]
    row = table.table[0, : table.num_blocks_per_row[0]]
    assert len(row) * table.block_size == 2**20
    assert len(intervals(row)) <= 3  # a window's few blocks lie where there was room


def test_a_long_request_on_an_idle_arena_is_one_interval(make_bench):
    bench = make_bench({"full": (16,), "window": (64, 16)}, max_model_len=64 * 1024, memory=2 * MIB)
    request = bench.open(0)
    for _ in range(64):
        bench.step(request, 1024)
    row = bench.row(request, "full")
    breaks = sum(after != before + 1 for before, after in pairwise(row))
    assert len(row) == 4096
    assert breaks <= 4
