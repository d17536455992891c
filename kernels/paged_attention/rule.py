"""What a query sees, and how its scores become weights."""

from typing import NamedTuple

import torch


class Rule(NamedTuple):
    """The options of one call of `kvgroups.ops.paged_attention` that say what attention is."""

    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    returns_lse: bool
    """Whether the log-sum-exp is wanted: outputs then are fp32 with one more column, which holds it."""

    def first_visible(self, position):
        """The lowest position that a query at `position` sees."""
        first = 0
        if self.window is not None:
            first = max(first, position - self.window + 1)
        if self.chunk is not None:
            first = max(first, position // self.chunk * self.chunk)
        return first

    @property
    def needs_scores(self):
        """Whether the scores must be in hand, so that the fused kernel cannot serve."""
        return self.softcap is not None or self.sinks is not None or self.returns_lse

    def of_heads(self, heads):
        """The rule of some query heads, a slice."""
        return self if self.sinks is None else self._replace(sinks=self.sinks[heads])

    def bias(self, queries, keys, dtype, device):
        """What is added to the scores of some queries and keys: 0 where a query sees a key and -inf where it does not.

        Only the corners differ from 0: the last keys, which come after the first queries, and the first keys, which the
        last queries have out of their window.

        Args:
            queries: their positions, a range within one attention chunk.
            keys: theirs, a range that begins with the first key that the first query sees (or later, where there is
                none), and ends where the queries end.

        Returns:
            (len(queries), len(keys)).
        """
        t, n = len(queries), len(keys)
        bias = torch.zeros(t, n, dtype=dtype, device=device)
        bias.narrow(1, n - t, t).fill_(float("-inf")).triu_(1)
        if self.window is not None:
            # Query i sees keys from the one numbered `first + i` on.
            first = queries.start - self.window + 1 - keys.start
            start = bias[:, : max(first + t - 1, 0)]
            start += torch.full_like(start, float("-inf")).tril_(first - 1)
        return bias
