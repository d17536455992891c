"""Whether something is a causal language model at all, told before it is probed."""

from __future__ import annotations

from os import PathLike
from typing import Any

from kvgroups.errors import UnsupportedModelError


def check_model(model: Any) -> None:
    """Raise unless `model` is a language model of transformers that generates from its own tokens alone.

    Whether its layers can be served is for the probe to find out.

    Raises:
        UnsupportedModelError: saying what it is instead, and what to pass.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(_no_model(model))
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name}: encoder-decoder models are not served, their cross-attention keeps the encoder's keys and values; "
            "pass a decoder-only causal language model"
        )
    if not hasattr(model, "generate"):
        raise UnsupportedModelError(_no_generator(model))


def _no_model(value: Any) -> str:
    """What to say of something that is no model of transformers."""
    from transformers import PreTrainedConfig

    name = type(value).__name__
    if isinstance(value, (str, PathLike)):
        path = str(value)
        return f"expected a model, got the {name} {path!r}; load it: AutoModelForCausalLM.from_pretrained({path!r})"
    if isinstance(value, PreTrainedConfig):
        return (
            f"expected a model, got its {name}; make one: AutoModelForCausalLM.from_config(config), which under "
            "torch.device('meta') takes no memory"
        )
    if isinstance(value, type):
        return f"expected a model, got the class {value.__name__}; pass an instance of it"
    return f"{name} is no transformers PreTrainedModel; patch the model that it wraps"


def _no_generator(model: Any) -> str:
    """What to say of a model that cannot generate."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = type(model).__name__
    sees_ahead = [
        f"{path} {type(module).__name__}"
        for path, module in model.named_modules()
        if getattr(module, "is_causal", None) is False
    ]
    if sees_ahead and getattr(model.config, "is_decoder", None) is False:
        return (
            f"{name}: encoders are not served, {sees_ahead[0]} sees tokens on both sides and needs no cache; pass a causal "
            "language model"
        )
    right = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model.config.model_type)
    if right is None:
        return f"{name}: it cannot generate, and transformers has no causal language model of its kind; pass one of another"
    what = f"the {right} that holds it" if model.base_model is model else f"a {right}"
    return f"{name}: it has no language-model head, so it cannot generate; pass {what}"
