"""The KV-cache groups of public models, with where their numbers were found.

A preset answers what a model's cache costs without its weights, without transformers and without a GPU. Each is one
JSON file in this folder: what `infer_config` says of the model built from its public config, which a test holds.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import Field

from kvgroups.errors import SpecError
from kvgroups.specs.base import Dtype, SpecModel, spec_errors
from kvgroups.specs.groups import KVGroupsConfig


class Preset(SpecModel):
    """One public model's config, and its sources.

    Example:
        >>> bamba = preset("bamba-9b")
        >>> [(group.name, len(group.layers)) for group in bamba.config.groups]
        [('state', 29), ('full', 3)]
    """

    name: str = Field(min_length=1)
    """The public name in lower case: "gemma-3-27b"."""
    model_type: str = Field(min_length=1)
    """The family, as transformers calls it: "gemma3_text"."""
    source: tuple[str, ...] = Field(min_length=1)
    """Where the numbers were found, each precise enough to look it up again."""
    dtype: Dtype
    """Of K, V and the convolution states; recurrent states are what the model keeps, mostly float32."""
    config: KVGroupsConfig
    """The groups, with the block sizes that `infer_config` chooses, and the longest request of the public config."""

    def with_dtype(self, dtype: str) -> Preset:
        """The same model with K, V and states stored in another dtype wherever they are in the preset's.

        Raises:
            SpecError: an unknown dtype; the message names the known ones.

        Example:
            >>> eight_bit = preset("llama-3.1-8b").with_dtype("float8_e4m3fn")
            >>> eight_bit.config.groups[0].bytes_per_token  # 32 layers, K and V, 8 heads of 128, 1 byte
            65536
        """
        # First the preset's own field alone: one complaint about an unknown dtype, not one for each tensor.
        new = Preset.model_validate({**self.model_dump(), "dtype": dtype}).dtype

        def swap(value: Any) -> Any:
            if isinstance(value, dict):
                return {
                    key: new if key == "dtype" and entry == self.dtype else swap(entry)
                    for key, entry in value.items()
                }
            return [swap(entry) for entry in value] if isinstance(value, list) else value

        return Preset.model_validate(swap(self.model_dump(mode="json")))


@cache
def preset_names() -> tuple[str, ...]:
    """The names of all presets, in alphabetical order."""
    return tuple(
        sorted(
            file.name.removesuffix(".json")
            for file in files(__name__).iterdir()
            if file.name.endswith(".json")
        )
    )


@cache
def preset(name: str) -> Preset:
    """The preset called `name`.

    Raises:
        SpecError: there is none; the message lists those there are.
    """
    if name not in preset_names():
        raise SpecError(f"no preset {name!r}; presets are {', '.join(preset_names())}")
    text = files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    with spec_errors(name):
        return Preset.model_validate_json(text)
