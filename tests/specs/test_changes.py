"""A config that is changed is as valid as one that is built: `replace`, `model_copy`, memory as text, and its YAML."""

import json

import pytest
from typer.testing import CliRunner

from kvgroups import infer_config
from kvgroups.cli import app
from kvgroups.errors import SpecError
from kvgroups.specs import (
    FullAttentionSpec,
    GroupConfig,
    KVGroupsConfig,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
)

SHAPE = {"num_kv_heads": 1, "head_dim": 32, "dtype": "float32"}
STATE = MambaSpec(states=[StateTensor(name="conv", shape=[4, 3], dtype="float32")])


@pytest.fixture
def config():
    window = SlidingWindowSpec(sliding_window=10, **SHAPE)
    return KVGroupsConfig(
        max_model_len=512,
        groups=[
            GroupConfig(name="full", layers=[0], spec=FullAttentionSpec(**SHAPE)),
            GroupConfig(name="window", layers=[1], spec=window, block_size=4),
            GroupConfig(name="state", layers=[2], spec=STATE),
        ],
    )


def of_groups(config, field):
    return {group.name: getattr(group, field) for group in config.groups}


def test_fields_and_groups_are_replaced_and_the_rest_stays(config):
    before = config.model_dump()
    changed = config.replace(max_num_reqs=8, memory=2**20, block_size={"full": 32}, layout="NHD", snapshot_interval=64)
    assert (changed.max_num_reqs, changed.memory, changed.max_model_len) == (8, 2**20, 512)
    assert of_groups(changed, "block_size") == {"full": 32, "window": 4, "state": 1}
    assert of_groups(changed, "layout") == {"full": "NHD", "window": "NHD", "state": config.group("state").layout}
    assert changed.group("state").spec.snapshot_interval == 64
    assert config.model_dump() == before
    assert config.replace() == config


def test_a_block_size_goes_with_its_mode(config):
    ring = config.replace(slot_mapping="ring")
    assert of_groups(ring, "slot_mapping") == {"full": "paged", "window": "ring", "state": "none"}
    assert of_groups(ring, "block_size") == of_groups(config, "block_size")
    tokens = config.replace(slot_mapping={"window": "token"})
    assert of_groups(tokens, "block_size") == {"full": 16, "window": 1, "state": 1}
    assert of_groups(tokens.replace(slot_mapping={"window": "paged"}), "block_size")["window"] == 4
    assert tokens.replace(slot_mapping={"window": "paged"}, block_size={"window": 8}).group("window").block_size == 8


def test_what_is_replaced_is_what_would_have_been_inferred():
    from kvgroups.testing import tiny

    model = tiny("falcon_h1")
    changes = {"max_num_reqs": 4, "memory": "3 MiB", "block_size": 8, "snapshot_interval": 32}
    assert infer_config(model).replace(**changes) == infer_config(model, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blok_size": 64}, "replace: unknown override blok_size; known are block_size, groups, layout, max_model_len"),
        ({"block_size": {"fool": 64}}, "replace: block_size names fool; this model's groups are full, window, state"),
        ({"snapshot_interval": {"full": 64}}, "replace: snapshot_interval names 'full', which stores tokens"),
        ({"max_num_reqs": -3}, "max_num_reqs: got -3"),
        ({"block_size": {"state": 4}}, "group 'state': block_size 4 with slot_mapping 'none'"),
        ({"memory": {"full": 3}}, "must name each of"),
    ],
)
def test_a_wrong_change_is_told_what_would_be_right(config, changes, message):
    with pytest.raises(SpecError, match=message):
        config.replace(**changes)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"blok_size": 64}, "KVGroupsConfig.blok_size: unknown field, got 64"),
        ({"max_num_reqs": -3}, "max_num_reqs: got -3"),
        ({"memory": "a lot"}, "memory: got 'a lot'; expected a size like 80GiB"),
        ({"groups": ()}, "groups"),
    ],
)
def test_a_copy_is_checked(config, update, message):
    with pytest.raises(SpecError, match=message):
        config.model_copy(update=update)


def test_a_copy_of_a_group_is_checked_too(config):
    group = config.group("full")
    assert group.model_copy(update={"block_size": 64}).block_size == 64
    with pytest.raises(SpecError, match="slot_mapping 'ring' serves sliding windows only"):
        group.model_copy(update={"slot_mapping": "ring"})
    assert config.model_copy() == config == config.model_copy(deep=True)


def test_a_group_that_was_not_checked_is_checked_in_its_config(config):
    group = GroupConfig.model_construct(**{**dict(config.group("full")), "block_size": -1})
    with pytest.raises(SpecError, match="block_size: got -1"):
        KVGroupsConfig(max_model_len=512, groups=[group])


@pytest.mark.parametrize(
    ("text", "nbytes"), [("80GiB", 80 * 2**30), ("512MiB", 2**29), ("1.5 GB", 1_500_000_000), ("4096", 4096)]
)
def test_memory_as_text_is_bytes(config, text, nbytes):
    assert config.replace(memory=text).memory == nbytes
    data = {**json.loads(config.model_dump_json()), "memory": text}
    assert KVGroupsConfig.model_validate_json(json.dumps(data)).memory == nbytes


@pytest.mark.parametrize(
    ("text", "message"),
    [("80 Gigs", "got '80 Gigs'; expected a size like 80GiB, 80GB, 512MiB or plain bytes"), ("0.5", "at least one byte")],
)
def test_memory_as_another_text(config, text, message):
    with pytest.raises(SpecError, match=f"KVGroupsConfig.memory: .*{message}"):
        config.replace(memory=text)


def test_printed_it_is_what_the_command_prints_and_load_reads(capsys, tmp_path):
    from kvgroups.testing import tiny

    config = infer_config(tiny("llama"))
    print(config)
    printed = capsys.readouterr().out
    (tmp_path / "model").mkdir()
    tiny("llama").save_pretrained(tmp_path / "model")
    capsys.readouterr()
    result = CliRunner().invoke(app, ["config", str(tmp_path / "model")])
    assert result.exit_code == 0, result.output
    assert printed == result.stdout
    (tmp_path / "printed.yaml").write_text(printed)
    assert KVGroupsConfig.load(tmp_path / "printed.yaml") == config


@pytest.mark.parametrize(
    ("name", "reason"), [("missing.yaml", "No such file"), ("missing.json", "No such file"), (".", "directory")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, reason):
    with pytest.raises(SpecError, match=f"{tmp_path}.*{reason}"):
        KVGroupsConfig.load(tmp_path / name)


def test_what_is_no_path():
    with pytest.raises(SpecError, match="expected the path of a YAML or JSON file, got NoneType"):
        KVGroupsConfig.load(None)
