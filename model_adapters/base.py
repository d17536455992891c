"""One pass through the model, as its layers need to know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from einops import rearrange

from kvgroups.errors import UnsupportedCallError
from kvgroups.geometry import BatchGeometry, GeometryTensors
from kvgroups.specs import GroupConfig

HANDLE = "kvgroups_handle"
"""Attribute of a key tensor, or keyword argument, that tells attention which cache layer's K it was given."""

CAUSES = (
    "a module or config was replaced after patch (kvgroups.unpatch(model), then patch it again), or its cache was "
    "withheld from it (gradient checkpointing does that in training mode: model.eval())"
)
"""What may have happened when a layer does not do what the probe saw it do."""

OUTSIDE = (
    "this cache was used outside of its model's forward; call the patched model itself, not one of its parts, another "
    "model, or the model after kvgroups.unpatch"
)


@dataclass(frozen=True)
class GroupStep:
    """One KV-cache group's part of a pass."""

    config: GroupConfig
    block_table: torch.Tensor
    """(num_reqs, width), int32: this pass's rows; column 0 is the state slot in a state group."""
    slots: torch.Tensor
    """(num_tokens,), int64: where each token of the pass is written; -1 where it is not."""
    ring_blocks: int
    """R of a ring group, 0 otherwise."""


@dataclass
class Step:
    """One pass: a batch of rows, some columns of which are real tokens.

    The model sees a rectangle (num_reqs, query_len). Tables and kernels see the real tokens only, packed one
    request after the other.
    """

    geometry: BatchGeometry
    query_len: int
    """Columns of the rectangle, padding included."""
    past_len: int
    """What the model is told as the length of the past; rows may have less."""
    token_index: torch.Tensor | None
    """(num_tokens,), int64: the real tokens' places in the flattened rectangle; None if all are real."""
    groups: dict[str, GroupStep]
    device: torch.device
    snapshot_tokens: torch.Tensor | None = None
    """(num_snapshots,), int64: packed tokens after which a state is to be kept; None for none."""
    snapshot_slots: dict[str, torch.Tensor] = field(default_factory=dict)
    """State group -> (num_snapshots,), int64: the slots that keep them."""
    after_forward: list[Callable[[], None]] = field(default_factory=list)
    """What must wait until the last layer has read: writes into rings."""
    attended: dict[int, bool] = field(default_factory=dict)
    """Layers that filed K and V in this pass -> whether their attention has been computed over pages."""
    _state_slots: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    tagged: list[torch.Tensor] = field(default_factory=list)
    """Key tensors that carry a handle, kept alive until the pass ends so that no other tensor takes their place."""

    @cached_property
    def tensors(self) -> GeometryTensors:
        """The geometry on the step's device."""
        return self.geometry.tensors(self.device)

    @cached_property
    def is_fresh(self) -> bool:
        """Whether no row of the pass has a past."""
        return not self.geometry.num_computed_tokens.any()

    @cached_property
    def is_decode(self) -> bool:
        """Whether every row has a past and feeds exactly one token."""
        geometry = self.geometry
        return bool((geometry.query_lens == 1).all() and (geometry.num_computed_tokens > 0).all())

    @cached_property
    def is_prefill(self) -> torch.Tensor:
        """(num_reqs,), bool: rows that are not decoding. transformers treats a lone token on a past as a decode."""
        geometry = self.geometry
        return torch.from_numpy((geometry.query_lens != 1) | (geometry.num_computed_tokens == 0)).to(self.device)

    def state_slots(self, group: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each row's state comes from and goes to, (num_reqs,) int32 each; 0 is the zero state."""
        if group not in self._state_slots:
            final = self.groups[group].block_table[:, 0]
            has_past = self.tensors.num_computed_tokens > 0
            self._state_slots[group] = (final * has_past, final)
        return self._state_slots[group]

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """(num_reqs, heads, query_len, dim) to the real tokens' (num_tokens, heads, dim)."""
        flat = states.transpose(1, 2).flatten(0, 1)  # no `rearrange`: each layer comes here three times a token
        return flat if self.token_index is None else flat.index_select(0, self.token_index)

    def queries(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The real queries, packed.

        A model may drop all but its last columns before a layer (Gemma 4 before its shared layers), so the
        queries are the last `columns` of the step's.

        Args:
            query: (num_reqs, num_heads, columns, head_dim) with columns <= query_len.

        Returns:
            Packed queries (num_queries, num_heads, head_dim), their query_start_loc (num_reqs + 1,) int32, and
            their places in the flattened (num_reqs, columns), or None if all are real.
        """
        columns = query.shape[2]
        if columns == self.query_len:
            return self.pack(query), self.tensors.query_start_loc, self.token_index
        num_reqs = query.shape[0]
        is_real = torch.ones((num_reqs, self.query_len), dtype=torch.bool, device=self.device)
        if self.token_index is not None:
            is_real = torch.zeros_like(is_real)
            is_real.view(-1)[self.token_index] = True
        is_real = is_real[:, -columns:]
        index = is_real.reshape(-1).nonzero().squeeze(1)
        start_loc = torch.zeros(num_reqs + 1, dtype=torch.int32, device=self.device)
        start_loc[1:] = is_real.sum(1).cumsum(0)
        return rearrange(query, "b h s d -> (b s) h d").index_select(0, index), start_loc, index

    def check_served(self) -> None:
        """Hold what the layers did against what the probe saw.

        Raises:
            UnsupportedCallError: if a layer filed nothing, or its attention read something else than the pages, so
                that the output is not what it looks like.
        """
        for index in [i for group in self.groups.values() if not group.config.is_state for i in group.config.layers]:
            if index not in self.attended:
                raise UnsupportedCallError(f"layer {index}: no K and V were stored for it in this forward; {CAUSES}")
            if not self.attended[index]:
                raise UnsupportedCallError(f"layer {index}: its attention did not read K and V from pages; {CAUSES}")

    def finish(self) -> None:
        """Write what had to wait and take the handles off."""
        for action in self.after_forward:
            action()
        self.release()

    def release(self) -> None:
        """Take the handles off the key tensors, also after a forward that failed."""
        while self.tagged:
            vars(self.tagged.pop()).pop(HANDLE, None)
        self.after_forward.clear()


class Running:
    """The step that a cache's layers are in; none between forwards."""

    def __init__(self) -> None:
        self.step: Step | None = None

    def require(self) -> Step:
        """The running step.

        Raises:
            UnsupportedCallError: if the layer was called from outside a patched model's forward.
        """
        if self.step is None:
            raise UnsupportedCallError(OUTSIDE)
        return self.step
