"""How the arena is cut: the bytes of a slab, and how each KV-cache group cuts its slabs into blocks.

Pure arithmetic on a config. The arena is a row of equal slabs. A group leases slabs one at a time and cuts each
into whole blocks; a group whose block is larger than a slab leases aligned runs of slabs instead. Either way
block `b` begins `b * stride_bytes` into the arena, whatever lies in between, so a layer's cache is one strided
view of all of it.

Worked example, Bamba-9B: 3 attention layers of 8 heads of 128 in bfloat16 on blocks of 16 tokens are 192 KiB a
block; three blocks are a slab of 576 KiB. The states of one request in 29 Mamba-2 layers, 118 MiB, are a run of
slabs, rounded up by less than half a percent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvgroups.constants import BLOCK_ALIGNMENT_BYTES
from kvgroups.errors import SpecError
from kvgroups.specs import KVGroupsConfig

WASTE_LIMIT = 0.02
"""The share of a block that a plan may lose to alignment, if any plan can do with so little."""

_SMALLEST_SLAB = 512 * 1024
"""Bytes below which a slab is made of more blocks, up to four of the largest: fewer slabs to account for."""

_LARGEST_SLAB = 64 * 1024 * 1024
"""Bytes above which blocks are padded a little instead of waiting for their least common multiple."""

_DIVISIBLE = 5040 * BLOCK_ALIGNMENT_BYTES
"""1.2 MiB that can be cut in 60 ways: 1 to 10, 12, 14, 15, 16, ... equal blocks."""


@dataclass(frozen=True)
class GroupPlan:
    """How one group cuts what it leases.

    Lease `i` is the slabs from `i * slabs_per_lease` on, and holds the blocks from `i * blocks_per_lease` on.
    """

    name: str
    block_bytes: int
    """Bytes of one block, all layers of the group."""
    stride_bytes: int
    """Bytes from one block to the next: `block_bytes` and what alignment adds."""
    slabs_per_lease: int
    """Slabs that the group leases at once: 1, or the length of a run."""
    blocks_per_lease: int
    """Blocks in one lease."""

    @property
    def is_run(self) -> bool:
        """Whether the group leases runs: its block is larger than a slab."""
        return self.slabs_per_lease > 1

    @property
    def waste(self) -> float:
        """The share of the group's leased bytes that no block uses."""
        return 1 - self.block_bytes / self.stride_bytes

    def num_leases(self, num_blocks: int) -> int:
        """Leases that hold so many blocks."""
        return -(-num_blocks // self.blocks_per_lease)


@dataclass(frozen=True)
class SlabPlan:
    """The cut of one config's arena.

    Example:
        Two layers of full attention and six with a window, blocks of 16 tokens of 256 bytes each:

        >>> from kvgroups.specs import FullAttentionSpec, GroupConfig, SlidingWindowSpec
        >>> shape = {"num_kv_heads": 1, "head_dim": 32, "dtype": "float32"}
        >>> window = SlidingWindowSpec(sliding_window=64, **shape)
        >>> plan = SlabPlan.for_config(KVGroupsConfig(max_model_len=512, groups=[
        ...     GroupConfig(name="full", layers=[0, 1], spec=FullAttentionSpec(**shape)),
        ...     GroupConfig(name="window", layers=[2, 3, 4, 5, 6, 7], spec=window),
        ... ]))
        >>> [(group.name, group.block_bytes, group.blocks_per_lease) for group in plan.groups]
        [('full', 8192, 12), ('window', 24576, 4)]
        >>> plan.slab_bytes
        98304
        >>> plan.num_slabs({"full": 13, "window": 1})  # the null slab, two for `full`, one for `window`
        4
    """

    slab_bytes: int
    run_slabs: int
    """Slabs in a run; 1 if no group needs runs."""
    groups: tuple[GroupPlan, ...]

    @classmethod
    def for_config(cls, config: KVGroupsConfig) -> SlabPlan:
        """The cut with the smallest slab that wastes at most `WASTE_LIMIT` in every group.

        The slab is a multiple of the token groups' least common multiple, so their blocks fill it exactly. If
        no slab of reasonable size is within the limit, the one that wastes least.
        """
        best: SlabPlan | None = None
        for plan in _candidates(config):
            if best is None or plan.waste < best.waste:
                best = plan
            if best.waste <= WASTE_LIMIT:
                break
        assert best is not None
        return best

    @property
    def waste(self) -> float:
        """The largest share of a group's leased bytes that no block uses."""
        return max(group.waste for group in self.groups)

    def group(self, name: str) -> GroupPlan:
        """The plan of the group called `name`."""
        for group in self.groups:
            if group.name == name:
                return group
        raise SpecError(f"no group {name!r}; the groups are {', '.join(g.name for g in self.groups)}")

    def num_leases(self, num_blocks: Mapping[str, int]) -> tuple[int, int]:
        """Slabs and runs that the groups lease for so many blocks each: `(slabs, runs)`."""
        leases = [(plan.is_run, plan.num_leases(num_blocks.get(plan.name, 0))) for plan in self.groups]
        return sum(n for is_run, n in leases if not is_run), sum(n for is_run, n in leases if is_run)

    def num_slabs(self, num_blocks: Mapping[str, int]) -> int:
        """Slabs of the smallest arena that holds so many blocks of each group, the null slab included.

        A run begins at a multiple of its length, and the first run's place is never leased: it begins with the
        null slab. The slabs beside that one serve tokens: with runs of 4, one run and 3 slabs fit in 8.
        """
        slabs, runs = self.num_leases(num_blocks)
        return max(1 + slabs + runs * self.run_slabs, (runs + 1) * self.run_slabs if runs else 0)

    def __str__(self) -> str:
        """A table: one line a group."""
        head = ("group", "block bytes", "stride", "blocks", "of slabs", "waste")
        lines = [
            (
                group.name,
                f"{group.block_bytes:,}",
                f"{group.stride_bytes:,}",
                f"{group.blocks_per_lease}",
                f"{group.slabs_per_lease}",
                f"{group.waste:.2%}",
            )
            for group in self.groups
        ]
        widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
        rows = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in (head, *lines)
        ]
        return "\n".join([f"slab of {self.slab_bytes:,} bytes", *rows])


def _candidates(config: KVGroupsConfig) -> Iterator[SlabPlan]:
    """Plans to choose from, the most wanted first."""
    sizes = {group.name: group.block_bytes for group in config.groups}
    token_blocks = [sizes[group.name] for group in config.groups if not group.is_state]
    for slab_bytes in _slab_sizes(token_blocks or list(sizes.values())):
        longest = -(-max(sizes.values()) // slab_bytes)
        # A longer run that holds several blocks can lose less than one that holds one: 2 blocks of 2.5 slabs in 5.
        for run_slabs in range(longest, 4 * longest + 1) if longest > 1 else (1,):
            yield SlabPlan(
                slab_bytes,
                run_slabs,
                tuple(_cut(name, block_bytes, slab_bytes, run_slabs) for name, block_bytes in sizes.items()),
            )


def _slab_sizes(blocks: Sequence[int]) -> Sequence[int]:
    """Multiples of the least common multiple of these block bytes, or of a number with many divisors where that
    is too large."""
    unit = math.lcm(*blocks)
    if unit > _LARGEST_SLAB:
        unit = _DIVISIBLE * -(-max(blocks) // _DIVISIBLE)
    # Small slabs last: 4, 5, ..., 128, then 3, 2, 1 of them where four are what a slab should be.
    usual = min(4, -(-_SMALLEST_SLAB // unit))
    factors = [f for f in range(usual, 129) if f == usual or f * unit <= _LARGEST_SLAB]
    return [factor * unit for factor in (*factors, *range(usual - 1, 0, -1))]


def _cut(name: str, block_bytes: int, slab_bytes: int, run_slabs: int) -> GroupPlan:
    """The most blocks whose stride divides a lease and is aligned."""
    slabs = 1 if block_bytes <= slab_bytes else run_slabs
    lease_bytes = slabs * slab_bytes
    units = lease_bytes // BLOCK_ALIGNMENT_BYTES
    blocks = next(count for count in range(lease_bytes // block_bytes, 0, -1) if units % count == 0)
    return GroupPlan(name, block_bytes, lease_bytes // blocks, slabs, blocks)
