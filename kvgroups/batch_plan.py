"""How a padded batch goes through the model: in which passes, and how their outputs become one again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvgroups.errors import UnsupportedCallError
from kvgroups.forward_inputs import PER_TOKEN

_PER_TOKEN_OUTPUTS = ("logits", "last_hidden_state", "hidden_states")
"""Outputs with one entry per row and column."""

_CACHES = ("cache", "past_key_values", "cache_params")
"""Names under which an output carries its cache."""


@dataclass(frozen=True)
class Pass:
    """Rows that go through the model together."""

    rows: np.ndarray
    """(num_rows,), int64: rows of the batch."""
    columns: np.ndarray | None
    """(num_columns,), int64: the columns that are fed, the same for each row; None for all of the batch."""


def plan_passes(
    is_real: np.ndarray,
    has_past: np.ndarray,
    *,
    splits_rows: bool,
    one_token: bool,
    max_tokens: int | None = None,
) -> list[Pass]:
    """Put rows into passes.

    Args:
        is_real: (batch, columns), bool: which tokens exist.
        has_past: (batch,), bool: which rows have computed tokens before.
        splits_rows: whether padding must not reach the model, since it would touch recurrent states.
        one_token: whether rows with a past take one token at a time.
        max_tokens: tokens of one pass at most; None for no limit.

    Returns:
        Passes that together feed every real token once, each row's from left to right.

    Example: rows of 2 and 3 tokens, padded left. A model with states takes them one after the other.
        >>> is_real = np.array([[False, True, True], [True, True, True]])
        >>> past = np.array([False, False])
        >>> [(p.rows.tolist(), p.columns.tolist())
        ...  for p in plan_passes(is_real, past, splits_rows=True, one_token=False)]
        [([0], [1, 2]), ([1], [0, 1, 2])]
        >>> plan_passes(is_real, past, splits_rows=False, one_token=False)[0].columns is None
        True
        >>> passes = plan_passes(is_real, past, splits_rows=False, one_token=False, max_tokens=3)
        >>> [p.columns.tolist() for p in passes]
        [[0, 1], [2]]
    """
    if not is_real.any():
        return []
    passes = [Pass(np.arange(len(is_real)), None)]
    if splits_rows:
        passes = _passes_without_padding(is_real, has_past, one_token)
    if max_tokens is None or is_real.sum() <= max_tokens:
        return passes
    split = [part for each in passes for part in _split(each, is_real, max_tokens)]
    if not (splits_rows and one_token):
        return split
    # What follows the first part of a new row has a past by then.
    seen = np.array(has_past)
    steps: list[Pass] = []
    for part in split:
        assert part.columns is not None
        columns = part.columns[:, None] if seen[part.rows[0]] else [part.columns]
        steps.extend(Pass(part.rows, step) for step in columns)
        seen[part.rows] = True
    return steps


def column_ends(is_real: np.ndarray, max_tokens: int) -> list[int]:
    """Where to cut columns so that no piece has more than `max_tokens` tokens; a single column may.

    Args:
        is_real: (rows, columns), bool: which tokens exist.
        max_tokens: tokens of one piece.

    Returns:
        The end of each piece, ascending, the last one being the number of columns.
    """
    ends, tokens = [], 0
    for column, count in enumerate(is_real.sum(0).tolist()):
        if tokens and tokens + count > max_tokens:
            ends.append(column)
            tokens = 0
        tokens += count
    return [*ends, is_real.shape[1]]


def _split(each: Pass, is_real: np.ndarray, max_tokens: int) -> list[Pass]:
    """A pass as several of at most `max_tokens` tokens, by columns, and by rows where a column has more."""
    columns = np.arange(is_real.shape[1]) if each.columns is None else each.columns
    if is_real[np.ix_(each.rows, columns)].sum() <= max_tokens:
        return [Pass(each.rows, columns)]
    parts = []
    for start in range(0, len(each.rows), max_tokens):
        rows = each.rows[start : start + max_tokens]
        real, begin = is_real[np.ix_(rows, columns)], 0
        for end in column_ends(real, max_tokens):
            if real[:, begin:end].any():
                parts.append(Pass(rows, columns[begin:end]))
            begin = end
    return parts


def _passes_without_padding(is_real: np.ndarray, has_past: np.ndarray, one_token: bool) -> list[Pass]:
    """Rows that feed the same columns together, and only those columns."""
    # Rows with and without a past part ways even when they feed one token each: a model treats a first token
    # as a prompt and a later one as a decode.
    kinds: dict[tuple[bytes, bool], list[int]] = {}
    for row in range(len(is_real)):
        kinds.setdefault((is_real[row].tobytes(), bool(has_past[row])), []).append(row)
    passes: list[Pass] = []
    for (_, past), rows in kinds.items():
        columns = np.flatnonzero(is_real[rows[0]])
        if not len(columns):
            continue
        steps = columns[:, None] if one_token and past else [columns]
        passes.extend(Pass(np.array(rows), step) for step in steps)
    if len(passes) == 1 and len(passes[0].rows) == len(is_real) and is_real.all():
        return [Pass(passes[0].rows, None)]
    return passes


def slice_inputs(
    inputs: Mapping[str, Any], rows: np.ndarray, columns: np.ndarray | None, batch_size: int, num_columns: int
) -> dict[str, Any]:
    """The forward's arguments for some rows and columns of the batch.

    Args:
        inputs: the arguments for the whole batch.
        rows: (num_rows,), int64, ascending.
        columns: (num_fed,), int64, ascending; None for all.
        batch_size: rows of the whole batch.
        num_columns: columns of the whole batch.

    Raises:
        UnsupportedCallError: naming an argument that cannot be cut by row and column.
    """
    if columns is None and len(rows) == batch_size:
        return dict(inputs)
    result = {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor) or name == "logits_to_keep":
            result[name] = value
        elif name in PER_TOKEN:
            result[name] = _cut(name, value, rows, columns, batch_size)
        else:
            raise UnsupportedCallError(
                f"{name}: a batch whose rows go through the model on their own cannot take this argument; leave it out"
            )
    if columns is not None and "logits_to_keep" in inputs:
        result["logits_to_keep"] = _kept_in_pass(inputs["logits_to_keep"], columns, num_columns)
    return result


def _cut(
    name: str, value: torch.Tensor, rows: np.ndarray, columns: np.ndarray | None, batch_size: int
) -> torch.Tensor:
    row_dim = value.ndim - 2 if name != "inputs_embeds" else 0  # position_ids may be (3, batch, tokens)
    if value.shape[row_dim] == 1 and batch_size > 1:
        value = value.expand(*value.shape[:row_dim], batch_size, *value.shape[row_dim + 1 :])
    value = value.index_select(row_dim, torch.from_numpy(rows).to(value.device))
    if columns is None:
        return value
    return value.index_select(row_dim + 1, torch.from_numpy(columns).to(value.device))


def merge_outputs(
    outputs: Sequence[Any], passes: Sequence[Pass], inputs: Mapping[str, Any], num_rows: int, num_columns: int
) -> Any:
    """One output for all rows of the passes; columns that no pass fed hold zeros.

    Args:
        outputs: what the model returned for each pass, with return_dict.
        passes: the passes, in the same order.
        inputs: the forward's arguments for the whole batch.
        num_rows: rows of all passes.
        num_columns: columns of the batch, padding included.

    Raises:
        UnsupportedCallError: naming an output that cannot be put together by row and column.
    """
    if passes[0].columns is None:
        return outputs[0]
    every_column = np.arange(num_columns)
    merged = type(outputs[0])()
    for name, first in outputs[0].items():
        parts = [output[name] for output in outputs]
        if name == "logits":
            kept = _kept_columns(inputs.get("logits_to_keep", 0), num_columns)
            merged[name] = _scatter(parts, passes, num_rows, kept)
        elif name == "last_hidden_state":
            merged[name] = _scatter(parts, passes, num_rows, every_column)
        elif name == "hidden_states":
            layers = zip(*parts, strict=True)
            merged[name] = tuple(_scatter(layer, passes, num_rows, every_column) for layer in layers)
        elif name in _CACHES:
            merged[name] = first
        else:
            raise _unknown_output(name)
    return merged


def repeat_rows(output: Any, places: Sequence[int]) -> Any:
    """The output for rows that were computed once and stand for several.

    Args:
        output: of the rows that went through the model.
        places: (batch,): for each row of the batch, which of them it is.

    Raises:
        UnsupportedCallError: naming an output of which it is not known what belongs to which row.
    """
    index = torch.tensor(places)
    return _each_per_token(output, lambda _, value: value.index_select(0, index.to(value.device)))


def last_columns(output: Any, num_columns: int, keeps: bool) -> Any:
    """The output for the last columns of what was fed.

    Args:
        output: of all columns.
        num_columns: how many are wanted.
        keeps: whether the logits are those of chosen columns already.

    Raises:
        UnsupportedCallError: naming an output of which it is not known what belongs to which column.
    """
    return _each_per_token(
        output, lambda name, value: value if name == "logits" and keeps else value[:, -num_columns:]
    )


def _each_per_token(output: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    for name, value in output.items():
        if name in _CACHES:
            continue
        if name not in _PER_TOKEN_OUTPUTS:
            raise _unknown_output(name)
        items = value if isinstance(value, tuple) else (value,)
        if any(item.ndim != 3 for item in items):
            raise _unknown_output(name)
        changed = tuple(change(name, item) for item in items)
        output[name] = changed if isinstance(value, tuple) else changed[0]
    return output


def _unknown_output(name: str) -> UnsupportedCallError:
    return UnsupportedCallError(
        f"{name}: a batch whose rows do not go through the model all at once cannot return this output; do not ask for it"
    )


def _scatter(
    parts: Sequence[torch.Tensor], passes: Sequence[Pass], num_rows: int, kept: np.ndarray
) -> torch.Tensor:
    """Put parts (rows of the pass, its kept columns, dim) into (rows, kept columns, dim)."""
    if parts[0].ndim != 3:
        raise _unknown_output(f"an output of shape {tuple(parts[0].shape)}")
    whole = parts[0].new_zeros((num_rows, len(kept), parts[0].shape[-1]))
    for part, each in zip(parts, passes, strict=True):
        assert each.columns is not None  # a pass of all columns is the only one, and is not put together
        have = each.columns[np.isin(each.columns, kept)]  # ascending, each once, whatever order the caller wants them in
        places = np.flatnonzero(np.isin(kept, have))
        if len(places):
            rows = torch.from_numpy(each.rows).to(whole.device)
            sources = torch.from_numpy(np.searchsorted(have, kept[places])).to(whole.device)
            whole[rows[:, None], torch.from_numpy(places).to(whole.device)] = part[:, sources]
    return whole


def _kept_columns(logits_to_keep: int | torch.Tensor, num_columns: int) -> np.ndarray:
    columns = np.arange(num_columns)
    if isinstance(logits_to_keep, torch.Tensor):
        return columns[logits_to_keep.cpu().numpy()]
    return columns[-logits_to_keep:] if logits_to_keep else columns


def _kept_in_pass(logits_to_keep: int | torch.Tensor, fed: np.ndarray, num_columns: int) -> int | torch.Tensor:
    """Which of a pass's own positions the caller wants logits of; one that is thrown away if none."""
    wanted = np.flatnonzero(np.isin(fed, _kept_columns(logits_to_keep, num_columns)))
    if len(wanted) == 0:
        return 1
    if wanted[0] == len(fed) - len(wanted):
        return len(wanted)
    return torch.from_numpy(wanted)
