"""From a model to its KV-cache groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvgroups.errors import SpecError
from kvgroups.specs.chunked import ChunkedAttentionSpec
from kvgroups.specs.full_attention import FullAttentionSpec
from kvgroups.specs.groups import GroupConfig, KVGroupsConfig, LayerSpec
from kvgroups.specs.mamba import MambaSpec
from kvgroups.specs.sliding_window import SlidingWindowSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvgroups.specs.probe import LayerFacts

DEFAULT_BLOCK_SIZE = 16
"""Tokens in a block of a full or chunked group, and at most in a block of a window."""

DEFAULT_MAX_MODEL_LEN = 32768
"""Tokens of the longest request where the model's config names no `max_position_embeddings`."""

_GROUP_NAMES = {
    "full_attention": "full",
    "sliding_window": "window",
    "chunked_attention": "chunk",
    "mamba": "state",
}

_GROUP_OVERRIDES: tuple[str, ...] = ("block_size", "slot_mapping", "layout", "snapshot_interval")
"""Overrides that speak of groups: one value for every group that it fits, or a dict by group name."""


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
        UnsupportedModelError: naming layer and class, if no adapter can serve one of the layers.
        SpecError: if an override is unknown or contradicts its group.

    Example:
        >>> from kvgroups.testing import tiny
        >>> config = infer_config(tiny("gemma3_text"), max_model_len=512, block_size={"full": 32})
        >>> [(group.name, group.layers, group.block_size) for group in config.groups]
        [('window', (0, 1, 3, 4), 4), ('full', (2, 5), 32)]
    """
    from kvgroups.specs.probe import probe

    return config_from_facts(model, probe(model), overrides)


def config_from_facts(
    model: PreTrainedModel, facts: Sequence[LayerFacts], overrides: Mapping[str, Any]
) -> KVGroupsConfig:
    """Put layers with equal specs into groups and apply the overrides."""
    overrides = dict(overrides)
    group_overrides = {key: overrides.pop(key) for key in _GROUP_OVERRIDES if key in overrides}
    fields = set(KVGroupsConfig.model_fields) - {"groups"}
    if unknown := sorted(set(overrides) - fields):
        known = sorted(fields | set(_GROUP_OVERRIDES))
        raise SpecError(f"infer_config: unknown override {', '.join(unknown)}; known are {', '.join(known)}")

    members: dict[LayerSpec, list[int]] = {}
    for layer in facts:
        for spec in layer_specs(layer):
            members.setdefault(spec, []).append(layer.index)
    names = _unique_names(list(members))
    _check_group_names(group_overrides, names)
    groups = [
        _group(name, layers, spec, group_overrides)
        for name, (spec, layers) in zip(names, members.items(), strict=True)
    ]
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_MODEL_LEN
    return KVGroupsConfig(groups=groups, **{"max_model_len": longest, **overrides})


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
    chosen = {key: _for_group(value, name) for key, value in overrides.items()}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    interval = chosen.pop("snapshot_interval", None)
    if isinstance(spec, MambaSpec):
        if interval is not None:
            spec = MambaSpec(states=spec.states, snapshot_interval=interval)
        # one value for every group means every group that it fits: a state has no tokens to arrange
        chosen = {key: value for key, value in chosen.items() if isinstance(overrides[key], Mapping)}
    elif interval is not None and isinstance(overrides["snapshot_interval"], Mapping):
        raise SpecError(
            f"infer_config: snapshot_interval names {name!r}, which stores tokens; only state groups have snapshots"
        )
    elif overrides.get("slot_mapping") == "ring" and not isinstance(spec, SlidingWindowSpec):
        del chosen["slot_mapping"]  # "ring" for every group means every window
    defaults = (
        {} if isinstance(spec, MambaSpec) or chosen.get("slot_mapping") == "token" else _block_size(spec)
    )
    return GroupConfig(name=name, layers=layers, spec=spec, **{**defaults, **chosen})


def _block_size(spec: LayerSpec) -> dict[str, int]:
    """A power of two: 16, but at most half a window, so that a window of 10 holds little beyond itself (4)."""
    if not isinstance(spec, SlidingWindowSpec):
        return {"block_size": DEFAULT_BLOCK_SIZE}
    half = max(1, spec.sliding_window // 2)
    return {"block_size": min(DEFAULT_BLOCK_SIZE, 1 << (half.bit_length() - 1))}


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


def _for_group(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else value


def _check_group_names(overrides: Mapping[str, Any], names: list[str]) -> None:
    for key, value in overrides.items():
        if isinstance(value, Mapping) and (unknown := sorted(set(value) - set(names))):
            raise SpecError(
                f"infer_config: {key} names {', '.join(unknown)}; this model's groups are {', '.join(names)}"
            )
