"""What a model's cache costs, from its config alone: bytes, the requests that fit, and what other schemes would take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvgroups.errors import OutOfBlocksError, SpecError
from kvgroups.schemes import PaddedEager, Slabs, UniformPage, blocks_held, most_blocks_held
from kvgroups.slab_plan import SlabPlan
from kvgroups.specs import GroupConfig, KVGroupsConfig, MambaSpec, SlidingWindowSpec
from kvgroups.specs.overrides import DEFAULT_BLOCK_SIZE

LENGTHS = (1024, 8192, 32768)
"""Lengths of requests that a plan speaks of, in tokens, besides the longest."""

_CHUNKS = 64
"""Chunks of a prompt that are looked at, from its end."""


@dataclass(frozen=True)
class GroupCost:
    """One KV-cache group: its block, and what a token and a request cost in it."""

    name: str
    kind: str
    num_layers: int
    block_size: int
    """Tokens in a block; 1 for a state group, whose block is one request's states."""
    why: str
    """Why the block has that size."""
    block_bytes: int
    bytes_per_token: int
    """Bytes of one token in all layers of the group; 0 for states."""
    request_bytes: tuple[int, ...]
    """Bytes of the blocks that one request owns at most on its way to each of the plan's lengths."""
    blocks_per_lease: int
    """Blocks in what the group leases at once."""
    slabs_per_lease: int
    """Slabs that it leases at once: 1, or the length of a run."""
    waste: float
    """The share of the leased bytes that no block uses."""


@dataclass(frozen=True)
class SchemeCost:
    """One way to keep the caches, at each of the plan's lengths."""

    name: str
    note: str
    request_bytes: tuple[int, ...]
    """Bytes that one more request of that length takes, beside others of the same length."""
    num_requests: tuple[int, ...]
    """Requests of that length that fit."""
    longest: int
    """Tokens that as many requests as the plan asks for may each have; 0 if not even one token fits."""


@dataclass(frozen=True)
class MemoryPlan:
    """What fits into `memory` bytes, without weights and without a GPU.

    A request counts with the most blocks that it owns on its way to its length. Beside the requests that decode, one may
    be in the middle of its prompt, with a chunk of `max_num_batched_tokens` in flight: windows hold more then.

    Example: 64 requests of Llama 3.1 8B in 40 GiB may each have 5,104 tokens: one slab of 2 MiB is the null slab.
        >>> from kvgroups.specs.presets import preset
        >>> plan = MemoryPlan.for_config(preset("llama-3.1-8b").config, memory=40 * 2**30, num_requests=64)
        >>> plan.schemes[0].longest
        5104
    """

    memory: int
    """Bytes for the caches."""
    max_model_len: int
    num_requests: int
    """Requests at once that the plan asks for."""
    lengths: tuple[int, ...]
    """Tokens of the requests that the costs speak of, ascending; the last is `max_model_len`."""
    slab_bytes: int
    groups: tuple[GroupCost, ...]
    schemes: tuple[SchemeCost, ...]
    """Ours first, then those that it is held against."""

    @classmethod
    def for_config(
        cls,
        config: KVGroupsConfig,
        *,
        memory: int,
        num_requests: int,
        max_model_len: int | None = None,
        lengths: Sequence[int] = LENGTHS,
    ) -> MemoryPlan:
        """Plan for `num_requests` requests at once in `memory` bytes.

        Args:
            config: the groups. Its own `memory` and `max_num_reqs` do not count.
            memory: bytes for the caches.
            num_requests: 1 or more.
            max_model_len: tokens of the longest request; None for the config's.
            lengths: tokens, those above `max_model_len` are left out.

        Raises:
            SpecError: a number below 1.
            OutOfBlocksError: not even one request of one token fits.
        """
        longest = config.max_model_len if max_model_len is None else max_model_len
        for name, value in (("memory", memory), ("num_requests", num_requests), ("max_model_len", longest)):
            if value < 1:
                raise SpecError(f"plan: {name} is {value}; must be 1 or more")
        slabs = Slabs.for_config(config)
        smallest = _slab_bytes(slabs, 1, 1)
        if memory < smallest:
            raise OutOfBlocksError(
                f"plan: {memory} bytes hold not even one request of one token, which takes {smallest} bytes in slabs of "
                f"{slabs.plan.slab_bytes}; give more memory"
            )
        lengths = tuple(sorted({*(length for length in lengths if 1 <= length < longest), longest}))
        eager, uniform = PaddedEager(config), UniformPage.for_config(config)
        taken: list[tuple[str, str, Callable[[int, int], int]]] = [
            (
                slabs.name,
                "free block sizes in one arena",
                lambda count, length: _slab_bytes(slabs, count, length),
            ),
            (
                uniform.name,
                _uniform_note(uniform),
                lambda count, length: _uniform_bytes(uniform, count, length),
            ),
            (
                eager.name,
                "every row as long as the others",
                lambda count, length: count * eager.row_bytes(length),
            ),
            (
                f"{eager.name}, mixed",
                f"beside one row of {longest:,} tokens, to which all are padded",
                lambda count, length: count * eager.row_bytes(longest),
            ),
        ]
        return cls(
            memory=memory,
            max_model_len=longest,
            num_requests=num_requests,
            lengths=lengths,
            slab_bytes=slabs.plan.slab_bytes,
            groups=tuple(_group_cost(config, group, slabs.plan, lengths) for group in config.groups),
            schemes=tuple(
                _scheme_cost(name, note, bytes_for, memory, num_requests, lengths)
                for name, note, bytes_for in taken
            ),
        )

    @property
    def waste(self) -> float:
        """The largest share of a group's leased bytes that no block uses."""
        return max(group.waste for group in self.groups)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every field by its name."""
        return {**asdict(self), "waste": self.waste}


def _group_cost(
    config: KVGroupsConfig, group: GroupConfig, plan: SlabPlan, lengths: Sequence[int]
) -> GroupCost:
    cut = plan.group(group.name)
    return GroupCost(
        name=group.name,
        kind=group.spec.kind,
        num_layers=len(group.layers),
        block_size=group.block_size,
        why=_why(group),
        block_bytes=group.block_bytes,
        bytes_per_token=group.bytes_per_token,
        request_bytes=tuple(most_blocks_held(config, group, n) * group.block_bytes for n in lengths),
        blocks_per_lease=cut.blocks_per_lease,
        slabs_per_lease=cut.slabs_per_lease,
        waste=cut.waste,
    )


def _why(group: GroupConfig) -> str:
    if isinstance(group.spec, MambaSpec):
        return "a block is one request's states; they have no tokens"
    if group.block_size == DEFAULT_BLOCK_SIZE:
        return f"{DEFAULT_BLOCK_SIZE} tokens by default: a request's last block is half empty on average"
    if isinstance(group.spec, SlidingWindowSpec) and group.block_size < DEFAULT_BLOCK_SIZE:
        return f"{group.block_size} tokens, so that a window of {group.spec.sliding_window} holds little beyond itself"
    return f"{group.block_size} tokens, as the config says"


def _uniform_note(uniform: UniformPage) -> str:
    sizes = [f"{group.block_size:,}" for group in uniform.groups.values() if not group.is_state]
    blocks = f"blocks of {' and '.join(dict.fromkeys(sizes))} tokens, " if sizes else ""
    return f"{blocks}tables of {uniform.layers_per_table} layers"


def _slab_bytes(slabs: Slabs, count: int, length: int) -> int:
    """Bytes of `count` requests on their way to `length` tokens, one of them perhaps in the middle of its prompt."""
    config = slabs.config
    return slabs.bytes_of_blocks({
        group.name: count * most_blocks_held(config, group, length) + _chunk_surplus(config, group, length)
        for group in config.groups
    })  # fmt: skip


def _uniform_bytes(uniform: UniformPage, count: int, length: int) -> int:
    one = uniform.num_blocks([length], most_blocks_held) - 1
    return uniform.block_bytes * (1 + count * one)


def _chunk_surplus(config: KVGroupsConfig, group: GroupConfig, length: int) -> int:
    """Blocks that a request owns beyond its share while a chunk of its prompt is in flight.

    What its first new token sees and what the next query will see are held together: almost two windows.
    """
    chunk = config.max_num_batched_tokens
    if group.is_state or length <= chunk:
        return 0
    # The last chunks stand for all: windows are full by then, and attention chunks come round.
    starts = range(chunk, length, chunk)[-_CHUNKS:]
    most = max(blocks_held(config, group, min(start + chunk, length), computed=start) for start in starts)
    return max(0, most - most_blocks_held(config, group, length))


def _scheme_cost(
    name: str,
    note: str,
    bytes_for: Callable[[int, int], int],
    memory: int,
    num_requests: int,
    lengths: Sequence[int],
) -> SchemeCost:
    def most(fits: Callable[[int], bool], limit: int) -> int:
        """The largest number up to `limit` that fits; what is larger never fits if something smaller does not."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    # 64 against 128 requests: a slab is shared, so one request alone says too much about the next.
    marginal = tuple((bytes_for(128, n) - bytes_for(64, n)) // 64 for n in lengths)
    return SchemeCost(
        name=name,
        note=note,
        request_bytes=marginal,
        num_requests=tuple(
            most(lambda count, n=n: bytes_for(count, n) <= memory, 2 * (memory // max(1, one) + 1))  # type: ignore[misc]
            for n, one in zip(lengths, marginal, strict=True)
        ),
        longest=most(lambda n: bytes_for(num_requests, n) <= memory, lengths[-1]),
    )
