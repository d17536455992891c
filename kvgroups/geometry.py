"""The one description of a step that every KV-cache group shares: who runs, and which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvgroups.errors import ShapeError

if TYPE_CHECKING:
    import torch

    from kvgroups.step_buffers import StepBuffers

_INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True)
class GeometryTensors:
    """A `BatchGeometry` on one device, at its padded lengths. Padding is the suffix of every tensor.

    A padded request has no tokens, sequence length 0 and row number 0. That number is there only so that an
    index stays in range: read tables through `BlockTable.gather`, which gives padded requests the null block.
    """

    rows: torch.Tensor
    """(num_padded_reqs,), int32: the table row of each request."""
    query_start_loc: torch.Tensor
    """(num_padded_reqs + 1,), int32: request i has tokens `[i]` to `[i + 1]`. Padding repeats the end."""
    positions: torch.Tensor
    """(num_padded_tokens,), int64: each token's position in its own row; 0 for padded tokens."""
    seq_lens: torch.Tensor
    """(num_padded_reqs,), int32: tokens of each request after this step."""
    num_computed_tokens: torch.Tensor
    """(num_padded_reqs,), int32: tokens of each request before this step."""


@dataclass(frozen=True, eq=False)
class BatchGeometry:
    """Which requests a step runs and which tokens of each. Make one with `build`, which checks and derives.

    The arrays are numpy, read-only, and hold real requests and tokens only. Padding always comes after
    them: `num_padded_reqs` and `num_padded_tokens` count real and padded together, and only the tensors
    on a device have those lengths.

    Example: two requests, one decoding its 36th token, one that starts with a prompt of three.
        >>> geometry = BatchGeometry.build(rows=[4, 0], query_lens=[1, 3], num_computed_tokens=[35, 0])
        >>> geometry.query_start_loc.tolist(), geometry.positions.tolist(), geometry.seq_lens.tolist()
        ([0, 1, 4], [35, 0, 1, 2], [36, 3])
    """

    rows: np.ndarray
    """(num_reqs,), int32: the table row of each request. Distinct, in any order."""
    num_tokens: int
    """Tokens of this step over all requests, without padding."""
    query_lens: np.ndarray
    """(num_reqs,), int32, tokens: how many each request computes in this step."""
    query_start_loc: np.ndarray
    """(num_reqs + 1,), int32: request i has the step's tokens `[i]` to `[i + 1]`."""
    positions: np.ndarray
    """(num_tokens,), int64: each token's position in its own row, from 0 to `seq_len - 1`."""
    seq_lens: np.ndarray
    """(num_reqs,), int32: `num_computed_tokens + query_len`, so this step's tokens are counted."""
    num_computed_tokens: np.ndarray
    """(num_reqs,), int32: tokens that earlier steps (or a prefix hit) have computed."""
    num_padded_reqs: int
    """Length of the request tensors on a device; at least `num_reqs`."""
    num_padded_tokens: int
    """Length of the token tensors on a device; at least `num_tokens`."""
    _tensors: dict[str, GeometryTensors] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def build(
        cls,
        rows: Sequence[int] | np.ndarray,
        query_lens: Sequence[int] | np.ndarray,
        num_computed_tokens: Sequence[int] | np.ndarray,
        *,
        num_padded_reqs: int | None = None,
        num_padded_tokens: int | None = None,
    ) -> BatchGeometry:
        """Check a step and derive the rest of its geometry.

        Args:
            rows: (num_reqs,), integers: the table row of each request. Distinct and not negative.
            query_lens: (num_reqs,), integers, tokens: what each request computes in this step. 0 is allowed.
            num_computed_tokens: (num_reqs,), integers, tokens: what each request has computed before.
            num_padded_reqs: length of the request tensors on a device. Default: no padding.
            num_padded_tokens: length of the token tensors on a device. Default: no padding.

        Raises:
            ShapeError: lengths differ, a value is negative or no integer, a row comes twice, a count leaves
                int32, or a padded length is smaller than the real one.
        """
        rows = _counts("rows", rows)
        query_lens = _counts("query_lens", query_lens)
        num_computed_tokens = _counts("num_computed_tokens", num_computed_tokens)
        if not len(rows) == len(query_lens) == len(num_computed_tokens):
            raise ShapeError(
                f"geometry: expected one entry per request in rows, query_lens and num_computed_tokens, got "
                f"{len(rows)}, {len(query_lens)} and {len(num_computed_tokens)}."
            )
        if len(set(rows.tolist())) < len(rows):
            distinct, uses = np.unique(rows, return_counts=True)
            raise ShapeError(
                f"geometry: expected distinct rows, got row {distinct[uses > 1][0]} more than once. "
                f"Give each request a row of its own."
            )
        seq_lens = num_computed_tokens + query_lens
        query_start_loc = np.concatenate(([0], np.cumsum(query_lens)))
        num_tokens = int(query_start_loc[-1])
        if max(num_tokens, int(seq_lens.max(initial=0))) > _INT32_MAX:
            raise ShapeError(
                f"geometry: expected token counts within int32, got {num_tokens} tokens in the step and a "
                f"sequence of {seq_lens.max()}."
            )
        # Token j of request i is at num_computed_tokens[i] + (j - query_start_loc[i]).
        first_position = np.repeat(num_computed_tokens - query_start_loc[:-1], query_lens)
        return cls(
            rows=_frozen(rows, np.int32),
            num_tokens=num_tokens,
            query_lens=_frozen(query_lens, np.int32),
            query_start_loc=_frozen(query_start_loc, np.int32),
            positions=_frozen(first_position + np.arange(num_tokens), np.int64),
            seq_lens=_frozen(seq_lens, np.int32),
            num_computed_tokens=_frozen(num_computed_tokens, np.int32),
            num_padded_reqs=_padded("num_padded_reqs", num_padded_reqs, len(rows)),
            num_padded_tokens=_padded("num_padded_tokens", num_padded_tokens, num_tokens),
        )

    @property
    def num_reqs(self) -> int:
        """Requests of this step, without padding."""
        return len(self.rows)

    @cached_property
    def max_query_len(self) -> int:
        """The most tokens that one request computes in this step; 0 for an empty batch."""
        return int(self.query_lens.max(initial=0))

    @cached_property
    def max_seq_len(self) -> int:
        """The longest sequence after this step; 0 for an empty batch."""
        return int(self.seq_lens.max(initial=0))

    def tensors(self, device: torch.device | str) -> GeometryTensors:
        """The geometry as tensors on `device`, padded. Moved once per device, then remembered."""
        key = str(device)
        if key not in self._tensors:
            self._tensors[key] = self._unpacked(to_device(self._packed(), device))
        return self._tensors[key]

    def place(self, buffers: StepBuffers) -> None:
        """Put the geometry into buffers on their device; `tensors` then gives views of them, until `forget`."""
        key = str(buffers.device)
        if key not in self._tensors:
            self._tensors[key] = self._unpacked(buffers.load("geometry", self._packed()))

    def forget(self, device: torch.device | str) -> None:
        """The buffers on a device belong to another step now; `tensors` would move the geometry there anew."""
        self._tensors.pop(str(device), None)

    def _parts(self) -> list[tuple[np.ndarray, int, int]]:
        """What a device needs, in the order of `GeometryTensors`: array, length when padded, what padding is."""
        return [
            (self.rows, self.num_padded_reqs, 0),
            (self.query_start_loc, self.num_padded_reqs + 1, self.num_tokens),
            (self.positions, self.num_padded_tokens, 0),
            (self.seq_lens, self.num_padded_reqs, 0),
            (self.num_computed_tokens, self.num_padded_reqs, 0),
        ]

    def _packed(self) -> np.ndarray:
        """(n,), int32: all parts in one piece, for one transfer; int64 as two halves.

        Each part begins on a multiple of 16 bytes: a kernel that is compiled for aligned pointers serves all shapes.
        """
        parts = [(array, length, fill, array.itemsize // 4) for array, length, fill in self._parts()]
        packed = np.zeros(sum(_aligned(length * words) for _, length, _, words in parts), dtype=np.int32)
        start = 0
        for array, length, fill, words in parts:
            part = packed[start : start + length * words].view(array.dtype)
            part[: len(array)], part[len(array) :] = array, fill
            start += _aligned(length * words)
        return packed

    def _unpacked(self, packed: torch.Tensor) -> GeometryTensors:
        import torch

        sizes: list[int] = []
        for array, length, _ in self._parts():
            count = length * array.itemsize // 4
            sizes += [count, _aligned(count) - count]
        rows, query_start_loc, positions, seq_lens, num_computed_tokens = packed.split(sizes)[::2]
        return GeometryTensors(rows, query_start_loc, positions.view(torch.int64), seq_lens, num_computed_tokens)


def to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Move an array without waiting, to a GPU through pinned memory. A CPU tensor shares its memory."""
    import torch  # here, so that planning a batch needs no torch

    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _counts(name: str, values: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)  # numpy makes an empty list float64
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ShapeError(
            f"geometry: expected {name} to be (num_reqs,) integers, got {array.shape} {array.dtype}."
        )
    array = array.astype(np.int64)
    if array.min(initial=0) < 0 or array.max(initial=0) > _INT32_MAX:
        raise ShapeError(
            f"geometry: expected {name} from 0 to {_INT32_MAX}, got {array.min()} to {array.max()}."
        )
    return array


def _padded(name: str, length: int | None, real: int) -> int:
    if length is None:
        return real
    if length < real:
        raise ShapeError(
            f"geometry: expected {name} >= {real}, the real count, got {length}. Padding only ever adds."
        )
    return int(length)


def _frozen(array: np.ndarray, dtype: type[np.integer]) -> np.ndarray:
    array = array.astype(dtype)
    array.setflags(write=False)
    return array


def _aligned(num_words: int) -> int:
    """A number of 4-byte words, rounded up to 16 bytes."""
    return -(-num_words // 4) * 4
