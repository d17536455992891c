"""Whether a generate that is about to start can run to its end, before it takes a block.

The arithmetic is that of `allocate`: how many blocks a row holds is asked of `GroupDemand`. What is counted here is
who holds them at once: the rows of the batch, which may share a prompt, and whatever else is alive.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvgroups.batch_plan import column_ends
from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.demand import GroupDemand
from kvgroups.errors import OutOfBlocksError
from kvgroups.manager import Manager
from kvgroups.rows import CacheRows
from kvgroups.sizes import exactly


@dataclass(frozen=True)
class Prospect:
    """What a batch will compute: its prompt in some steps, then one token a row and step.

    Rows that are fed the same prompt are one request until the first step after it.
    """

    computed: np.ndarray
    """(num_requests,), int64: tokens that each request holds."""
    ends: np.ndarray
    """(num_requests, steps), int64: tokens that it holds after each step of the prompt."""
    num_rows: np.ndarray
    """(num_requests,), int64: rows that go on from it after the prompt."""
    num_decodes: int
    """Steps after the prompt."""
    is_in_step: bool = True
    """Whether all requests take each step of the prompt together, rather than one after the other."""
    drafted: int = 0
    """Tokens that each later step feeds beside its own and can take back."""
    max_rewind: int = 0
    """Tokens of each step that can be taken back."""

    @property
    def max_len(self) -> int:
        """Tokens of the longest row at its end."""
        return int(self.ends[:, -1].max()) + self.num_decodes


def foresee(
    keys: Sequence[Hashable],
    computed: np.ndarray,
    is_real: np.ndarray,
    num_decodes: int,
    chunk_size: int | None,
    max_tokens: int,
    splits_rows: bool,
    drafted: int = 0,
    max_rewind: int = 0,
) -> Prospect:
    """What a padded batch will compute.

    Args:
        keys: one a row, equal for rows that are one request until their prompt has been computed.
        computed: (batch,), int64: tokens that each row holds.
        is_real: (batch, columns), bool: which tokens of the prompt's new columns exist.
        num_decodes: tokens a row that are computed after the prompt.
        chunk_size: columns of one prefill step; None for all at once.
        max_tokens: tokens of one pass at most.
        splits_rows: whether rows go through the model one after the other.
        drafted, max_rewind: see `Prospect`.
    """
    first = {key: row for row, key in reversed(list(enumerate(keys)))}
    rows = np.array(sorted(first.values()))
    counts = Counter(keys)
    real, size = is_real[rows], chunk_size or is_real.shape[1]
    columns: list[int] = []
    for start in range(0, real.shape[1], size):
        columns += [start + end for end in column_ends(real[:, start : start + size], max_tokens)]
    total = real.cumsum(1)
    return Prospect(
        computed=computed[rows],
        ends=computed[rows][:, None] + total[:, [end - 1 for end in columns]],
        num_rows=np.array([counts[keys[row]] for row in rows]),
        num_decodes=num_decodes,
        is_in_step=not splits_rows and len(rows) <= max_tokens,
        drafted=drafted,
        max_rewind=max_rewind,
    )


def check_prospect(manager: Manager, rows: CacheRows, prospect: Prospect) -> None:
    """Refuse what cannot fit beside what other requests hold now.

    Args:
        manager: of the model.
        rows: of the cache that the batch goes on from; may be empty.
        prospect: what the batch will compute.

    Raises:
        OutOfBlocksError: naming the group, the need and what there is; nothing is taken.
    """
    config = manager.config
    if config.memory is None:
        return
    demands = {group.name: GroupDemand(config, group) for group in config.groups}
    holdings = {name: _Holding.of(manager, name, rows) for name in demands}
    need = {name: _peak(demand, prospect, holdings[name]) for name, demand in demands.items()}
    what = f"{int(prospect.num_rows.sum())} requests of up to {prospect.max_len} tokens need"
    advice = "raise the config's `memory`, close other caches, or pass fewer or shorter requests"
    for name, held in holdings.items():
        cap = manager.pool(name).max_blocks
        if cap is not None and need[name] + held.others > cap:
            beside = f", {held.others} of which other caches hold" if held.others else ""
            raise OutOfBlocksError(
                f"group {name!r}: {what} {need[name]} blocks of {config.group(name).block_size} tokens and there are "
                f"{cap}{beside}; {advice}"
            )
    if isinstance(config.memory, dict):
        return
    total = {name: max(need[name] + held.others, held.pinned) for name, held in holdings.items()}
    num_slabs, there = manager.plan.num_slabs(total), manager.slabs.num_slabs
    if num_slabs > there:
        largest = max(need, key=lambda name: need[name] * manager.plan.group(name).stride_bytes)
        beside = ", with what other caches hold," if any(held.others for held in holdings.values()) else ""
        needed, granted = (exactly(number * manager.plan.slab_bytes) for number in (num_slabs, there))
        raise OutOfBlocksError(
            f"memory: {what}{beside} {needed} (group {largest!r}: {need[largest]} blocks) and there are {granted}; {advice}"
        )


@dataclass(frozen=True)
class _Holding:
    """What is held of one group now."""

    others: int
    """Blocks that somebody else than the cache holds."""
    pinned: int
    """Blocks of the leases in which some of those lie."""
    saved: int
    """Blocks that rows of the cache share with each other or with somebody else, counted once too often each time."""

    @classmethod
    def of(cls, manager: Manager, name: str, rows: CacheRows) -> _Holding:
        pool, plan = manager.pool(name), manager.plan.group(name)
        requests = list({id(request): request for request in rows.requests}.values())
        own = [manager.held_blocks(request, name) for request in requests]
        blocks, counts = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *own]), return_counts=True)
        is_alone = pool.references[blocks] == counts
        of_others = pool.references > 0
        of_others[blocks[is_alone]] = False
        of_others[NULL_BLOCK_ID] = False
        others = np.flatnonzero(of_others)
        leases = np.unique(others // plan.blocks_per_lease)
        saved = int(counts.sum() - is_alone.sum())
        return cls(len(others), len(leases) * plan.blocks_per_lease, saved)


def _peak(demand: GroupDemand, prospect: Prospect, holding: _Holding) -> int:
    """The most blocks that the batch holds at once."""
    # Blocks that no window passes by stay shared; of others it is not known how long.
    saved = holding.saved if demand.group.spec.kind == "full_attention" else 0
    rewind = prospect.max_rewind
    prompt = np.array([_held(demand, start, stop, rewind) for start, stop in _prompt_steps(prospect)])
    peak = int(prompt.sum(1).max() if prospect.is_in_step else prompt.max(0).sum())
    # Decoding repeats itself where a block edge meets the edge of an attention chunk: look at the last period.
    period = math.lcm(demand.group.block_size, getattr(demand.group.spec, "chunk_size", 1))
    fed, last = 1 + prospect.drafted, prospect.ends[:, -1]
    rewind = min(rewind, fed)
    for step in range(max(0, prospect.num_decodes - period), prospect.num_decodes):
        stop = np.minimum(last + step + fed, last + prospect.num_decodes)
        start = np.maximum(0, last + step - prospect.drafted)  # states go back and are fed again
        held = _held(demand, start, stop, rewind)
        shared = _shared(demand, last, start, rewind)
        peak = max(peak, int((prospect.num_rows * held - (prospect.num_rows - 1) * shared).sum()))
    return peak - saved


def _prompt_steps(prospect: Prospect) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """From where to where each request computes in each step of the prompt; the last one feeds drafts too."""
    start, ends = prospect.computed, prospect.ends.copy()
    ends[:, -1] += min(prospect.drafted, prospect.num_decodes)
    for stop in ends.T:
        yield start, stop
        start = stop


def _held(demand: GroupDemand, start: np.ndarray, stop: np.ndarray, rewind: int) -> np.ndarray:
    """(num_requests,), int64: blocks that each holds while it computes the tokens from `start` to `stop`."""
    spans = zip(start.tolist(), stop.tolist(), strict=True)
    return np.array([_held_by_one(demand, begin, end - begin, rewind) for begin, end in spans])


def _held_by_one(demand: GroupDemand, computed: int, count: int, rewind: int) -> int:
    if computed + count == 0:
        return 0
    if demand.group.is_state:
        return 1 + (rewind > 0)  # the running state and its checkpoint
    hidden = demand.num_hidden_blocks(computed, max(demand.max_rewind, rewind))
    kept = max(0, demand.num_logical_blocks(computed) - hidden)
    return kept + demand.growth(computed, count, rewind).num_new()


def _shared(demand: GroupDemand, parted: np.ndarray, computed: np.ndarray, rewind: int) -> np.ndarray:
    """(num_requests,), int64: blocks that rows which parted at `parted` tokens share after `computed` tokens."""
    if demand.group.is_state or demand.ring_blocks:
        return np.zeros(len(parted), dtype=np.int64)
    hidden = demand.num_hidden_blocks(computed, np.full_like(computed, max(demand.max_rewind, rewind)))
    return np.maximum(0, parted // demand.group.block_size - hidden)
