"""From what a person types to a model: tiny families, trained ones, the real Gemma 3, a folder, or a hub id."""

from __future__ import annotations

import contextlib
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgroups.cli.errors import UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DTYPES = {
    "float32": "float32", "float64": "float64", "bfloat16": "bfloat16", "float16": "float16",
    "fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "fp16": "float16",
}  # fmt: skip
"""Names that `--dtype` takes, and torch's."""


_HUB_TIMEOUT = 5.0
"""Seconds that the hub may take to say whether it knows a model."""


def bundled_names(all: bool = False) -> list[str]:
    """Names of the models that come with kvgroups: the trained ones and the core tiny families, or with `all`
    every tiny family."""
    from kvgroups.testing import tiny_names, trained_names

    return [*trained_names(), *tiny_names(all=all)]


def parse_dtype(name: str) -> torch.dtype:
    """The dtype called `name`; `UsageError` naming the known ones otherwise."""
    import torch

    if name not in DTYPES:
        raise UsageError(f"--dtype {name!r}: expected one of {', '.join(DTYPES)}")
    return getattr(torch, DTYPES[name])


def load_model(
    name: str, *, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[PreTrainedModel, Any]:
    """A model in eval mode and its tokenizer, None if it has none.

    The name of a bundled model wins over a hub id that reads the same; `./name` is always a folder.

    Raises:
        UsageError: there is no such model or no such device.
        GemmaNotInstalledError: the optional packages of `gemma-3-270m` are absent.
    """
    from kvgroups.testing import load_gemma_3_270m, tiny, tiny_names, trained, trained_names
    from kvgroups.testing.gemma import MODEL_NAME

    tokenizer = None
    if name in tiny_names(all=True):
        model = tiny(name, dtype=dtype, seed=seed)
    elif name in trained_names():
        model, tokenizer = trained(name, dtype=dtype)
    elif name == MODEL_NAME:
        model, tokenizer = load_gemma_3_270m(dtype=dtype)
    else:
        model, tokenizer = _from_pretrained(name, dtype)
    try:
        return model.to(device).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device!r}: {_first_line(error)}") from None


def _from_pretrained(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """From a folder, from what the hub's client keeps on this machine, or from the hub, in this order."""
    if not name.strip():
        raise UsageError("model '': expected the name of a bundled model (kvgroups parity --list), a folder or a hub id")
    path = Path(name).expanduser()
    if path.is_dir():
        return _load(name, str(path), dtype)
    if name.startswith((".", "/", "~")):
        raise UsageError(f"model {name!r}: there is no such folder")
    if _is_kept(name):
        with contextlib.suppress(UsageError):  # kept in part: the hub has the rest
            return _load(name, name, dtype, local_files_only=True)
    _ask_hub(name)
    return _load(name, name, dtype)


def _load(name: str, place: str, dtype: torch.dtype, **options: Any) -> tuple[PreTrainedModel, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **options)
    except Exception as error:  # transformers and the hub's client raise many kinds
        raise UsageError(f"model {name!r}: transformers cannot load it: {_first_line(error)}") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
    except Exception:  # a model without a tokenizer is asked random token ids
        return model, None
    # Where there are no files, transformers may make one up that knows special tokens and nothing else.
    is_hollow = len(tokenizer) <= len(set(tokenizer.all_special_ids))
    return model, None if is_hollow else tokenizer


def _is_kept(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # no hub id at all
        return False


def _ask_hub(name: str) -> None:
    """Ask once whether there is such a model: loading would try again and again where there is no network."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT)
    except Exception as error:
        raise UsageError(
            f"model {name!r}: neither bundled (kvgroups parity --list) nor gemma-3-270m nor a folder, and the hub "
            f"does not give it: {_first_line(error)}.{_suggestion(name)}"
        ) from None


def _suggestion(name: str) -> str:
    close = get_close_matches(name, [*bundled_names(all=True), "gemma-3-270m"], n=3)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
