"""Byte-level models of one to two million parameters, trained: small enough for a test, and they write words.

They and the record of their training lie in `kvgroups/assets`; `examples/train_tiny_models.py` made them.
"""

from __future__ import annotations

from importlib.resources import as_file, files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvgroups.errors import UnsupportedModelError

_NAMES = ("tiny-gemma3", "tiny-bamba", "tiny-jamba")


def trained_names() -> list[str]:
    """The names that `trained` knows."""
    return [*_NAMES]


def trained(
    name: str, *, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A small trained model, in eval mode, on the CPU, and its tokenizer.

    A token is one byte of UTF-8, with `<bos>` before the text. The models continue English prose about Python;
    `<eos>` ends a document. They were trained on 256 tokens at a time, and write best within about that many.

    Args:
        name: one of `trained_names()`: sliding windows of 64 tokens and full attention (Gemma 3), Mamba-2 and full
            attention (Bamba), or Mamba-1 and full attention (Jamba).
        dtype: of the weights. They are kept as float16, which float32 holds exactly.

    Raises:
        UnsupportedModelError: no such name; the message lists those there are.

    Example:
        >>> model, tokenizer = trained("tiny-gemma3")
        >>> tokenizer("Hi!").input_ids
        [256, 72, 105, 33]
    """
    if name not in _NAMES:
        raise UnsupportedModelError(
            f"trained: no trained model is called {name!r}. Use one of: {', '.join(_NAMES)}."
        )
    with as_file(files("kvgroups.assets") / name) as folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model.eval(), AutoTokenizer.from_pretrained(folder)


def heldout_text() -> str:
    """About 11 KB of the same kind of text as the trained models were trained on, and never saw."""
    return (files("kvgroups.assets") / "heldout.txt").read_text(encoding="utf-8")


@torch.no_grad()
def nats_per_byte(model: PreTrainedModel, text: str, *, window: int = 256) -> float:
    """The mean loss of a byte-level model on `text`, cut into windows that do not see each other.

    Args:
        model: whose token ids are bytes. A uniform guess among all bytes scores ln 256, which is 5.55.
        text: at least one window; what is left over at the end is not scored.
        window: bytes of a window. Its first byte is given, the others are predicted.
    """
    ids = torch.tensor(list(text.encode()), device=model.device)
    windows = ids[: len(ids) // window * window].view(-1, window)
    losses = [
        model(input_ids=rows, labels=rows, use_cache=False).loss.item() * len(rows)
        for rows in windows.split(8)
    ]
    return sum(losses) / len(windows)
