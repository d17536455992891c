"""What a cache was fed: which columns of the padded batch exist, and which tokens they were."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvgroups.errors import ShapeError, UnsupportedCallError


class TokenHistory:
    """The padded batch so far, column by column.

    Tokens that an attention mask hides do not exist for the cache, so a later mask that says otherwise about
    the same columns is an error and not a change.
    """

    def __init__(self) -> None:
        self.num_columns = 0
        """Columns fed so far, padding included: what transformers calls the cache's length."""
        self._is_real: np.ndarray | None = None  # None as long as there was no padding
        self._ids: list[torch.Tensor | None] = []

    @property
    def token_ids(self) -> torch.Tensor | None:
        """(batch, num_columns), int64: the tokens fed; None if some of them came as embeddings."""
        if not self._ids or any(ids is None for ids in self._ids):
            return None
        self._ids = [torch.cat(self._ids, dim=1)]
        return self._ids[0]

    def real_columns(self, mask: torch.Tensor | None, batch_size: int, num_new: int) -> np.ndarray:
        """Which of the next columns exist, by a 2-D padding mask over them or over all columns so far.

        Args:
            mask: (batch, num_new) or (batch, num_columns + num_new), 0 where there is no token; None for none.
            batch_size: rows.
            num_new: columns of this forward.

        Returns:
            (batch, num_new), bool.

        Raises:
            UnsupportedCallError: a mask that is not 2-D, or that contradicts an earlier one.
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
        whole = self.num_columns + num_new
        if mask.shape[0] != batch_size or mask.shape[1] not in (num_new, whole):
            raise ShapeError(
                f"attention_mask: expected ({batch_size}, {whole}) or ({batch_size}, {num_new}), got {tuple(mask.shape)}"
            )
        host = mask.ne(0).cpu().numpy()
        if mask.shape[1] > num_new:
            self._check_past(host[:, :-num_new])
        return host[:, -num_new:]

    def append(self, token_ids: torch.Tensor | None, is_real: np.ndarray) -> None:
        """Note the columns of a forward: (batch, num_new) ids, or None, and which of them exist."""
        if self._is_real is not None or not is_real.all():
            self._is_real = np.concatenate((self._past(len(is_real)), is_real), axis=1)
        self._ids.append(None if token_ids is None else token_ids.detach())
        self.num_columns += is_real.shape[1]

    def num_tokens(self, batch_size: int) -> list[int]:
        """Columns of each row that exist."""
        return self._past(batch_size).sum(1).tolist()

    def last(self, num_columns: int, batch_size: int) -> tuple[torch.Tensor | None, np.ndarray]:
        """The ids (None if unknown) and the existence, (batch, num_columns) bool, of the last columns."""
        start = self.num_columns - num_columns
        ids = self.token_ids
        return None if ids is None else ids[:, start:], self._past(batch_size)[:, start:]

    def truncate(self, num_columns: int) -> None:
        """Forget all but the first columns."""
        if self._is_real is not None:
            self._is_real = self._is_real[:, :num_columns]
        ids = self.token_ids
        self._ids = [None] if ids is None else [ids[:, :num_columns]]
        self.num_columns = num_columns

    def select(self, rows: Sequence[int]) -> None:
        """Row i goes on from row `rows[i]`."""
        if self._is_real is not None:
            self._is_real = self._is_real[list(rows)]
        self._ids = [ids if ids is None else ids[torch.tensor(list(rows), device=ids.device)] for ids in self._ids]

    def copy(self) -> TokenHistory:
        """A second history with the same past."""
        twin = TokenHistory()
        twin.num_columns = self.num_columns
        twin._is_real, twin._ids = self._is_real, list(self._ids)
        return twin

    def _past(self, batch_size: int) -> np.ndarray:
        return np.ones((batch_size, self.num_columns), dtype=bool) if self._is_real is None else self._is_real

    def _check_past(self, is_real: np.ndarray) -> None:
        past = self._past(len(is_real))
        changed = np.argwhere(is_real != past)
        if len(changed):
            row, column = changed[0].tolist()
            was = "stored" if past[row, column] else "skipped as padding"
            raise UnsupportedCallError(
                f"attention_mask: column {column} of row {row} was {was} by an earlier forward and the mask now says "
                "otherwise; pass the mask of that forward for the past (generate without a mask infers one from "
                "pad_token_id: pass attention_mask)"
            )
