"""Text in the terminal as it comes, and what it cost."""

from __future__ import annotations

import time
from typing import TextIO

import torch
from transformers import TextStreamer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvgroups.manager import Manager
from kvgroups.sizes import in_units
from kvgroups.usage import Usage


class MeteredStreamer(TextStreamer):
    """Writes prompt and answer to `out`, and notes tokens, time and the memory of the KV-cache groups.

    Args:
        tokenizer: of the model.
        manager: of the patched model; asked after every step, since only a step changes what is held.
        out: where the text goes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, manager: Manager, out: TextIO) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self.manager = manager
        self.out = out
        self.num_tokens = -1  # the first call brings the prompt
        self.peak: Usage = manager.usage()
        self.started = self.ended = time.monotonic()

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, (1, prompt tokens), then one token at a time, (1,)."""
        self.num_tokens += 1
        if self.num_tokens == 0:
            # Shown with the first token: a call that is refused shows nothing.
            self.token_cache = value[0].tolist()
            return
        self.ended = time.monotonic()
        self.peak = max(self.peak, self.manager.usage(), key=lambda usage: usage.held_bytes)
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write text that no later token can change."""
        self.out.write(text + "\n" * stream_end)
        self.out.flush()

    def summary(self) -> str:
        """One line: new tokens, how fast, and the bytes of each group when all together held most."""
        seconds = self.ended - self.started
        groups = ", ".join(f"{group.name} {in_units(group.held_bytes)}" for group in self.peak.groups)
        return (
            f"{self.num_tokens} tokens in {seconds:.1f} s, {self.num_tokens / seconds:.1f} tokens/s; "
            f"KV cache at its peak {in_units(self.peak.held_bytes)}: {groups}"
        )
