"""From a model to its KV-cache groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvgroups.specs.chunked import ChunkedAttentionSpec
from kvgroups.specs.full_attention import FullAttentionSpec
from kvgroups.specs.groups import GroupConfig, KVGroupsConfig, LayerSpec
from kvgroups.specs.mamba import MambaSpec
from kvgroups.specs.overrides import check_group_names, default_block_size, group_changes, split_overrides
from kvgroups.specs.sliding_window import SlidingWindowSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvgroups.specs.probe import LayerFacts

DEFAULT_MAX_MODEL_LEN = 32768
"""Tokens of the longest request where the model's config names no `max_position_embeddings`."""

_GROUP_NAMES = {
    "full_attention": "full",
    "sliding_window": "window",
    "chunked_attention": "chunk",
    "mamba": "state",
}


def infer_config(model: PreTrainedModel, **overrides: Any) -> KVGroupsConfig:
    """The `KVGroupsConfig` that `kvgroups.patch(model)` uses when it is given none.

    Layer kinds come from transformers' own `get_layer_types_and_kwargs`, shapes and dtypes from a probe of two
    tokens on meta tensors. Layers with equal specs share a group.

    Args:
        model: a causal language model of transformers. Its weights are not touched.
        **overrides: any field of `KVGroupsConfig` but `groups`; and for the groups `block_size`,
            `slot_mapping`, `layout` or `snapshot_interval`, each one value for every group that it fits or a
            dict by group name ("full", "window", "chunk", "state").

    Returns:
        A config that can be changed, saved, loaded and handed to `patch`.

    Raises:
        UnsupportedModelError: naming layer and class, if no adapter can serve one of the layers; or saying what to
            pass, if it is no causal language model.
        SpecError: if an override is unknown or contradicts its group.

    Example:
        >>> from kvgroups.testing import tiny
        >>> config = infer_config(tiny("gemma3_text"), max_model_len=512, block_size={"full": 32})
        >>> [(group.name, group.layers, group.block_size) for group in config.groups]
        [('window', (0, 1, 3, 4), 4), ('full', (2, 5), 32)]
    """
    from kvgroups.specs.model_kind import check_model
    from kvgroups.specs.probe import probe

    check_model(model)
    return config_from_facts(model, probe(model), overrides)


def config_from_facts(
    model: PreTrainedModel, facts: Sequence[LayerFacts], overrides: Mapping[str, Any]
) -> KVGroupsConfig:
    """Put layers with equal specs into groups and apply the overrides."""
    fields = set(KVGroupsConfig.model_fields) - {"groups"}
    of_config, of_groups = split_overrides("infer_config", overrides, fields)
    members: dict[LayerSpec, list[int]] = {}
    for layer in facts:
        for spec in layer_specs(layer):
            members.setdefault(spec, []).append(layer.index)
    names = _unique_names(list(members))
    check_group_names("infer_config", of_groups, names)
    groups = [
        _group(name, layers, spec, of_groups)
        for name, (spec, layers) in zip(names, members.items(), strict=True)
    ]
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_MODEL_LEN
    return KVGroupsConfig(groups=groups, **{"max_model_len": longest, **of_config})


def layer_specs(layer: LayerFacts) -> list[LayerSpec]:
    """The specs of one layer: none for a dummy, one for most, two where attention and a state share a layer."""
    specs: list[LayerSpec] = []
    if layer.key_shape is not None and layer.value_shape is not None:
        heads, dim = layer.key_shape
        dim_v = layer.value_shape[1]
        shape: dict[str, Any] = {
            "num_kv_heads": heads,
            "head_dim": dim,
            "head_dim_v": None if dim_v == dim else dim_v,
            "dtype": layer.dtype,
        }
        if layer.window is not None:
            specs.append(SlidingWindowSpec(sliding_window=layer.window, **shape))
        elif layer.chunk is not None:
            specs.append(ChunkedAttentionSpec(chunk_size=layer.chunk, **shape))
        else:
            specs.append(FullAttentionSpec(**shape))
    if layer.states:
        specs.append(MambaSpec(states=layer.states))
    return specs


def _group(name: str, layers: list[int], spec: LayerSpec, overrides: Mapping[str, Any]) -> GroupConfig:
    spec, chosen = group_changes("infer_config", name, spec, overrides)
    defaults = default_block_size(spec, chosen.get("slot_mapping"))
    return GroupConfig(name=name, layers=layers, spec=spec, **{**defaults, **chosen})


def _unique_names(specs: list[LayerSpec]) -> list[str]:
    """`full`, `window`, ..., numbered from the second of a kind on: `full`, `full_1`."""
    seen: dict[str, int] = {}
    names = []
    for spec in specs:
        base = _GROUP_NAMES[spec.kind]
        count = seen.get(base, 0)
        names.append(base if count == 0 else f"{base}_{count}")
        seen[base] = count + 1
    return names
