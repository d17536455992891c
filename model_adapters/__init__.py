"""How a model's own layers read and write through grouped paged caches."""

from kvgroups.model_adapters.base import GroupStep, Running, Step
from kvgroups.model_adapters.generic_attention import ATTENTION_NAME, AttentionLayer, register_attention
from kvgroups.model_adapters.generic_state import HybridLayer, StateLayer

__all__ = [
    "ATTENTION_NAME",
    "AttentionLayer",
    "GroupStep",
    "HybridLayer",
    "Running",
    "StateLayer",
    "Step",
    "register_attention",
]
