"""A manager with one table, its requests by row, and a short way to say which groups it has."""

from __future__ import annotations

from typing import Any

import pytest

from kvgroups.block_table import MultiGroupBlockTable
from kvgroups.manager import Manager, Request
from kvgroups.specs import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    GroupConfig,
    KVGroupsConfig,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
)

ONE_FLOAT = {"num_kv_heads": 1, "head_dim": 1, "dtype": "float32"}
"""K and V of one float each, so that a test can write a token's number into its slot."""


def make_group(layer: int, name: str, sizes: tuple[int, ...]) -> GroupConfig:
    """The group `name`, which begins with its kind: "full" (B,), "window" and "ring" (W, B), "chunk" (C, B),
    "state" () or (floats,)."""
    kind = name.partition("_")[0]
    common: dict[str, Any] = {"name": name, "layers": [layer], "layout": "NHD"}
    match kind, sizes:
        case "full", (block_size,):
            return GroupConfig(spec=FullAttentionSpec(**ONE_FLOAT), block_size=block_size, **common)
        case "window" | "ring", (window, block_size):
            mode = "ring" if kind == "ring" else "paged"
            spec = SlidingWindowSpec(sliding_window=window, **ONE_FLOAT)
            return GroupConfig(spec=spec, block_size=block_size, slot_mapping=mode, **common)
        case "chunk", (chunk, block_size):
            spec = ChunkedAttentionSpec(chunk_size=chunk, **ONE_FLOAT)
            return GroupConfig(spec=spec, block_size=block_size, **common)
        case "state", _:
            states = [StateTensor(name="recurrent", shape=sizes or (1,), dtype="float32")]
            return GroupConfig(spec=MambaSpec(states=states), **common)
    raise ValueError(f"{name}: {sizes}")


class Bench:
    """A manager, one table and the requests in its rows.

    Blocks are 256 bytes unless a test asks for more, and slabs four of the largest: slab 1 holds blocks 4 to 7.

    Args:
        groups: sizes by group name, as `make_group` takes them: `{"full": (16,), "window": (10, 4), "state": ()}`.
        config: other fields of `KVGroupsConfig`.
    """

    def __init__(self, groups: dict[str, tuple[int, ...]], **config: Any) -> None:
        self.config = KVGroupsConfig(
            groups=[make_group(layer, *item) for layer, item in enumerate(groups.items())],
            **{"max_num_reqs": 8, "max_model_len": 512, **config},
        )
        self.manager = Manager(self.config, "cpu")
        self.tables = MultiGroupBlockTable.from_config(self.config)

    def open(self, row: int, num_tokens: int = 0) -> Request:
        """A request in `row` that has computed `num_tokens` in one step."""
        request = self.manager.open(self.tables, row)
        self.step(request, num_tokens)
        return request

    def step(self, request: Request, count: int) -> None:
        self.manager.allocate([request], [count])
        self.manager.advance([request], [count])

    def row(self, request: Request, group: str) -> list[int]:
        """Block ids of a request's row."""
        table = request.tables[group]
        return table.table[request.row, : table.num_blocks_per_row[request.row]].tolist()

    def picture(self, request: Request, group: str) -> str:
        """The row as `..xx`: a dot for a null block, an x for one of its own."""
        return "".join("x" if block_id else "." for block_id in self.row(request, group))

    def num_used(self) -> dict[str, int]:
        return {group.name: self.manager.pool(group.name).num_used for group in self.config.groups}

    def snapshot(self) -> list[object]:
        """Everything that a refused call must leave alone: tables, counts, owners of blocks and of slabs."""
        parts: list[object] = [dict(enumerate(self.manager.slabs.owners))]
        for name, table in self.tables.tables.items():
            parts += [table.table.tolist(), table.num_blocks_per_row.tolist()]
            parts += [dict(enumerate(self.manager.pool(name).references.tolist())), self.manager.pool(name).leases]
        # What nobody has is left out: an arena may grow.
        return [{k: v for k, v in part.items() if v} if isinstance(part, dict) else part for part in parts]


@pytest.fixture(scope="session")
def make_bench() -> type[Bench]:
    return Bench
