"""How a model's own layers read and write through grouped paged caches."""

from kvgroups.model_adapters.base import GroupStep, Running, Step
from kvgroups.model_adapters.fused_state import FusedMixer, running_fused
from kvgroups.model_adapters.generic_attention import ATTENTION_NAME, AttentionLayer, register_attention
from kvgroups.model_adapters.generic_state import HybridLayer, StateLayer
from kvgroups.model_adapters.registry import find_mixers, register_adapter

__all__ = [
    "ATTENTION_NAME",
    "AttentionLayer",
    "FusedMixer",
    "GroupStep",
    "HybridLayer",
    "Running",
    "StateLayer",
    "Step",
    "find_mixers",
    "register_adapter",
    "register_attention",
    "running_fused",
]
