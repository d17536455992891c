"""Which block holds which tokens of which request, in one KV-cache group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from kvgroups import ops
from kvgroups.constants import NULL_BLOCK_ID, TABLE_ALIGNMENT_TOKENS
from kvgroups.errors import KVGroupsError, ShapeError, SpecError
from kvgroups.geometry import BatchGeometry, to_device

if TYPE_CHECKING:
    from kvgroups.multi_group_block_table import MultiGroupBlockTable as MultiGroupBlockTable

SLOT_MAPPINGS = get_args(ops.SlotMappingMode)
"""How a group turns a position into a slot. "none" is a state group, whose table holds state slots."""


_LARGEST_ID = int(np.iinfo(np.int32).max)

_ENTRY_BYTES = 12
"""Of a changed entry on its way to the device: an int64 place and an int32 id."""

_NO_CHANGES = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)


class BlockTable:
    """`table[row, logical block] = block id` of one KV-cache group, on the CPU and mirrored on a device.

    The CPU's table is the truth and only the verbs write it; the device sees a change after `commit`.
    Whatever shortens a row clears its tail to the null block, since padded rows and kernels that load whole
    vectors do read there. A verb that raises has changed nothing.

    A row counts every logical block of its request, also those that no later query can see: these are
    `NULL_BLOCK_ID`, never left out, so that `position // block_size` stays the column.

    Args:
        max_num_reqs: number of rows.
        max_model_len: tokens that the longest request may hold; sets the width.
        block_size: tokens in a block. Must be 1 for "token".
        slot_mapping: one of `SLOT_MAPPINGS`.
        ring_blocks: blocks that a request owns for life. For "ring" only.
        device: where the mirror lives.
        cp_world_size: ranks that share each sequence (context parallelism). A logical block then spans
            `block_size * cp_world_size` tokens, of which this rank stores `block_size`.
        cp_rank: this rank, from 0.
        cp_interleave: consecutive tokens on one rank before the next rank's turn; divides `block_size`.

    Raises:
        SpecError: the arguments contradict each other.

    Source: vLLM v1 `BlockTable`. Ours clears tails, and commits changes instead of whole rows.

    Example: 35 tokens in blocks of 16 take three blocks; token 48 would need a fourth.
        >>> table = BlockTable(max_num_reqs=4, max_model_len=1000, block_size=16)
        >>> table.append_row(2, [7, 1023])
        >>> table.append_row(2, [5])
        >>> table.table[2, :4].tolist(), table.num_blocks_per_row.tolist()
        ([7, 1023, 5, 0], [0, 0, 3, 0])
        >>> table.commit()  # three entries of 12 bytes: an int64 place and an int32 id
        36
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int,
        *,
        slot_mapping: ops.SlotMappingMode = "paged",
        ring_blocks: int = 0,
        device: torch.device | str = "cpu",
        cp_world_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
    ) -> None:
        for name, value in (
            ("max_num_reqs", max_num_reqs),
            ("max_model_len", max_model_len),
            ("block_size", block_size),
            ("cp_world_size", cp_world_size),
            ("cp_interleave", cp_interleave),
        ):
            if value < 1:
                raise SpecError(f"block_table: expected {name} >= 1, got {value}.")
        if slot_mapping not in SLOT_MAPPINGS:
            raise SpecError(f"block_table: expected slot_mapping in {SLOT_MAPPINGS}, got {slot_mapping!r}.")
        if (slot_mapping == "ring") != (ring_blocks > 0):
            raise SpecError(
                f"block_table: expected ring_blocks >= 1 for a ring and 0 otherwise, got {ring_blocks} for "
                f"slot_mapping={slot_mapping!r}."
            )
        if slot_mapping == "token" and block_size != 1:
            raise SpecError(
                f'block_table: expected block_size 1 for slot_mapping="token", got {block_size}. '
                f'Use "paged" for larger blocks.'
            )
        if not 0 <= cp_rank < cp_world_size:
            raise SpecError(f"block_table: expected cp_rank from 0 to {cp_world_size - 1}, got {cp_rank}.")
        if slot_mapping != "none" and block_size % cp_interleave:
            raise SpecError(
                f"block_table: expected cp_interleave to divide block_size {block_size}, got {cp_interleave}."
            )
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.slot_mapping = slot_mapping
        self.ring_blocks = ring_blocks
        self.device = torch.device(device)
        self.cp_world_size = cp_world_size
        self.cp_rank = cp_rank
        self.cp_interleave = cp_interleave
        self.committed_bytes = 0
        """Bytes that all commits so far have moved to the device."""

        self._table = np.full((max_num_reqs, self._width()), NULL_BLOCK_ID, dtype=np.int32)
        self._num_blocks = np.zeros(max_num_reqs, dtype=np.int32)
        # Columns [start, stop) of each row that the device has not seen; start >= stop where there are none.
        self._dirty_start = np.full(max_num_reqs, self.width, dtype=np.int32)
        self._dirty_stop = np.zeros(max_num_reqs, dtype=np.int32)
        # A copy on the CPU too: a forgotten commit must be wrong there as it is on a GPU.
        with torch.inference_mode(False):  # or it could not be written outside of inference mode
            self.device_table = torch.full(self._table.shape, NULL_BLOCK_ID, dtype=torch.int32, device=device)
        """(max_num_reqs, width), int32, on `device`: the table as of the last commit."""

    def _width(self) -> int:
        """Blocks for `max_model_len`, rounded up so that width * block_size is a multiple of 128 tokens.

        At B = 16, 48 and 128 that is a multiple of 8, 8 and 1 blocks. A ring is exactly as wide as it has
        blocks (its column is taken modulo that), and a state group needs one entry.
        """
        if self.slot_mapping == "none":
            return 1
        if self.slot_mapping == "ring":
            return self.ring_blocks
        multiple = TABLE_ALIGNMENT_TOKENS // math.gcd(TABLE_ALIGNMENT_TOKENS, self.block_size)
        num_blocks = _cdiv(self.max_model_len, self.block_size * self.cp_world_size)
        return _cdiv(num_blocks, multiple) * multiple

    @property
    def width(self) -> int:
        """Entries of a row: the most blocks that a request can have."""
        return self._table.shape[1]

    @property
    def table(self) -> np.ndarray:
        """(max_num_reqs, width), int32, block ids. A read-only view: the verbs write it."""
        return _read_only(self._table)

    @property
    def num_blocks_per_row(self) -> np.ndarray:
        """(max_num_reqs,), int32: filled entries of each row, null ones included. A read-only view."""
        return _read_only(self._num_blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the table, and again of its mirror. 256 rows of 32K tokens at B = 16 take 2 MiB."""
        return self._table.nbytes

    @property
    def has_uncommitted_changes(self) -> bool:
        """Whether the device's table differs from the CPU's until the next `commit`."""
        return bool((self._dirty_start < self._dirty_stop).any())

    def append_row(self, row: int, block_ids: Sequence[int] | np.ndarray) -> None:
        """Add blocks at the end of a row.

        Args:
            row: table row.
            block_ids: (n,), integers >= 0; `NULL_BLOCK_ID` for blocks that no later query can see.

        Raises:
            ShapeError: no such row, an id that is negative or no int32, or more blocks than the width.
        """
        ids = self.check_append(row, block_ids)
        count = int(self._num_blocks[row])
        self._write(row, count, ids)
        self._num_blocks[row] = count + len(ids)

    def append_each(self, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        """Add one block at the end of each of several rows: what a decode step does, at the price of one call.

        Args:
            rows: (n,), distinct table rows.
            block_ids: (n,), integers >= 0, a block for each row.

        Raises:
            ShapeError: what `append_row` would raise for one of them; then no row has changed.
        """
        where, ids = np.asarray(rows, dtype=np.int64), np.asarray(block_ids, dtype=np.int64)
        is_known = (where >= 0) & (where < self.max_num_reqs)
        columns = self._num_blocks[where % self.max_num_reqs]
        is_fitting = is_known & (columns < self.width) & (ids >= 0) & (ids <= _LARGEST_ID)
        if not is_fitting.all():
            wrong = int(np.argmin(is_fitting))
            self.check_append(rows[wrong], ids[wrong : wrong + 1])
        self._set_each(where, columns, ids)
        self._num_blocks[where] = columns + 1

    def add_row(self, row: int, block_ids: Sequence[int] | np.ndarray) -> None:
        """Replace a row: afterwards it holds these blocks and nothing else. Arguments as for `append_row`."""
        self._replace(row, self.check_add(row, block_ids))

    def copy_row(self, source: int, target: int) -> None:
        """Make row `target` equal to row `source`, which stays as it is. Both then name the same blocks."""
        self.check_rows(source, target)
        self._replace(target, self._blocks(source))

    def move_row(self, source: int, target: int) -> None:
        """Move row `source` to `target` and clear the vacated row. What `target` held is gone."""
        self.check_rows(source, target)
        if source != target:
            self._replace(target, self._blocks(source))
            self._shorten(source, 0)

    def swap_row(self, a: int, b: int) -> None:
        """Exchange two rows."""
        self.check_rows(a, b)
        blocks_of_a = self._blocks(a)
        self._replace(a, self._blocks(b))
        self._replace(b, blocks_of_a)

    def truncate_row(self, row: int, num_blocks: int) -> None:
        """Keep the first `num_blocks` blocks of a row and clear the rest.

        Raises:
            ShapeError: no such row, or the row has fewer blocks.
        """
        self.check_truncate(row, num_blocks)
        self._shorten(row, num_blocks)

    def null_range(self, row: int, start: int, stop: int) -> None:
        """Make logical blocks `start` to `stop - 1` null: they fell behind the window. The count stays.

        Raises:
            ShapeError: no such row, or the range is not within the row's blocks.
        """
        self.check_null_range(row, start, stop)
        self._write(row, start, np.full(stop - start, NULL_BLOCK_ID, dtype=np.int32))

    def null_each(self, rows: Sequence[int], columns: Sequence[int]) -> None:
        """Make one logical block of each of several rows null: what a decode step does, at the price of one call.

        Args:
            rows: (n,), distinct table rows.
            columns: (n,), a block of each row.

        Raises:
            ShapeError: what `null_range` would raise for one of them; then no row has changed.
        """
        where, places = np.asarray(rows, dtype=np.int64), np.asarray(columns, dtype=np.int64)
        is_known = (where >= 0) & (where < self.max_num_reqs)
        is_fitting = is_known & (places >= 0) & (places < self._num_blocks[where % self.max_num_reqs])
        if not is_fitting.all():
            wrong = int(np.argmin(is_fitting))
            self.check_null_range(rows[wrong], columns[wrong], columns[wrong] + 1)
        is_changed = self._table[where, places] != NULL_BLOCK_ID
        self._set_each(where[is_changed], places[is_changed], NULL_BLOCK_ID)

    def _set_each(self, rows: np.ndarray, columns: np.ndarray, block_ids: np.ndarray | int) -> None:
        """Write one entry in each of several distinct rows, and note that it changed."""
        self._table[rows, columns] = block_ids
        self._dirty_start[rows] = np.minimum(self._dirty_start[rows], columns)
        self._dirty_stop[rows] = np.maximum(self._dirty_stop[rows], columns + 1)

    def replace_block(self, row: int, column: int, block_id: int) -> None:
        """Have another block, with the same content, in one place of a row.

        Raises:
            ShapeError: no such row, a column that the row does not have, or an id that is negative or no int32.
        """
        self.check_null_range(row, column, column + 1)
        self._write(row, column, self._fitting(row, [block_id], column))

    def clear_row(self, row: int) -> None:
        """Empty a row."""
        self.check_rows(row)
        self._shorten(row, 0)

    def commit(self) -> int:
        """Bring the device's table up to date, moving only what changed since the last commit.

        One transfer of 12 bytes an entry (place and id) and one scatter; per row, the entries from the first
        changed to the last changed column are moved. On a GPU the transfer is pinned and is ordered on the
        current stream: work on another stream waits for an event of this one.

        Returns:
            Bytes moved; 0 when nothing changed. They grow with new blocks, not with `max_model_len`.
        """
        places, block_ids = self.changes()
        moved = update_device(self.device_table, places, block_ids)
        self.note_committed(len(places))
        return moved

    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """What the device has not seen.

        Returns:
            (n,), int64: places, `row * width + column`; (n,), int32: what they hold.
        """
        rows = np.flatnonzero(self._dirty_start < self._dirty_stop)
        if not len(rows):
            return _NO_CHANGES
        starts = rows * self.width + self._dirty_start[rows]
        lengths = self._dirty_stop[rows] - self._dirty_start[rows]
        total = int(lengths.sum())
        places = starts
        if total > len(rows):  # spans [10, 12) and [30, 33) -> places 10 11 30 31 32
            places = np.arange(total) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return places, self._table.reshape(-1)[places]

    def note_committed(self, num_entries: int) -> None:
        """The device has seen all changes, so many entries of them."""
        if num_entries:
            self._dirty_start.fill(self.width)
            self._dirty_stop.fill(0)
            self.committed_bytes += _ENTRY_BYTES * num_entries

    def compute_slot_mapping(self, geometry: BatchGeometry) -> torch.Tensor:
        """The slot of each token of this step in this group. Commit first.

        Returns:
            (num_padded_tokens,), int64, on `device`: -1 for padding, for tokens of another context-parallel
            rank and for tokens without a block.

        Raises:
            ShapeError: the geometry names a row that the table lacks, or a token beyond the row's blocks.
            KVGroupsError: changes are not committed.
        """
        self.check_tokens_have_blocks(geometry)
        return slot_mappings([self], geometry)[0]

    def width_for(self, geometry: BatchGeometry) -> int:
        """Entries of a row that a step can need: those of its longest sequence, rounded up to a power of two from 16
        on, so that there are few widths to compile for; all of them for a ring."""
        if self.slot_mapping in ("ring", "none"):
            return self.width
        num_blocks = _cdiv(geometry.max_seq_len, self.block_size * self.cp_world_size)
        return min(self.width, max(16, 1 << max(0, num_blocks - 1).bit_length()))

    def gather(self, geometry: BatchGeometry, out: torch.Tensor | None = None) -> torch.Tensor:
        """This step's rows, in the order of the step. Commit first.

        Args:
            geometry: the step.
            out: (num_padded_reqs, `width_for(geometry)`), int32, contiguous: where to put them; None for a new tensor.

        Returns:
            (num_padded_reqs, width_for(geometry)), int32, on `device`: padded requests have the null block
            everywhere. A state group's state slots are column 0.

        Raises:
            ShapeError: the geometry names a row that the table lacks.
            KVGroupsError: changes are not committed.
        """
        self.check_readable(geometry)
        width, num_reqs = self.width_for(geometry), geometry.num_reqs
        if out is None:
            out = self.device_table.new_empty((geometry.num_padded_reqs, width))
        rows = geometry.tensors(self.device).rows[:num_reqs]
        torch.index_select(self.device_table[:, :width], 0, rows, out=out[:num_reqs])
        if num_reqs < len(out):
            out[num_reqs:] = NULL_BLOCK_ID
        return out

    # The checks of the verbs, on their own: several tables change together only after all have agreed.

    def check_rows(self, *rows: int) -> None:
        """Raise ShapeError unless the table has these rows."""
        for row in rows:
            if not 0 <= row < self.max_num_reqs:
                raise ShapeError(
                    f"block_table: expected a row from 0 to {self.max_num_reqs - 1}, got {row}. "
                    f"Raise max_num_reqs to hold more requests."
                )

    def check_append(self, row: int, block_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The ids as (n,) int32, or ShapeError if `append_row` would refuse them."""
        self.check_rows(row)
        return self._fitting(row, block_ids, int(self._num_blocks[row]))

    def check_add(self, row: int, block_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The ids as (n,) int32, or ShapeError if `add_row` would refuse them."""
        self.check_rows(row)
        return self._fitting(row, block_ids, 0)

    def check_truncate(self, row: int, num_blocks: int) -> None:
        """Raise ShapeError if `truncate_row` would refuse."""
        self.check_rows(row)
        if not 0 <= num_blocks <= self._num_blocks[row]:
            raise ShapeError(
                f"block_table: expected num_blocks from 0 to {self._num_blocks[row]}, what row {row} has, "
                f"got {num_blocks}. Use append_row to lengthen a row."
            )

    def check_null_range(self, row: int, start: int, stop: int) -> None:
        """Raise ShapeError if `null_range` would refuse."""
        self.check_rows(row)
        if not 0 <= start <= stop <= self._num_blocks[row]:
            raise ShapeError(
                f"block_table: expected 0 <= start <= stop <= {self._num_blocks[row]}, the blocks of row "
                f"{row}, got start {start} and stop {stop}."
            )

    def _fitting(self, row: int, block_ids: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
        ids = np.asarray(block_ids)
        if ids.size == 0:
            ids = ids.astype(np.int32)  # numpy makes an empty list float64
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ShapeError(f"block_table: expected block_ids (n,) integers, got {ids.shape} {ids.dtype}.")
        if ids.min(initial=0) < 0 or ids.max(initial=0) > _LARGEST_ID:
            raise ShapeError(
                f"block_table: expected block ids from 0 to {_LARGEST_ID}, got {ids.min()} to "
                f"{ids.max()} for row {row}. A block that holds nothing is NULL_BLOCK_ID = {NULL_BLOCK_ID}; "
                f"-1 is for slots only."
            )
        if count + len(ids) > self.width:
            raise ShapeError(
                f"block_table: row {row} would have {count + len(ids)} blocks of {self.block_size} tokens, "
                f"expected at most {self.width}, the width for max_model_len={self.max_model_len} and "
                f"slot_mapping={self.slot_mapping!r}. Raise max_model_len for longer requests."
            )
        return ids.astype(np.int32)

    def _blocks(self, row: int) -> np.ndarray:
        return self._table[row, : self._num_blocks[row]].copy()

    def _replace(self, row: int, ids: np.ndarray) -> None:
        self._write(row, 0, ids)
        if len(ids) < self._num_blocks[row]:
            self._shorten(row, len(ids))
        self._num_blocks[row] = len(ids)

    def _shorten(self, row: int, count: int) -> None:
        tail = int(self._num_blocks[row]) - count
        self._write(row, count, np.full(tail, NULL_BLOCK_ID, dtype=np.int32))
        self._num_blocks[row] = count

    def _write(self, row: int, start: int, ids: np.ndarray) -> None:
        """Write entries and note the columns that changed: nulling a null range again moves no bytes."""
        entries = self._table[row, start : start + len(ids)]
        (changed,) = (entries != ids).nonzero()
        if len(changed):
            entries[:] = ids
            first, stop = start + changed[0], start + changed[-1] + 1
            if first < self._dirty_start[row]:
                self._dirty_start[row] = first
            if stop > self._dirty_stop[row]:
                self._dirty_stop[row] = stop

    def check_readable(self, geometry: BatchGeometry) -> None:
        """Raise unless the device's table is up to date and has the step's rows."""
        if self.has_uncommitted_changes:
            raise KVGroupsError(
                "block_table: expected a committed table, got changes that the device has not seen. Call "
                "commit() after the last verb and before the step reads the table."
            )
        if geometry.num_reqs:
            self.check_rows(int(geometry.rows.max()))

    def check_device(self) -> None:
        """Raise KVGroupsError if the device's table differs from the CPU's anywhere but where a commit is due.

        Waits for the device and reads all of it: for debugging.
        """
        is_wrong = self.device_table.cpu().numpy() != self._table
        for row in np.flatnonzero(is_wrong.any(axis=1)).tolist():
            is_wrong[row, self._dirty_start[row] : self._dirty_stop[row]] = False
            if is_wrong[row].any():
                column = int(np.argmax(is_wrong[row]))
                raise KVGroupsError(
                    f"row {row}, column {column}: block {self._table[row, column]} on the CPU and "
                    f"{int(self.device_table[row, column])} on {self.device}, and no commit is due there"
                )

    def check_tokens_have_blocks(self, geometry: BatchGeometry) -> None:
        """Raise unless `compute_slot_mapping` can give every token of the step its slot."""
        self.check_readable(geometry)
        if self.slot_mapping == "none":
            return
        # A token past its row's blocks would read a cleared entry, get slot -1 and be lost in silence.
        needed = -(-geometry.seq_lens // (self.block_size * self.cp_world_size))
        if self.slot_mapping == "ring":
            needed = np.minimum(needed, self.ring_blocks)
        short = np.flatnonzero((self._num_blocks[geometry.rows] < needed) & (geometry.query_lens > 0))
        if len(short):
            request = short[0]
            row = geometry.rows[request]
            raise ShapeError(
                f"block_table: row {row} has {self._num_blocks[row]} blocks of {self.block_size} tokens, "
                f"expected {needed[request]} for {geometry.seq_lens[request]} tokens. Append blocks before "
                f"the step (NULL_BLOCK_ID for those that no later query can see)."
            )


def update_device(table: torch.Tensor, places: np.ndarray, block_ids: np.ndarray) -> int:
    """Change entries of a table on its device, in one transfer and one scatter.

    Args:
        table: (rows, width), int32, contiguous.
        places: (n,), int64, `row * width + column`, distinct.
        block_ids: (n,), int32.

    Returns:
        Bytes moved.
    """
    total = len(places)
    if not total:
        return 0
    packed = np.empty(3 * total, dtype=np.int32)  # int64 places first, so that both halves are aligned
    packed[: 2 * total].view(np.int64)[:] = places
    packed[2 * total :] = block_ids
    moved = to_device(packed, table.device)
    ops.table_update(table, moved[: 2 * total].view(torch.int64), moved[2 * total :])
    return packed.nbytes


def slot_mappings(tables: list[BlockTable], geometry: BatchGeometry) -> torch.Tensor:
    """(num_tables, num_padded_tokens), int64, in one launch for tables that share device and ranks."""
    shared = tables[0]
    tensors = geometry.tensors(shared.device)
    return ops.slot_mapping(
        [table.device_table for table in tables],
        tensors.rows,
        tensors.query_start_loc,
        tensors.positions[: geometry.num_tokens],
        tensors.seq_lens,
        block_sizes=[table.block_size for table in tables],
        modes=[table.slot_mapping for table in tables],
        ring_blocks=[table.ring_blocks for table in tables],
        num_padded_tokens=geometry.num_padded_tokens,
        cp_world_size=shared.cp_world_size,
        cp_rank=shared.cp_rank,
        cp_interleave=shared.cp_interleave,
    )


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.setflags(write=False)
    return view


def _cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def __getattr__(name: str) -> Any:
    """All groups' tables as one are imported from here too."""
    if name != "MultiGroupBlockTable":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvgroups.multi_group_block_table import MultiGroupBlockTable

    return MultiGroupBlockTable
