"""SlabPlan: blocks keep their own size, fill the slab exactly or lose next to nothing, and the count of slabs is exact."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgroups.errors import SpecError
from kvgroups.slab_plan import WASTE_LIMIT, GroupPlan, SlabPlan
from kvgroups.slab_pool import SlabPool
from kvgroups.specs import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    GroupConfig,
    KVGroupsConfig,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
)
from kvgroups.specs.presets import preset, preset_names

KIB, MIB = 1024, 1024 * 1024


def attention(kind, layers, heads, dim, block_size=16, dtype="bfloat16"):
    shape = {"num_kv_heads": heads, "head_dim": dim, "dtype": dtype}
    spec = {
        "full": lambda: FullAttentionSpec(**shape),
        "window": lambda: SlidingWindowSpec(sliding_window=1024, **shape),
        "chunk": lambda: ChunkedAttentionSpec(chunk_size=1024, **shape),
    }[kind]()
    return kind, layers, spec, block_size


def states(layers, *tensors):
    spec = MambaSpec(
        states=[StateTensor(name=f"s{i}", shape=shape, dtype=dtype) for i, (shape, dtype) in enumerate(tensors)]
    )
    return "state", layers, spec, 1


def config_of(*groups):
    """Groups of so many layers each; a layer index is used once for tokens and once for states."""
    first = {True: 0, False: 0}
    configs = []
    for name, layers, spec, block_size in groups:
        is_state = spec.kind == "mamba"
        indices = range(first[is_state], first[is_state] + layers)
        first[is_state] += layers
        configs.append(GroupConfig(name=name, layers=list(indices), spec=spec, block_size=block_size))
    return KVGroupsConfig(groups=configs, max_model_len=1024)


@pytest.mark.parametrize(
    ("groups", "slab_bytes", "cuts"),
    [
        pytest.param(
            # 16 tokens of 1 KiB a layer: 48 KiB and 240 KiB. 240 is a multiple of both; three are over 512 KiB.
            [attention("full", 3, 1, 256), attention("window", 15, 1, 256)],
            720 * KIB,
            {"full": (48 * KIB, 1, 15), "window": (240 * KIB, 1, 3)},
            id="Gemma 3 270M: 3 and 15 layers",
        ),
        pytest.param(
            # 1.25 MiB and 6.5 MiB: 10 and 52 layers meet at 260.
            [attention("full", 10, 16, 128), attention("window", 52, 16, 128)],
            32 * MIB + 512 * KIB,
            {"full": (1280 * KIB, 1, 26), "window": (6656 * KIB, 1, 5)},
            id="Gemma 3 27B: 10 and 52 layers",
        ),
        pytest.param(
            # 4.05 MiB of states a layer, 117.4 MiB in all: 209.5 slabs of three token blocks, a run of 210.
            [attention("full", 3, 8, 128), states(29, ((8448, 4), "bfloat16"), ((128, 64, 128), "float32"))],
            576 * KIB,
            {"full": (192 * KIB, 1, 3), "state": (210 * 576 * KIB, 210, 1)},
            id="Bamba 9B: 3 attention and 29 Mamba-2 layers",
        ),
        pytest.param(
            [attention("full", 44, 2, 128), states(44, ((3584, 4), "bfloat16"), ((24, 128, 256), "float32"))],
            704 * KIB,
            {"full": (704 * KIB, 1, 1), "state": (194 * 704 * KIB, 194, 1)},
            id="Falcon-H1 7B: both in each of 44 layers",
        ),
        pytest.param(
            # 120 KiB of states fit in a slab: eight of them are five token blocks of 192 KiB.
            [attention("full", 6, 8, 64), states(10, ((2048, 3), "bfloat16"))],
            960 * KIB,
            {"full": (192 * KIB, 1, 5), "state": (120 * KIB, 1, 8)},
            id="short convolutions share slabs with tokens",
        ),
        pytest.param(
            [states(24, ((1024,), "float32"))],
            384 * KIB,
            {"state": (96 * KIB, 1, 4)},
            id="states alone are cut like tokens",
        ),
        pytest.param(
            [attention("full", 1, 1, 8, dtype="float32"), states(1, ((5 * 1024,), "float32"))],
            4 * KIB,
            {"full": (KIB, 1, 4), "state": (20 * KIB, 5, 1)},
            id="a tiny model: four blocks a slab",
        ),
    ],
)
def test_the_cut_of_known_shapes(groups, slab_bytes, cuts):
    plan = SlabPlan.for_config(config_of(*groups))
    assert plan.slab_bytes == slab_bytes
    assert {
        group.name: (group.stride_bytes, group.slabs_per_lease, group.blocks_per_lease) for group in plan.groups
    } == cuts


@pytest.mark.parametrize("name", preset_names())
def test_public_models_waste_less_than_two_percent(name):
    config = preset(name).config
    plan = SlabPlan.for_config(config)
    assert plan.waste < 0.02
    assert plan.slab_bytes <= 33 * MIB
    for group in plan.groups:
        if not config.group(group.name).is_state:
            assert group.waste == 0


def test_blocks_without_a_common_multiple_are_padded_a_little():
    """Blocks of 13, 17 and 19 tokens have a least common multiple of gigabytes."""
    groups = [attention("full", 7, 3, 80, 17), attention("window", 11, 5, 96, 13), attention("chunk", 13, 1, 112, 19)]
    config = config_of(*groups)
    assert math.lcm(*(group.block_bytes for group in config.groups)) > 1024 * MIB
    plan = SlabPlan.for_config(config)
    assert plan.slab_bytes <= 64 * MIB
    assert WASTE_LIMIT < plan.waste < 0.05  # a 60th of a slab is not fine enough; nothing is refused for it


blocks = st.integers(1, 40)
token_groups = st.lists(
    st.tuples(st.sampled_from(["full", "window", "chunk"]), st.integers(1, 6), st.integers(1, 4), st.integers(1, 40)),
    max_size=3,
    unique_by=lambda group: group[0],
)
state_sizes = st.lists(st.integers(1, 20_000), max_size=2)


@given(tokens=token_groups, sizes=state_sizes, data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_cut_is_aligned_and_every_count_is_exact(tokens, sizes, data):
    groups = [attention(kind, layers, heads, dim) for kind, layers, heads, dim in tokens]
    groups += [(f"state{i}", *states(1, ((size,), "float32"))[1:]) for i, size in enumerate(sizes)]
    if not groups:
        return
    plan = SlabPlan.for_config(config_of(*groups))
    for group in plan.groups:
        assert group.stride_bytes >= group.block_bytes
        assert group.stride_bytes % 256 == 0
        assert group.blocks_per_lease * group.stride_bytes == group.slabs_per_lease * plan.slab_bytes
        assert group.slabs_per_lease == (plan.run_slabs if group.block_bytes > plan.slab_bytes else 1)

    need = {group.name: data.draw(blocks, label=group.name) for group in plan.groups}
    for num_slabs, fits in ((plan.num_slabs(need), True), (plan.num_slabs(need) - 1, False)):
        if num_slabs:
            assert (SlabPool(plan, num_slabs).size_for(*plan.num_leases(need)) == num_slabs) == fits


@pytest.mark.parametrize(
    ("need", "num_slabs"),
    [
        ({}, 1),
        ({"full": 1}, 2),
        ({"full": 4}, 2),
        ({"full": 5, "window": 1}, 4),
        # Runs of 5: the first place begins with the null slab and is no run's; four slabs of it serve tokens.
        ({"state": 1}, 10),
        ({"full": 16, "state": 1}, 10),
        ({"full": 17, "state": 1}, 11),
        ({"full": 17, "state": 2}, 16),
    ],
)
def test_the_smallest_arena_for_so_many_blocks(need, num_slabs):
    tokens = [GroupPlan(name, 256, 256, slabs_per_lease=1, blocks_per_lease=4) for name in ("full", "window")]
    runs = GroupPlan("state", 5120, 5120, slabs_per_lease=5, blocks_per_lease=1)
    assert SlabPlan(1024, 5, (*tokens, runs)).num_slabs(need) == num_slabs


def test_a_plan_prints_itself_as_a_table():
    groups = [attention("full", 3, 8, 128), states(29, ((8448, 4), "bfloat16"), ((128, 64, 128), "float32"))]
    assert str(SlabPlan.for_config(config_of(*groups))).splitlines() == [
        "slab of 589,824 bytes",
        "group  block bytes       stride  blocks  of slabs  waste",
        " full      196,608      196,608       3         1  0.00%",
        "state  123,594,752  123,863,040       1       210  0.22%",
    ]


def test_an_unknown_group_is_refused_with_the_known_ones():
    with pytest.raises(SpecError, match="no group 'ful'; the groups are full, window"):
        SlabPlan.for_config(config_of(attention("full", 1, 1, 8), attention("window", 1, 1, 8))).group("ful")
