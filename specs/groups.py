"""KV-cache groups: which layers share a spec, a block size, a slot-mapping mode and a block table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, field_validator, model_validator

from kvgroups.constants import BLOCK_ALIGNMENT_BYTES
from kvgroups.errors import SpecError
from kvgroups.sizes import parse_bytes
from kvgroups.specs.attention import Layout
from kvgroups.specs.base import ITEM_SIZE, BlockTensor, SpecModel
from kvgroups.specs.chunked import ChunkedAttentionSpec
from kvgroups.specs.full_attention import FullAttentionSpec
from kvgroups.specs.mamba import MambaSpec
from kvgroups.specs.overrides import check_group_names, default_block_size, group_changes, split_overrides
from kvgroups.specs.sliding_window import SlidingWindowSpec

LayerSpec = Annotated[
    FullAttentionSpec | SlidingWindowSpec | ChunkedAttentionSpec | MambaSpec, Field(discriminator="kind")
]
SlotMapping = Literal["paged", "ring", "token", "none"]

_TENSOR_ALIGNMENT_BYTES = 16
"""Every tensor inside a block starts on a multiple of this, so that 16-byte loads are aligned."""


class GroupConfig(SpecModel):
    """One KV-cache group.

    A physical block of the group holds one logical block for all of its layers, layer after layer.
    """

    name: str = Field(min_length=1)
    """What tables, errors and reports call the group."""
    layers: tuple[int, ...] = Field(min_length=1)
    """Indices of the model's cache layers that belong to the group."""
    spec: LayerSpec
    """What one layer of the group stores; the same for all of them."""
    block_size: int = Field(ge=1)
    """Tokens in a block; 1 for a state group, whose block is one request's states."""
    slot_mapping: SlotMapping
    """How a token finds its slot: `paged`, `ring` (windows), `token` (block size 1), `none` (states)."""
    layout: Layout = "HND"
    """Order inside a block: `NHD` is (tokens, heads, dim), `HND` is (heads, tokens, dim)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, data: Any) -> Any:
        """A state group has one possible mode and block size; an attention group is paged by 16."""
        if not isinstance(data, dict):
            return data
        spec = data.get("spec")
        kind = spec.get("kind") if isinstance(spec, dict) else getattr(spec, "kind", None)
        is_state = kind == "mamba"
        one_token = is_state or data.get("slot_mapping") == "token"
        return {
            "slot_mapping": "none" if is_state else "paged",
            "block_size": 1 if one_token else 16,
            **data,
        }

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        where = f"group {self.name!r}"
        if len(set(self.layers)) < len(self.layers) or min(self.layers) < 0:
            raise ValueError(f"{where}: layers must be distinct and not negative, got {list(self.layers)}")
        is_state = isinstance(self.spec, MambaSpec)
        if is_state != (self.slot_mapping == "none"):
            right = "none" if is_state else "paged, ring or token"
            raise ValueError(
                f"{where}: slot_mapping {self.slot_mapping!r} with a {self.spec.kind} spec; must be {right}"
            )
        if self.slot_mapping == "ring" and not isinstance(self.spec, SlidingWindowSpec):
            raise ValueError(
                f"{where}: slot_mapping 'ring' serves sliding windows only; must be paged or token"
            )
        if self.slot_mapping in ("token", "none") and self.block_size != 1:
            raise ValueError(
                f"{where}: block_size {self.block_size} with slot_mapping {self.slot_mapping!r}; must be 1"
            )
        return self

    @property
    def is_state(self) -> bool:
        """Whether the group holds recurrent states rather than tokens."""
        return isinstance(self.spec, MambaSpec)

    @property
    def block_bytes(self) -> int:
        """Bytes of one physical block: all layers, rounded up to the block alignment."""
        return _align(self._packed()[1], BLOCK_ALIGNMENT_BYTES)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers of the group; 0 for a state group."""
        return 0 if isinstance(self.spec, MambaSpec) else self.spec.bytes_per_token * len(self.layers)

    def tensor_offsets(self) -> dict[int, dict[str, tuple[int, BlockTensor]]]:
        """Where each layer's tensors lie inside a block: `{layer: {name: (byte offset, tensor)}}`."""
        return self._packed()[0]

    def _packed(self) -> tuple[dict[int, dict[str, tuple[int, BlockTensor]]], int]:
        offsets: dict[int, dict[str, tuple[int, BlockTensor]]] = {}
        end = 0
        for layer in self.layers:
            offsets[layer] = {}
            for tensor in self.spec.block_tensors(self.block_size, self.layout):
                start = _align(end, max(_TENSOR_ALIGNMENT_BYTES, ITEM_SIZE[tensor.dtype]))
                offsets[layer][tensor.name] = (start, tensor)
                end = start + tensor.nbytes
        return offsets, end


class KVGroupsConfig(SpecModel):
    """All KV-cache groups of one model, and the limits that its tables and pools are built for.

    Round-trips through JSON (`model_dump_json`, `model_validate_json`) and through files (`save`, `load`).
    """

    groups: tuple[GroupConfig, ...] = Field(min_length=1)
    """The groups; a layer may be in one attention group and in one state group."""
    memory: int | float | dict[str, int] | None = None
    """None: grow as needed. An int: bytes, which may be given as text: "80GiB", "512MiB", "1.5 GB".
    A float below 1: that share of the device's memory. A dict: blocks of each group by name, the null block not
    counted (for tests)."""
    max_num_reqs: int = Field(default=256, ge=1)
    """Rows of a block table: requests that are resident at once."""
    max_model_len: int = Field(ge=1)
    """Tokens of the longest request, prompt and answer together."""
    max_num_batched_tokens: int = Field(default=8192, ge=1)
    """Tokens of one step at most."""
    max_rewind: int = Field(default=0, ge=0)
    """Tokens that a request can be taken back; windows keep that many more."""
    sanitize: bool = False
    """Debug mode: fill free blocks with NaN, and hold every slot that a step writes and every block that it reads
    against their owners. Slow; costs nothing when off."""

    @field_validator("memory", mode="before")
    @classmethod
    def _is_memory(cls, value: Any) -> Any:
        """One sentence instead of one for each type that it could have been; and True is no byte."""
        counts = list(value.values()) if isinstance(value, dict) else [value]
        if all(isinstance(count, int) and not isinstance(count, bool) for count in counts):
            return value
        if value is None or isinstance(value, float):
            return value
        if isinstance(value, str):
            return parse_bytes(value)
        raise ValueError(
            "must be None, an int of bytes or text like 80GiB, a float share of the device, or {group: blocks}"
        )

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for name, count in Counter(group.name for group in self.groups).items():
            if count > 1:
                raise ValueError(f"groups: the name {name!r} is used {count} times; names must be unique")
        taken: dict[tuple[int, bool], str] = {}
        for group in self.groups:
            for layer in group.layers:
                other = taken.setdefault((layer, group.is_state), group.name)
                if other != group.name:
                    raise ValueError(
                        f"groups: layer {layer} is in {other!r} and in {group.name!r}; "
                        "a layer may be in one attention group and in one state group"
                    )
        self._check_memory({group.name for group in self.groups})
        return self

    def _check_memory(self, names: set[str]) -> None:
        memory = self.memory
        if isinstance(memory, dict):
            if set(memory) != names:
                raise ValueError(
                    f"memory: got blocks for {sorted(memory)}; must name each of {sorted(names)}"
                )
            if min(memory.values()) < 1:
                raise ValueError(f"memory: got {memory}; every group needs at least one block")
        elif isinstance(memory, float) and not 0 < memory < 1:
            raise ValueError(f"memory: got {memory}; a float is a share of the device, between 0 and 1")
        elif isinstance(memory, int) and memory < 1:
            raise ValueError(f"memory: got {memory}; must be a positive number of bytes")

    def group(self, name: str) -> GroupConfig:
        """The group called `name`; `SpecError` naming the known ones otherwise."""
        for group in self.groups:
            if group.name == name:
                return group
        raise SpecError(f"no group {name!r}; the groups are {', '.join(g.name for g in self.groups)}")

    def ring_blocks(self, group: GroupConfig) -> int:
        """R, the blocks that a request owns in a ring group; 0 for the other modes.

        `R * block_size >= W - 1 + max_rewind`: a window of 10 on blocks of 4 needs 9 tokens, three blocks.
        """
        if group.slot_mapping != "ring" or not isinstance(group.spec, SlidingWindowSpec):
            return 0
        tokens = group.spec.sliding_window - 1 + self.max_rewind
        return max(1, -(-tokens // group.block_size))

    def replace(self, **changes: Any) -> KVGroupsConfig:
        """Another config, equal to this one but for the changes, and valid like every config.

        Args:
            **changes: fields of the config by name; and for the groups `block_size`, `slot_mapping`, `layout` or
                `snapshot_interval`, each one value for every group that it fits or a dict by group name.

        Raises:
            SpecError: if a change is unknown, with those that are known, or contradicts the rest.

        Example:
            >>> from kvgroups.specs import FullAttentionSpec
            >>> spec = FullAttentionSpec(num_kv_heads=1, head_dim=32, dtype="float32")
            >>> full = GroupConfig(name="full", layers=[0, 1], spec=spec)
            >>> config = KVGroupsConfig(groups=[full], max_model_len=512)
            >>> changed = config.replace(memory="1.5 MiB", block_size={"full": 32})
            >>> changed.memory, changed.group("full").block_size, config.group("full").block_size
            (1572864, 32, 16)
        """
        of_config, of_groups = split_overrides("replace", changes, type(self).model_fields)
        changed = self.model_copy(update=of_config)
        check_group_names("replace", of_groups, [group.name for group in changed.groups])
        groups = tuple(_changed(group, of_groups) for group in changed.groups)
        return changed.model_copy(update={"groups": groups})

    def __str__(self) -> str:
        """YAML, as `save` writes it and `kvgroups config` prints it."""
        return self._yaml().removesuffix("\n")

    def _yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def save(self, path: str | Path) -> None:
        """Write the config to `path`: JSON if it ends in `.json`, YAML otherwise."""
        path = Path(path)
        if path.suffix == ".json":
            text = self.model_dump_json(indent=2) + "\n"
        else:
            text = self._yaml()
        path.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> KVGroupsConfig:
        """Read what `save` wrote. `SpecError` names the file if it cannot be read, and what is wrong in it."""
        if not isinstance(path, (str, Path)):
            raise SpecError(f"load: expected the path of a YAML or JSON file, got {type(path).__name__}")
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SpecError(
                f"{path}: cannot be read: {error.strerror}; expected a YAML or JSON file that KVGroupsConfig.save wrote"
            ) from error
        except UnicodeDecodeError:
            raise SpecError(f"{path}: expected text in UTF-8, got bytes that are none") from None
        if path.suffix == ".json":
            return cls.model_validate_json(text)
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise SpecError(f"{path}: expected YAML, got text that cannot be read as such: {error}") from None
        if not isinstance(data, dict):
            kind = "nothing" if data is None else type(data).__name__
            raise SpecError(f"{path}: expected a mapping with `groups` and `max_model_len`, got {kind}")
        return cls.model_validate(data)


def _changed(group: GroupConfig, overrides: dict[str, Any]) -> GroupConfig:
    """The group after overrides of groups. A block size that came with the old mode goes with it."""
    spec, chosen = group_changes("replace", group.name, group.spec, overrides)
    new_mode = chosen.get("slot_mapping", group.slot_mapping)
    if new_mode != group.slot_mapping and "token" in (new_mode, group.slot_mapping):
        chosen = {"block_size": 1, **default_block_size(spec, new_mode), **chosen}
    return group.model_copy(update={**chosen, "spec": spec})


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
