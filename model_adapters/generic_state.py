"""Any state layer that uses transformers' Cache: Mamba, gated delta net, short convolution and their kin.

The layer keeps its own code. Before a pass its states are gathered from their slots, so the layer sees what
transformers' cache would have handed it, and after the pass they are written back.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import LinearAttentionLayer

from kvgroups import ops
from kvgroups.model_adapters.base import Running, Step
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
        super().__init__(number_of_states=1 + max(index for _, index in self.places.values()))
        self.state_facts = facts
        self.state_group = group
        self.state_storage = storage

    def begin(self, step: Step) -> None:
        """Take the rows' states from their slots; rows without a past start from zeros."""
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
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), not step.is_fresh)

    def commit(self, step: Step) -> None:
        """Write the states that the layer left back to their slots."""
        if self.is_fused:
            return
        slots = step.groups[self.state_group.name].block_table[:, 0]
        views = self.state_storage.layer(self.state_facts.index)
        for name, (kind, index) in self.places.items():
            ops.scatter_states(views[name], slots, self._states(kind)[index].detach().to(views[name].dtype))
        self.release()

    def view(self, name: str) -> torch.Tensor:
        """(num_slots, *state_shape), the states of all slots by name, for kernels that work in place."""
        return self.state_storage.layer(self.state_facts.index)[name]

    def release(self) -> None:
        """Let go of the gathered rows."""
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
