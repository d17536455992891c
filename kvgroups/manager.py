"""Which request owns which blocks in every KV-cache group, and what that costs."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
import torch

from kvgroups import audit
from kvgroups.arena import Arena
from kvgroups.block_pool import BlockPool
from kvgroups.block_table import MultiGroupBlockTable
from kvgroups.errors import KVGroupsError, OutOfBlocksError, ShapeError
from kvgroups.eviction import EvictionPolicy
from kvgroups.filing import Filing
from kvgroups.group_manager import GroupManager
from kvgroups.prefix_cache import PrefixCache
from kvgroups.prefix_hit import PrefixHit, PrefixStats
from kvgroups.prefix_tree import Extra
from kvgroups.request import Checkpoint, Request
from kvgroups.retention import RetentionPolicy
from kvgroups.room import Room
from kvgroups.slab_plan import SlabPlan
from kvgroups.slab_pool import SlabPool
from kvgroups.specs import KVGroupsConfig
from kvgroups.storage import GroupStorage
from kvgroups.usage import RequestUsage, Usage

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
        self._lock = threading.RLock()
        self._requests: dict[Request, None] = {}
        self._peak_held_bytes = 0
        budget = self._budget_bytes()
        self._is_capped = budget is not None
        num_slabs = 1 if budget is None else self._num_slabs_of(budget)
        self.slabs = SlabPool(self.plan, num_slabs)
        self.arena = Arena(self.plan.slab_bytes, self.device, num_slabs)
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
                caps.get(group.name),
            )
            for group in config.groups
        }
        self._room = Room(self.plan, self.slabs, self.arena, self._groups, self._is_capped)
        retention = retention or RetentionPolicy()
        share = int(retention.max_share * self.arena.nbytes) if self._is_capped else None
        self._filing = Filing(self.prefixes, retention, self._groups, self._room, share)

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
        with self._lock:
            self._check_vacant(tables, row)
            request = Request(tables, row, extra=extra)
            self._requests[request] = None
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
            KVGroupsError: a request that was freed, or whose last step was neither advanced nor cancelled.
        """
        with self._lock:
            for request, count in zip(requests, num_new_tokens, strict=True):
                self._check_request(request, count)
                if request.num_allocated_tokens != request.num_computed_tokens:
                    self._check_step(request, 0)
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
            self._note_peak()

    def advance(self, requests: Sequence[Request], num_new_tokens: Sequence[int]) -> None:
        """Count tokens as computed, after the forward that wrote them.

        A window keeps what a query after all of the step's tokens can see, so a step is counted whole.

        Raises:
            KVGroupsError: a count that is not what `allocate` was given; nothing is counted.
        """
        with self._lock:
            for request, count in zip(requests, num_new_tokens, strict=True):
                self._check_step(request, count)
            for request, count in zip(requests, num_new_tokens, strict=True):
                request.num_computed_tokens += count

    def cancel(self, requests: Sequence[Request]) -> None:
        """Give back what `allocate` gave for tokens that were not computed after all."""
        with self._lock:
            for group in self._groups.values():
                for request in requests:
                    group.truncate(request, request.num_computed_tokens)
            for request in requests:
                request.num_allocated_tokens = request.num_computed_tokens

    def free(self, request: Request) -> None:
        """Give up all blocks of a request. A request can be freed once."""
        with self._lock:
            self._check_request(request, 0)
            self.prefixes.tick()
            for group in self._groups.values():
                group.free(group.row_blocks(request))
            request.tables.clear_row(request.row)
            self._drop_checkpoint(request)
            if request.cursor is not None:
                self.prefixes.close(request.cursor)
            request.is_live = False
            del self._requests[request]

    def fork(self, request: Request, tables: MultiGroupBlockTable, row: int) -> Request:
        """A second request with the same past, in an empty `row` of `tables`.

        Full blocks are shared, since nothing writes to them again; the partial tail, ring blocks and
        running states are copied.

        Raises:
            OutOfBlocksError: if the copies do not fit.
            KVGroupsError: the row belongs to another request, or `request` was freed or is in the middle of a
                step. Whatever is raised, nothing is changed.
        """
        with self._lock:
            self._check_request(request, 0)
            self._check_step(request, 0)
            self._check_vacant(tables, row)
            copies = {name: group.private_columns(request) for name, group in self._groups.items()}
            need = {name: len(columns) for name, columns in copies.items()}
            self._room.check(need)
            self._room.make(need)
            child = Request(
                tables,
                row,
                request.num_computed_tokens,
                request.num_allocated_tokens,
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
            self._requests[child] = None
            self._note_peak()
            return child

    def move(self, request: Request, tables: MultiGroupBlockTable, row: int) -> None:
        """Put a request into an empty `row`, of other tables too; its blocks stay where they are.

        Raises:
            KVGroupsError: the row belongs to a request, or `request` was freed. Nothing is changed.
        """
        with self._lock:
            self._check_request(request, 0)
            self._check_vacant(tables, row)
            tables.add_row(row, {name: group.row_blocks(request) for name, group in self._groups.items()})
            request.tables.clear_row(request.row)
            request.tables, request.row = tables, row

    def set_checkpoints(self, requests: Sequence[Request], offsets: Sequence[int]) -> None:
        """Make room for each request's states as they are `offsets[i]` tokens into its next step.

        With offset 0 the running states are copied now. With another offset, whoever runs the step writes the
        slots of `request.checkpoint` when it comes to that token. A request's earlier checkpoint is given up.

        Args:
            requests: requests of this manager, each once, before their `allocate`.
            offsets: tokens of the step that come before the checkpoint.

        Raises:
            OutOfBlocksError: if the slots do not fit; nothing is changed.
        """
        with self._lock:
            states = {name: group for name, group in self._groups.items() if group.config.is_state}
            totals = [r.num_computed_tokens + offset for r, offset in zip(requests, offsets, strict=True)]
            for request in requests:
                self._check_request(request, 0)
            need = sum(total > 0 for total in totals)
            old = [request.checkpoint.slots for request in requests if request.checkpoint is not None]
            self._room.check(
                dict.fromkeys(states, need),
                {
                    name: np.array([slots[name] for slots in old if name in slots], dtype=np.int64)
                    for name in states
                },
            )
            for request in requests:
                self._drop_checkpoint(request)
            self._room.make(dict.fromkeys(states, need))
            for request, total, offset in zip(requests, totals, offsets, strict=True):
                slots = {name: group.pool.allocate(1)[0] for name, group in states.items() if total}
                if offset == 0:
                    for name, slot in slots.items():
                        states[name].copy_block(int(states[name].row_blocks(request)[0]), slot)
                request.checkpoint = Checkpoint(total, slots)
            self._note_peak()

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
        with self._lock:
            base = self._rewind_base(request, num_tokens)
            if num_tokens == 0:
                return 0
            shared = [name for name, group in self._groups.items() if group.has_shared_tail(request, base)]
            self._room.check(dict.fromkeys(shared, 1))
            self._room.make(dict.fromkeys(shared, 1))
            if request.cursor is not None:
                self.prefixes.rewind(request.cursor, base)
            for name, group in self._groups.items():
                if group.config.is_state:
                    group.restore_state(request)
                    continue
                group.truncate(request, base)
                if name in shared:
                    group.own_tail(request)
                elif base % group.config.block_size and not group.demand.ring_blocks:
                    group.forget(int(group.row_blocks(request)[-1]))
            if request.checkpoint is not None:
                request.checkpoint = None  # its slots are the running ones now
            target = request.num_computed_tokens - num_tokens
            request.num_computed_tokens = request.num_allocated_tokens = base
            return target - base

    def check_rewind(self, request: Request, num_tokens: int) -> None:
        """Raise what `rewind` would raise for want of a checkpoint or of window tokens; change nothing."""
        with self._lock:
            self._rewind_base(request, num_tokens)

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
        with self._lock:
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
            max_new_tokens: tokens of its first step at most; None for as many as there are.
            extra: see `match_prefix`.
            version: see `match_prefix`.

        Raises:
            OutOfBlocksError: if it does not fit now. Whatever is raised, nothing is changed.
            KVGroupsError: the row belongs to another request.
            ShapeError: no such row, no prompt, or one of more than `max_model_len` tokens.
        """
        with self._lock:
            self._check_vacant(tables, row)
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
            self._requests[request] = None
            self._note_peak()
            return request

    def next_step(self, request: Request, max_new_tokens: int | None = None) -> int:
        """Tokens of the prompt that a request computes next: what is left of it, or up to its next retention point.

        Args:
            request: one that was admitted.
            max_new_tokens: at most so many.
        """
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
        with self._lock:
            self._check_request(request, 0)
            self._check_step(request, 0)
            here = request.num_computed_tokens
            if len(token_ids) < here:
                raise ShapeError(
                    f"token_ids: expected the {here} tokens that the request has computed, got {len(token_ids)}"
                )
            self.prefixes.note_version(version)
            self._filing.file(request, token_ids[:here])

    def flush(self) -> None:
        """Forget all prefixes, as after a change of the model's parameters. Live requests keep their blocks; what
        they compute from now on depends on what they computed before, so it is not filed any more."""
        with self._lock:
            for name, block_ids in self.prefixes.flush().items():
                self._groups[name].pool.drop(block_ids)
            for request in self._requests:
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
        with self._lock:
            self._check_request(request, 0)
            lines = [f"row {request.row}: {request.num_computed_tokens} tokens are computed"]
            if request.hit is None:
                lines.append("  it was opened without a prompt, so no prefix was looked for")
            else:
                lines += [f"  {line}" for line in request.hit.explain().splitlines()]
            lines += [f"  {group.explain(request)}" for group in self._groups.values()]
            if request.points:
                lines.append(f"  it keeps retention points at {', '.join(map(str, sorted(request.points)))}")
            return "\n".join(lines)

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
        self._check_request(request, hit.num_prompt_tokens - hit.num_tokens)
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
        """
        if self.config.memory is None:
            return
        pads = Counter(padding or [0] * num_requests)
        need = {
            name: sum(
                count * group.demand.peak_blocks(prompt_len, max_len, chunk_size, pad, max_rewind)
                for pad, count in pads.items()
            )
            - num_shared * group.demand.num_shared_blocks(prompt_len - max(pads))
            for name, group in self._groups.items()
        }
        what = f"{num_requests} requests of up to {max_len} tokens need"
        for name, group in self._groups.items():
            cap = group.pool.max_blocks
            if cap is not None and need[name] > cap:
                raise OutOfBlocksError(
                    f"group {name!r}: {what} {need[name]} blocks of {group.config.block_size} tokens and there are "
                    f"{cap}; give more memory, or fewer or shorter requests"
                )
        num_slabs = self.plan.num_slabs(need)
        if self._is_capped and num_slabs > self.slabs.num_slabs:
            largest = max(need, key=lambda name: need[name] * self.plan.group(name).stride_bytes)
            raise OutOfBlocksError(
                f"memory: {what} {num_slabs} slabs of {self.plan.slab_bytes} bytes (group {largest!r}: "
                f"{need[largest]} blocks) and there are {self.slabs.num_slabs}; give more memory, or fewer or shorter "
                "requests"
            )

    def usage(self) -> Usage:
        """Bytes live, cached, free, leased and wasted, group by group, and what each request holds."""
        with self._lock:
            return Usage(
                groups=tuple(group.usage() for group in self._groups.values()),
                requests=tuple(self._request_usage(request) for request in self._requests),
                allocated_bytes=self.arena.nbytes,
                peak_held_bytes=self._peak_held_bytes,
                copied_bytes=sum(group.copied_bytes for group in self._groups.values()),
            )

    def reset_peak(self) -> None:
        """Start the peaks of `usage` anew from what is held now."""
        with self._lock:
            self._peak_held_bytes = 0
            for group in self._groups.values():
                group.peak_held_bytes = 0
            self._note_peak()

    def check(self) -> None:
        """Hold every slab and every block's owners against the tables, and every row against its request.

        Raises:
            KVGroupsError: naming the group and the slab, block or row, if a slab is leased to another group than
                uses it, if a block is in more or fewer rows than it has owners, if owned, cached, free and null
                blocks are not all there are, if a row reaches past its request, or if a block that its next query
                sees is null.
        """
        with self._lock:
            audit.check_slabs(self.slabs, self._groups, self.arena.num_slabs)
            for group in self._groups.values():
                audit.check_blocks(group, self._requests)
                for request in self._requests:
                    audit.check_row(group, request)
            cursors = [request.cursor for request in self._requests if request.cursor is not None]
            self.prefixes.check(cursors)

    # Going back

    def _rewind_base(self, request: Request, num_tokens: int) -> int:
        """The number of tokens that a rewound request can really go back to."""
        self._check_request(request, 0)
        self._check_step(request, 0)
        target = request.num_computed_tokens - num_tokens
        if num_tokens < 0 or target < 0:
            raise ShapeError(
                f"rewind: expected 0 to {request.num_computed_tokens} tokens, what the request has, got {num_tokens}"
            )
        base = target
        if num_tokens and any(group.config.is_state for group in self._groups.values()):
            if request.checkpoint is None or request.checkpoint.num_tokens > target:
                at = (
                    "none"
                    if request.checkpoint is None
                    else f"one after {request.checkpoint.num_tokens} tokens"
                )
                raise KVGroupsError(
                    f"rewind: the states after {target} tokens or fewer are needed, and of checkpoints there is {at}; "
                    "raise max_rewind before the tokens are fed"
                )
            base = request.checkpoint.num_tokens
        for group in self._groups.values():
            group.check_window(request, base, max(self.config.max_rewind, request.max_rewind))
        return base

    def _drop_checkpoint(self, request: Request) -> None:
        if request.checkpoint is not None:
            for name, slot in request.checkpoint.slots.items():
                self._groups[name].free([slot])
            request.checkpoint = None

    # Checks

    def _check_request(self, request: Request, count: int) -> None:
        if not request.is_live:
            raise KVGroupsError(f"the request in row {request.row} was freed before; open a new one")
        if count < 0:
            raise ShapeError(f"num_new_tokens: expected 0 or more, got {count}")
        if request.num_computed_tokens + count > self.config.max_model_len:
            raise ShapeError(
                f"request of {request.num_computed_tokens + count} tokens: max_model_len is {self.config.max_model_len}; "
                "patch the model with a config whose max_model_len is larger"
            )

    def _check_step(self, request: Request, count: int) -> None:
        allocated = request.num_allocated_tokens - request.num_computed_tokens
        if allocated != count:
            raise KVGroupsError(
                f"the request in row {request.row} has blocks for a step of {allocated} tokens, expected {count}; "
                "advance by what was allocated, or cancel, before the next step"
            )

    def _check_vacant(self, tables: MultiGroupBlockTable, row: int) -> None:
        for name in self._groups:
            tables[name].check_rows(row)
        if any(request.tables is tables and request.row == row for request in self._requests):
            raise KVGroupsError(
                f"row {row} belongs to another request; free that first, or take an empty row"
            )

    # Memory

    def _request_usage(self, request: Request) -> RequestUsage:
        held, shared = {}, {}
        for name, group in self._groups.items():
            blocks = group.held_blocks(request)
            held[name] = len(blocks) * group.plan.block_bytes
            shared[name] = int((group.pool.references[blocks] > 1).sum()) * group.plan.block_bytes
        return RequestUsage(request.row, request.num_computed_tokens, held, shared)

    def _note_peak(self) -> None:
        for group in self._groups.values():
            group.note_peak()
        held = sum(group.held_bytes for group in self._groups.values())
        self._peak_held_bytes = max(self._peak_held_bytes, held)

    def _num_slabs_of(self, budget: int) -> int:
        num_slabs = budget // self.plan.slab_bytes
        needed = self.plan.num_slabs({group.name: 1 for group in self.config.groups})
        if num_slabs < needed:
            raise OutOfBlocksError(
                f"memory: {budget} bytes are {num_slabs} slabs of {self.plan.slab_bytes}, and one block of each group "
                f"takes {needed} ({needed * self.plan.slab_bytes} bytes); give more memory or smaller blocks"
            )
        return num_slabs

    def _budget_bytes(self) -> int | None:
        memory = self.config.memory
        if memory is None or isinstance(memory, dict):
            return None
        if isinstance(memory, int):
            return memory
        if self.device.type == "cuda":
            return int(memory * torch.cuda.mem_get_info(self.device)[1])
        return int(memory * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
