"""Any state layer that uses transformers' Cache: Mamba, gated delta net, short convolution and their kin.

The layer keeps its own code. Before a pass its states are gathered from their slots, so the layer sees what
transformers' cache would have handed it, and after the pass they are written back.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from kvgroups import ops
from kvgroups.errors import UnsupportedCallError
from kvgroups.model_adapters.base import CAUSES, OUTSIDE, Running, Step
from kvgroups.model_adapters.generic_attention import AttentionLayer
from kvgroups.specs import GroupConfig
from kvgroups.specs.probe import LayerFacts
from kvgroups.storage import GroupStorage


class StateLayer(LinearAttentionLayer):
    """One layer's recurrent states on state slots, with the interface of transformers' own layer.

    What happens to a state in between, the left padding of a short convolution, the in-place updates of a
    single step, is transformers' code: only where states come from and go to is ours.
    """

    def __init__(
        self, facts: LayerFacts, group: GroupConfig, storage: GroupStorage, *, is_fused: bool = False
    ) -> None:
        self.is_fused = is_fused
        self.places = {state.name: _place(state.name) for state in facts.states}
        self.is_running = self.was_used = False
        self.state_facts = facts
        super().__init__(number_of_states=1 + max(index for _, index in self.places.values()))
        self.state_group = group
        self.state_storage = storage

    def begin(self, step: Step) -> None:
        """Take the rows' states from their slots; rows without a past start from zeros."""
        self.is_running, self.was_used = True, False
        if self.is_fused:
            return  # the mixer works on the slots themselves
        slots = step.groups[self.state_group.name].block_table[:, 0]
        views = self.state_storage.layer(self.state_facts.index)
        self.device = step.device
        for state in self.state_facts.states:
            kind, index = self.places[state.name]
            dtype = getattr(torch, state.dtype)
            if step.is_fresh:
                rows = torch.zeros((len(slots), *state.shape), dtype=dtype, device=step.device)
            else:
                rows = ops.gather_states(views[state.name], slots).to(dtype)
            self._states(kind)[index] = rows
            if kind == "conv":
                self.dtype = dtype
                self.is_conv_states_initialized[index] = True
                self.conv_kernel_size[index] = state.shape[-1]
            else:
                self.is_recurrent_states_initialized[index] = True
        self._has_previous_state = dict.fromkeys(range(self.number_of_states), not step.is_fresh)

    def check_used(self) -> None:
        """Raise UnsupportedCallError if nothing asked for the layer's states, so that they are not those after the step."""
        if not self.was_used:
            index = self.state_facts.index
            raise UnsupportedCallError(f"layer {index}: its states were not used in this forward; {CAUSES}")

    def commit(self, step: Step) -> None:
        """Write the states that the layer left back to their slots."""
        if self.is_fused:
            return
        slots = step.groups[self.state_group.name].block_table[:, 0]
        views = self.state_storage.layer(self.state_facts.index)
        for name, (kind, index) in self.places.items():
            rows = self._states(kind)[index]
            assert rows is not None  # begin() put them there
            ops.scatter_states(views[name], slots, rows.detach().to(views[name].dtype))
        self.release()

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """By state, whether rows have a past. transformers asks before it hands a state out or takes one in."""
        self._note_use()
        return self._has_previous_state

    @has_previous_state.setter
    def has_previous_state(self, value: dict[int, bool]) -> None:
        self._has_previous_state = value

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take in the state after the step, as transformers' own layer does."""
        self._note_use()
        return super().update_recurrent_state(*args, **kwargs)

    def _note_use(self) -> None:
        """A module works on the gathered states; there are none of a fused layer, nor outside of a forward."""
        if not self.is_running:
            raise UnsupportedCallError(OUTSIDE)
        if self.is_fused:
            raise UnsupportedCallError(
                f"layer {self.state_facts.index} ({self.state_facts.owner}): another module than the one that runs fused "
                f"asks for its states; {CAUSES}"
            )
        self.was_used = True

    @property
    def keys(self) -> None:
        """A state layer has none, whatever it is asked by."""
        raise UnsupportedCallError(
            f"layer {self.state_facts.index} ({self.state_facts.owner}): it keeps states on slots, and something reads "
            "cache.layers[i].keys or .values; kvgroups.unpatch(model) to run code that does"
        )

    values = keys

    def view(self, name: str) -> torch.Tensor:
        """(num_slots, *state_shape), the states of all slots by name, for kernels that work in place."""
        return self.state_storage.layer(self.state_facts.index)[name]

    def release(self) -> None:
        """Let go of the gathered rows."""
        self.is_running = False
        for kind, index in self.places.values():
            self._states(kind)[index] = None

    def _states(self, kind: str) -> dict[int, torch.Tensor | None]:
        return self.conv_states if kind == "conv" else self.recurrent_states


class HybridLayer(AttentionLayer, StateLayer):
    """A layer with K and V in pages and states on slots, as in Falcon-H1 and Zamba."""

    is_compileable = False

    def __init__(
        self,
        facts: LayerFacts,
        group: GroupConfig,
        storage: GroupStorage,
        state_group: GroupConfig,
        state_storage: GroupStorage,
        running: Running,
        *,
        is_fused: bool = False,
    ) -> None:
        StateLayer.__init__(self, facts, state_group, state_storage, is_fused=is_fused)
        AttentionLayer.__init__(self, facts, group, storage, running)

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: pages and states exist before the forward starts."""


def _place(name: str) -> tuple[str, int]:
    """`conv_2` is the convolution state with index 2, `recurrent` the recurrent state with index 0."""
    kind, _, index = name.partition("_")
    return kind, int(index or 0)
