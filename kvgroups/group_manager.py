"""One KV-cache group's share of the manager: the rows of its tables, its blocks and its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvgroups.arena import Arena
from kvgroups.block_pool import BlockPool
from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.demand import GroupDemand, Growth
from kvgroups.errors import KVGroupsError
from kvgroups.pending_ops import PendingOps
from kvgroups.prefix_cache import PrefixCache
from kvgroups.prefix_hit import PrefixHit
from kvgroups.request import Request
from kvgroups.slab_plan import GroupPlan
from kvgroups.slab_pool import SlabPool
from kvgroups.specs import GroupConfig, KVGroupsConfig, MambaSpec
from kvgroups.storage import GroupStorage
from kvgroups.usage import GroupUsage

Release = tuple[Request, range]
"""A request, and the columns of its row that no query sees any more."""


class GroupManager:
    """What every group does alike, with what differs asked of its `GroupDemand`.

    Its calls change one group, so the manager makes them only once it knows that all groups can follow.

    Args:
        config: the limits.
        group: the group's config.
        plan: how the group cuts the arena.
        slabs: where slabs are leased.
        arena: the bytes of all groups.
        prefixes: what is known of blocks' content, in all groups.
        pending: where copies are written down.
        max_blocks: the most blocks that may be owned at once; None for as many as the slabs hold.
    """

    def __init__(
        self,
        config: KVGroupsConfig,
        group: GroupConfig,
        plan: GroupPlan,
        slabs: SlabPool,
        arena: Arena,
        prefixes: PrefixCache,
        pending: PendingOps,
        max_blocks: int | None = None,
    ) -> None:
        self.config = group
        self.name = group.name
        self.plan = plan
        self.demand = GroupDemand(config, group)
        self.pool = BlockPool(plan, slabs, max_blocks)
        self.storage = GroupStorage(group, plan, arena)
        self._prefixes = prefixes
        self._pending = pending
        self.on_copy: Callable[[int, int], None] | None = None
        """Told of every copy that is written down: from which block to which."""
        self.on_replace: Callable[[Request, int, int], None] | None = None
        """Told when a request holds another block in a column of its row."""
        self.copied_bytes = 0
        """Bytes that forks and rewinds have copied since the manager was made."""
        self.peak_held_bytes = 0
        """The most bytes of owned blocks at once."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that have an owner."""
        return self.pool.num_used * self.plan.block_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of the blocks that nobody owns and a later request may find."""
        return self.pool.num_cached * self.plan.block_bytes

    def note_peak(self) -> None:
        """Remember what is held now if it is more than ever before."""
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)

    def usage(self) -> GroupUsage:
        """The group's account of this moment."""
        num_leased = len(self.pool.leases) * self.plan.slabs_per_lease
        return GroupUsage(
            name=self.name,
            block_bytes=self.plan.block_bytes,
            num_used=self.pool.num_used,
            num_cached=self.pool.num_cached,
            num_free=self.pool.num_free,
            num_leased_slabs=num_leased,
            leased_bytes=self.pool.num_blocks * self.plan.stride_bytes,
            peak_held_bytes=self.peak_held_bytes,
        )

    # Owners

    def free(self, block_ids: Sequence[int] | np.ndarray) -> None:
        """Give up one ownership of each block; what is known of their content is kept."""
        ids = np.asarray(block_ids, dtype=np.int64)
        kept = ids[self.pool.is_kept[ids]]  # few, most often: nothing is known of the others
        self.pool.free(ids)
        if len(kept):
            self._prefixes.release(self.name, np.unique(kept[self.pool.references[kept] == 0]).tolist())

    def cached_blocks(self) -> np.ndarray:
        """(n,), int64, ascending: blocks that nobody owns and a later request may find."""
        return np.flatnonzero(self.pool.is_kept & (self.pool.references == 0))

    def not_kept(self, block_ids: np.ndarray) -> np.ndarray:
        """Those of some blocks that are free, and not cached, without an owner."""
        return block_ids[~self.pool.is_kept[block_ids]]

    def unowned(self, block_ids: Iterable[int]) -> np.ndarray:
        """(n,), int64: those of some blocks that have no owner."""
        ids = np.array(list(block_ids), dtype=np.int64)
        return ids[self.pool.references[ids] == 0]

    def forget(self, block_id: int) -> None:
        """A block is about to be written again: what was known of it is not true any more."""
        if self.pool.is_kept[block_id]:
            self._prefixes.forget(self.name, block_id)
            self.pool.drop([block_id])

    def check_filed(self) -> None:
        """Raise KVGroupsError unless exactly the blocks whose content is known are kept, and those of them that
        nobody owns can be evicted."""
        kept, filed = np.flatnonzero(self.pool.is_kept).tolist(), self._prefixes.filed_blocks(self.name)
        if kept != filed:
            odd = min(set(kept) ^ set(filed))
            raise KVGroupsError(
                f"group {self.name!r}: block {odd} is {'kept and not filed' if odd in kept else 'filed and not kept'}"
            )
        idle = sorted(block.block_id for block in self._prefixes.idle_blocks(self.name))
        if idle != self.cached_blocks().tolist():
            raise KVGroupsError(
                f"group {self.name!r}: blocks {idle} can be evicted and {self.cached_blocks().tolist()} have no owner"
            )

    # Rows

    def row_blocks(self, request: Request) -> np.ndarray:
        """(blocks,), int32: the request's row, null entries included. A read-only view."""
        table = request.tables[self.name]
        return table.table[request.row, : table.num_blocks_per_row[request.row]]

    def held_blocks(self, request: Request) -> np.ndarray:
        """(n,), int32: the blocks that the request owns, its checkpoint's slot among them."""
        blocks = self.row_blocks(request)
        slots = request.checkpoint.slots if request.checkpoint is not None else {}
        own = [slots[self.name]] if self.name in slots else []
        return np.append(blocks[blocks != NULL_BLOCK_ID], np.array(own, dtype=np.int32))

    def _last_block(self, request: Request) -> int:
        """The block that new ones should follow, so that a long request is few intervals.

        A group that lets blocks go has none: its blocks do better low down than in the way of those that stay.
        """
        blocks = self.row_blocks(request)
        return int(blocks[-1]) if len(blocks) and self.demand.keeps_all else NULL_BLOCK_ID

    # A step

    def growths(
        self, requests: Sequence[Request], computed: np.ndarray, counts: np.ndarray, rewinds: np.ndarray
    ) -> list[tuple[Request, Growth]]:
        """What the next `counts[i]` tokens of `requests[i]` need, for those that need anything.

        Args:
            requests: (n,).
            computed: (n,), int64, tokens that each has computed.
            counts: (n,), int64, tokens that each is about to compute.
            rewinds: (n,), int64, tokens that each may be taken back, if more than the config says.
        """
        keeps_all = self.demand.keeps_all
        released = [0 if keeps_all else request.num_released.get(self.name, 0) for request in requests]
        return [
            (requests[i], growth) for i, growth in self.demand.growths(computed, counts, rewinds, released)
        ]

    def freed_by(self, growths: Iterable[tuple[Request, Growth]]) -> np.ndarray:
        """(n,), int64, ascending: blocks that nobody owns once all these releases are applied."""
        releases = [(request, growth.release) for request, growth in growths if growth.release]
        if not releases:
            return np.zeros(0, dtype=np.int64)
        ids, counts = np.unique(self._named(releases), return_counts=True)
        return ids[self.pool.references[ids] == counts]  # the null block has no owner to begin with

    def release(self, growths: Iterable[tuple[Request, Growth]]) -> None:
        """Give up what no query sees any more, of all rows at once: slabs that empty go back."""
        releases = [(request, growth.release) for request, growth in growths if growth.release]
        if not releases:
            return
        self.free(self._named(releases))
        if (places := _one_in_each(releases)) is not None:
            releases[0][0].tables[self.name].null_each(*places)
        for request, which in releases:
            if places is None:
                request.tables[self.name].null_range(request.row, which.start, which.stop)
            request.num_released[self.name] = which.stop

    def _named(self, releases: Sequence[Release]) -> np.ndarray:
        """(n,), int64: the blocks in these columns of these requests' rows, null ones included."""
        if (places := _one_in_each(releases)) is not None:
            return releases[0][0].tables[self.name].table[places].astype(np.int64)
        return np.concatenate([self.row_blocks(request)[which] for request, which in releases]).astype(np.int64)

    def append(self, growths: Iterable[tuple[Request, Growth]]) -> None:
        """Give every row its new blocks, one row's behind the other's."""
        growing = [(request, growth.append) for request, growth in growths if growth.append]
        if not growing:
            return
        num_new = sum(sum(append) for _, append in growing)
        block_ids = self.pool.allocate(num_new, after=self._last_block(growing[0][0]))
        tables = growing[0][0].tables
        if all(append == (True,) and request.tables is tables for request, append in growing):
            tables[self.name].append_each([request.row for request, _ in growing], block_ids)
            return
        fresh = iter(block_ids)
        for request, append in growing:
            blocks = [next(fresh) if is_stored else NULL_BLOCK_ID for is_stored in append]
            request.tables[self.name].append_row(request.row, blocks)

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Give up the blocks that `num_tokens` tokens do not need."""
        keep = self.demand.num_logical_blocks(num_tokens)
        self.free(self.row_blocks(request)[keep:])
        request.tables[self.name].truncate_row(request.row, keep)
        request.num_released[self.name] = min(request.num_released.get(self.name, 0), keep)

    # Hits and eviction

    def num_for_hit(self, hit: PrefixHit) -> int:
        """Blocks of its own that a request needs to begin behind a hit: a running state."""
        return int(self.config.is_state and hit.num_tokens > 0)

    def claim(self, hit: PrefixHit) -> None:
        """Own what a hit serves."""
        block_ids = list(hit.blocks[self.name].values())
        self._prefixes.claim(self.name, block_ids)
        self.pool.share(block_ids)

    def hit_row(self, hit: PrefixHit) -> np.ndarray:
        """(blocks,), int32: the row of a request that begins behind a hit, whose blocks are claimed.

        A snapshot is copied, never written: it is given up again once the request has a state of its own.
        """
        row = np.zeros(self.demand.num_logical_blocks(hit.num_tokens), dtype=np.int32)
        for column, block_id in hit.blocks[self.name].items():
            row[column] = block_id
            if self.config.is_state:
                (row[column],) = self.pool.allocate(1)
                self.copy_block(block_id, int(row[column]))
                self.free([block_id])
        return row

    def hold_instead(self, request: Request, column: int, block_id: int) -> None:
        """Hold a filed block in the place of a request's own, which has the same content."""
        own = int(self.row_blocks(request)[column])
        self._prefixes.claim(self.name, [block_id])
        self.pool.share([block_id])
        request.tables[self.name].replace_block(request.row, column, block_id)
        self.free([own])
        if self.on_replace is not None:
            self.on_replace(request, column, block_id)

    def first_cached(self) -> tuple[float, int] | None:
        """What evicting the block that is missed least would lose per byte, and when it was last used."""
        first = self._prefixes.first(self.name)
        return None if first is None else first[1][:2]

    def evict_first(self, count: int, max_loss: float = np.inf) -> None:
        """Evict up to `count` cached blocks, those that are missed least, as long as a byte is worth no more."""
        evicted: list[int] = []
        while len(evicted) < count:
            first = self._prefixes.first(self.name)
            if first is None or first[1][0] > max_loss:
                break
            self._prefixes.evict(first[0])
            evicted.append(first[0].block_id)
        self.pool.drop(evicted)

    def evict_lease(self, lease: int) -> None:
        """Evict all blocks of a lease, none of which has an owner, so that its slabs go back."""
        start = lease * self.plan.blocks_per_lease
        block_ids = start + np.flatnonzero(self.pool.is_kept[start : start + self.plan.blocks_per_lease])
        for block_id in block_ids.tolist():
            self._prefixes.evict(self._prefixes.block(self.name, block_id))
        self.pool.drop(block_ids)

    def lease_losses(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What evicting each lease would lose, and when any of it was last used.

        Returns:
            (n,), int64, the leases; (n,), float64, infinite where a block has an owner; (n,), int64.
        """
        leases = np.fromiter(self.pool.leases, dtype=np.int64)
        losses, ticks = self._prefixes.losses(self.name, len(self.pool.references))
        shape = (-1, self.plan.blocks_per_lease)
        is_owned = (self.pool.references.reshape(shape)[leases] > 0).any(1)
        lost = losses.reshape(shape)[leases].sum(1)
        return leases, np.where(is_owned, np.inf, lost), ticks.reshape(shape)[leases].max(1, initial=0)

    def explain(self, request: Request) -> str:
        """Where the blocks of a request's row came from, in one line."""
        blocks = self.row_blocks(request)
        held = blocks[blocks != NULL_BLOCK_ID]
        hit = set(request.hit.blocks[self.name].values()) if request.hit is not None else set()
        num_hit = 0 if self.config.is_state else sum(int(block_id) in hit for block_id in held)
        num_shared = int((self.pool.references[held] > 1).sum())
        num_kept = int(self.pool.is_kept[held].sum())
        text = (
            f"group {self.name!r}: {len(held)} blocks, {num_hit} of them from the hit, {num_shared} shared with other "
            f"requests, {num_kept} findable"
        )
        return text + f"; {len(blocks) - len(held)} out of sight" * (len(held) < len(blocks))

    # Forks

    def private_columns(self, request: Request) -> list[int]:
        """Columns that a fork must copy: the partial tail, a ring's blocks, the running state."""
        blocks = self.row_blocks(request)
        full = request.num_computed_tokens // self.config.block_size
        first = 0 if self.config.is_state or self.demand.ring_blocks else full
        return [column for column in range(first, len(blocks)) if blocks[column] != NULL_BLOCK_ID]

    def fork_row(self, request: Request, copied: Sequence[int]) -> np.ndarray:
        """(blocks,), int32: a row that shares the request's blocks but for copies of the columns `copied`."""
        blocks = self.row_blocks(request).copy()
        shared = np.delete(blocks, copied)
        self.pool.share(shared[shared != NULL_BLOCK_ID])
        fresh = self.pool.allocate(len(copied), after=self._last_block(request))
        for column, block_id in zip(copied, fresh, strict=True):
            self.copy_block(int(blocks[column]), block_id)
            blocks[column] = block_id
        return blocks

    def copy_block(self, source: int, target: int) -> None:
        """Have a block's bytes copied, and count them."""
        self._pending.copy(self.name, source, target)
        if self.on_copy is not None:
            self.on_copy(source, target)
        self.copied_bytes += self.plan.block_bytes

    def copy_state(self, request: Request, slot: int) -> None:
        """Have a request's running state copied to another slot."""
        self.copy_block(int(self.row_blocks(request)[0]), slot)

    # Going back

    def check_window(self, request: Request, base: int, max_rewind: int) -> None:
        """Raise unless the group still holds what a query after `base` tokens sees.

        Args:
            request: the request.
            base: tokens that it would go back to.
            max_rewind: what it could have gone back, for the message.
        """
        spec, size = self.config.spec, self.config.block_size
        if isinstance(spec, MambaSpec):
            return
        if self.demand.ring_blocks:
            written = max(request.num_written, request.num_computed_tokens)
            kept = written - self.demand.ring_blocks * size
            is_kept = base == request.num_computed_tokens or kept <= spec.first_visible(base)
        else:
            blocks = self.row_blocks(request)
            needed = blocks[spec.first_visible(base) // size : self.demand.num_logical_blocks(base)]
            is_kept = bool((needed != NULL_BLOCK_ID).all())
        if not is_kept:
            raise KVGroupsError(
                f"rewind: group {self.name!r} has let go of tokens that a query after {base} tokens sees; "
                f"raise max_rewind (now {max_rewind}) before the tokens are fed"
            )

    def has_shared_tail(self, request: Request, base: int) -> bool:
        """Whether another request holds the block that this one would write to at `base` tokens."""
        if self.config.is_state or self.demand.ring_blocks or base % self.config.block_size == 0:
            return False
        return bool(self.pool.references[self.row_blocks(request)[base // self.config.block_size]] > 1)

    def own_tail(self, request: Request) -> None:
        """Replace the last block of a row, which others share, by a copy."""
        blocks = self.row_blocks(request)
        column, shared = len(blocks) - 1, int(blocks[-1])
        (own,) = self.pool.allocate(1, after=int(blocks[-2]) if column else NULL_BLOCK_ID)
        self.copy_block(shared, own)
        self.free([shared])
        request.tables[self.name].truncate_row(request.row, column)
        request.tables[self.name].append_row(request.row, [own])

    def restore_state(self, request: Request) -> None:
        """Make the checkpoint's slot the running one."""
        assert request.checkpoint is not None
        self.free(self.row_blocks(request))
        request.tables[self.name].truncate_row(request.row, 0)
        if self.name in request.checkpoint.slots:
            request.tables[self.name].append_row(request.row, [request.checkpoint.slots[self.name]])


def _one_in_each(releases: Sequence[Release]) -> tuple[list[int], list[int]] | None:
    """Rows and columns, where several rows of one table release one block each, as decode steps do; None otherwise."""
    tables = releases[0][0].tables
    if len(releases) == 1 or any(len(which) != 1 or request.tables is not tables for request, which in releases):
        return None
    return [request.row for request, _ in releases], [which.start for _, which in releases]
