"""How many blocks of one KV-cache group a request needs: one arithmetic for admission and for allocation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, overload

import numpy as np

from kvgroups.specs import GroupConfig, KVGroupsConfig, MambaSpec


class Growth(NamedTuple):
    """What one request's row needs in one group for its next tokens."""

    release: range
    """Logical blocks that no query from now on can see."""
    append: tuple[bool, ...]
    """Logical blocks to add: True for a block of its own, False for the null block."""

    def num_new(self) -> int:
        """Blocks to take."""
        return sum(self.append)


class GroupDemand:
    """The arithmetic of one group. A function of numbers of tokens: it knows no request and no block.

    Args:
        config: the limits: `max_rewind`, and R for rings.
        group: one of its groups.
    """

    def __init__(self, config: KVGroupsConfig, group: GroupConfig) -> None:
        self.group = group
        self.ring_blocks = config.ring_blocks(group)
        self.max_rewind = config.max_rewind
        self.keeps_all = group.is_state or self.ring_blocks > 0 or group.spec.kind == "full_attention"
        """Whether a request's blocks stay until it ends: it has no window or chunk that passes by them."""

    @overload
    def num_logical_blocks(self, num_tokens: int) -> int: ...
    @overload
    def num_logical_blocks(self, num_tokens: np.ndarray) -> np.ndarray: ...
    def num_logical_blocks(self, num_tokens: int | np.ndarray) -> int | np.ndarray:
        """Entries of a row for so many tokens, null ones included; of each row, given an array."""
        if self.group.is_state:
            return (num_tokens > 0) * 1
        if self.ring_blocks:
            return (num_tokens > 0) * self.ring_blocks
        return -(-num_tokens // self.group.block_size)

    @overload
    def num_hidden_blocks(self, num_tokens: int, rewind: int = 0) -> int: ...
    @overload
    def num_hidden_blocks(self, num_tokens: np.ndarray, rewind: np.ndarray) -> np.ndarray: ...
    def num_hidden_blocks(
        self, num_tokens: int | np.ndarray, rewind: int | np.ndarray = 0
    ) -> int | np.ndarray:
        """Leading logical blocks that hold nothing a query can see after `num_tokens` tokens, or after `rewind`
        fewer; of each row, given arrays."""
        spec = self.group.spec
        if isinstance(spec, MambaSpec) or self.keeps_all:
            return 0
        position: Any = num_tokens - rewind  # specs speak of one position, and their arithmetic fits arrays
        return spec.first_visible(position * (position > 0)) // self.group.block_size

    def growth(self, computed: int, count: int, rewind: int = 0, released: int = 0) -> Growth:
        """What a request of `computed` tokens needs for `count` more.

        Worked example, W = 8 on blocks of 4: 30 tokens at once end in `[0, 0, 0, 0, 0, x, x, x]`, since the
        query at 30 sees from 23 on; the query at 31 sees from 24 on, and releases block 5 (20 to 23).

        Args:
            computed: tokens that it has computed.
            count: tokens that it is about to compute.
            rewind: tokens that it may be taken back, if more than the config says.
            released: leading logical blocks that it has given up.
        """
        rewind, total = max(self.max_rewind, rewind), computed + count
        had = self.num_logical_blocks(computed)
        hidden = min(self.num_hidden_blocks(computed, rewind), had)
        return _growth(released, hidden, self.num_hidden_blocks(total, rewind), had, self.num_logical_blocks(total))

    def growths(
        self, computed: np.ndarray, counts: np.ndarray, rewinds: np.ndarray, released: Sequence[int]
    ) -> list[tuple[int, Growth]]:
        """`growth` of several requests at once, for those that need anything: most decode steps end inside a block.

        Args:
            computed, counts, rewinds: (n,), int64, what `growth` takes.
            released: (n,), what `growth` takes.

        Returns:
            `(index, growth)`, in ascending order of the index.
        """
        rewinds, totals = np.maximum(rewinds, self.max_rewind), computed + counts
        had, want = self.num_logical_blocks(computed), self.num_logical_blocks(totals)
        changes = want > had
        hidden = hidden_then = np.zeros_like(computed)
        if not self.keeps_all:
            hidden = np.minimum(self.num_hidden_blocks(computed, rewinds), had)
            hidden_then = self.num_hidden_blocks(totals, rewinds)
            changes |= hidden > released
        (indices,) = changes.nonzero()
        columns = [array[indices].tolist() for array in (hidden, hidden_then, had, want)]
        return [
            (index, _growth(released[index], *numbers))
            for index, *numbers in zip(indices.tolist(), *columns, strict=True)
        ]

    def peak_blocks(
        self, prompt_len: int, max_len: int, chunk_size: int | None, pad: int = 0, drafted: int = 0
    ) -> int:
        """The most blocks that a request holds from its first chunk to its last token.

        Args:
            prompt_len: tokens of the longest prompt of its batch.
            max_len: tokens of the longest prompt and its answer.
            chunk_size: tokens of one prefill step; None for the whole prompt at once.
            pad: how many tokens its own prompt is shorter, padded on the left.
            drafted: tokens that each decode step feeds beside its own and can take back.
        """
        chunk = chunk_size or max(1, prompt_len)
        ends = [max(0, column - pad) for column in (*range(0, prompt_len, chunk), prompt_len)]
        peak = max(
            (self._num_held(start, stop - start, drafted) for start, stop in pairwise(ends)), default=0
        )
        # Decoding repeats itself where a block edge meets the edge of an attention chunk: look at the last period.
        # Chunks of 5 on blocks of 3 need 2, 3, 2 blocks, 2, 3, 2, ...
        period = math.lcm(self.group.block_size, getattr(self.group.spec, "chunk_size", 1))
        decodes = range(max(prompt_len, max_len - period) - pad, max_len - pad)
        return max([peak, *(self._num_held(computed, 1 + drafted, drafted) for computed in decodes)])

    def num_shared_blocks(self, prompt_len: int) -> int:
        """Blocks that requests with one prompt hold together to their end: those that no window passes by."""
        return prompt_len // self.group.block_size if self.group.spec.kind == "full_attention" else 0

    def _num_held(self, computed: int, count: int, drafted: int) -> int:
        """Blocks that one request owns while it computes `count` tokens after `computed`."""
        if self.group.is_state:
            return 1 + (drafted > 0)  # the running state and its checkpoint
        hidden = self.num_hidden_blocks(computed, max(self.max_rewind, drafted))
        kept = max(0, self.num_logical_blocks(computed) - hidden)
        return kept + self.growth(computed, count, drafted).num_new()


def _growth(released: int, hidden: int, hidden_then: int, had: int, want: int) -> Growth:
    """From blocks released, hidden and there before the step to blocks hidden and there after it."""
    if want == had + 1:  # a decode step begins a block
        append: tuple[bool, ...] = (had >= hidden_then,)
    else:
        append = tuple(column >= hidden_then for column in range(had, want))
    return Growth(range(min(released, hidden), hidden), append)
