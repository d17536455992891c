"""The block tables of all KV-cache groups, as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kvgroups.block_table import BlockTable, slot_mappings, update_device
from kvgroups.errors import KVGroupsError, ShapeError, SpecError
from kvgroups.geometry import BatchGeometry
from kvgroups.step_buffers import StepBuffers

if TYPE_CHECKING:
    from kvgroups.specs import KVGroupsConfig


class Inspector(Protocol):
    """Who looks at what a step computed from the tables before the step uses it; see `kvgroups.sanitizer`."""

    def check_slots(
        self, tables: MultiGroupBlockTable, geometry: BatchGeometry, slots: Mapping[str, torch.Tensor]
    ) -> None:
        """Raise if a slot of the step is wrong."""

    def check_rows(
        self, tables: MultiGroupBlockTable, geometry: BatchGeometry, gathered: Mapping[str, torch.Tensor]
    ) -> None:
        """Raise if a row of the step is wrong."""


class MultiGroupBlockTable:
    """The block tables of all KV-cache groups, changed together and read with one `BatchGeometry`.

    It has the verbs of `BlockTable`. A request has the same row in every group, so verbs on whole rows take
    only rows. Blocks differ in id, size and number from group to group, so verbs that speak of blocks take
    a mapping from group name. Every verb is all-or-nothing: if one group refuses, none has changed.

    Args:
        tables: group name -> table. Equal `max_num_reqs`, device and context-parallel arguments.

    Raises:
        SpecError: no table, or tables that disagree.

    Example: blocks of 16 for full attention, of 4 for a window.
        >>> tables = MultiGroupBlockTable({"full": BlockTable(2, 256, 16), "window": BlockTable(2, 256, 4)})
        >>> tables.append_row(1, {"full": [9], "window": [0, 0, 5]})
        >>> {name: table.num_blocks_per_row.tolist() for name, table in tables.tables.items()}
        {'full': [0, 1], 'window': [0, 3]}
    """

    def __init__(self, tables: Mapping[str, BlockTable]) -> None:
        if not tables:
            raise SpecError("block_table: expected at least one KV-cache group, got none.")
        first, *others = tables
        for name in ("max_num_reqs", "device", "cp_world_size", "cp_rank", "cp_interleave"):
            value = getattr(tables[first], name)
            for other in others:
                if getattr(tables[other], name) != value:
                    raise SpecError(
                        f"block_table: expected one {name} for all KV-cache groups, got {value} in "
                        f"{first!r} and {getattr(tables[other], name)} in {other!r}."
                    )
        self.tables = dict(tables)
        """Group name -> its table. Change rows through the verbs here wherever groups must stay in step."""
        self._join_device_tables()
        self.buffers = StepBuffers(self.tables[first].device)
        """What each step's geometry, slots and rows are written to."""
        self._placed: BatchGeometry | None = None
        self.inspector: Inspector | None = None
        """Looks at every slot mapping and at all gathered rows; None outside of debugging."""

    def _join_device_tables(self) -> None:
        """Put the groups' device tables into one tensor, so that one scatter changes all of them."""
        sizes = [-(-table.device_table.numel() // 4) * 4 for table in self.tables.values()]  # each aligned to 16 bytes
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        with torch.inference_mode(False):
            device = next(iter(self.tables.values())).device
            self._device_tables = torch.zeros((1, sum(sizes)), dtype=torch.int32, device=device)
            for start, table in zip(self._starts, self.tables.values(), strict=True):
                own = table.device_table
                joined = self._device_tables[0, start : start + own.numel()].view(own.shape)
                table.device_table = joined.copy_(own)

    @classmethod
    def from_config(
        cls,
        config: KVGroupsConfig,
        *,
        max_num_reqs: int | None = None,
        max_model_len: int | None = None,
        device: torch.device | str = "cpu",
    ) -> MultiGroupBlockTable:
        """Tables for the groups of a config, empty.

        Args:
            config: its groups give name, block size and slot mapping, itself `ring_blocks(group)`.
            max_num_reqs: rows. Default: the config's.
            max_model_len: tokens of the longest request. Default: the config's.
            device: where the mirrors live.
        """
        return cls(
            {
                group.name: BlockTable(
                    config.max_num_reqs if max_num_reqs is None else max_num_reqs,
                    config.max_model_len if max_model_len is None else max_model_len,
                    group.block_size,
                    slot_mapping=group.slot_mapping,
                    ring_blocks=config.ring_blocks(group),
                    device=device,
                )
                for group in config.groups
            }
        )

    def __getitem__(self, group: str) -> BlockTable:
        """The table of one KV-cache group."""
        return self.tables[group]

    @property
    def max_num_reqs(self) -> int:
        """Rows of every group's table."""
        return next(iter(self.tables.values())).max_num_reqs

    @property
    def nbytes(self) -> int:
        """Bytes of all tables on the CPU; the mirrors have as many."""
        return sum(table.nbytes for table in self.tables.values())

    @property
    def committed_bytes(self) -> int:
        """Bytes that all commits so far have moved, over all groups."""
        return sum(table.committed_bytes for table in self.tables.values())

    def append_row(self, row: int, block_ids: Mapping[str, Sequence[int] | np.ndarray]) -> None:
        """Add blocks at the end of a row: group name -> block ids. Groups left out stay as they are."""
        self._check_names(block_ids)
        for name, ids in block_ids.items():
            with _naming(name):
                self.tables[name].check_append(row, ids)
        for name, ids in block_ids.items():
            self.tables[name].append_row(row, ids)

    def add_row(self, row: int, block_ids: Mapping[str, Sequence[int] | np.ndarray]) -> None:
        """Replace a row in every group: group name -> block ids. No group may be left out."""
        self._check_names(block_ids)
        if missing := [name for name in self.tables if name not in block_ids]:
            raise ShapeError(
                f"block_table: expected block ids for every KV-cache group, got none for {missing}. "
                f"Give [] for a group that shall be empty."
            )
        for name, ids in block_ids.items():
            with _naming(name):
                self.tables[name].check_add(row, ids)
        for name, ids in block_ids.items():
            self.tables[name].add_row(row, ids)

    def copy_row(self, source: int, target: int) -> None:
        """Make row `target` equal to row `source` in every group. Both then name the same blocks."""
        self._check_rows(source, target)
        for table in self.tables.values():
            table.copy_row(source, target)

    def move_row(self, source: int, target: int) -> None:
        """Move row `source` to `target` in every group and clear the vacated row."""
        self._check_rows(source, target)
        for table in self.tables.values():
            table.move_row(source, target)

    def swap_row(self, a: int, b: int) -> None:
        """Exchange two rows in every group."""
        self._check_rows(a, b)
        for table in self.tables.values():
            table.swap_row(a, b)

    def truncate_row(self, row: int, num_blocks: Mapping[str, int]) -> None:
        """Keep the first blocks of a row: group name -> how many. Groups left out stay as they are."""
        self._check_names(num_blocks)
        for name, count in num_blocks.items():
            with _naming(name):
                self.tables[name].check_truncate(row, count)
        for name, count in num_blocks.items():
            self.tables[name].truncate_row(row, count)

    def null_range(self, row: int, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Make blocks null: group name -> (start, stop). Groups left out stay as they are."""
        self._check_names(ranges)
        for name, (start, stop) in ranges.items():
            with _naming(name):
                self.tables[name].check_null_range(row, start, stop)
        for name, (start, stop) in ranges.items():
            self.tables[name].null_range(row, start, stop)

    def clear_row(self, row: int) -> None:
        """Empty a row in every group."""
        self._check_rows(row)
        for table in self.tables.values():
            table.clear_row(row)

    def commit(self) -> int:
        """Bring every group's device table up to date, in one transfer and one scatter. Returns the bytes moved."""
        changes = [table.changes() for table in self.tables.values()]
        places = np.concatenate([start + each for start, (each, _) in zip(self._starts, changes, strict=True)])
        moved = update_device(self._device_tables, places, np.concatenate([ids for _, ids in changes]))
        for table, (_, ids) in zip(self.tables.values(), changes, strict=True):
            table.note_committed(len(ids))
        return moved

    def compute_slot_mapping(self, geometry: BatchGeometry) -> dict[str, torch.Tensor]:
        """The slot of each token of this step in every group, in one launch. Commit first.

        Returns:
            Group name -> (num_padded_tokens,), int64: views of one buffer, until the next step. All -1 for a state
            group.

        Raises:
            ShapeError: the geometry names a row that the tables lack, or a token beyond a row's blocks.
            KVGroupsError: changes are not committed.
        """
        for name, table in self.tables.items():
            with _naming(name):
                table.check_tokens_have_blocks(geometry)
        self._place(geometry)
        found = slot_mappings(list(self.tables.values()), geometry)
        num_tokens = found.shape[1]
        # An even length keeps every group's slots on a multiple of 16 bytes, as kernels are compiled for.
        kept = self.buffers.take("slots", (len(found), num_tokens + num_tokens % 2), torch.int64)[:, :num_tokens]
        slots = dict(zip(self.tables, kept.copy_(found), strict=True))
        if self.inspector is not None:
            self.inspector.check_slots(self, geometry, slots)
        return slots

    def gather(self, geometry: BatchGeometry) -> dict[str, torch.Tensor]:
        """This step's rows of every group. Commit first.

        Returns:
            Group name -> (num_padded_reqs, `width_for(geometry)`), int32: in a buffer, until the next step.
        """
        self._place(geometry)
        gathered = {}
        for name, table in self.tables.items():
            shape = (geometry.num_padded_reqs, table.width_for(geometry))
            gathered[name] = table.gather(geometry, self.buffers.take(f"rows of {name}", shape, torch.int32))
        if self.inspector is not None:
            self.inspector.check_rows(self, geometry, gathered)
        return gathered

    def _place(self, geometry: BatchGeometry) -> None:
        """Give the buffers to a step; its geometry is moved to the device once, for all groups."""
        if self._placed is not geometry:
            if self._placed is not None:
                self._placed.forget(self.buffers.device)
            geometry.place(self.buffers)
            self._placed = geometry

    def _check_rows(self, *rows: int) -> None:
        next(iter(self.tables.values())).check_rows(*rows)  # all tables have the same rows

    def _check_names(self, names: Mapping[str, object]) -> None:
        if unknown := [name for name in names if name not in self.tables]:
            raise ShapeError(
                f"block_table: expected KV-cache groups among {list(self.tables)}, got {unknown}."
            )


@contextmanager
def _naming(group: str) -> Iterator[None]:
    """Say in which KV-cache group a check failed."""
    try:
        yield
    except KVGroupsError as error:
        raise type(error)(f"KV-cache group {group!r}: {error}") from error
