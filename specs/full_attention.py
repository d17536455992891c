"""Full attention: every token is kept for as long as the request lives."""

from __future__ import annotations

from typing import Literal

from kvgroups.specs.attention import AttentionSpec


class FullAttentionSpec(AttentionSpec):
    """A layer whose query at position p sees positions 0 to p.

    Example:
        >>> spec = FullAttentionSpec(num_kv_heads=8, head_dim=128, dtype="bfloat16")
        >>> spec.bytes_per_token  # K and V, 8 heads of 128, 2 bytes each
        4096
        >>> spec.first_visible(1000)
        0
    """

    kind: Literal["full_attention"] = "full_attention"

    def first_visible(self, position: int) -> int:
        return 0
