"""MultiGroupBlockTable: one row in every group, changed in all of them or in none."""

import pytest

from kvgroups import ops
from kvgroups.block_table import BlockTable
from kvgroups.errors import KVGroupsError, ShapeError, SpecError
from kvgroups.geometry import BatchGeometry
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.specs import (
    FullAttentionSpec,
    GroupConfig,
    KVGroupsConfig,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
)


def three_groups() -> MultiGroupBlockTable:
    """Full attention in blocks of 16, a window in blocks of 4, one running state; row 0 holds 20 tokens."""
    tables = MultiGroupBlockTable(
        {
            "full": BlockTable(4, 64, 16),
            "window": BlockTable(4, 64, 4),
            "state": BlockTable(4, 64, 64, slot_mapping="none"),
        }
    )
    tables.add_row(0, {"full": [7, 8], "window": [0, 0, 3, 4, 5], "state": [2]})
    tables.commit()
    return tables


def contents(tables: MultiGroupBlockTable, row: int) -> dict[str, list[int]]:
    return {
        name: tables[name].table[row, : tables[name].num_blocks_per_row[row]].tolist()
        for name in tables.tables
    }


ROW_0 = {"full": [7, 8], "window": [0, 0, 3, 4, 5], "state": [2]}
EMPTY = {"full": [], "window": [], "state": []}


def test_verbs_on_whole_rows_reach_every_group():
    tables = three_groups()
    tables.copy_row(0, 1)
    assert contents(tables, 1) == ROW_0
    tables.move_row(1, 3)
    assert contents(tables, 1) == EMPTY and contents(tables, 3) == ROW_0
    tables.swap_row(3, 2)
    assert contents(tables, 3) == EMPTY and contents(tables, 2) == ROW_0
    tables.clear_row(2)
    assert contents(tables, 2) == EMPTY and contents(tables, 0) == ROW_0


def test_verbs_on_blocks_name_their_groups_and_leave_the_others():
    tables = three_groups()
    tables.append_row(0, {"window": [6]})
    tables.null_range(0, {"window": (2, 3)})
    tables.truncate_row(0, {"full": 1})
    assert contents(tables, 0) == {"full": [7], "window": [0, 0, 0, 4, 5, 6], "state": [2]}


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        pytest.param(
            "append_row", (0, {"full": [9], "window": [9], "state": [9]}), "'state'.*at most 1", id="full"
        ),
        pytest.param(
            "append_row", (0, {"full": [9], "window": [-1]}), "'window'", id="pad slot in second group"
        ),
        pytest.param("append_row", (0, {"full": [9], "mamba": [1]}), r"\['mamba'\]", id="unknown group"),
        pytest.param(
            "add_row", (1, {"full": [9], "window": [9], "state": [-1]}), "'state'", id="third group"
        ),
        pytest.param(
            "add_row", (0, {"full": [9], "window": []}), r"none for \['state'\]", id="group left out"
        ),
        pytest.param(
            "truncate_row", (0, {"full": 1, "window": 6}), "'window'.*0 to 5", id="truncate to more"
        ),
        pytest.param(
            "null_range", (0, {"full": (0, 1), "window": (4, 6)}), "'window'", id="null past the row"
        ),
        pytest.param("copy_row", (0, 4), "got 4", id="copy to no row"),
        pytest.param("move_row", (0, 4), "got 4", id="move to no row"),
        pytest.param("swap_row", (0, 4), "got 4", id="swap with no row"),
        pytest.param("clear_row", (4,), "got 4", id="clear no row"),
    ],
)
def test_a_verb_that_one_group_refuses_changes_no_group(verb, arguments, message):
    tables = three_groups()
    with pytest.raises(ShapeError, match=message):
        getattr(tables, verb)(*arguments)
    assert [contents(tables, row) for row in range(4)] == [ROW_0, EMPTY, EMPTY, EMPTY]
    assert tables.commit() == 0


def test_one_commit_moves_the_changes_of_all_groups_in_one_scatter(monkeypatch):
    tables = three_groups()
    scatters = []
    original = ops.table_update
    monkeypatch.setattr(ops, "table_update", lambda *args: scatters.append(args) or original(*args))
    before = tables.committed_bytes
    tables.append_row(0, {"full": [9], "window": [9, 10]})
    assert tables.commit() == 3 * 12
    assert len(scatters) == 1
    for table in tables.tables.values():
        assert table.device_table.tolist() == table.table.tolist()
    assert tables.committed_bytes == before + 36
    assert tables.nbytes == sum(tables[name].nbytes for name in tables.tables)


def test_one_geometry_gives_every_group_its_slots_in_one_launch(monkeypatch):
    launches = []
    original = ops.slot_mapping
    monkeypatch.setattr(ops, "slot_mapping", lambda *a, **k: launches.append(k) or original(*a, **k))
    tables = three_groups()
    geometry = BatchGeometry.build([0], [4], [16], num_padded_reqs=2, num_padded_tokens=6)

    slots = tables.compute_slot_mapping(geometry)

    assert {name: mapping.tolist() for name, mapping in slots.items()} == {
        "full": [128, 129, 130, 131, -1, -1],
        "window": [20, 21, 22, 23, -1, -1],
        "state": [-1] * 6,
    }
    assert len(launches) == 1
    assert slots["full"].untyped_storage().data_ptr() == slots["window"].untyped_storage().data_ptr()


def test_each_group_gives_the_slots_it_gives_alone():
    tables = three_groups()
    geometry = BatchGeometry.build([0], [20], [0])
    together = tables.compute_slot_mapping(geometry)
    for name in tables.tables:
        assert together[name].tolist() == tables[name].compute_slot_mapping(geometry).tolist()


def test_a_group_without_blocks_for_the_step_is_named():
    with pytest.raises(ShapeError, match="'window'.*row 0 has 5 blocks"):
        three_groups().compute_slot_mapping(BatchGeometry.build([0], [1], [20]))


def test_uncommitted_changes_in_one_group_stop_the_step():
    tables = three_groups()
    tables.append_row(0, {"window": [6]})
    with pytest.raises(KVGroupsError, match=r"'window'.*commit\(\)"):
        tables.compute_slot_mapping(BatchGeometry.build([0], [1], [19]))


def test_gather_gives_every_group_this_steps_rows():
    gathered = three_groups().gather(BatchGeometry.build([0], [1], [19], num_padded_reqs=2))
    assert gathered["full"].tolist() == [[7, 8, 0, 0, 0, 0, 0, 0], [0] * 8]
    assert gathered["state"].tolist() == [[2], [0]]


def test_tables_that_disagree_are_refused():
    with pytest.raises(
        SpecError, match="one max_num_reqs for all KV-cache groups, got 4 in 'a' and 5 in 'b'"
    ):
        MultiGroupBlockTable({"a": BlockTable(4, 64, 16), "b": BlockTable(5, 64, 16)})
    with pytest.raises(SpecError, match="at least one"):
        MultiGroupBlockTable({})


def test_from_config_makes_a_table_for_each_group():
    full = FullAttentionSpec(num_kv_heads=2, head_dim=8, dtype="float32")
    window = SlidingWindowSpec(num_kv_heads=2, head_dim=8, dtype="float32", sliding_window=10)
    state = MambaSpec(states=[StateTensor(name="ssm", shape=(4, 8), dtype="float32")])
    config = KVGroupsConfig(
        groups=[
            GroupConfig(name="full", layers=[0], spec=full, block_size=16),
            GroupConfig(name="window", layers=[1], spec=window, block_size=4, slot_mapping="ring"),
            GroupConfig(name="state", layers=[2], spec=state),
        ],
        max_num_reqs=8,
        max_model_len=512,
    )
    tables = MultiGroupBlockTable.from_config(config)
    assert {name: table.table.shape for name, table in tables.tables.items()} == {
        "full": (8, 32),
        "window": (8, 3),  # the last 9 tokens, in blocks of 4
        "state": (8, 1),
    }
    smaller = MultiGroupBlockTable.from_config(config, max_num_reqs=2, max_model_len=100)
    assert smaller.max_num_reqs == 2 and smaller["full"].table.shape == (2, 8)
