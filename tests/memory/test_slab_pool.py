"""SlabPool: slabs from one end, runs from the other, and no run is broken up while another slab will do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgroups.errors import OutOfBlocksError
from kvgroups.slab_plan import GroupPlan, SlabPlan
from kvgroups.slab_pool import SlabPool, slabs_of

TOKENS = GroupPlan("tokens", 256, 256, slabs_per_lease=1, blocks_per_lease=4)
RUNS = GroupPlan("runs", 4096, 4096, slabs_per_lease=4, blocks_per_lease=1)


def pool(picture: str) -> SlabPool:
    """A pool in runs of 4, leased as `0tt. .... rrrr .` says: null, tokens, runs, free. Spaces mark runs."""
    marks = picture.replace(" ", "")
    slabs = SlabPool(SlabPlan(1024, 4, (TOKENS, RUNS)), len(marks))
    for slab, mark in enumerate(marks):
        if mark == "t":
            slabs._set_owner(slab, slab + 1, "tokens")
        elif mark == "r" and slab % 4 == 0:
            slabs._set_owner(slab, slab + 4, "runs")
    return slabs


def picture(slabs: SlabPool) -> str:
    marks = "".join({None: ".", "(null)": "0"}.get(owner, owner[:1] if owner else "") for owner in slabs.owners)
    return " ".join(marks[start : start + 4] for start in range(0, len(marks), 4))


@pytest.mark.parametrize(
    ("before", "plan", "after"),
    [
        pytest.param("0... .... ....", TOKENS, "0t.. .... ....", id="slab 0 is never leased"),
        pytest.param("0tt. .... ....", TOKENS, "0ttt .... ....", id="the lowest slab beside others"),
        pytest.param("0ttt .... .... ..", TOKENS, "0ttt .... .... t.", id="the end that is no run before a run"),
        pytest.param("0ttt .... .... tt", TOKENS, "0ttt t... .... tt", id="the lowest run where nothing else is left"),
        pytest.param("0ttt .... ..t. ..", TOKENS, "0ttt .... t.t. ..", id="a run that is broken already"),
        pytest.param("0... .... .... ..", RUNS, "0... .... rrrr ..", id="the highest run, aligned"),
        pytest.param("0... .... ...t ..", RUNS, "0... rrrr ...t ..", id="the highest whole run"),
        pytest.param("0... t... ...t ..", RUNS, None, id="nine free slabs and no run"),
        pytest.param("0... rrrr ...t", RUNS, None, id="the null slab's run is no run"),
        pytest.param("0ttt rrrr tttt", TOKENS, None, id="full"),
    ],
)  # fmt: skip
def test_what_is_leased_next(before, plan, after):
    slabs = pool(before)
    assert picture(slabs) == before
    if after is None:
        with pytest.raises(OutOfBlocksError, match=f"group '{plan.name}': a (slab|run of 4 slabs) is needed, and of"):
            slabs.lease(plan)
        after = before
    else:
        slabs.lease(plan)
    assert picture(slabs) == after
    assert slabs.num_free == after.count(".") == len(slabs.free_slabs())


@pytest.mark.parametrize(
    ("before", "after", "slab"),
    [
        pytest.param("0.t. ....", 2, 3, id="the slab behind"),
        pytest.param("0.tt .t.. ....", 3, 4, id="the slab behind, in the next broken run"),
        pytest.param("0.tt .... ....", 3, 1, id="another one before a whole run is broken"),
        pytest.param("0ttt rrrr .... t...", 3, 13, id="the next free one behind a gap"),
        pytest.param("0.tt tttt rrrr", 5, 1, id="the lowest where there is none behind"),
    ],
)
def test_a_slab_may_follow_another(before, after, slab):
    slabs = pool(before)
    assert slabs.lease(TOKENS, after=after) == slab


@pytest.mark.parametrize(
    ("before", "slabs", "runs"), [("0tt. .... .t.. ....", 12, 2), ("0ttt rrrr", 0, 0), ("0... .... ..", 9, 1)]
)
def test_how_many_leases_there_are_to_be_had(before, slabs, runs):
    assert pool(before).num_leasable(TOKENS) == slabs
    assert pool(before).num_leasable(RUNS) == runs


def test_without_runs_slabs_are_leased_in_order():
    slabs = SlabPool(SlabPlan(1024, 1, (TOKENS,)), 2000)
    assert [slabs.lease(TOKENS) for _ in range(1999)] == list(range(1, 2000))


def test_what_is_given_back_is_leased_again():
    slabs = pool("0ttt .... rrrr")
    slabs.release(RUNS, 2)
    slabs.release(TOKENS, 2)
    assert picture(slabs) == "0t.t .... ...."
    assert (slabs.lease(TOKENS), slabs.lease(RUNS)) == (2, 2)


def test_growing_keeps_leases_and_completes_the_last_run():
    slabs = pool("0t.. .... rrrr .")
    slabs.grow(19)
    assert picture(slabs) == "0t.. .... rrrr .... ..."
    assert slabs.lease(RUNS) == 3


@pytest.mark.parametrize(
    ("before", "num_slabs", "num_runs", "returned", "size"),
    [
        pytest.param("0... .... ....", 3, 2, [], 12, id="as it is"),
        pytest.param("0... .... ....", 4, 2, [], 13, id="one slab too few"),
        pytest.param("0... .... ....", 0, 3, [], 16, id="one run too few"),
        pytest.param("0... .... .", 4, 1, [], 9, id="the end that is no run counts for slabs"),
        pytest.param("0... t... ...t", 0, 1, [], 16, id="nine free slabs and no run"),
        pytest.param("0... t... ...t", 0, 1, [4], 12, id="a slab that goes back makes a run"),
        pytest.param("0... t... ...t", 8, 1, [4], 14, id="and cannot be leased twice"),
        pytest.param("0ttt rrrr rrrr", 4, 0, [4, 5, 6, 7], 12, id="a run that goes back serves as slabs"),
        pytest.param("0", 0, 1, [], 8, id="the first run behind the null slab's"),
        pytest.param("0", 1, 0, [], 2, id="the first slab"),
    ],
)
def test_the_size_that_is_needed(before, num_slabs, num_runs, returned, size):
    slabs = pool(before)
    assert slabs.size_for(num_slabs, num_runs, returned) == size
    assert picture(slabs) == before


@given(
    marks=st.lists(st.sampled_from(["....", "rrrr", "t...", ".tt.", "tttt"]), max_size=6),
    tail=st.sampled_from(["", ".", "t.", "..."]),
    order=st.lists(st.sampled_from("tr"), max_size=12),
    returned=st.sets(st.integers(0, 27)),
)
@settings(max_examples=300, deadline=None)
def test_what_size_for_promises_is_leased_in_any_order(marks, tail, order, returned):
    slabs = pool(" ".join(["0tt.", *marks, tail]))
    given_back = [slab for slab in returned if slab < slabs.num_slabs and slabs.owners[slab] == "tokens"]
    size = slabs.size_for(order.count("t"), order.count("r"), given_back)
    fits = size == slabs.num_slabs
    slabs.grow(size)
    for slab in given_back:
        slabs.release(TOKENS, slab)
    leases = [(plan, slabs.lease(plan)) for plan in (TOKENS if mark == "t" else RUNS for mark in order)]
    taken = [slab for plan, lease in leases for slab in slabs_of(plan, [lease])]
    assert len(taken) == len(set(taken)) == order.count("t") + 4 * order.count("r")
    if not fits:
        smaller = pool(" ".join(["0tt.", *marks, tail]))
        for slab in given_back:
            smaller.release(TOKENS, slab)
        with pytest.raises(OutOfBlocksError):  # runs first is the order that wastes nothing
            for mark in sorted(order):
                smaller.lease(RUNS if mark == "r" else TOKENS)
