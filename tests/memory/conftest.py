"""A manager with one table, its requests by row, and a short way to say which groups it has."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvgroups.geometry import BatchGeometry
from kvgroups.manager import Manager, Request
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.prefix_tree import Node
from kvgroups.retention import RetentionPolicy
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
    "state" (), (floats,) or (floats, snapshot interval)."""
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
            floats, interval = (*sizes, *(1, 256)[len(sizes) :])
            states = [StateTensor(name="recurrent", shape=(floats,), dtype="float32")]
            return GroupConfig(spec=MambaSpec(states=states, snapshot_interval=interval), **common)
    raise ValueError(f"{name}: {sizes}")


class Bench:
    """A manager, one table and the requests in its rows.

    Blocks are 256 bytes unless a test asks for more, and slabs four of the largest: slab 1 holds blocks 4 to 7.

    Args:
        groups: sizes by group name, as `make_group` takes them: `{"full": (16,), "window": (10, 4), "state": ()}`.
        retention: where requests leave retention points.
        config: other fields of `KVGroupsConfig`.
    """

    def __init__(
        self, groups: dict[str, tuple[int, ...]], retention: RetentionPolicy | None = None, **config: Any
    ) -> None:
        self.config = KVGroupsConfig(
            groups=[make_group(layer, *item) for layer, item in enumerate(groups.items())],
            **{"max_num_reqs": 8, "max_model_len": 512, **config},
        )
        self.manager = Manager(self.config, "cpu", retention)
        self.tables = MultiGroupBlockTable.from_config(self.config)

    def open(self, row: int, num_tokens: int = 0) -> Request:
        """A request in `row` that has computed `num_tokens` in one step."""
        request = self.manager.open(self.tables, row)
        self.step(request, num_tokens)
        return request

    def step(self, request: Request, count: int) -> None:
        self.manager.allocate([request], [count])
        self.manager.drain()
        self.manager.advance([request], [count])

    def forward(self, requests: Sequence[Request], num_padded: int = 0) -> dict[str, np.ndarray]:
        """Ask the manager and the tables what a forward asks of them; the slots of the requests' step by group."""
        self.manager.drain()
        counts = [request.num_allocated_tokens - request.num_computed_tokens for request in requests]
        geometry = BatchGeometry.build(
            [request.row for request in requests],
            counts,
            [request.num_computed_tokens for request in requests],
            num_padded_reqs=len(requests) + num_padded,
            num_padded_tokens=sum(counts) + num_padded,
        )
        tables = requests[0].tables
        tables.commit()
        slots = tables.compute_slot_mapping(geometry)
        tables.gather(geometry)
        return {name: mapping.numpy() for name, mapping in slots.items()}

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
            parts += [
                dict(enumerate(self.manager.pool(name).references.tolist())),
                self.manager.pool(name).leases,
            ]
        # What nobody has is left out: an arena may grow.
        return [{k: v for k, v in part.items() if v} if isinstance(part, dict) else part for part in parts]


class Worker(Bench):
    """A bench that computes: the value at a position is a number made of all tokens up to there, as K, V and states
    are. So a block that serves another prefix, or was written too early or late, reads wrong."""

    def begin(
        self, row: int, tokens: Sequence[int], max_new_tokens: int | None = None, extra: Any = None
    ) -> Request:
        """Admit a prompt and compute its first step."""
        request = self.manager.admit(self.tables, row, list(tokens), max_new_tokens, extra)
        self.finish_step(request, tokens)
        return request

    def prefill(
        self, row: int, tokens: Sequence[int], chunk: int | None = None, extra: Any = None
    ) -> Request:
        """Admit a prompt and compute all of it, stopping at its retention points."""
        request = self.begin(row, tokens, chunk, extra)
        while count := self.manager.next_step(request, chunk):
            self.manager.allocate([request], [count])
            self.finish_step(request, tokens)
        return request

    def serve(self, row: int, tokens: Sequence[int], chunk: int | None = None, extra: Any = None) -> int:
        """Compute a prompt and free it; the tokens that a hit served."""
        request = self.prefill(row, tokens, chunk, extra)
        self.assert_reads(request, tokens)
        self.manager.free(request)
        self.manager.check()
        return request.hit.num_tokens

    def decode(self, request: Request, tokens: Sequence[int], num_known: int) -> None:
        """Compute `tokens[num_known:]`, one a step."""
        for stop in range(num_known + 1, len(tokens) + 1):
            self.manager.allocate([request], [1])
            self.finish_step(request, tokens[:stop])

    def finish_step(self, request: Request, tokens: Sequence[int]) -> None:
        """Write the step that was allocated, count it and file it."""
        count = request.num_allocated_tokens - request.num_computed_tokens
        self.write(request, tokens, count)
        self.manager.advance([request], [count])
        self.manager.file(request, list(tokens))

    def write(self, request: Request, tokens: Sequence[int], count: int) -> None:
        """Write the values of the next `count` tokens, as a forward does."""
        self.forward([request], num_padded=2) if self.config.sanitize else self.manager.drain()
        start = request.num_computed_tokens
        values = prefix_values(tokens, request.extra)
        for group in self.config.groups:
            if group.is_state:
                if count:
                    self.state(request, group)[...] = values[start + count - 1]
                continue
            row, num_blocks = self.row(request, group.name), self.config.ring_blocks(group)
            first = max(start, start + count - num_blocks * group.block_size) if num_blocks else start
            for position in range(first, start + count):
                block_id = row[position // group.block_size % (num_blocks or len(row))]
                if block_id:
                    self.keys(group)[block_id, position % group.block_size] = values[position]

    def assert_reads(self, request: Request, tokens: Sequence[int]) -> None:
        """Everything that the next query sees has the value of its own prefix."""
        self.manager.drain()
        values = prefix_values(tokens, request.extra)
        here = request.num_computed_tokens
        for group in self.config.groups:
            if group.is_state:
                assert here == 0 or self.state(request, group)[0] == values[here - 1], group.name
                continue
            row, num_blocks = self.row(request, group.name), self.config.ring_blocks(group)
            for position in range(group.spec.first_visible(here), here):
                block_id = row[position // group.block_size % (num_blocks or len(row))]
                assert block_id, f"{group.name}: token {position} is in the null block"
                found = int(self.keys(group)[block_id, position % group.block_size])
                assert found == values[position], f"{group.name}: token {position}"

    def assert_findable_is_right(self) -> None:
        """Every block that a later prompt may find has the values of the prefix that it is filed under."""
        self.manager.drain()
        for group in self.config.groups:
            for block_id, node in self.manager.prefixes._nodes[group.name].items():
                *path, root = [node, *node.ancestors(), root_of(node)]
                ids = np.concatenate([np.frombuffer(step.tokens, dtype=np.int64) for step in reversed(path)])
                values = np.array(prefix_values(ids.tolist(), root.tokens.decode()[1:] or None))
                if group.is_state:
                    found, expected = self.states(group)[block_id, :1], values[-1:]
                else:
                    found, expected = self.keys(group)[block_id], values[-group.block_size :]
                assert (found == expected).all(), f"{group.name}: block {block_id}, {found} is not {expected}"

    def keys(self, group: GroupConfig) -> np.ndarray:
        return self.manager.storage(group.name).layer(group.layers[0])["key"].numpy()[:, :, 0, 0]

    def states(self, group: GroupConfig) -> np.ndarray:
        return self.manager.storage(group.name).layer(group.layers[0])["recurrent"].numpy()

    def state(self, request: Request, group: GroupConfig) -> np.ndarray:
        (slot,) = self.row(request, group.name)
        return self.states(group)[slot]


def root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def prefix_values(tokens: Sequence[int], extra: Any = None) -> list[int]:
    """For each token a number that float32 holds exactly, made of it and of all before it."""
    values, value = [], zlib.crc32(repr(extra).encode())
    for token in tokens:
        value = zlib.crc32(token.to_bytes(8, "little"), value)
        values.append(value & 0xFFFFFF)
    return values


@pytest.fixture(scope="session")
def make_bench() -> type[Bench]:
    return Bench


@pytest.fixture(scope="session")
def make_worker() -> type[Worker]:
    return Worker
