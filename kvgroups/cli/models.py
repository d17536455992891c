"""From what a person types to a model: tiny families, trained ones, the real Gemma 3, a folder, or a hub id."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgroups.cli.errors import UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DTYPES = ("float32", "float64", "bfloat16", "float16")
"""Names that `--dtype` takes."""


def parse_dtype(name: str) -> torch.dtype:
    """The dtype called `name`; `UsageError` naming the known ones otherwise."""
    import torch

    if name not in DTYPES:
        raise UsageError(f"--dtype {name!r}: expected one of {', '.join(DTYPES)}")
    return getattr(torch, name)


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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    looks_like_path = name.startswith((".", "/", "~"))
    path = Path(name).expanduser()
    if looks_like_path and not path.is_dir():
        raise UsageError(f"model {name!r}: there is no such folder")
    place = str(path) if path.is_dir() else name
    try:
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
    except Exception as error:  # transformers and the hub client raise many kinds
        raise UsageError(
            f"model {name!r}: neither bundled (kvgroups parity --list) nor gemma-3-270m, and transformers "
            f"cannot load it: {_first_line(error)}{_suggestion(name)}"
        ) from None
    try:
        return model, AutoTokenizer.from_pretrained(place)
    except Exception:  # a model without a tokenizer is asked random token ids
        return model, None


def _suggestion(name: str) -> str:
    from kvgroups.testing import tiny_names, trained_names

    close = get_close_matches(name, [*tiny_names(all=True), *trained_names()], n=3)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
