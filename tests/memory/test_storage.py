"""GroupStorage: one byte tensor, and views of every layer that neither overlap nor move."""

import pytest
import torch

from kvgroups.specs import FullAttentionSpec, GroupConfig, MambaSpec, StateTensor
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

every_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())


def stored(group: GroupConfig, num_blocks: int) -> GroupStorage:
    """So many blocks, with a value of its own in every tensor of every layer of every block but the null one."""
    storage = GroupStorage(group, "cpu")
    storage.resize(num_blocks)
    for layer in group.layers:
        for index, view in enumerate(storage.layer(layer).values()):
            for block_id in range(1, num_blocks):
                view[block_id] = value_of(layer, index, block_id)
    return storage


def value_of(layer: int, tensor: int, block_id: int) -> float:
    return 1 + 64 * tensor + 8 * layer + block_id  # at most 128: exact in bfloat16


def assert_holds_its_values(storage: GroupStorage, blocks: range) -> None:
    for layer in storage.group.layers:
        for index, view in enumerate(storage.layer(layer).values()):
            assert not view[0].any()
            for block_id in blocks:
                assert (view[block_id] == value_of(layer, index, block_id)).all(), (layer, index, block_id)


@every_group
def test_views_have_the_specs_shapes_and_the_blocks_stride(group):
    storage = GroupStorage(group, "cpu")
    storage.resize(6)
    for layer in group.layers:
        tensors = group.spec.block_tensors(group.block_size, group.layout)
        views = storage.layer(layer)
        assert list(views) == [tensor.name for tensor in tensors]
        for tensor in tensors:
            view = views[tensor.name]
            assert view.shape == (6, *tensor.shape)
            assert view.dtype == getattr(torch, tensor.dtype)
            assert view.stride(0) * view.itemsize == group.block_bytes
            assert view[0].is_contiguous()
            assert view.data_ptr() % 16 == 0


@every_group
def test_no_layer_and_no_block_overlaps_another(group):
    assert_holds_its_values(stored(group, 6), range(1, 6))


@every_group
def test_growing_keeps_bytes_and_ids_and_shrinking_keeps_what_is_left(group):
    storage = stored(group, 4)
    storage.resize(9)
    assert storage.num_blocks == 9
    assert_holds_its_values(storage, range(1, 4))
    storage.resize(3)
    assert storage.nbytes == 3 * group.block_bytes
    assert_holds_its_values(storage, range(1, 3))


@every_group
def test_a_new_storage_has_a_null_block_of_zeros(group):
    storage = GroupStorage(group, "cpu")
    assert (storage.num_blocks, storage.nbytes) == (1, group.block_bytes)
    assert_holds_its_values(storage, range(0))


@every_group
def test_copying_a_block_copies_all_layers_and_nothing_else(group):
    storage = stored(group, 5)
    storage.copy_block(2, 4)
    assert_holds_its_values(storage, range(1, 4))
    for layer in group.layers:
        for index, view in enumerate(storage.layer(layer).values()):
            assert (view[4] == value_of(layer, index, 2)).all()


@every_group
def test_poisoned_blocks_read_as_nan_and_their_neighbours_do_not(group):
    storage = stored(group, 5)
    storage.fill([1, 4], 0xFF)
    assert_holds_its_values(storage, range(2, 4))
    for layer in group.layers:
        for view in storage.layer(layer).values():
            assert view[[1, 4]].isnan().all()


def test_the_layout_orders_heads_and_tokens():
    spec = FullAttentionSpec(num_kv_heads=3, head_dim=5, head_dim_v=7, dtype="float16")
    shapes = {
        layout: [
            tuple(view.shape[1:])
            for view in GroupStorage(
                GroupConfig(name="full", layers=[0], spec=spec, block_size=4, layout=layout), "cpu"
            )
            .layer(0)
            .values()
        ]
        for layout in ("NHD", "HND")
    }
    assert shapes == {"NHD": [(4, 3, 5), (4, 3, 7)], "HND": [(3, 4, 5), (3, 4, 7)]}


def test_views_taken_before_a_resize_stay_on_the_old_bytes():
    storage = stored(GROUPS["attention, HND"], 3)
    old = storage.layer(0)["key"]
    storage.resize(4)
    storage.layer(0)["key"][1] = 0
    assert (old[1] == value_of(0, 0, 1)).all()
    assert storage.layer(0)["key"] is storage.layer(0)["key"]  # made once, until the next resize
