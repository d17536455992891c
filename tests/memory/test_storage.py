"""Arena and GroupStorage: one byte tensor, and views of every layer that neither overlap nor move."""

import pytest
import torch

from kvgroups.arena import Arena
from kvgroups.errors import KVGroupsError
from kvgroups.slab_plan import GroupPlan, SlabPlan
from kvgroups.specs import FullAttentionSpec, GroupConfig, KVGroupsConfig, MambaSpec, StateTensor
from kvgroups.storage import GroupStorage

GROUPS = {
    # 3 heads of 5: nothing is a power of two, and V is narrower than K.
    "attention, HND": GroupConfig(
        name="full",
        layers=[0, 2, 5],
        spec=FullAttentionSpec(num_kv_heads=3, head_dim=5, head_dim_v=3, dtype="float32"),
        block_size=4,
    ),
    "attention, NHD, 16 bit": GroupConfig(
        name="full",
        layers=[1, 0],
        spec=FullAttentionSpec(num_kv_heads=3, head_dim=5, dtype="bfloat16"),
        block_size=2,
        layout="NHD",
    ),
    "states of two dtypes": GroupConfig(
        name="state",
        layers=[3, 4],
        spec=MambaSpec(
            states=[
                StateTensor(name="conv", shape=(5, 3), dtype="bfloat16"),
                StateTensor(name="recurrent", shape=(2, 3, 4), dtype="float32"),
            ]
        ),
    ),
}

PADDING = 256
"""Bytes that the test's plans leave between blocks, as a plan with padded strides does."""

every_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())


def storage_of(group: GroupConfig, num_slabs: int) -> tuple[Arena, GroupStorage]:
    """Slabs of two blocks each, so that slab 1 holds blocks 2 and 3."""
    stride = group.block_bytes + PADDING
    plan = GroupPlan(group.name, group.block_bytes, stride, slabs_per_lease=1, blocks_per_lease=2)
    arena = Arena(2 * stride, "cpu", num_slabs)
    return arena, GroupStorage(group, plan, arena)


def stored(group: GroupConfig, num_slabs: int) -> tuple[Arena, GroupStorage]:
    """With a value of its own in every tensor of every layer of every block but those of the null slab."""
    arena, storage = storage_of(group, num_slabs)
    arena.fill(range(1, num_slabs), 0)
    write_values(storage, range(2, 2 * num_slabs))
    return arena, storage


def write_values(storage: GroupStorage, blocks: range) -> None:
    for layer in storage.group.layers:
        for index, view in enumerate(storage.layer(layer).values()):
            for block_id in blocks:
                view[block_id] = value_of(layer, index, block_id)


def value_of(layer: int, tensor: int, block_id: int) -> float:
    return 1 + 64 * tensor + 8 * layer + block_id  # at most 128: exact in bfloat16


def assert_holds_its_values(storage: GroupStorage, blocks: range) -> None:
    for layer in storage.group.layers:
        for index, view in enumerate(storage.layer(layer).values()):
            assert not view[0].any()
            for block_id in blocks:
                assert (view[block_id] == value_of(layer, index, block_id)).all(), (layer, index, block_id)


@every_group
def test_views_have_the_specs_shapes_and_the_plans_stride(group):
    _, storage = storage_of(group, 3)
    for layer in group.layers:
        tensors = group.spec.block_tensors(group.block_size, group.layout)
        views = storage.layer(layer)
        assert list(views) == [tensor.name for tensor in tensors]
        for tensor in tensors:
            view = views[tensor.name]
            assert view.shape == (6, *tensor.shape)
            assert view.dtype == getattr(torch, tensor.dtype)
            assert view.stride(0) * view.itemsize == group.block_bytes + PADDING
            assert view[0].is_contiguous()
            assert view.data_ptr() % 16 == 0


@every_group
def test_no_layer_and_no_block_overlaps_another(group):
    arena, storage = stored(group, 3)
    assert_holds_its_values(storage, range(2, 6))
    arena.check_null()


@every_group
def test_growing_keeps_bytes_and_ids(group):
    arena, storage = stored(group, 2)
    arena.grow(5)
    assert (storage.num_blocks, arena.nbytes) == (10, 5 * arena.slab_bytes)
    assert_holds_its_values(storage, range(2, 4))


@every_group
def test_copying_a_block_copies_all_layers_and_nothing_else(group):
    _, storage = stored(group, 3)
    storage.copy_blocks([2], [4])
    assert_holds_its_values(storage, range(2, 4))
    assert_holds_its_values(storage, range(5, 6))
    for layer in group.layers:
        for index, view in enumerate(storage.layer(layer).values()):
            assert (view[4] == value_of(layer, index, 2)).all()


@every_group
def test_poisoned_blocks_read_as_nan_and_their_neighbours_do_not(group):
    _, storage = stored(group, 3)
    storage.fill([2, 5], 0xFF)
    assert_holds_its_values(storage, range(3, 5))
    for layer in group.layers:
        for view in storage.layer(layer).values():
            assert view[[2, 5]].isnan().all()


def test_the_layout_orders_heads_and_tokens():
    spec = FullAttentionSpec(num_kv_heads=3, head_dim=5, head_dim_v=7, dtype="float16")
    shapes = {}
    for layout in ("NHD", "HND"):
        group = GroupConfig(name="full", layers=[0], spec=spec, block_size=4, layout=layout)
        _, storage = storage_of(group, 1)
        shapes[layout] = [tuple(view.shape[1:]) for view in storage.layer(0).values()]
    assert shapes == {"NHD": [(4, 3, 5), (4, 3, 7)], "HND": [(3, 4, 5), (3, 4, 7)]}


def test_views_taken_before_growth_stay_on_the_old_bytes():
    arena, storage = stored(GROUPS["attention, HND"], 2)
    old = storage.layer(0)["key"]
    arena.grow(3)
    storage.layer(0)["key"][2] = 0
    assert (old[2] == value_of(0, 0, 2)).all()
    assert storage.layer(0)["key"] is storage.layer(0)["key"]  # made once, until the arena grows


# Several groups in one arena


def shared_arena(num_slabs: int) -> tuple[Arena, GroupStorage, GroupStorage]:
    """Tokens in slabs of four blocks, and states that take a run of five slabs each."""
    tokens = GroupConfig(
        name="full", layers=[0], spec=FullAttentionSpec(num_kv_heads=1, head_dim=8, dtype="float32"), block_size=4
    )
    states = GroupConfig(
        name="state",
        layers=[1],
        spec=MambaSpec(states=[StateTensor(name="recurrent", shape=(1280,), dtype="float32")]),
    )
    plan = SlabPlan.for_config(KVGroupsConfig(groups=[tokens, states], max_model_len=64))
    assert (plan.slab_bytes, plan.run_slabs) == (1024, 5)
    arena = Arena(plan.slab_bytes, "cpu", num_slabs)
    return arena, *(GroupStorage(group, plan.group(group.name), arena) for group in (tokens, states))


def test_groups_with_other_strides_see_the_same_bytes_in_their_own_slabs():
    """12 slabs: the state's block 1 is slabs 5 to 9, which would be token blocks 20 to 39."""
    arena, tokens, states = shared_arena(12)
    assert (tokens.num_blocks, states.num_blocks) == (48, 2)
    arena.fill(range(12), 0)
    states.layer(1)["recurrent"][1] = 1
    keys, values = tokens.layer(0)["key"], tokens.layer(0)["value"]
    assert (keys[20:40] == 1).all() and (values[20:40] == 1).all()
    assert not keys[:20].any() and not keys[40:].any()
    keys[[19, 40]] = 2
    values[[19, 40]] = 2
    assert (states.layer(1)["recurrent"][1] == 1).all()


def test_the_null_block_of_a_group_of_runs_is_not_filled():
    """It has no bytes of its own: where it would lie are the null slab and other groups' tokens."""
    arena, tokens, states = shared_arena(12)
    arena.fill(range(12), 0)
    states.fill([0, 1], 0xFF)
    assert states.layer(1)["recurrent"][1].isnan().all()
    assert not tokens.layer(0)["key"][:20].any()
    arena.check_null()


def test_a_written_null_slab_is_found():
    arena, tokens, _ = shared_arena(2)
    arena.check_null()
    tokens.layer(0)["value"][3, 0, 0, 0] = 1.0  # 0x3f800000: bytes 896 to 899 of the slab, the low ones first
    with pytest.raises(KVGroupsError, match="arena: byte 898 of the null slab is 128, expected 0"):
        arena.check_null()


def test_an_arena_without_bytes_keeps_accounts():
    arena = Arena(1 << 20, "meta", 1 << 16)
    assert arena.nbytes == 64 << 30
    arena.grow(1 << 17)
    assert arena.num_slabs == 1 << 17
