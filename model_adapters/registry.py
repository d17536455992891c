"""Which state layers run fused: known by the kernels that they call, or registered by class."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from kvgroups.model_adapters.fused_state import FusedMixer, fusable_kernels
from kvgroups.specs.probe import LayerFacts

logger = logging.getLogger(__name__)

Factory = Callable[[torch.nn.Module, int], FusedMixer]

_registered: dict[type[torch.nn.Module], Factory] = {}


def register_adapter(mixer: type[torch.nn.Module], factory: Factory) -> None:
    """Use `factory` for every state layer of class `mixer` in models that are patched from now on.

    Args:
        mixer: the class of the module that keeps the states.
        factory: takes the module and the index of its cache layer, and returns a `FusedMixer`, or an object with its
            `module`, `index`, `is_current()` and a `forward` that takes the module's arguments and works on state slots.
    """
    _registered[mixer] = factory


def find_mixers(model: torch.nn.Module, facts: Sequence[LayerFacts]) -> list[FusedMixer]:
    """The state layers of a model that can run fused; the generic adapter serves the others.

    Why a layer is not fused is logged at INFO.
    """
    mixers = []
    for layer in facts:
        if layer.mixer is None:
            continue
        module = model.get_submodule(layer.mixer)
        if type(module) in _registered:
            mixers.append(_registered[type(module)](module, layer.index))
            continue
        kernels, reasons = fusable_kernels(module, {state.name for state in layer.states})
        if "forward" in module.__dict__:
            reasons.append("something has put a forward of its own on the module")
        if layer.num_mixers > 1:
            reasons.append(f"{layer.num_mixers} modules keep states in it")
        if reasons:
            logger.info("layer %d (%s) is not fused: %s", layer.index, layer.owner, "; ".join(reasons))
        elif kernels is not None:
            mixers.append(FusedMixer(module, layer.index, kernels))
    return mixers
