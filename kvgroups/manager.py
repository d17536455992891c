"""Which request owns which blocks in every KV-cache group, and what that costs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from kvgroups import audit
from kvgroups.accounts import Accounts
from kvgroups.admission import Admission
from kvgroups.arena import Arena
from kvgroups.block_pool import BlockPool
from kvgroups.budget import budget_bytes, num_slabs_of
from kvgroups.checkpoints import Checkpoints
from kvgroups.errors import KVGroupsError, ShapeError
from kvgroups.eviction import EvictionPolicy
from kvgroups.filing import Filing
from kvgroups.group_manager import GroupManager
from kvgroups.guard import Guard
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.pending_ops import POISON, PendingOps
from kvgroups.prefix_cache import PrefixCache
from kvgroups.prefix_hit import PrefixHit, PrefixStats
from kvgroups.prefix_tree import Extra
from kvgroups.request import Checkpoint, Request
from kvgroups.retention import RetentionPolicy
from kvgroups.room import Room
from kvgroups.roster import Roster
from kvgroups.sanitizer import Sanitizer
from kvgroups.slab_plan import SlabPlan
from kvgroups.slab_pool import SlabPool
from kvgroups.specs import KVGroupsConfig
from kvgroups.storage import GroupStorage
from kvgroups.usage import Usage

__all__ = ["Checkpoint", "Manager", "Request"]


class Manager:
    """Hands blocks of all groups to requests, all or nothing, and keeps the bytes behind them.

    One per patched model. Tables belong to whoever runs the requests; the manager writes their rows.
    Safe to call from two threads.

    Args:
        config: the groups and limits. With `memory=None` the arena grows between forwards as needed; with bytes
            or a share it is taken at once and never grows; with blocks by group it grows, and each group keeps
            to its own.
        device: where K, V and states live; "meta" to keep accounts only.
        retention: where requests leave points at which their prefixes can be resumed.
        eviction: the order in which cached blocks are given up; None for a policy of our own.

    Raises:
        OutOfBlocksError: if `config.memory` cannot hold one block of each group.
    """

    def __init__(
        self,
        config: KVGroupsConfig,
        device: torch.device | str,
        retention: RetentionPolicy | None = None,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.plan = SlabPlan.for_config(config)
        self.guard = Guard(self._free_dropped)
        """Entered by every call; `with manager.guard` makes one of several."""
        self._roster = Roster()
        self.pending = PendingOps()
        budget = budget_bytes(config, self.device)
        is_capped = budget is not None
        num_slabs = 1 if budget is None else num_slabs_of(budget, self.plan)
        self.slabs = SlabPool(self.plan, num_slabs)
        self.arena = Arena(self.plan.slab_bytes, self.device, num_slabs, POISON if config.sanitize else None)
        self.prefixes = PrefixCache(config, eviction)
        caps = config.memory if isinstance(config.memory, dict) else {}
        self._groups = {
            group.name: GroupManager(
                config,
                group,
                self.plan.group(group.name),
                self.slabs,
                self.arena,
                self.prefixes,
                self.pending,
                caps.get(group.name),
            )
            for group in config.groups
        }
        self._accounts = Accounts(self._groups, self.arena)
        self._admission = Admission(self.plan, self.slabs, self._groups, is_capped)
        self._room = Room(self.plan, self.slabs, self.arena, self._groups, is_capped)
        self._checkpoints = Checkpoints(self._groups, self._room, self.prefixes, config.max_rewind)
        retention = retention or RetentionPolicy()
        share = int(retention.max_share * self.arena.nbytes) if is_capped else None
        self._filing = Filing(self.prefixes, retention, self._groups, self._room, share)
        self._sanitizer = self._new_sanitizer() if config.sanitize else None

    def _new_sanitizer(self) -> Sanitizer:
        sanitizer = Sanitizer(self._groups, self._roster, self.pending)
        self.prefixes.on_filed = sanitizer.filed
        for name, group in self._groups.items():
            group.on_copy = partial(sanitizer.copied, name)
            group.on_replace = partial(sanitizer.replaced, name)
            group.pool.on_release = partial(sanitizer.released, name)
        return sanitizer

    def storage(self, name: str) -> GroupStorage:
        """The bytes of the group called `name`."""
        return self._groups[name].storage

    def pool(self, name: str) -> BlockPool:
        """The block ownership of the group called `name`."""
        return self._groups[name].pool

    # Requests

    def open(self, tables: MultiGroupBlockTable, row: int, extra: Extra = None) -> Request:
        """A new request without blocks, in an empty `row` of `tables`.

        Args:
            tables: where its row is.
            row: the row.
            extra: what its cached values depend on beside its tokens, if it is filed.

        Raises:
            KVGroupsError: the row belongs to another request.
            ShapeError: no such row.
        """
        with self.guard:
            self._roster.check_vacant(tables, row)
            request = Request(tables, row, extra=extra)
            self._roster.add(request)
            if self._sanitizer is not None:
                self._sanitizer.opened(request)
            return request

    def allocate(self, requests: Sequence[Request], num_new_tokens: Sequence[int]) -> None:
        """Give every request the blocks for its next tokens, in all groups, or raise and change nothing.

        Blocks that no query from now on can see are given up first, so they can serve the new tokens.
        New tokens that no later query can see get no block; their table entry is the null block.
        `advance` or `cancel` ends the step, before the next `allocate`.

        Args:
            requests: requests of this manager, each once.
            num_new_tokens: tokens that each of them is about to compute, 0 or more.

        Raises:
            OutOfBlocksError: naming the group, the need and what there is.
            ShapeError: a negative count, or more tokens than `max_model_len`.
            KVGroupsError: a request that was freed, is another manager's or comes twice, or whose last step was neither
                advanced nor cancelled.
        """
        with self.guard:
            self._roster.check(requests, num_new_tokens)
            longest = self.config.max_model_len
            for request, count in zip(requests, num_new_tokens, strict=True):
                here = request.num_computed_tokens
                # A decode step comes by here for every request: the checks are called only for what they refuse.
                if count < 0 or here + count > longest:
                    request.check_count(count, longest)
                if request.num_allocated_tokens != here:
                    request.check_step(0)
            computed = np.array([request.num_computed_tokens for request in requests], dtype=np.int64)
            rewinds = np.array([request.max_rewind for request in requests], dtype=np.int64)
            counts = np.array(num_new_tokens, dtype=np.int64)
            growths = {
                name: group.growths(requests, computed, counts, rewinds) for name, group in self._groups.items()
            }
            need = {name: sum(growth.num_new() for _, growth in rows) for name, rows in growths.items()}
            self._room.check(
                need, {name: self._groups[name].freed_by(rows) for name, rows in growths.items()}
            )
            self.prefixes.tick()
            # In all groups first: a slab that one gives back may serve another.
            for name, rows in growths.items():
                self._groups[name].release(rows)
            self._room.make(need)
            for name, rows in growths.items():
                self._groups[name].append(rows)
            for request, count in zip(requests, num_new_tokens, strict=True):
                request.num_allocated_tokens += count
            self._accounts.note_peak()

    def drain(self) -> None:
        """Do what the calls so far have written down in `pending`: copies for forks, hits, checkpoints and snapshots.

        Called after `allocate` and before the forward, when no other forward runs.
        """
        if self.pending:
            with self.guard:
                self.pending.drain({name: group.storage for name, group in self._groups.items()})

    def advance(self, requests: Sequence[Request], num_new_tokens: Sequence[int]) -> None:
        """Count tokens as computed, after the forward that wrote them.

        A window keeps what a query after all of the step's tokens can see, so a step is counted whole.

        Raises:
            KVGroupsError: a count that is not what `allocate` was given, or a copy that the step depended on was not
                drained before it; nothing is counted.
        """
        with self.guard:
            self._roster.check(requests, num_new_tokens)
            if self.pending:
                self._check_drained(requests)
            for request, count in zip(requests, num_new_tokens, strict=True):
                if request.num_allocated_tokens - request.num_computed_tokens != count:
                    request.check_step(count)
            if self._sanitizer is not None:
                self._sanitizer.advanced(requests, num_new_tokens)
            for request in requests:
                request.num_computed_tokens = request.num_allocated_tokens

    def cancel(self, requests: Sequence[Request]) -> None:
        """Give back what `allocate` gave for tokens that were not computed after all.

        Raises:
            KVGroupsError: a request that was freed or is another manager's; nothing is given back.
        """
        with self.guard:
            self._roster.check(requests)
            for group in self._groups.values():
                for request in requests:
                    group.truncate(request, request.num_computed_tokens)
            for request in requests:
                request.num_allocated_tokens = request.num_computed_tokens

    def free(self, request: Request) -> None:
        """Give up all blocks of a request. A request can be freed once."""
        with self.guard:
            self._roster.check([request])
            self.prefixes.tick()
            for group in self._groups.values():
                group.free(group.row_blocks(request))
            request.tables.clear_row(request.row)
            self._checkpoints.drop(request)
            if request.cursor is not None:
                self.prefixes.close(request.cursor)
            self._roster.remove(request)
            if self._sanitizer is not None:
                self._sanitizer.freed(request)

    def drop(self, request: Request) -> None:
        """Free a request that nobody can reach any more, whatever else the manager is in the middle of: for finalizers."""
        self.guard.drop(request)

    def _free_dropped(self, request: Request) -> None:
        if request.is_live:
            self.free(request)

    def fork(self, request: Request, tables: MultiGroupBlockTable, row: int) -> Request:
        """A second request with the same past, in an empty `row` of `tables`.

        Full blocks are shared, since nothing writes to them again; the partial tail, ring blocks and
        running states are copied.

        Raises:
            OutOfBlocksError: if the copies do not fit.
            KVGroupsError: the row belongs to another request, or `request` was freed or is in the middle of a
                step. Whatever is raised, nothing is changed.
        """
        with self.guard:
            self._roster.check([request])
            request.check_step(0)
            self._roster.check_vacant(tables, row)
            copies = {name: group.private_columns(request) for name, group in self._groups.items()}
            need = {name: len(columns) for name, columns in copies.items()}
            self._room.check(need)
            self._room.make(need)
            child = Request(
                tables,
                row,
                request.num_computed_tokens,
                request.num_allocated_tokens,
                num_written=request.num_written,
                num_released=dict(request.num_released),
                extra=request.extra,
                hit=request.hit,
                num_prompt_tokens=request.num_prompt_tokens,
                stops=request.stops,
                cursor=None if request.cursor is None else self.prefixes.fork(request.cursor),
            )
            tables.add_row(
                row, {name: group.fork_row(request, copies[name]) for name, group in self._groups.items()}
            )
            self._mark([request, child])
            self._roster.add(child)
            if self._sanitizer is not None:
                self._sanitizer.forked(request, child)
            self._accounts.note_peak()
            return child

    def move(self, request: Request, tables: MultiGroupBlockTable, row: int) -> None:
        """Put a request into an empty `row`, of other tables too; its blocks stay where they are.

        Raises:
            KVGroupsError: the row belongs to a request, or `request` was freed. Nothing is changed.
        """
        with self.guard:
            self._roster.check([request])
            self._roster.check_vacant(tables, row)
            tables.add_row(row, {name: group.row_blocks(request) for name, group in self._groups.items()})
            request.tables.clear_row(request.row)
            request.tables, request.row = tables, row
            if self._sanitizer is not None:
                self._sanitizer.moved(request)

    def set_checkpoints(self, requests: Sequence[Request], offsets: Sequence[int]) -> None:
        """Make room for each request's states as they are `offsets[i]` tokens into its next step.

        With offset 0 the running states are copied now. With another offset, whoever runs the step writes the
        slots of `request.checkpoint` when it comes to that token. A request's earlier checkpoint is given up.

        Args:
            requests: requests of this manager, each once, before their `allocate`.
            offsets: tokens of the step that come before the checkpoint.

        Raises:
            OutOfBlocksError: if the slots do not fit.
            ShapeError: a negative offset.
            KVGroupsError: a request that was freed or is in the middle of a step. Whatever is raised, nothing is
                changed.
        """
        with self.guard:
            self._roster.check(requests, offsets)
            self._checkpoints.set(requests, offsets)
            self._mark(requests)
            self._accounts.note_peak()

    def rewind(self, request: Request, num_tokens: int) -> int:
        """Take a request back by some tokens, in all groups, or raise and change nothing.

        States cannot be undone, only restored: a request with states goes back to its checkpoint, and the tokens
        from there to where it should be must be fed again.

        Args:
            request: between two steps.
            num_tokens: tokens to take back; 0 does nothing.

        Returns:
            Tokens that must be fed again: 0 without state groups.

        Raises:
            ShapeError: fewer than 0 tokens, or more than the request has.
            KVGroupsError: there is no checkpoint that far back, or a window has let go of what a query there
                would see.
            OutOfBlocksError: the new tail is shared and its copy does not fit.
        """
        with self.guard:
            self._roster.check([request])
            again = self._checkpoints.rewind(request, num_tokens)
            if self._sanitizer is not None:
                self._sanitizer.rewound(request)
            self._mark([request])
            return again

    def check_rewind(self, request: Request, num_tokens: int) -> None:
        """Raise what `rewind` would raise for want of a checkpoint or of window tokens; change nothing."""
        with self.guard:
            self._roster.check([request])
            self._checkpoints.base_of(request, num_tokens)

    # Prefixes

    def match_prefix(
        self, token_ids: Sequence[int] | np.ndarray, extra: Extra = None, version: Hashable = None
    ) -> PrefixHit:
        """How much of a prompt is cached in all groups at once, and which group limits it. Takes nothing.

        Args:
            token_ids: (num_tokens,), integers: the prompt.
            extra: what its cached values depend on beside its tokens: an adapter's name, a salt, a digest of
                embeddings.
            version: what identifies the model's parameters; a change since prefixes were cached is warned about.
        """
        with self.guard:
            return self.prefixes.match(token_ids, extra, version)

    def admit(
        self,
        tables: MultiGroupBlockTable,
        row: int,
        token_ids: Sequence[int] | np.ndarray,
        max_new_tokens: int | None = None,
        extra: Extra = None,
        version: Hashable = None,
    ) -> Request:
        """A request that begins behind the longest cached prefix of its prompt, with blocks for its first step.

        The first step is `num_allocated_tokens - num_computed_tokens` tokens: see `next_step`. What the hit serves
        is owned first, then the step's blocks are allocated.

        Args:
            tables: where its row is.
            row: an empty row.
            token_ids: (num_tokens,), integers: the prompt, at least one token.
            max_new_tokens: tokens of its first step at most, 1 or more; None for as many as there are.
            extra: see `match_prefix`.
            version: see `match_prefix`.

        Raises:
            OutOfBlocksError: if it does not fit now. Whatever is raised, nothing is changed.
            KVGroupsError: the row belongs to another request.
            ShapeError: no such row, no prompt, one of more than `max_model_len` tokens, or `max_new_tokens` below 1.
        """
        with self.guard:
            self._roster.check_vacant(tables, row)
            hit = self.prefixes.match(token_ids, extra, version)
            request = self._request_behind(hit, tables, row, extra)
            count = self.next_step(request, max_new_tokens)
            growths = {
                name: group.demand.growth(hit.num_tokens, count, 0, request.num_released[name])
                for name, group in self._groups.items()
            }
            own = {name: group.num_for_hit(hit) for name, group in self._groups.items()}
            need = {name: growth.num_new() + own[name] for name, growth in growths.items()}
            unowned = {name: group.unowned(hit.blocks[name].values()) for name, group in self._groups.items()}
            self._room.check(need, claimed=unowned)
            self.prefixes.tick()
            for group in self._groups.values():
                group.claim(hit)
            self._room.make(need)
            tables.add_row(row, {name: group.hit_row(hit) for name, group in self._groups.items()})
            for name, growth in growths.items():
                self._groups[name].append([(request, growth)])
            request.num_allocated_tokens += count
            request.cursor = self.prefixes.open(extra, hit)
            self._mark([request])
            self._roster.add(request)
            if self._sanitizer is not None:
                self._sanitizer.admitted(request, np.asarray(token_ids))
            self._accounts.note_peak()
            return request

    def next_step(self, request: Request, max_new_tokens: int | None = None) -> int:
        """Tokens of the prompt that a request computes next: what is left of it, or up to its next retention point.

        Args:
            request: one that was admitted.
            max_new_tokens: at most so many, 1 or more.

        Raises:
            ShapeError: `max_new_tokens` below 1.
        """
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ShapeError(f"max_new_tokens: expected 1 or more, or None, got {max_new_tokens}")
        here = request.num_computed_tokens
        stop = min([request.num_prompt_tokens, *(stop for stop in request.stops if stop > here)])
        left = max(0, stop - here)
        return left if max_new_tokens is None else min(left, max_new_tokens)

    def file(self, request: Request, token_ids: Sequence[int] | np.ndarray, version: Hashable = None) -> None:
        """Make findable what a request has computed: its full blocks, and its states if it is at a retention point.

        Called between two steps, after `advance` and when drafts are verified. Costs what is new.

        Args:
            request: the request.
            token_ids: (num_tokens,), integers: its tokens from the first on, at least the computed ones.
            version: see `match_prefix`.

        Raises:
            ShapeError: fewer tokens than were computed.
            KVGroupsError: the request was freed, or is in the middle of a step.
        """
        with self.guard:
            self._roster.check([request])
            request.check_step(0)
            here = request.num_computed_tokens
            if len(token_ids) < here:
                raise ShapeError(
                    f"token_ids: expected the {here} tokens that the request has computed, got {len(token_ids)}"
                )
            self.prefixes.note_version(version)
            watched = self._sanitizer.filing(request, np.asarray(token_ids[:here])) if self._sanitizer else nullcontext()
            with watched:
                self._filing.file(request, token_ids[:here])
            self._mark([request])

    def flush(self) -> None:
        """Forget all prefixes, as after a change of the model's parameters. Live requests keep their blocks; what
        they compute from now on depends on what they computed before, so it is not filed any more."""
        with self.guard:
            for name, block_ids in self.prefixes.flush().items():
                self._groups[name].pool.drop(block_ids)
            for request in self._roster:
                if request.cursor is None:
                    request.cursor = self.prefixes.open(request.extra)
                request.cursor.is_blocked = request.num_computed_tokens > 0
                request.points.clear()

    @property
    def prefix_stats(self) -> PrefixStats:
        """What the prefix cache did since the manager was made."""
        return self.prefixes.stats

    def explain(self, request: Request) -> str:
        """Where a request's blocks came from, and why its hit was not longer: a text for people."""
        with self.guard:
            self._roster.check([request])
            return self._accounts.explain(request)

    def _request_behind(
        self, hit: PrefixHit, tables: MultiGroupBlockTable, row: int, extra: Extra
    ) -> Request:
        request = Request(
            tables,
            row,
            hit.num_tokens,
            hit.num_tokens,
            num_released={name: min(hit.blocks[name], default=0) for name in self._groups},
            extra=extra,
            hit=hit,
            num_prompt_tokens=hit.num_prompt_tokens,
            stops=self._filing.stops(hit),
        )
        if hit.num_prompt_tokens == 0:
            raise ShapeError("token_ids: expected at least one token, got none")
        request.check_count(hit.num_prompt_tokens - hit.num_tokens, self.config.max_model_len)
        return request

    # Limits and accounts

    def check_fits(
        self,
        num_requests: int,
        prompt_len: int,
        max_len: int,
        chunk_size: int | None = None,
        padding: Sequence[int] = (),
        num_shared: int = 0,
        max_rewind: int = 0,
    ) -> None:
        """Refuse what can never fit, with the arithmetic that `allocate` uses, before anything is taken.

        Args:
            num_requests: requests that run side by side.
            prompt_len: tokens of the longest prompt.
            max_len: tokens of the longest prompt and its answer, as far as they are computed.
            chunk_size: tokens of one prefill step; None for the whole prompt at once.
            padding: how many tokens each prompt is shorter than the longest, padded on the left; empty if none
                is. A shorter prompt can need more of a window: it may end elsewhere in its block.
            num_shared: requests whose prompt is that of another one, so that they share its full blocks.
            max_rewind: drafted tokens that each step feeds beside its own and can take back; states are then
                checkpointed.

        Raises:
            OutOfBlocksError: naming the group, the need and what there is.
            ShapeError: no request, or a negative length.
        """
        if num_requests < 1 or prompt_len < 0 or (chunk_size is not None and chunk_size < 1):
            raise ShapeError(
                f"check_fits: expected one request or more, of 0 tokens or more, in chunks of one or more, got "
                f"{num_requests}, {prompt_len} and {chunk_size}"
            )
        if self.config.memory is None:
            return
        self._admission.check_fits(
            num_requests, prompt_len, max_len, chunk_size, padding, num_shared, max_rewind
        )

    def usage(self) -> Usage:
        """Bytes live, cached, free, leased and wasted, group by group, and what each request holds."""
        with self.guard:
            return self._accounts.usage(self._roster)

    def held_blocks(self, request: Request, name: str) -> np.ndarray:
        """(n,), int32: what a request holds of the group called `name`: its row's blocks, and its checkpoint's slot."""
        return self._groups[name].held_blocks(request)

    def held_bytes(self, requests: Sequence[Request]) -> dict[str, int]:
        """Group -> bytes of the blocks that these requests hold; one that several hold counts once."""
        with self.guard:
            return self._accounts.held_bytes(requests)

    def reset_peak(self) -> None:
        """Start the peaks of `usage` anew from what is held now."""
        with self.guard:
            self._accounts.reset_peak()

    def check(self) -> None:
        """Hold every slab and every block's owners against the tables, every row against its request, and the device's
        tables against the CPU's.

        Raises:
            KVGroupsError: naming the group and the slab, block or row, if a slab is leased to another group than
                uses it, if a block is in more or fewer rows than it has owners, if owned, cached, free and null
                blocks are not all there are, if a row reaches past its request, or if a block that its next query
                sees is null.
        """
        with self.guard:
            audit.check_all(self.slabs, self._groups, self.arena.num_slabs, list(self._roster))
            self.prefixes.check([request.cursor for request in self._roster if request.cursor is not None])

    # What waits

    def _mark(self, requests: Sequence[Request]) -> None:
        """What has been written down by now concerns these requests: their next forward comes after it."""
        for request in requests:
            request.num_ops = self.pending.num_recorded

    def _check_drained(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.num_ops > self.pending.num_drained:
                raise KVGroupsError(
                    f"the request in row {request.row} was computed while {len(self.pending)} copies of blocks were "
                    "waiting; call drain() after allocate and before the forward"
                )
