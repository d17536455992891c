"""Chunked attention: a token sees its own chunk and nothing before it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvgroups.specs.attention import AttentionSpec


class ChunkedAttentionSpec(AttentionSpec):
    """A layer whose query at position p sees from the start of its chunk of C tokens to p.

    Source: Llama 4's local layers (`attention_chunk_size` in transformers).

    Example:
        >>> spec = ChunkedAttentionSpec(num_kv_heads=8, head_dim=128, dtype="bfloat16", chunk_size=8192)
        >>> spec.first_visible(8191), spec.first_visible(8192)  # a new chunk starts empty
        (0, 8192)
    """

    kind: Literal["chunked_attention"] = "chunked_attention"
    chunk_size: int = Field(ge=1)
    """C, in tokens."""

    def first_visible(self, position: int) -> int:
        return position // self.chunk_size * self.chunk_size
