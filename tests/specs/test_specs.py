"""Specs and configs: what a query sees, what a block weighs, and what a wrong config is told."""

from __future__ import annotations

import pydantic
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgroups.errors import SpecError
from kvgroups.specs import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    GroupConfig,
    KVGroupsConfig,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
)
from kvgroups.specs.base import ITEM_SIZE

HEADS = {"num_kv_heads": 2, "head_dim": 8, "dtype": "float32"}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(sliding_window=10, **HEADS)
CHUNK = ChunkedAttentionSpec(chunk_size=8, **HEADS)
CONV = StateTensor(name="conv", shape=(64, 4), dtype="bfloat16")
STATE = MambaSpec(states=[CONV, StateTensor(name="recurrent", shape=(8, 8, 16), dtype="float32")])


def group(**fields) -> GroupConfig:
    return GroupConfig(**{"name": "full", "layers": [0], "spec": FULL, **fields})


def config(*groups, **fields) -> KVGroupsConfig:
    return KVGroupsConfig(groups=groups or [group()], **{"max_model_len": 512, **fields})


# What a query sees


@pytest.mark.parametrize(
    ("spec", "first_visible"),
    [
        pytest.param(FULL, {0: 0, 7: 0, 10**6: 0}, id="full: everything"),
        pytest.param(
            SlidingWindowSpec(sliding_window=8, **HEADS), {6: 0, 7: 0, 8: 1, 9: 2}, id="window of 8, itself included"
        ),
        pytest.param(SlidingWindowSpec(sliding_window=1, **HEADS), {0: 0, 1: 1, 9: 9}, id="window of one token"),
        pytest.param(CHUNK, {0: 0, 7: 0, 8: 8, 9: 8, 15: 8, 16: 16}, id="chunks of 8 start empty"),
        pytest.param(ChunkedAttentionSpec(chunk_size=1, **HEADS), {0: 0, 5: 5}, id="chunks of one token"),
    ],
)  # fmt: skip
def test_the_first_position_that_a_query_sees(spec, first_visible):
    assert {position: spec.first_visible(position) for position in first_visible} == first_visible


# What a block weighs


def test_bytes_of_eighty_layers_of_fp8():
    """100 GiB of fp8 K and V in 80 layers of 8 heads of 128 is 655,360 slots, or 40,960 blocks of 16."""
    spec = FullAttentionSpec(num_kv_heads=8, head_dim=128, dtype="float8_e4m3fn")
    full = group(layers=range(80), spec=spec, block_size=16)
    assert (100 << 30) / full.bytes_per_token == 655_360
    assert (100 << 30) / full.block_bytes == 40_960


@pytest.mark.parametrize(
    ("fields", "bytes_per_token", "block_bytes"),
    [
        pytest.param({}, 2 * 2 * 8 * 4, 16 * 128, id="K and V of 2 heads of 8 floats, 16 tokens"),
        pytest.param({"layers": [0, 3, 5]}, 3 * 128, 3 * 16 * 128, id="three layers"),
        pytest.param(
            {"spec": FullAttentionSpec(head_dim_v=4, **HEADS)}, 2 * (8 + 4) * 4, 16 * 96, id="V narrower than K"
        ),
        pytest.param({"block_size": 3}, 128, 512, id="a block is a multiple of 256 bytes"),
        pytest.param(
            {"spec": STATE}, 0, 64 * 4 * 2 + 8 * 8 * 16 * 4, id="states weigh by the request and not by the token"
        ),
    ],
)  # fmt: skip
def test_bytes_of_a_token_and_of_a_block(fields, bytes_per_token, block_bytes):
    assert (group(**fields).bytes_per_token, group(**fields).block_bytes) == (bytes_per_token, block_bytes)


def test_a_block_holds_each_layers_tensors_one_after_the_other():
    states = group(layers=[4, 1], spec=STATE)
    assert {
        layer: {name: offset for name, (offset, _) in tensors.items()}
        for layer, tensors in states.tensor_offsets().items()
    } == {4: {"conv": 0, "recurrent": 512}, 1: {"conv": 4608, "recurrent": 5120}}
    assert states.block_bytes == 9216


@pytest.mark.parametrize(
    ("max_rewind", "window", "block_size", "blocks"),
    [
        (0, 10, 4, 3),  # the query sees 9 tokens before itself
        (0, 9, 4, 2),
        (3, 10, 4, 3),  # 12 tokens
        (4, 10, 4, 4),
        (0, 1, 4, 1),  # sees none, and still has a place to write to
        (0, 8, 16, 1),
    ],
)
def test_blocks_of_a_ring(max_rewind, window, block_size, blocks):
    spec = SlidingWindowSpec(sliding_window=window, **HEADS)
    ring = group(name="ring", spec=spec, block_size=block_size, slot_mapping="ring")
    assert config(ring, max_rewind=max_rewind).ring_blocks(ring) == blocks


def test_only_rings_have_ring_blocks():
    groups = [group(name="paged", spec=WINDOW), group(name="state", spec=STATE)]
    assert [config(*groups).ring_blocks(each) for each in groups] == [0, 0]


# Defaults, and round trips


def test_a_group_knows_what_its_spec_leaves_no_choice_about():
    assert (group().slot_mapping, group().block_size) == ("paged", 16)
    assert (group(spec=STATE).slot_mapping, group(spec=STATE).block_size) == ("none", 1)
    assert group(slot_mapping="token").block_size == 1


def test_a_torch_dtype_is_stored_by_name():
    spec = FullAttentionSpec(num_kv_heads=1, head_dim=8, dtype=torch.bfloat16)
    assert spec.dtype == "bfloat16"
    assert spec == FullAttentionSpec(num_kv_heads=1, head_dim=8, dtype="bfloat16")


def test_item_sizes_are_torchs():
    assert {name: getattr(torch, name).itemsize for name in ITEM_SIZE} == ITEM_SIZE


@pytest.mark.parametrize("model", [FULL, STATE, group(), config()], ids=lambda model: type(model).__name__)
def test_everything_is_frozen_and_hashable(model):
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        setattr(model, next(iter(type(model).model_fields)), 3)
    assert hash(model) == hash(model.model_copy())


def test_every_field_is_described_in_the_json_schema():
    schema = KVGroupsConfig.model_json_schema()
    described = {**schema["$defs"], "KVGroupsConfig": schema}
    missing = [
        f"{name}.{field}"
        for name, model in described.items()
        for field, facts in model["properties"].items()
        if "description" not in facts and field != "kind"
    ]
    assert missing == []


dims = st.integers(1, 64)
dtypes = st.sampled_from(list(ITEM_SIZE))
heads = {"num_kv_heads": dims, "head_dim": dims, "head_dim_v": st.none() | dims, "dtype": dtypes}
state_tensors = st.lists(
    st.builds(StateTensor, name=st.text(min_size=1), shape=st.lists(dims, max_size=3), dtype=dtypes),
    min_size=1,
    max_size=3,
    unique_by=lambda tensor: tensor.name,
)
token_specs = st.one_of(
    st.builds(FullAttentionSpec, **heads),
    st.builds(SlidingWindowSpec, sliding_window=dims, **heads),
    st.builds(ChunkedAttentionSpec, chunk_size=dims, **heads),
)
state_specs = st.builds(MambaSpec, states=state_tensors, snapshot_interval=dims)


@st.composite
def configs(draw) -> KVGroupsConfig:
    """Any valid config of one to four groups; a layer may be in one of each sort."""
    names = draw(st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True))
    groups = []
    for number, name in enumerate(names):
        layers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
        fields = {"name": name, "layers": [10 * number + layer for layer in layers]}
        if draw(st.booleans()):
            groups.append(GroupConfig(spec=draw(state_specs), **fields))
            continue
        spec = draw(token_specs)
        modes = ["paged", "token", *(["ring"] if isinstance(spec, SlidingWindowSpec) else [])]
        fields["slot_mapping"] = draw(st.sampled_from(modes))
        fields["block_size"] = 1 if fields["slot_mapping"] == "token" else draw(st.integers(1, 256))
        groups.append(GroupConfig(spec=spec, layout=draw(st.sampled_from(["NHD", "HND"])), **fields))
    memory = st.one_of(
        st.none(),
        st.integers(1, 1 << 50),
        st.floats(0, 1, exclude_min=True, exclude_max=True),
        st.fixed_dictionaries({name: st.integers(1, 1000) for name in names}),
    )
    return KVGroupsConfig(
        groups=groups,
        memory=draw(memory),
        max_num_reqs=draw(dims),
        max_model_len=draw(dims),
        max_num_batched_tokens=draw(dims),
        max_rewind=draw(st.integers(0, 8)),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("configs")


@given(configs())
@settings(max_examples=60, deadline=None)
def test_every_config_survives_json_and_yaml_unchanged(folder, config):
    assert KVGroupsConfig.model_validate_json(config.model_dump_json()) == config
    assert KVGroupsConfig.model_validate(config.model_dump()) == config
    for name in ("config.json", "config.yaml"):
        config.save(folder / name)
        loaded = KVGroupsConfig.load(folder / name)
        assert loaded == config
        assert type(loaded.memory) is type(config.memory)


@given(configs())
@settings(max_examples=60, deadline=None)
def test_tensors_of_a_block_are_aligned_apart_and_within_it(config):
    for each in config.groups:
        offsets = each.tensor_offsets()
        assert tuple(offsets) == each.layers
        end = 0
        for tensors in offsets.values():
            assert list(tensors) == [
                tensor.name for tensor in each.spec.block_tensors(each.block_size, each.layout)
            ]
            for start, tensor in tensors.values():
                assert start >= end
                assert start % 16 == 0
                end = start + tensor.nbytes
        assert end <= each.block_bytes < end + 256
        assert each.block_bytes % 256 == 0


def test_a_config_file_reads_as_a_person_would_write_it(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        """
        groups:
        - {name: full, layers: [1], spec: {kind: full_attention, num_kv_heads: 2, head_dim: 8, dtype: float32}}
        - name: state
          layers: [0]
          spec: {kind: mamba, states: [{name: conv, shape: [64, 4], dtype: bfloat16}]}
        memory: {full: 100, state: 4}
        max_model_len: 512
        """
    )
    loaded = KVGroupsConfig.load(path)
    assert [(each.name, each.slot_mapping, each.block_size) for each in loaded.groups] == [
        ("full", "paged", 16),
        ("state", "none", 1),
    ]
    assert loaded.memory == {"full": 100, "state": 4}
    assert loaded.group("full").spec == FULL
    config().save(path)
    assert yaml.safe_load(path.read_text())["groups"][0]["spec"]["kind"] == "full_attention"


# What is wrong is told when it is built: field, value, and what would be right

WRONG = {
    "unknown dtype": (lambda: FullAttentionSpec(**{**HEADS, "dtype": "int8"}),
                      "FullAttentionSpec.dtype: got 'int8'; expected one of float64, float32, bfloat16"),
    "torch dtype of integers": (lambda: FullAttentionSpec(**{**HEADS, "dtype": torch.int8}),
                                "dtype: got torch.int8; expected one of float64"),
    "no heads": (lambda: FullAttentionSpec(**{**HEADS, "num_kv_heads": 0}),
                 "FullAttentionSpec.num_kv_heads: got 0; input should be greater than or equal to 1"),
    "misspelt field": (lambda: FullAttentionSpec(head_dimm=8, **HEADS),
                       "FullAttentionSpec.head_dimm: unknown field, got 8; check the spelling"),
    "no window": (lambda: SlidingWindowSpec(**HEADS), "SlidingWindowSpec.sliding_window: missing"),
    "window of nothing": (lambda: SlidingWindowSpec(sliding_window=0, **HEADS), "sliding_window: got 0"),
    "two wrong fields": (lambda: SlidingWindowSpec(**{**HEADS, "head_dim": 0}, sliding_window=-1),
                         "head_dim: got 0; .*; SlidingWindowSpec.sliding_window: got -1"),
    "no states": (lambda: MambaSpec(states=[]), r"MambaSpec.states: got \[\]; .* at least 1 item"),
    "two states of one name": (lambda: MambaSpec(states=[CONV, CONV]), "names must be unique, got conv, conv"),
    "state of negative size": (lambda: StateTensor(name="conv", shape=(4, -1), dtype="float32"),
                               "StateTensor.shape.1: got -1; input should be greater than or equal to 1"),
    "wrong kind": (lambda: group(spec={"kind": "full", **HEADS}),
                   "GroupConfig.spec: .*'full' .*'full_attention', 'sliding_window', 'chunked_attention', 'mamba'"),
    "no kind": (lambda: group(spec=HEADS), "GroupConfig.spec.kind: missing; this field is required"),
    "ring on full attention": (lambda: group(slot_mapping="ring"),
                               "group 'full': slot_mapping 'ring' serves sliding windows only; must be paged or token"),
    "ring on chunks": (lambda: group(spec=CHUNK, slot_mapping="ring"), "'ring' serves sliding windows only"),
    "unknown mode": (lambda: group(slot_mapping="rings"),
                     "slot_mapping: got 'rings'; input should be 'paged', 'ring', 'token' or 'none'"),
    "token with blocks of 16": (lambda: group(slot_mapping="token", block_size=16),
                                "group 'full': block_size 16 with slot_mapping 'token'; must be 1"),
    "tokens without slots": (lambda: group(slot_mapping="none"),
                             "slot_mapping 'none' with a full_attention spec; must be paged, ring or token"),
    "paged states": (lambda: group(spec=STATE, slot_mapping="paged"),
                     "slot_mapping 'paged' with a mamba spec; must be none"),
    "states in blocks of 4": (lambda: group(spec=STATE, block_size=4), "block_size 4 .*'none'; must be 1"),
    "blocks of nothing": (lambda: group(block_size=0), "GroupConfig.block_size: got 0"),
    "no layers": (lambda: group(layers=[]), r"GroupConfig.layers: got \[\]; .* at least 1 item"),
    "negative layer": (lambda: group(layers=[0, -1]), r"distinct and not negative, got \[0, -1\]"),
    "layer named twice": (lambda: group(layers=[1, 1]), r"distinct and not negative, got \[1, 1\]"),
    "unknown layout": (lambda: group(layout="DHN"), "layout: got 'DHN'; input should be 'NHD' or 'HND'"),
    "no groups": (lambda: KVGroupsConfig(groups=[], max_model_len=8), r"groups: got \[\]; .* at least 1 item"),
    "two groups of one name": (lambda: config(group(), group(layers=[1])),
                               "the name 'full' is used 2 times; names must be unique"),
    "layer in two attention groups": (lambda: config(group(), group(name="window", spec=WINDOW)),
                                      "layer 0 is in 'full' and in 'window'; .* one attention group and in one state"),
    "layer in two state groups": (lambda: config(group(name="a", spec=STATE), group(name="b", spec=STATE)),
                                  "layer 0 is in 'a' and in 'b'"),
    "no length": (lambda: KVGroupsConfig(groups=[group()]), "KVGroupsConfig.max_model_len: missing"),
    "blocks for an unknown group": (lambda: config(memory={"ful": 3}),
                                    r"got blocks for \['ful'\]; must name each of \['full'\]"),
    "no blocks": (lambda: config(memory={"full": 0}), "got {'full': 0}; every group needs at least one block"),
    "blocks that are no number": (lambda: config(memory={"full": "many"}),
                                  "memory: got {'full': 'many'}; must be None, an int of bytes or text .* a float share"),
    "a share of more than all": (lambda: config(memory=1.5), "got 1.5; a float is a share .* between 0 and 1"),
    "a share of all": (lambda: config(memory=1.0), "got 1.0; a float is a share of the device"),
    "a negative share": (lambda: config(memory=-0.5), "got -0.5; a float is a share"),
    "no share": (lambda: config(memory=float("nan")), "got nan; a float is a share"),
    "no bytes": (lambda: config(memory=0), "memory: got 0; must be a positive number of bytes"),
    "memory in words": (lambda: config(memory="lots"),
                        "KVGroupsConfig.memory: got 'lots'; expected a size like 80GiB, 80GB, 512MiB or plain bytes"),
    "memory that is true": (lambda: config(memory=True), "memory: got True; must be None, an int of bytes"),
    "negative rewind": (lambda: config(max_rewind=-1), "max_rewind: got -1"),
    "unknown group asked for": (lambda: config().group("window"), "no group 'window'; the groups are full"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_config_is_told_what_would_be_right(build, message):
    with pytest.raises(SpecError, match=message):
        build()


def test_an_error_in_a_nested_spec_is_told_once():
    wrong = {"name": "full", "layers": [0], "spec": {"kind": "full_attention", **HEADS, "head_dim": -1}}
    with pytest.raises(SpecError) as error:
        KVGroupsConfig(groups=[wrong], max_model_len=8)
    assert str(error.value) == (
        "FullAttentionSpec.head_dim: got -1; input should be greater than or equal to 1"
    )


def test_a_layer_may_be_in_an_attention_group_and_in_a_state_group():
    config(group(), group(name="state", spec=STATE))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", '{"groups": [', "KVGroupsConfig: Invalid JSON"),
        ("config.yaml", "groups: [", r"config.yaml: expected YAML, got text"),
        ("config.yaml", "", "expected a mapping with `groups` and `max_model_len`, got nothing"),
        ("config.yaml", "max_model_len: 8", "KVGroupsConfig.groups: missing"),
    ],
    ids=["broken JSON", "broken YAML", "empty file", "no groups"],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=message):
        KVGroupsConfig.load(tmp_path / name)
