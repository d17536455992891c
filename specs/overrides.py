"""Changes to a config by name: fields of the config, and fields of its groups as `{group: value}`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvgroups.errors import SpecError
from kvgroups.specs.mamba import MambaSpec
from kvgroups.specs.sliding_window import SlidingWindowSpec

if TYPE_CHECKING:
    from kvgroups.specs.groups import LayerSpec

DEFAULT_BLOCK_SIZE = 16
"""Tokens in a block of a full or chunked group, and at most in a block of a window."""

_OF_GROUPS = ("block_size", "slot_mapping", "layout", "snapshot_interval")
"""Overrides that speak of groups: one value for every group that it fits, or a dict by group name."""


def split_overrides(
    caller: str, overrides: Mapping[str, Any], fields: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Overrides of the config itself, and overrides of its groups.

    Args:
        caller: for the message.
        overrides: by name.
        fields: of the config, those that may be overridden.

    Raises:
        SpecError: naming what is known, if something else is among them.
    """
    if unknown := sorted(set(overrides) - {*fields, *_OF_GROUPS}):
        known = ", ".join(sorted({*fields, *_OF_GROUPS}))
        raise SpecError(f"{caller}: unknown override {', '.join(unknown)}; known are {known}")
    of_config = {name: value for name, value in overrides.items() if name in fields}
    return of_config, {name: value for name, value in overrides.items() if name not in fields}


def check_group_names(caller: str, overrides: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise SpecError if an override by group speaks of a group that there is not."""
    for key, value in overrides.items():
        if isinstance(value, Mapping) and (unknown := sorted(set(value) - set(names))):
            raise SpecError(f"{caller}: {key} names {', '.join(unknown)}; this model's groups are {', '.join(names)}")


def group_changes(
    caller: str, name: str, spec: LayerSpec, overrides: Mapping[str, Any]
) -> tuple[LayerSpec, dict[str, Any]]:
    """What overrides of groups make of one group: its spec, and the fields that they choose.

    Args:
        caller: for the message.
        name: of the group.
        spec: of the group.
        overrides: those of groups, by name.

    Raises:
        SpecError: if a snapshot grid is asked for in a group that stores tokens.
    """
    chosen = {key: value.get(name) if isinstance(value, Mapping) else value for key, value in overrides.items()}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    interval = chosen.pop("snapshot_interval", None)
    if isinstance(spec, MambaSpec):
        if interval is not None:
            spec = MambaSpec(states=spec.states, snapshot_interval=interval)
        # one value for every group means every group that it fits: a state has no tokens to arrange
        chosen = {key: value for key, value in chosen.items() if isinstance(overrides[key], Mapping)}
    elif interval is not None and isinstance(overrides["snapshot_interval"], Mapping):
        raise SpecError(f"{caller}: snapshot_interval names {name!r}, which stores tokens; only state groups have snapshots")
    elif overrides.get("slot_mapping") == "ring" and not isinstance(spec, SlidingWindowSpec):
        del chosen["slot_mapping"]  # "ring" for every group means every window
    return spec, chosen


def default_block_size(spec: LayerSpec, slot_mapping: str | None) -> dict[str, int]:
    """A power of two: 16, but at most half a window, so that a window of 10 holds little beyond itself (4).

    Empty for groups whose block size is not to be chosen: states and token-to-slot maps.
    """
    if isinstance(spec, MambaSpec) or slot_mapping == "token":
        return {}
    if not isinstance(spec, SlidingWindowSpec):
        return {"block_size": DEFAULT_BLOCK_SIZE}
    half = max(1, spec.sliding_window // 2)
    return {"block_size": min(DEFAULT_BLOCK_SIZE, 1 << (half.bit_length() - 1))}
