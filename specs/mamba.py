"""State layers: a request keeps states of fixed size, however long it grows."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from kvgroups.specs.attention import Layout
from kvgroups.specs.base import BlockTensor, SpecModel


class StateTensor(BlockTensor):
    """One recurrent state of one request in one layer, for example a convolution's last inputs."""


class MambaSpec(SpecModel):
    """The fixed-size states of one request in one layer.

    One class for every such layer: Mamba-1, Mamba-2, gated delta net, short convolution. What differs
    between them is the shapes. The table of such a group has width 1: the running state's slot.

    Source: Mamba (Gu and Dao, 2023), section 3.3; Mamba-2 (Dao and Gu, 2024), section 7.

    Example:
        >>> spec = MambaSpec(states=[
        ...     StateTensor(name="conv", shape=(256, 4), dtype="bfloat16"),
        ...     StateTensor(name="recurrent", shape=(8, 32, 16), dtype="float32"),
        ... ])
        >>> spec.bytes_per_request
        18432
    """

    kind: Literal["mamba"] = "mamba"
    states: tuple[StateTensor, ...] = Field(min_length=1)
    """The states, in the order in which a block holds them; names are unique."""
    snapshot_interval: int = Field(default=256, ge=1)
    """Tokens between the positions at which a prefix may be resumed from a snapshot."""

    @field_validator("states")
    @classmethod
    def _names_are_unique(cls, states: tuple[StateTensor, ...]) -> tuple[StateTensor, ...]:
        names = [state.name for state in states]
        if len(set(names)) < len(names):
            raise ValueError(f"state names must be unique, got {', '.join(names)}")
        return states

    @property
    def bytes_per_request(self) -> int:
        """Bytes of one request's states in one layer."""
        return sum(state.nbytes for state in self.states)

    def block_tensors(self, block_size: int, layout: Layout) -> tuple[BlockTensor, ...]:
        """The states of one layer in one state slot; a slot has no tokens and no layout."""
        return self.states
