"""What a cache was fed: which columns of the padded batch exist, and which tokens they were."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch

from kvgroups.errors import ShapeError, UnsupportedCallError

_UNKNOWN = -1
"""Stands for a token that came as an embedding."""


class TokenHistory:
    """The padded batch so far, column by column.

    Tokens that an attention mask hides do not exist for the cache, so a later mask that says otherwise about
    the same columns is an error and not a change.
    """

    def __init__(self) -> None:
        self.num_columns = 0
        """Columns fed so far, padding included: what transformers calls the cache's length."""
        self.pending: np.ndarray | None = None
        """(batch, n), bool: which tokens of the last n columns must be fed again, since the states of their rows
        were taken back beyond them; None for none."""
        self.positions: torch.Tensor | None = None
        """(..., batch, n), integers: the positions that the last n columns were fed with, where the caller named
        some; None where they were counted."""
        self._is_real: np.ndarray | None = None  # None as long as there was no padding
        self._ids: list[torch.Tensor] = []
        self._first_known = 0  # ids before this column are not all known

    @property
    def num_pending(self) -> int:
        """Last columns of which some row must be fed its tokens again."""
        return 0 if self.pending is None else self.pending.shape[1]

    @property
    def token_ids(self) -> torch.Tensor | None:
        """(batch, num_columns), int64: the tokens fed; None if some of them came as embeddings."""
        return self.last_ids(self.num_columns) if self.num_columns else None

    def real_columns(self, mask: torch.Tensor | None, batch_size: int, num_new: int) -> np.ndarray:
        """Which of the next columns exist, by a 2-D padding mask over them or over all columns so far.

        Args:
            mask: (batch, num_new) or (batch, num_columns + num_new), 0 where there is no token; None for none.
            batch_size: rows.
            num_new: columns of this forward.

        Returns:
            (batch, num_new), bool.

        Raises:
            UnsupportedCallError: a mask that is not 2-D.
            ShapeError: a mask of another size.
        """
        if mask is None:
            return np.ones((batch_size, num_new), dtype=bool)
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise UnsupportedCallError(
                f"attention_mask: expected a 2-D padding mask (batch, tokens), got {shape}; kvgroups sees to "
                "causality and windows itself"
            )
        widths = dict.fromkeys((self.num_columns + num_new, num_new))
        if mask.shape[0] != batch_size or mask.shape[1] not in widths:
            expected = " or ".join(f"({batch_size}, {width})" for width in widths)
            raise ShapeError(f"attention_mask: expected {expected}, got {tuple(mask.shape)}")
        return mask.ne(0).cpu().numpy()[:, -num_new:]

    def hidden_tail(self, mask: torch.Tensor | None, num_new: int) -> np.ndarray | None:
        """Which past tokens a mask over all columns hides after the fact: the last ones of some rows, or none.

        After the end of its answer a row of a batch is fed pads, as `generate` does; the next turn's mask may hide
        them.

        Args:
            mask: what `real_columns` has accepted.
            num_new: columns of this forward.

        Returns:
            (batch, num_columns), bool; None if the mask says what earlier ones said.

        Raises:
            UnsupportedCallError: if the mask contradicts them in another way.
        """
        if mask is None or mask.shape[1] == num_new:
            return None
        says = mask.ne(0).cpu().numpy()[:, :-num_new]
        past = self._past(len(says))
        if np.array_equal(says, past):
            return None
        hidden = past & ~says
        # From its first hidden token on, nothing of a row may be left.
        wrong = np.argwhere((says & ~past) | (says & (np.cumsum(hidden, axis=1) > 0)))
        if len(wrong):
            row, column = wrong[0].tolist()
            was = "stored" if past[row, column] else "skipped as padding"
            if past[row, column]:
                column = int(np.flatnonzero(hidden[row])[0])
            raise UnsupportedCallError(
                f"attention_mask: column {column} of row {row} was {was} by an earlier forward and the mask now says "
                "otherwise; pass the mask of that forward for the past (generate without a mask infers one from "
                "pad_token_id: pass attention_mask)"
            )
        return hidden

    def append(
        self, token_ids: torch.Tensor | None, is_real: np.ndarray, positions: torch.Tensor | None = None
    ) -> None:
        """Note the columns of a forward.

        Args:
            token_ids: (batch, num_new), integers; None if they came as embeddings.
            is_real: (batch, num_new), bool: which of them exist.
            positions: (..., batch, n), integers: the positions that the caller named for all columns of the
                forward, those that were fed again among them; None for none.
        """
        batch_size, num_new = is_real.shape
        if self._is_real is not None or not is_real.all():
            self._is_real = np.concatenate((self._past(batch_size), is_real), axis=1)
        self.num_columns += num_new
        if token_ids is None:
            token_ids = torch.full((batch_size, num_new), _UNKNOWN)
            self._first_known = self.num_columns
        # Copies: callers reuse their buffers.
        self._ids.append(token_ids.detach().clone())
        self.positions = None if positions is None else positions.detach().clone()
        self.pending = None

    def num_tokens(self, batch_size: int) -> list[int]:
        """Columns of each row that exist."""
        return self._past(batch_size).sum(1).tolist()

    def last_ids(self, num_columns: int) -> torch.Tensor | None:
        """(batch, num_columns), int64: the tokens of the last columns; None if some of them came as embeddings."""
        start = self.num_columns - num_columns
        if start < self._first_known:
            return None
        if len(self._ids) > 1:
            self._ids = [torch.cat([ids.to(self._ids[-1].device) for ids in self._ids], dim=1)]
        return self._ids[0][:, start:]

    def stored(self, num_columns: int, batch_size: int) -> np.ndarray:
        """(batch, num_columns), bool: which tokens of the last columns the cache holds."""
        is_stored = self._past(batch_size)[:, self.num_columns - num_columns :].copy()
        overlap = min(num_columns, self.num_pending)
        if self.pending is not None and overlap:
            is_stored[:, -overlap:] &= ~self.pending[:, -overlap:]
        return is_stored

    def hide(self, is_hidden: np.ndarray) -> None:
        """Note that tokens, (batch, num_columns) bool, do not exist any more."""
        self._is_real = self._past(len(is_hidden)) & ~is_hidden

    def feed_again(self, rows: np.ndarray, num_columns: int) -> None:
        """Note that some rows, (batch,) bool, must be fed their tokens of the last columns again."""
        pending = np.zeros((len(rows), max(num_columns, self.num_pending)), dtype=bool)
        if self.pending is not None:
            pending[:, -self.num_pending :] = self.pending
        if num_columns:
            pending[rows, -num_columns:] = True
        pending &= self._past(len(rows))[:, self.num_columns - pending.shape[1] :]
        self._set_pending(pending)

    def truncate(self, num_columns: int) -> None:
        """Forget all but the first columns."""
        num_gone = self.num_columns - num_columns
        if num_gone == 0:
            return
        if self._is_real is not None:
            self._is_real = self._is_real[:, :num_columns]
        if self.pending is not None:
            self._set_pending(self.pending[:, :-num_gone])
        if self.positions is not None:
            self.positions = self.positions[..., :-num_gone]
        self._ids = [torch.cat([ids.to(self._ids[-1].device) for ids in self._ids], dim=1)[:, :num_columns]]
        self._first_known = min(self._first_known, num_columns)
        self.num_columns = num_columns

    def select(self, rows: Sequence[int]) -> None:
        """Row i goes on from row `rows[i]`."""
        rows = list(rows)
        if self._is_real is not None:
            self._is_real = self._is_real[rows]
        if self.pending is not None:
            self._set_pending(self.pending[rows])
        if self.positions is not None:
            self.positions = self.positions[..., rows, :]
        self._ids = [ids[torch.tensor(rows, device=ids.device)] for ids in self._ids]

    def copy(self) -> TokenHistory:
        """A second history with the same past."""
        twin = copy.copy(self)
        twin._ids = list(self._ids)
        return twin

    def _set_pending(self, pending: np.ndarray) -> None:
        self.pending = pending if pending.any() else None

    def _past(self, batch_size: int) -> np.ndarray:
        return np.ones((batch_size, self.num_columns), dtype=bool) if self._is_real is None else self._is_real
