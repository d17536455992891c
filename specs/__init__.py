"""Declarative specs of what layers remember, and the config that puts them into KV-cache groups."""

from kvgroups.specs.attention import AttentionSpec
from kvgroups.specs.base import BlockTensor, SpecModel
from kvgroups.specs.chunked import ChunkedAttentionSpec
from kvgroups.specs.full_attention import FullAttentionSpec
from kvgroups.specs.groups import GroupConfig, KVGroupsConfig, LayerSpec, SlotMapping
from kvgroups.specs.mamba import MambaSpec, StateTensor
from kvgroups.specs.sliding_window import SlidingWindowSpec

__all__ = [
    "AttentionSpec",
    "BlockTensor",
    "ChunkedAttentionSpec",
    "FullAttentionSpec",
    "GroupConfig",
    "KVGroupsConfig",
    "LayerSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "SlotMapping",
    "SpecModel",
    "StateTensor",
]
