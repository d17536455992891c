"""Sliding-window attention: the last W tokens are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvgroups.specs.attention import AttentionSpec


class SlidingWindowSpec(AttentionSpec):
    """A layer whose query at position p sees positions p-W+1 to p, itself included.

    This is the convention of transformers' `sliding_window`. Flash-attention kernels count the query
    apart: their `window_size=(W-1, 0)` is our `sliding_window=W`.

    Source: Longformer (Beltagy et al., 2020), section 3.1; Mistral 7B (Jiang et al., 2023), section 2.

    Example:
        >>> spec = SlidingWindowSpec(num_kv_heads=1, head_dim=64, dtype="float32", sliding_window=8)
        >>> spec.first_visible(7), spec.first_visible(8)  # the ninth token pushes out the first
        (0, 1)
    """

    kind: Literal["sliding_window"] = "sliding_window"
    sliding_window: int = Field(ge=1)
    """W, in tokens, the query itself included."""

    def first_visible(self, position: int) -> int:
        first = position - self.sliding_window + 1
        return first * (first > 0)  # not max(): an array of positions is as welcome
