"""Which request owns which blocks in every KV-cache group, and what that costs."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from kvgroups.block_pool import BlockPool
from kvgroups.block_table import MultiGroupBlockTable
from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.errors import KVGroupsError, OutOfBlocksError, ShapeError
from kvgroups.specs import GroupConfig, KVGroupsConfig, MambaSpec
from kvgroups.storage import GroupStorage
from kvgroups.usage import GroupUsage, Usage

_GROWTH = 1.5
"""A pool that must grow takes this many times its blocks, so that a long answer copies little."""


@dataclass(frozen=True)
class Checkpoint:
    """Where a request can be taken back to in its state groups."""

    num_tokens: int
    """Tokens that had been computed."""
    slots: dict[str, int]
    """State group -> the slot that holds the state after them; empty where there were none."""


@dataclass(eq=False)
class Request:
    """A request that holds blocks: its row in its owner's tables, and how far it has been computed."""

    tables: MultiGroupBlockTable
    row: int
    num_computed_tokens: int = 0
    num_allocated_tokens: int = 0
    """Tokens that `allocate` has provided for; more than are computed only while a step runs."""
    max_rewind: int = 0
    """Tokens that windows keep beyond what the next query sees, if more than the config's `max_rewind`."""
    checkpoint: Checkpoint | None = None
    is_live: bool = True


@dataclass(frozen=True)
class _Growth:
    """What one request needs in one group for its next tokens."""

    release: range
    """Logical blocks that no query from now on can see."""
    append: tuple[bool, ...]
    """Logical blocks to add: True for a block of its own, False for the null block."""

    def num_new(self) -> int:
        return sum(self.append)


@dataclass
class _Group:
    config: GroupConfig
    pool: BlockPool
    storage: GroupStorage
    ring_blocks: int
    num_blocks_fixed: int | None = field(default=None)


class Manager:
    """Hands blocks of all groups to requests, all or nothing, and keeps the bytes behind them.

    One per patched model. Tables belong to whoever runs the requests; the manager writes their rows.
    Safe to call from two threads.

    Args:
        config: the groups and limits. With `memory=None` pools grow between forwards as needed.
        device: where K, V and states live.

    Raises:
        OutOfBlocksError: if `config.memory` cannot hold even the null blocks.
    """

    def __init__(self, config: KVGroupsConfig, device: torch.device | str) -> None:
        self.config = config
        self.device = torch.device(device)
        self._lock = threading.RLock()
        self._requests: set[Request] = set()
        self._peak_held_bytes = 0
        self._copied_bytes = 0
        self._groups = {
            group.name: _Group(
                config=group,
                pool=BlockPool(group.name),
                storage=GroupStorage(group, device),
                ring_blocks=config.ring_blocks(group),
            )
            for group in config.groups
        }
        self._budget = self._budget_bytes()
        if isinstance(config.memory, dict):
            for name, num_blocks in config.memory.items():
                self._groups[name].num_blocks_fixed = num_blocks + 1
                self._resize(self._groups[name], num_blocks + 1)
        if self._budget is not None and self._allocated_bytes() > self._budget:
            raise OutOfBlocksError(
                f"memory: {self._budget} bytes cannot hold one null block per group "
                f"({self._allocated_bytes()} bytes); give more memory or smaller blocks"
            )

    def storage(self, name: str) -> GroupStorage:
        """The bytes of the group called `name`."""
        return self._groups[name].storage

    def pool(self, name: str) -> BlockPool:
        """The block ownership of the group called `name`."""
        return self._groups[name].pool

    # Requests

    def open(self, tables: MultiGroupBlockTable, row: int) -> Request:
        """A new request without blocks, in an empty `row` of `tables`.

        Raises:
            KVGroupsError: the row belongs to another request.
            ShapeError: no such row.
        """
        with self._lock:
            self._check_vacant(tables, row)
            request = Request(tables, row)
            self._requests.add(request)
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
                self._check_step(request, 0)
            plans = {
                name: [
                    self._growth(group, request, count)
                    for request, count in zip(requests, num_new_tokens, strict=True)
                ]
                for name, group in self._groups.items()
            }
            self._make_room(
                {
                    name: sum(plan.num_new() for plan in plans[name])
                    - self._num_releasable(group, requests, plans[name])
                    for name, group in self._groups.items()
                }
            )
            for name, group in self._groups.items():
                for request, plan in zip(requests, plans[name], strict=True):
                    self._apply_release(group, request, plan)
                for request, plan in zip(requests, plans[name], strict=True):
                    self._apply_append(group, request, plan)
            for request, count in zip(requests, num_new_tokens, strict=True):
                request.num_allocated_tokens += count
            self._peak_held_bytes = max(self._peak_held_bytes, self._held_bytes())

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
                    keep = self._num_logical_blocks(group, request.num_computed_tokens)
                    blocks = self._row_blocks(group, request)
                    group.pool.free(blocks[keep:])
                    request.tables[group.config.name].truncate_row(request.row, keep)
            for request in requests:
                request.num_allocated_tokens = request.num_computed_tokens

    def free(self, request: Request) -> None:
        """Give up all blocks of a request. A request can be freed once."""
        with self._lock:
            self._check_request(request, 0)
            for group in self._groups.values():
                group.pool.free(self._row_blocks(group, request))
            request.tables.clear_row(request.row)
            self._drop_checkpoint(request)
            request.is_live = False
            self._requests.discard(request)

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
            copies = {name: self._private_columns(group, request) for name, group in self._groups.items()}
            self._make_room({name: len(columns) for name, columns in copies.items()})
            child = Request(tables, row, request.num_computed_tokens, request.num_allocated_tokens)
            rows = {}
            for name, group in self._groups.items():
                blocks = self._row_blocks(group, request).copy()
                shared = np.delete(blocks, copies[name])
                group.pool.share(shared[shared != NULL_BLOCK_ID].tolist())
                for column, block_id in zip(
                    copies[name], group.pool.allocate(len(copies[name])), strict=True
                ):
                    self._copy_block(group, int(blocks[column]), block_id)
                    blocks[column] = block_id
                rows[name] = blocks
            tables.add_row(row, rows)
            self._requests.add(child)
            self._peak_held_bytes = max(self._peak_held_bytes, self._held_bytes())
            return child

    def move(self, request: Request, tables: MultiGroupBlockTable, row: int) -> None:
        """Put a request into an empty `row`, of other tables too; its blocks stay where they are.

        Raises:
            KVGroupsError: the row belongs to a request, or `request` was freed. Nothing is changed.
        """
        with self._lock:
            self._check_request(request, 0)
            self._check_vacant(tables, row)
            tables.add_row(
                row, {name: self._row_blocks(group, request) for name, group in self._groups.items()}
            )
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
            old = sum(request.checkpoint is not None and bool(request.checkpoint.slots) for request in requests)
            need = sum(total > 0 for total in totals)
            self._make_room({name: need - old for name in states})
            for request, total, offset in zip(requests, totals, offsets, strict=True):
                self._drop_checkpoint(request)
                slots = {name: group.pool.allocate(1)[0] for name, group in states.items() if total}
                if offset == 0:
                    for name, slot in slots.items():
                        self._copy_block(states[name], int(self._row_blocks(states[name], request)[0]), slot)
                request.checkpoint = Checkpoint(total, slots)
            self._peak_held_bytes = max(self._peak_held_bytes, self._held_bytes())

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
            tails = {name: self._shared_tail(group, request, base) for name, group in self._groups.items()}
            self._make_room({name: int(tail is not None) for name, tail in tails.items()})
            for name, group in self._groups.items():
                if group.config.is_state:
                    self._restore_state(group, request)
                    continue
                keep = self._num_logical_blocks(group, base)
                group.pool.free(self._row_blocks(group, request)[keep:])
                request.tables[name].truncate_row(request.row, keep)
                if tails[name] is not None:
                    self._replace_tail(group, request, keep - 1)
            if request.checkpoint is not None:
                request.checkpoint = None  # its slots are the running ones now
            target = request.num_computed_tokens - num_tokens
            request.num_computed_tokens = request.num_allocated_tokens = base
            return target - base

    def check_rewind(self, request: Request, num_tokens: int) -> None:
        """Raise what `rewind` would raise for want of a checkpoint or of window tokens; change nothing."""
        with self._lock:
            self._rewind_base(request, num_tokens)

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
                count * self._peak_blocks(group, prompt_len, max_len, chunk_size, pad, max_rewind)
                for pad, count in pads.items()
            )
            - num_shared * self._num_shared_blocks(group, prompt_len - max(pads))
            for name, group in self._groups.items()
        }
        for name, group in self._groups.items():
            if group.num_blocks_fixed is not None and need[name] > group.num_blocks_fixed - 1:
                raise OutOfBlocksError(
                    f"group {name!r}: {num_requests} requests of up to {max_len} tokens need {need[name]} blocks of "
                    f"{group.config.block_size} tokens and there are {group.num_blocks_fixed - 1}; "
                    "give more memory, or fewer or shorter requests"
                )
        nbytes = {name: (need[name] + 1) * group.config.block_bytes for name, group in self._groups.items()}
        if self._budget is not None and sum(nbytes.values()) > self._budget:
            largest = max(nbytes, key=lambda name: nbytes[name])
            raise OutOfBlocksError(
                f"memory: {num_requests} requests of up to {max_len} tokens need {sum(nbytes.values())} bytes "
                f"(group {largest!r}: {nbytes[largest]}) and there are {self._budget}; "
                "give more memory, or fewer or shorter requests"
            )

    def usage(self) -> Usage:
        """Bytes held and allocated, group by group."""
        with self._lock:
            groups = tuple(
                GroupUsage(name, group.config.block_bytes, group.pool.num_used, group.pool.num_blocks - 1)
                for name, group in self._groups.items()
            )
            return Usage(groups, self._peak_held_bytes, self._copied_bytes)

    def reset_peak(self) -> None:
        """Start the peak of `usage` anew from what is held now."""
        with self._lock:
            self._peak_held_bytes = self._held_bytes()

    def check(self) -> None:
        """Hold every block's owners against the tables, and every row against its request.

        Raises:
            KVGroupsError: naming the group and the block or row, if a block is in more or fewer rows than it
                has owners, if owned, free and null blocks are not all there are, if a row reaches past its
                request, or if a block that its next query sees is null.
        """
        with self._lock:
            for group in self._groups.values():
                self._check_owners(group)
                for request in self._requests:
                    self._check_row(group, request)

    # Arithmetic: what a request of some length holds

    def _num_logical_blocks(self, group: _Group, num_tokens: int) -> int:
        """Entries of a row for so many tokens, null ones included."""
        if num_tokens == 0:
            return 0
        if group.config.is_state:
            return 1
        if group.ring_blocks:
            return group.ring_blocks
        return -(-num_tokens // group.config.block_size)

    def _num_hidden_blocks(self, group: _Group, num_tokens: int, rewind: int) -> int:
        """Leading logical blocks that hold nothing a query can see after `num_tokens` tokens, or after `rewind`
        fewer."""
        spec = group.config.spec
        if isinstance(spec, MambaSpec) or group.ring_blocks:
            return 0
        return spec.first_visible(max(0, num_tokens - rewind)) // group.config.block_size

    def _blocks_for(self, group: _Group, computed: int, count: int, rewind: int) -> _Growth:
        """Worked example, W = 8 on blocks of 4: 30 tokens at once end in `[0, 0, 0, 0, 0, x, x, x]`, since the
        query at 30 sees from 23 on; the query at 31 sees from 24 on, and releases block 5 (20 to 23)."""
        had = self._num_logical_blocks(group, computed)
        total = computed + count
        hidden = self._num_hidden_blocks(group, total, rewind)
        return _Growth(
            release=range(min(self._num_hidden_blocks(group, computed, rewind), had)),
            append=tuple(column >= hidden for column in range(had, self._num_logical_blocks(group, total))),
        )

    def _growth(self, group: _Group, request: Request, count: int) -> _Growth:
        rewind = max(self.config.max_rewind, request.max_rewind)
        plan = self._blocks_for(group, request.num_computed_tokens, count, rewind)
        blocks = self._row_blocks(group, request)
        first = int(np.argmax(blocks != NULL_BLOCK_ID)) if len(blocks) else 0
        return _Growth(range(min(first, plan.release.stop), plan.release.stop), plan.append)

    def _num_held(self, group: _Group, computed: int, count: int, drafted: int) -> int:
        """Blocks that one request owns while it computes `count` tokens after `computed`."""
        if group.config.is_state:
            return 1 + (drafted > 0)  # the running state and its checkpoint
        rewind = max(self.config.max_rewind, drafted)
        had, hidden = self._num_logical_blocks(group, computed), self._num_hidden_blocks(group, computed, rewind)
        return max(0, had - hidden) + self._blocks_for(group, computed, count, rewind).num_new()

    def _peak_blocks(
        self, group: _Group, prompt_len: int, max_len: int, chunk_size: int | None, pad: int, drafted: int
    ) -> int:
        chunk = chunk_size or max(1, prompt_len)
        ends = [max(0, column - pad) for column in (*range(0, prompt_len, chunk), prompt_len)]
        peak = max(
            (self._num_held(group, start, stop - start, drafted) for start, stop in pairwise(ends)), default=0
        )
        # Decoding repeats itself where a block edge meets the edge of an attention chunk: look at the last period.
        # Chunks of 5 on blocks of 3 need 2, 3, 2 blocks, 2, 3, 2, ...
        period = math.lcm(group.config.block_size, getattr(group.config.spec, "chunk_size", 1))
        decodes = range(max(prompt_len, max_len - period) - pad, max_len - pad)
        return max([peak, *(self._num_held(group, computed, 1 + drafted, drafted) for computed in decodes)])

    def _num_shared_blocks(self, group: _Group, prompt_len: int) -> int:
        """Blocks that requests with one prompt hold together to their end: those that no window passes by."""
        if group.config.spec.kind != "full_attention":
            return 0
        return prompt_len // group.config.block_size

    def _private_columns(self, group: _Group, request: Request) -> list[int]:
        """Columns that a fork must copy: the partial tail, a ring's blocks, the running state."""
        blocks = self._row_blocks(group, request)
        if group.config.is_state or group.ring_blocks:
            return [column for column in range(len(blocks)) if blocks[column] != NULL_BLOCK_ID]
        full = request.num_computed_tokens // group.config.block_size
        return [column for column in range(full, len(blocks)) if blocks[column] != NULL_BLOCK_ID]

    # Changes, once it is known that they fit

    def _row_blocks(self, group: _Group, request: Request) -> np.ndarray:
        table = request.tables[group.config.name]
        return table.table[request.row, : table.num_blocks_per_row[request.row]]

    def _num_releasable(self, group: _Group, requests: Sequence[Request], plans: Sequence[_Growth]) -> int:
        """Blocks that become free when all plans' releases are applied: those that only these rows share."""
        released: dict[int, int] = {}
        for request, plan in zip(requests, plans, strict=True):
            for block_id in self._row_blocks(group, request)[plan.release.start : plan.release.stop].tolist():
                if block_id != NULL_BLOCK_ID:
                    released[block_id] = released.get(block_id, 0) + 1
        return sum(group.pool.references[block_id] == count for block_id, count in released.items())

    def _apply_release(self, group: _Group, request: Request, plan: _Growth) -> None:
        if plan.release:
            start, stop = plan.release.start, plan.release.stop
            group.pool.free(self._row_blocks(group, request)[start:stop].tolist())
            request.tables[group.config.name].null_range(request.row, start, stop)

    def _apply_append(self, group: _Group, request: Request, plan: _Growth) -> None:
        if plan.append:
            fresh = iter(group.pool.allocate(plan.num_new()))
            blocks = [next(fresh) if is_stored else NULL_BLOCK_ID for is_stored in plan.append]
            request.tables[group.config.name].append_row(request.row, blocks)

    def _copy_block(self, group: _Group, source: int, target: int) -> None:
        group.storage.copy_block(source, target)
        self._copied_bytes += group.config.block_bytes

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
                at = "none" if request.checkpoint is None else f"one after {request.checkpoint.num_tokens} tokens"
                raise KVGroupsError(
                    f"rewind: the states after {target} tokens or fewer are needed, and of checkpoints there is {at}; "
                    "raise max_rewind before the tokens are fed"
                )
            base = request.checkpoint.num_tokens
        for group in self._groups.values():
            self._check_window(group, request, base)
        return base

    def _check_window(self, group: _Group, request: Request, base: int) -> None:
        """Raise unless the group still holds what a query after `base` tokens sees."""
        spec, size = group.config.spec, group.config.block_size
        if isinstance(spec, MambaSpec):
            return
        if group.ring_blocks:
            kept = request.num_computed_tokens - group.ring_blocks * size
            is_kept = base == request.num_computed_tokens or kept <= spec.first_visible(base)
        else:
            blocks = self._row_blocks(group, request)
            needed = blocks[spec.first_visible(base) // size : self._num_logical_blocks(group, base)]
            is_kept = bool((needed != NULL_BLOCK_ID).all())
        if not is_kept:
            raise KVGroupsError(
                f"rewind: group {group.config.name!r} has let go of tokens that a query after {base} tokens sees; "
                f"raise max_rewind (now {max(self.config.max_rewind, request.max_rewind)}) before the tokens are fed"
            )

    def _shared_tail(self, group: _Group, request: Request, base: int) -> int | None:
        """The block that a request at `base` tokens would write to, if another request holds it too."""
        if group.config.is_state or group.ring_blocks or base % group.config.block_size == 0:
            return None
        block_id = int(self._row_blocks(group, request)[base // group.config.block_size])
        return block_id if group.pool.references[block_id] > 1 else None

    def _replace_tail(self, group: _Group, request: Request, column: int) -> None:
        name = group.config.name
        shared = int(self._row_blocks(group, request)[column])
        (own,) = group.pool.allocate(1)
        self._copy_block(group, shared, own)
        group.pool.free([shared])
        request.tables[name].truncate_row(request.row, column)
        request.tables[name].append_row(request.row, [own])

    def _restore_state(self, group: _Group, request: Request) -> None:
        name = group.config.name
        assert request.checkpoint is not None
        group.pool.free(self._row_blocks(group, request))
        request.tables[name].truncate_row(request.row, 0)
        if name in request.checkpoint.slots:
            request.tables[name].append_row(request.row, [request.checkpoint.slots[name]])

    def _drop_checkpoint(self, request: Request) -> None:
        if request.checkpoint is not None:
            for name, slot in request.checkpoint.slots.items():
                self._groups[name].pool.free([slot])
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

    def _check_owners(self, group: _Group) -> None:
        name, pool = group.config.name, group.pool
        uses = np.zeros(pool.num_blocks, dtype=np.int64)
        for request in self._requests:
            np.add.at(uses, self._row_blocks(group, request), 1)
            if request.checkpoint is not None and name in request.checkpoint.slots:
                uses[request.checkpoint.slots[name]] += 1
        uses[NULL_BLOCK_ID] = 0
        wrong = np.flatnonzero(uses != pool.references)
        if len(wrong):
            block_id = int(wrong[0])
            raise KVGroupsError(
                f"group {name!r}: block {block_id} is in {uses[block_id]} rows and has "
                f"{pool.references[block_id]} owners"
            )
        owned = np.count_nonzero(pool.references)
        if not owned + pool.num_free + 1 == pool.num_blocks == group.storage.num_blocks:
            raise KVGroupsError(
                f"group {name!r}: {owned} owned, {pool.num_free} free and 1 null block of {pool.num_blocks}, "
                f"with bytes for {group.storage.num_blocks}"
            )

    def _check_row(self, group: _Group, request: Request) -> None:
        where = f"group {group.config.name!r}: row {request.row}"
        blocks = self._row_blocks(group, request)
        expected = self._num_logical_blocks(group, request.num_allocated_tokens)
        if len(blocks) != expected:
            raise KVGroupsError(
                f"{where} has {len(blocks)} blocks, expected {expected} for {request.num_allocated_tokens} tokens"
            )
        if request.tables[group.config.name].table[request.row, expected:].any():
            raise KVGroupsError(f"{where} names blocks behind its {expected} blocks")
        for num_tokens in (request.num_computed_tokens, request.num_allocated_tokens):
            needed = range(
                self._num_hidden_blocks(group, num_tokens, 0), self._num_logical_blocks(group, num_tokens)
            )
            for column in needed:
                if blocks[column] == NULL_BLOCK_ID:
                    raise KVGroupsError(
                        f"{where} has the null block at column {column}, which a query after {num_tokens} tokens sees"
                    )

    # Memory

    def _make_room(self, need: dict[str, int]) -> None:
        """Have `need[name]` free blocks in every group, growing pools where the limits allow, or raise."""
        short = {
            name: count - self._groups[name].pool.num_free
            for name, count in need.items()
            if count > self._groups[name].pool.num_free
        }
        if not short:
            return
        for name, missing in short.items():
            group = self._groups[name]
            if group.num_blocks_fixed is not None:
                raise OutOfBlocksError(
                    f"group {name!r}: {need[name]} blocks are needed and {group.pool.num_free} of "
                    f"{group.num_blocks_fixed - 1} are free ({missing} short); give more memory or fewer requests"
                )
        generous = {
            name: max(missing, int((_GROWTH - 1) * self._groups[name].pool.num_blocks))
            for name, missing in short.items()
        }
        for growth in (generous, short):
            if self._fits_budget(growth):
                break
        else:
            for group in self._groups.values():
                self._resize(group, group.pool.shrink())
            short = {name: max(0, need[name] - self._groups[name].pool.num_free) for name in need}
            growth = short
            if not self._fits_budget(growth):
                self._raise_over_budget(growth)
        for name, missing in growth.items():
            group = self._groups[name]
            self._resize(group, group.pool.num_blocks + missing)

    def _fits_budget(self, growth: dict[str, int]) -> bool:
        return self._budget is None or self._allocated_bytes() + self._growth_bytes(growth) <= self._budget

    def _growth_bytes(self, growth: dict[str, int]) -> int:
        return sum(missing * self._groups[name].config.block_bytes for name, missing in growth.items())

    def _raise_over_budget(self, growth: dict[str, int]) -> None:
        name = max(growth, key=lambda name: growth[name] * self._groups[name].config.block_bytes)
        raise OutOfBlocksError(
            f"group {name!r}: {growth[name]} more blocks of {self._groups[name].config.block_bytes} bytes are needed, "
            f"and {self._allocated_bytes()} of {self._budget} bytes of memory are taken; give more memory or fewer requests"
        )

    def _resize(self, group: _Group, num_blocks: int) -> None:
        group.storage.resize(num_blocks)
        if num_blocks > group.pool.num_blocks:
            group.pool.grow(num_blocks)

    def _allocated_bytes(self) -> int:
        return sum(group.storage.nbytes for group in self._groups.values())

    def _held_bytes(self) -> int:
        return sum(group.pool.num_used * group.config.block_bytes for group in self._groups.values())

    def _budget_bytes(self) -> int | None:
        memory = self.config.memory
        if memory is None or isinstance(memory, dict):
            return None
        if isinstance(memory, int):
            return memory
        if self.device.type == "cuda":
            return int(memory * torch.cuda.mem_get_info(self.device)[1])
        return int(memory * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
