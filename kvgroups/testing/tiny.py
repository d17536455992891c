"""Tiny seeded random models of many families, built from transformers' own config classes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvgroups.errors import UnsupportedModelError
from kvgroups.testing.tiny_configs import BASE, CORE, MORE


def tiny_names(all: bool = False) -> list[str]:
    """The names that `tiny` knows: the core families, or with `all` every family."""
    return [*CORE, *MORE] if all else [*CORE]


def tiny(
    model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config_overrides: Any
) -> PreTrainedModel:
    """A small random model of one family, in eval mode, on the CPU.

    The same name, seed and overrides give the same weights; another dtype gives the same weights, rounded.
    Nothing is downloaded and the global random state is left alone. There is no stop token and no padding
    token: `generate` runs to its length, and any token id may be used to pad (give an `attention_mask` then).

    Args:
        model_type: transformers' `model_type`, one of `tiny_names(all=True)`. What follows a `+` names a
            variant of the family.
        seed: seeds every weight.
        dtype: of the weights.
        config_overrides: fields of the family's config class, instead of those chosen here.

    Raises:
        UnsupportedModelError: no such name; the message lists those there are.

    Example:
        >>> model = tiny("gemma3_text")
        >>> model.config.layer_types[:3]
        ['sliding_attention', 'sliding_attention', 'full_attention']
    """
    families = {**CORE, **MORE}
    if model_type not in families:
        raise UnsupportedModelError(
            f"tiny: no tiny model is called {model_type!r}. Use one of: {', '.join(sorted(families))}."
        )
    config = _config(model_type.partition("+")[0], families[model_type], config_overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
        _let_everything_matter(model)
        if dtype != torch.float32:
            # Filled from the float32 model, so that buffers which a class keeps in float32 stay so.
            rounded = AutoModelForCausalLM.from_config(config, dtype=dtype)
            rounded.load_state_dict(model.state_dict())
            model = rounded
    # Prompts hold any token, so `generate` must not read one of them as padding.
    model.generation_config.pad_token_id = None
    return model.eval()


def _config(model_type: str, family: dict[str, Any], config_overrides: dict[str, Any]) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    declared = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    settings = {name: value for name, value in BASE.items() if name in declared}
    # Deep copies: config classes edit the lists and dicts they are given.
    return config_class(**copy.deepcopy({**settings, **family, **config_overrides}))


@torch.no_grad()
def _let_everything_matter(model: PreTrainedModel) -> None:
    """Undo initial values that would hide a mistake: constants, rows of zeros, states that fade at once."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            # Decay rates of 0.05 to 0.5 a unit of time. The usual ones, up to 16, forget within one token.
            parameter.uniform_(-3.0, -0.7)
        elif parameter.numel() > 1 and parameter.min() == parameter.max():
            # A bias of zero or a norm of one would hide that somebody forgot it.
            parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            # The few classes that insist on a padding token; its row of zeros would hide a leak.
            module.weight[module.padding_idx].normal_(std=module.weight.std().item())
            module.padding_idx = None
