"""What a set of live requests costs under our scheme and under those that others use. Pure arithmetic on a config.

A scheme answers one question: `bytes_for(lengths)`, the bytes taken while requests of so many tokens each are
decoding. Shared prefixes are not counted; nobody has them here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvgroups.slab_plan import SlabPlan
from kvgroups.specs import ChunkedAttentionSpec, GroupConfig, KVGroupsConfig, MambaSpec, SlidingWindowSpec

_PAGE_TOKENS = 16
"""Tokens that a uniform page is a multiple of, as attention kernels ask for."""


class Scheme(Protocol):
    """A way to keep KV caches."""

    @property
    def name(self) -> str:
        """What tables call it."""

    def bytes_for(self, lengths: Sequence[int]) -> int:
        """Bytes taken by live requests of so many tokens each, 1 or more."""


Count = Callable[[KVGroupsConfig, GroupConfig, int], int]
"""Blocks of one request: `blocks_held` at a length, or `most_blocks_held` on the way to it."""


def blocks_held(
    config: KVGroupsConfig, group: GroupConfig, num_tokens: int, computed: int | None = None
) -> int:
    """Blocks that one request owns in `group` during the step that brings it to `num_tokens` tokens.

    Args:
        config: the limits: `max_rewind`, and R for rings.
        group: one of its groups.
        num_tokens: tokens after the step, 1 or more.
        computed: tokens before it; None for a step of one token.

    Example: a window of 8 on blocks of 4. The query at 30 sees 23 to 30, so blocks 5, 6 and 7 are held; the one at 31
    sees 24 to 31, and lets go of block 5. A chunk from 24 to 32 begins with a query that sees 17 to 24, and ends with
    32 tokens, of which the next query sees 25 to 32: blocks 4, 5, 6 and 7.
        >>> from kvgroups.specs import SlidingWindowSpec
        >>> spec = SlidingWindowSpec(num_kv_heads=1, head_dim=8, dtype="float32", sliding_window=8)
        >>> window = GroupConfig(name="window", layers=[0], spec=spec, block_size=4)
        >>> config = KVGroupsConfig(groups=[window], max_model_len=64)
        >>> blocks_held(config, window, 31), blocks_held(config, window, 32), blocks_held(config, window, 32, computed=24)
        (3, 2, 4)
    """
    if isinstance(group.spec, MambaSpec):
        return 1
    if ring_blocks := config.ring_blocks(group):
        return ring_blocks
    computed = num_tokens - 1 if computed is None else computed
    size, spec = group.block_size, group.spec
    had, total = -(-computed // size), -(-num_tokens // size)
    before = min(had, spec.first_visible(max(0, computed - config.max_rewind)) // size)
    after = spec.first_visible(max(0, num_tokens - config.max_rewind)) // size
    return had - before + max(0, total - max(had, after))


def most_blocks_held(config: KVGroupsConfig, group: GroupConfig, num_tokens: int) -> int:
    """The most blocks that one request owns in `group` on its way to `num_tokens` tokens.

    A window's blocks come and go: with blocks of 4 a window of 8 owns 3, 3, 3, 2 of them in turn.
    """
    spec, counts = group.spec, [num_tokens]
    if isinstance(spec, SlidingWindowSpec):
        counts += range(max(1, num_tokens - group.block_size), num_tokens)
    elif isinstance(spec, ChunkedAttentionSpec):
        # Most at a chunk's end. Where chunks are no whole blocks, the ends of one period differ.
        period = math.lcm(group.block_size, spec.chunk_size)
        last = (num_tokens - config.max_rewind) // spec.chunk_size * spec.chunk_size
        counts += [
            end + config.max_rewind for end in range(last, max(0, last - period), -spec.chunk_size) if end > 0
        ]
    return max(blocks_held(config, group, count) for count in counts)


@dataclass(frozen=True)
class Slabs:
    """Ours: free block sizes, one arena cut into slabs that all groups lease from."""

    config: KVGroupsConfig
    plan: SlabPlan
    name: str = "kvgroups"

    @classmethod
    def for_config(cls, config: KVGroupsConfig) -> Slabs:
        return cls(config, SlabPlan.for_config(config))

    def bytes_for(self, lengths: Sequence[int], count: Count = blocks_held) -> int:
        """Whole slabs, the null slab among them."""
        return self.bytes_of_blocks({
            group.name: sum(count(self.config, group, length) for length in lengths)
            for group in self.config.groups
        })  # fmt: skip

    def bytes_of_blocks(self, num_blocks: Mapping[str, int]) -> int:
        """Bytes of the smallest arena that holds so many blocks of each group."""
        return self.plan.num_slabs(num_blocks) * self.plan.slab_bytes


@dataclass(frozen=True)
class UniformPage:
    """One page size for all layers: state and attention page inflated until they match.

    Attention pages get as many tokens as it takes to reach the largest state of a layer, states are padded up to
    that page, and layers are put into tables of equally many, the last one padded.

    Source: vLLM's hybrid KV cache manager (`v1/core/kv_cache_utils.py`, and the block size that it sets for models with
    Mamba layers). It can also keep a state for each block, for prefix reuse; here a request has one.

    Example: Bamba-9B's attention layers get blocks of 1,056 tokens, and its 29 state layers 10 tables of 3.
        >>> from kvgroups.specs.presets import preset
        >>> page = UniformPage.for_config(preset("bamba-9b").config)
        >>> page.groups["full"].block_size, page.page_bytes, page.layers_per_table, page.tables
        (1056, 4325376, 3, {'state': 10, 'full': 1})
    """

    config: KVGroupsConfig
    page_bytes: int
    """Bytes of one page: one layer, so many tokens or one state."""
    layers_per_table: int
    """Layers that share a block id."""
    groups: Mapping[str, GroupConfig]
    """The groups with the inflated block sizes."""
    name: str = "uniform page"

    @classmethod
    def for_config(cls, config: KVGroupsConfig) -> UniformPage:
        states = [g.spec.bytes_per_request for g in config.groups if isinstance(g.spec, MambaSpec)]
        token_bytes = {g.name: g.bytes_per_token // len(g.layers) for g in config.groups if not g.is_state}
        widest = max(token_bytes.values(), default=0)
        tokens = _PAGE_TOKENS * max(1, -(-max(states, default=0) // (_PAGE_TOKENS * widest))) if widest else 1
        page_bytes = tokens * widest or max(states)
        groups = {
            group.name: group
            if group.is_state
            # A narrower layer's page holds more tokens, in whole units, and is padded to the same bytes.
            else group.model_copy(
                update={"block_size": page_bytes // (token_bytes[group.name] * _PAGE_TOKENS) * _PAGE_TOKENS}
            )
            for group in config.groups
        }
        return cls(config, page_bytes, min(len(group.layers) for group in config.groups), groups)

    @property
    def tables(self) -> dict[str, int]:
        """Block tables of each group: its layers in parts of `layers_per_table`."""
        return {group.name: -(-len(group.layers) // self.layers_per_table) for group in self.config.groups}

    @property
    def block_bytes(self) -> int:
        """Bytes behind one block id."""
        return self.page_bytes * self.layers_per_table

    def bytes_for(self, lengths: Sequence[int], count: Count = blocks_held) -> int:
        """Whole blocks, the null block among them."""
        return self.block_bytes * self.num_blocks(lengths, count)

    def num_blocks(self, lengths: Sequence[int], count: Count = blocks_held) -> int:
        """Block ids in use, the null block among them."""
        return 1 + sum(
            self.tables[name] * count(self.config, group, length)
            for name, group in self.groups.items()
            for length in lengths
        )


@dataclass(frozen=True)
class PaddedEager:
    """The cache of Hugging Face's eager models: one tensor a layer, every row as long as the longest.

    Source: `DynamicCache` in transformers' `cache_utils.py`; windows and attention chunks keep the last W - 1 tokens. While
    a step appends to a layer, that layer is there twice; that is not counted.
    """

    config: KVGroupsConfig
    name: str = "padded eager"

    def bytes_for(self, lengths: Sequence[int]) -> int:
        return len(lengths) * self.row_bytes(max(lengths, default=0))

    def row_bytes(self, num_tokens: int) -> int:
        """Bytes of one row of a batch whose longest row has `num_tokens` tokens."""
        return sum(self._group_bytes(group, num_tokens) for group in self.config.groups)

    def _group_bytes(self, group: GroupConfig, num_tokens: int) -> int:
        spec = group.spec
        if isinstance(spec, MambaSpec):
            return spec.bytes_per_request * len(group.layers)
        if isinstance(spec, SlidingWindowSpec):
            num_tokens = min(num_tokens, spec.sliding_window - 1)
        elif isinstance(spec, ChunkedAttentionSpec):
            num_tokens = min(num_tokens, spec.chunk_size - 1)
        return group.bytes_per_token * num_tokens


@dataclass(frozen=True)
class Bound:
    """What no scheme can go below: the tokens that the running query sees, and one state a request."""

    config: KVGroupsConfig
    name: str = "bound"

    def bytes_for(self, lengths: Sequence[int]) -> int:
        return sum(self._group_bytes(group, length) for group in self.config.groups for length in lengths)

    def _group_bytes(self, group: GroupConfig, num_tokens: int) -> int:
        spec = group.spec
        if isinstance(spec, MambaSpec):
            return spec.bytes_per_request * len(group.layers)
        return group.bytes_per_token * (num_tokens - spec.first_visible(num_tokens - 1))
