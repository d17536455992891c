"""Rewind: what each kind of group has left after tokens are taken back, and how far it can go."""

from __future__ import annotations

import pytest

from kvgroups.errors import KVGroupsError


@pytest.mark.parametrize(
    ("group", "sizes", "max_rewind", "num_tokens", "taken", "picture"),
    [
        pytest.param("full", (16,), 0, 35, 2, "xxx", id="full: 33 tokens begin a third block"),
        pytest.param("full", (16,), 0, 35, 3, "xx", id="full: 32 tokens fill two"),
        pytest.param("full", (16,), 0, 35, 4, "xx", id="full: 31 tokens"),
        pytest.param("full", (16,), 0, 35, 35, "", id="full: all of them"),
        # The query at 30 sees from 23 on, so blocks 5 (20 to 23), 6 and 7 are held.
        pytest.param("window", (8, 4), 0, 30, 1, ".....xxx", id="window: the query at 29 sees from 22 on"),
        pytest.param("window", (8, 4), 0, 30, 3, ".....xx", id="window: at 27, from 20 on: block 5 to its first token"),
        pytest.param("window", (8, 4), 0, 30, 4, None, id="window: at 26, from 19 on: block 4 is gone"),
        pytest.param("window", (8, 4), 4, 30, 4, "....xxx", id="window: with slack for 4, block 4 is there"),
        pytest.param("window", (8, 4), 4, 30, 7, "....xx", id="window: slack ends where its block begins, 16"),
        pytest.param("window", (8, 4), 4, 30, 8, None, id="window: at 22, from 15 on: block 3 is gone"),
        pytest.param("window", (8, 4), 0, 7, 7, "", id="window: a short request, all of it"),
        # The third chunk is 16 to 23, the fourth 24 to 31; the query at 30 sees 24 to 29.
        pytest.param("chunk", (8, 4), 0, 30, 5, "......x", id="chunk: inside its own chunk"),
        pytest.param("chunk", (8, 4), 0, 30, 6, "......", id="chunk: to its beginning, where nothing is seen"),
        pytest.param("chunk", (8, 4), 0, 30, 7, None, id="chunk: into the one before"),
        # R = ceil((9 + 4) / 4) = 4 blocks hold the last 16 tokens: 14 to 29.
        pytest.param("ring", (10, 4), 4, 30, 4, "xxxx", id="ring: the query at 26 sees from 17 on"),
        pytest.param("ring", (10, 4), 4, 30, 7, "xxxx", id="ring: at 23, from 14 on"),
        pytest.param("ring", (10, 4), 4, 30, 8, None, id="ring: at 22, from 13 on, which was written over"),
        pytest.param("ring", (10, 4), 4, 5, 3, "xxxx", id="ring: owned for life"),
    ],
)  # fmt: skip
def test_what_is_left(make_bench, group, sizes, max_rewind, num_tokens, taken, picture):
    bench = make_bench({group: sizes}, max_rewind=max_rewind)
    request = bench.open(0, num_tokens)
    before = bench.snapshot()
    if picture is None:
        with pytest.raises(KVGroupsError, match=f"group '{group}' has let go of tokens .* raise max_rewind"):
            bench.manager.rewind(request, taken)
        assert bench.snapshot() == before and request.num_computed_tokens == num_tokens
    else:
        assert bench.manager.rewind(request, taken) == 0
        assert bench.picture(request, group) == picture
        assert request.num_computed_tokens == num_tokens - taken
        assert bench.num_used() == {group: picture.count("x")}
    bench.manager.check()
    bench.step(request, 9)
    bench.manager.check()


@pytest.mark.parametrize(
    ("checkpoint", "taken", "fed_again"),
    [
        pytest.param(28, 2, 0, id="to the checkpoint itself"),
        pytest.param(28, 1, 1, id="to one token behind it: that one is fed again"),
        pytest.param(26, 1, 3, id="three tokens behind it"),
        pytest.param(28, 3, None, id="before it"),
        pytest.param(30, 1, None, id="a checkpoint at the end helps nobody"),
        pytest.param(None, 1, None, id="there is none"),
        pytest.param(None, 0, 0, id="nothing is taken back"),
    ],
)
def test_states_go_back_to_their_checkpoint(make_bench, checkpoint, taken, fed_again):
    bench = make_bench({"full": (16,), "state": ()}, max_rewind=4)
    request = bench.open(0, 26)
    if checkpoint is not None:
        bench.manager.set_checkpoints([request], [checkpoint - 26])
    bench.step(request, 4)
    if fed_again is None:
        before = bench.snapshot()
        with pytest.raises(KVGroupsError, match=f"states after {30 - taken} tokens or fewer are needed"):
            bench.manager.rewind(request, taken)
        assert bench.snapshot() == before
    else:
        running, slots = bench.row(request, "state"), request.checkpoint and request.checkpoint.slots
        assert bench.manager.rewind(request, taken) == fed_again
        assert request.num_computed_tokens == (checkpoint if taken else 30)
        assert bench.row(request, "state") == ([slots["state"]] if taken else running)
        assert bench.num_used()["state"] == 1
    bench.manager.check()


@pytest.mark.parametrize(
    ("taken", "parent", "child"),
    [
        pytest.param(2, [4, 5, 6], [4, 5, 7], id="to 33: in a tail of its own"),
        pytest.param(3, [4, 5], [4, 5, 7], id="to 32: on a block edge nothing is written to"),
        pytest.param(4, [4, 6], [4, 5, 7], id="to 31: into a block that its fork has too, which is copied"),
        pytest.param(20, [6], [4, 5, 7], id="to 15: into an earlier one"),
    ],
)
def test_a_block_that_a_fork_shares_is_copied_before_it_is_written_again(make_bench, taken, parent, child):
    bench = make_bench({"full": (16,)})
    request = bench.open(0, 35)
    twin = bench.manager.fork(request, bench.tables, 1)
    assert (bench.row(request, "full"), bench.row(twin, "full")) == ([4, 5, 6], [4, 5, 7])
    bench.manager.rewind(request, taken)
    assert (bench.row(request, "full"), bench.row(twin, "full")) == (parent, child)
    bench.manager.check()
