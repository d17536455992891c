"""The plan says what fits, and one more would not."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from kvgroups.errors import OutOfBlocksError, SpecError
from kvgroups.manager import Manager
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.plan import MemoryPlan
from kvgroups.schemes import most_blocks_held
from kvgroups.specs import FullAttentionSpec, GroupConfig, KVGroupsConfig, SlidingWindowSpec
from kvgroups.specs.presets import preset, preset_names

SHAPE = {"num_kv_heads": 1, "head_dim": 32, "dtype": "float32"}
SMALL = KVGroupsConfig(
    max_model_len=512,
    max_num_reqs=8,
    groups=[
        GroupConfig(name="full", layers=[0, 1], spec=FullAttentionSpec(**SHAPE)),
        GroupConfig(
            name="window", layers=[2, 3, 4], spec=SlidingWindowSpec(sliding_window=40, **SHAPE), block_size=8
        ),
    ],
)


def test_requests_that_fit_by_hand():
    """A token of Llama 3.1 8B is 128 KiB, a block and slab of 16 tokens 2 MiB: 1 GiB is 512 slabs, one of them null."""
    plan = MemoryPlan.for_config(
        preset("llama-3.1-8b").config, memory=2**30, num_requests=7, max_model_len=8192, lengths=[16, 1000]
    )

    assert plan.lengths == (16, 1000, 8192)
    assert plan.slab_bytes == 2**21
    ours = plan.schemes[0]
    assert ours.request_bytes == (2**21, 63 * 2**21, 512 * 2**21)
    assert ours.num_requests == (511, 8, 0)
    assert ours.longest == 511 // 7 * 16
    (full,) = plan.groups
    assert (full.block_size, full.bytes_per_token, full.request_bytes[1]) == (16, 131072, 63 * 2**21)
    assert full.waste == plan.waste == 0


def test_a_state_costs_the_same_at_every_length():
    plan = MemoryPlan.for_config(preset("bamba-9b").config, memory=80 * 2**30, num_requests=64)
    state, full = plan.groups

    assert set(state.request_bytes) == {123_594_752}
    assert state.bytes_per_token == 0
    assert full.request_bytes[:2] == (1024 * 12288, 8192 * 12288)
    assert state.slabs_per_lease > 1 and full.slabs_per_lease == 1


def test_short_requests_feel_the_uniform_page_most():
    """Falcon-H1 7B: a block of 3,104 tokens for a request of 1,024."""
    ours, uniform, *_ = MemoryPlan.for_config(
        preset("falcon-h1-7b").config, memory=80 * 2**30, num_requests=64
    ).schemes

    assert "3,104 tokens" in uniform.note
    assert uniform.request_bytes[0] > 1.5 * ours.request_bytes[0]
    assert uniform.num_requests[0] < 0.7 * ours.num_requests[0]


@pytest.mark.parametrize("name", preset_names())
def test_more_memory_never_holds_less(name: str):
    config = preset(name).config
    plans = [MemoryPlan.for_config(config, memory=gib * 2**30, num_requests=16) for gib in (4, 20, 80)]
    for small, large in pairwise(plans):
        for less, more in zip(small.schemes, large.schemes, strict=True):
            assert less.longest <= more.longest
            assert all(a <= b for a, b in zip(less.num_requests, more.num_requests, strict=True))


def test_the_manager_admits_what_the_plan_says_and_not_one_block_less():
    """`check_fits` and the plan count alike: as many blocks as the plan counts are enough, one less is not."""
    blocks = {group.name: 5 * most_blocks_held(SMALL, group, 300) for group in SMALL.groups}
    Manager(SMALL.model_copy(update={"memory": blocks}), "meta").check_fits(5, prompt_len=1, max_len=300)
    for name in blocks:
        short = SMALL.model_copy(update={"memory": {**blocks, name: blocks[name] - 1}})
        with pytest.raises(OutOfBlocksError, match=name):
            Manager(short, "meta").check_fits(5, prompt_len=1, max_len=300)


def test_the_longest_that_the_plan_promises_runs_to_its_end():
    """Three requests, one after the other through their prompts in chunks of 64, while those before them decode."""
    memory = 1_000_000
    config = SMALL.model_copy(update={"memory": memory, "max_num_batched_tokens": 64})
    longest = MemoryPlan.for_config(config, memory=memory, num_requests=3).schemes[0].longest
    assert 64 < longest < 512
    manager = Manager(config, "meta")
    tables = MultiGroupBlockTable.from_config(config, max_num_reqs=8, device="cpu")
    requests = [manager.open(tables, row) for row in range(3)]
    prompt = longest - 40
    while any(request.num_computed_tokens < longest for request in requests):
        prefilling = next((r for r in requests if r.num_computed_tokens < prompt), None)
        step = {r: 1 for r in requests if prompt <= r.num_computed_tokens < longest}
        if prefilling is not None:
            step[prefilling] = min(64, prompt - prefilling.num_computed_tokens)
        manager.allocate(list(step), list(step.values()))
        manager.advance(list(step), list(step.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": 0}, "memory is 0; must be 1 or more"),
        ({"num_requests": 0}, "num_requests is 0; must be 1 or more"),
        ({"max_model_len": -1}, "max_model_len is -1; must be 1 or more"),
    ],
)
def test_numbers_below_one(change: dict[str, int], message: str):
    with pytest.raises(SpecError, match=message):
        MemoryPlan.for_config(SMALL, **{"memory": 2**20, "num_requests": 1, **change})


def test_memory_for_nothing_at_all():
    with pytest.raises(OutOfBlocksError, match="1000 bytes hold not even one request of one token"):
        MemoryPlan.for_config(SMALL, memory=1000, num_requests=1)


def test_a_plan_is_json():
    plan = MemoryPlan.for_config(SMALL, memory=2**20, num_requests=2, lengths=[100])
    data = json.loads(json.dumps(plan.as_dict()))

    assert data["lengths"] == [100, 512]
    assert [group["name"] for group in data["groups"]] == ["full", "window"]
    assert data["schemes"][0]["name"] == "kvgroups"
    assert data["waste"] == plan.waste
