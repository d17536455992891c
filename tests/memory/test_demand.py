"""GroupDemand: what one step needs, alone and with others, is the same arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgroups.demand import GroupDemand, Growth

GROUPS = {"full": (16,), "window": (8, 4), "ring": (10, 4), "chunk": (6, 4), "state": ()}


def demand_of(make_bench, name: str, max_rewind: int = 0) -> GroupDemand:
    config = make_bench({name: GROUPS[name]}, max_rewind=max_rewind).config
    return GroupDemand(config, config.groups[0])


@pytest.mark.parametrize(
    ("name", "step", "growth"),
    [
        # `computed, count, rewind, released`; three logical blocks are named 0, 1, 2.
        pytest.param("full", (0, 35, 0, 0), (range(0), "xxx"), id="full: 35 tokens in blocks of 16"),
        pytest.param("full", (35, 13, 0, 0), (range(0), ""), id="full: up to the edge of the third block"),
        pytest.param("full", (48, 1, 0, 0), (range(0), "x"), id="full: the token behind the edge"),
        pytest.param("window", (0, 30, 0, 0), (range(0), ".....xxx"), id="window: what the query at 30 sees, 23 on"),
        pytest.param("window", (31, 1, 0, 0), (range(6), ""), id="window: the query at 31 sees from 24 on"),
        pytest.param("window", (31, 1, 0, 5), (range(5, 6), ""), id="window: what is released already is not again"),
        pytest.param("window", (31, 1, 4, 5), (range(5, 5), ""), id="window: four tokens may be taken back"),
        pytest.param("window", (32, 1, 0, 6), (range(6, 6), "x"), id="window: a new block"),
        pytest.param("ring", (0, 1, 0, 0), (range(0), "xxx"), id="ring: three blocks of 4 for W = 10, at once"),
        pytest.param("ring", (1, 99, 0, 0), (range(0), ""), id="ring: for life"),
        pytest.param("chunk", (12, 1, 0, 0), (range(3), "x"), id="chunk of 6: at 12 two chunks of three blocks are over"),
        pytest.param("state", (0, 7, 0, 0), (range(0), "x"), id="state: one slot"),
        pytest.param("state", (7, 7, 0, 0), (range(0), ""), id="state: for life"),
    ],
)  # fmt: skip
def test_what_the_next_tokens_need(make_bench, name, step, growth):
    release, append = growth
    expected = Growth(release, tuple(mark == "x" for mark in append))
    assert demand_of(make_bench, name).growth(*step) == expected


rows = st.tuples(st.integers(0, 80), st.integers(0, 40), st.integers(0, 5), st.integers(0, 10))


@given(name=st.sampled_from(list(GROUPS)), steps=st.lists(rows, max_size=6), max_rewind=st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_several_requests_need_what_each_needs_alone(make_bench, name, steps, max_rewind):
    demand = demand_of(make_bench, name, max_rewind)
    computed, counts, rewinds, released = np.array(steps, dtype=np.int64).reshape(-1, 4).T
    alone = [(index, demand.growth(*step)) for index, step in enumerate(steps)]
    together = demand.growths(computed, counts, rewinds, released.tolist())
    assert together == [(index, growth) for index, growth in alone if growth.release or growth.append]
