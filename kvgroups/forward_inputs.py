"""What a forward over a cache was called with: is it served, and what must be fed before it once more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kvgroups.errors import ShapeError, UnsupportedCallError
from kvgroups.history import TokenHistory

PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
"""Arguments with one entry per row and column."""

_IGNORED_LABEL = -100


def batch_shape(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of the padded batch.

    Args:
        inputs: the forward's arguments by name, None left out.

    Raises:
        ShapeError: naming the argument, if tokens or positions are not what a model takes.
        UnsupportedCallError: if a tensor of arguments is something else, or tokens are given twice.
    """
    ids, embeds = _tensor(inputs, "input_ids"), _tensor(inputs, "inputs_embeds")
    if ids is None and embeds is None:
        raise ShapeError("input_ids: expected (batch, tokens) int64 or inputs_embeds, got neither")
    if ids is not None and embeds is not None:
        raise UnsupportedCallError("inputs_embeds: got input_ids too; pass one of the two")
    if ids is not None and (ids.ndim != 2 or not _is_integer(ids)):
        raise ShapeError(f"input_ids: expected (batch, tokens) int64, got {_describe(ids)}")
    if embeds is not None and (embeds.ndim != 3 or not embeds.is_floating_point()):
        raise ShapeError(f"inputs_embeds: expected (batch, tokens, hidden) floats, got {_describe(embeds)}")
    tokens = embeds if ids is None else ids
    assert tokens is not None
    batch_size, num_columns = tokens.shape[:2]
    if batch_size == 0 or num_columns == 0:
        raise ShapeError(f"input_ids: expected at least one row and one token, got {tuple(tokens.shape)}")
    _check_positions(_tensor(inputs, "position_ids"), batch_size, num_columns)
    keep = inputs.get("logits_to_keep")
    if isinstance(keep, torch.Tensor):
        _check_kept(keep, num_columns)
    elif keep is not None and keep < 0:
        raise ShapeError(f"logits_to_keep: expected 0 for all or the number of last columns, got {keep}")
    return batch_size, num_columns


def kept_columns(logits_to_keep: int | torch.Tensor) -> int | torch.Tensor:
    """A mask of columns, (columns,) bool, as their indices; anything else as it is."""
    if isinstance(logits_to_keep, torch.Tensor) and logits_to_keep.dtype == torch.bool:
        return logits_to_keep.nonzero().squeeze(1)
    return logits_to_keep


def _check_kept(keep: torch.Tensor, num_columns: int) -> None:
    is_mask = keep.dtype == torch.bool
    if keep.ndim != 1 or not (is_mask or _is_integer(keep)) or (is_mask and len(keep) != num_columns):
        raise ShapeError(
            f"logits_to_keep: expected an int, (n,) int64 or ({num_columns},) bool, got {_describe(keep)}"
        )
    # Not on a GPU: the check would wait for it.
    if not is_mask and keep.device.type == "cpu" and bool(((keep < -num_columns) | (keep >= num_columns)).any()):
        raise ShapeError(
            f"logits_to_keep: expected columns from {-num_columns} to {num_columns - 1}, got {keep.tolist()}"
        )


def check_losses(inputs: Mapping[str, Any], is_real: np.ndarray) -> None:
    """Refuse losses and router logits that would count tokens that do not exist.

    Args:
        inputs: the forward's arguments.
        is_real: (batch, columns), bool: which of them exist.

    Raises:
        UnsupportedCallError: naming the argument.
    """
    if is_real.all():
        return
    if inputs.get("output_router_logits"):
        raise UnsupportedCallError(
            "output_router_logits: the batch has padding, and router logits and their loss would count it; set it to "
            "False or pass rows of one length"
        )
    labels = _tensor(inputs, "labels")
    if labels is None:
        return
    counts = labels.ne(_IGNORED_LABEL).cpu().numpy()
    if counts.shape != is_real.shape:
        raise ShapeError(f"labels: expected {is_real.shape}, got {_describe(labels)}")
    # The logits that a label is held against are those of the column before it.
    is_right = is_real.copy()
    is_right[:, 1:] &= is_real[:, :-1]
    is_right[:, 0] = True
    wrong = np.argwhere(counts & ~is_right)
    if len(wrong):
        row, column = wrong[0].tolist()
        raise UnsupportedCallError(
            f"labels: the one in column {column} of row {row} is at or right after padding, which has no logits; set it "
            f"to {_IGNORED_LABEL}"
        )


def check_fed_again(inputs: Mapping[str, Any]) -> None:
    """Raise UnsupportedCallError, naming the argument, if it cannot be given for tokens that are fed once more."""
    if inputs.get("input_ids") is None:
        raise UnsupportedCallError("inputs_embeds: tokens must be fed again after a crop; pass input_ids")
    for name in ("labels", "output_router_logits"):
        if inputs.get(name) is not None and inputs[name] is not False:
            raise UnsupportedCallError(
                f"{name}: tokens must be fed again after a crop, and would be counted; feed one token without it first"
            )


def prepend_pending(
    inputs: dict[str, Any], history: TokenHistory, num_tokens: np.ndarray, is_real: np.ndarray
) -> np.ndarray:
    """Put what must be fed once more before what is new. Its logits are not returned.

    Args:
        inputs: the forward's arguments for the new columns. Changed.
        history: knows the tokens.
        num_tokens: (batch,), int64: what each row holds.
        is_real: (batch, columns), bool: which of the new tokens exist.

    Returns:
        (batch, pending and new columns), bool: which tokens are fed.

    Raises:
        UnsupportedCallError: naming an argument that cannot be given for tokens that were fed before.
    """
    pending, num_pending = history.pending, history.num_pending
    assert pending is not None
    ids = history.last_ids(num_pending)
    check_fed_again(inputs)
    assert ids is not None  # a crop that would need embeddings is refused
    new = inputs["input_ids"]
    inputs["input_ids"] = torch.cat((ids.to(new), new), dim=1)
    is_fed = np.concatenate((pending, is_real), axis=1)
    if inputs.get("position_ids") is not None or history.positions is not None:
        inputs["position_ids"] = _all_positions(inputs.get("position_ids"), history, num_tokens, is_fed, new.device)
    if (types := inputs.get("token_type_ids")) is not None:
        inputs["token_type_ids"] = torch.cat((types.new_zeros((len(types), num_pending)), types), dim=1)
    keep = inputs.get("logits_to_keep")
    if isinstance(keep, torch.Tensor):
        inputs["logits_to_keep"] = torch.where(keep < 0, keep, keep + num_pending)
    return is_fed


def _all_positions(
    given: torch.Tensor | None, history: TokenHistory, num_tokens: np.ndarray, is_fed: np.ndarray, device: torch.device
) -> torch.Tensor:
    """(..., batch, columns), int64: positions of pending and new columns, as the caller named them or counted."""
    num_pending = history.num_pending
    counted = torch.from_numpy((num_tokens[:, None] + is_fed.cumsum(1) - 1).clip(0)).to(device)
    before, after = counted[:, :num_pending], counted[:, num_pending:]
    if history.positions is not None:
        before = history.positions[..., -num_pending:].to(device)
    if given is not None:
        after = given
    lead = torch.broadcast_shapes(before.shape[:-1], after.shape[:-1])
    return torch.cat((before.expand(*lead, -1), after.expand(*lead, -1)), dim=-1)


def _check_positions(positions: torch.Tensor | None, batch_size: int, num_columns: int) -> None:
    if positions is None:
        return
    is_right = positions.ndim in (2, 3) and _is_integer(positions)
    if not is_right or positions.shape[-1] != num_columns or positions.shape[-2] not in (1, batch_size):
        raise ShapeError(
            f"position_ids: expected ({batch_size}, {num_columns}) int64, a position for each new token, got "
            f"{_describe(positions)}"
        )


def _tensor(inputs: Mapping[str, Any], name: str) -> torch.Tensor | None:
    value = inputs.get(name)
    if value is not None and not isinstance(value, torch.Tensor):
        raise UnsupportedCallError(f"{name}: expected a tensor, got {type(value).__name__}; make one with torch.tensor")
    return value


def _is_integer(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
