"""Going back: the states that requests may be taken back to, and taking them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvgroups.errors import KVGroupsError, ShapeError
from kvgroups.group_manager import GroupManager
from kvgroups.prefix_cache import PrefixCache
from kvgroups.request import Checkpoint, Request
from kvgroups.room import Room


class Checkpoints:
    """Tokens can be taken back by forgetting them; states only by going on from an earlier copy of them.

    Args:
        groups: the groups by name.
        room: makes room for checkpoints, and for tails that must be copied.
        prefixes: where requests are filed.
        max_rewind: what every request can be taken back at least, in tokens.
    """

    def __init__(
        self, groups: Mapping[str, GroupManager], room: Room, prefixes: PrefixCache, max_rewind: int
    ) -> None:
        self._groups = groups
        self._states = {name: group for name, group in groups.items() if group.config.is_state}
        self._room = room
        self._prefixes = prefixes
        self._max_rewind = max_rewind

    def set(self, requests: Sequence[Request], offsets: Sequence[int]) -> None:
        """Replace the requests' checkpoints, or raise and change nothing; see `Manager.set_checkpoints`."""
        totals = [r.num_computed_tokens + offset for r, offset in zip(requests, offsets, strict=True)]
        for request, offset in zip(requests, offsets, strict=True):
            request.check_live()
            request.check_step(0)
            if offset < 0:
                raise ShapeError(f"set_checkpoints: expected offsets of 0 tokens or more, got {offset}")
        need = dict.fromkeys(self._states, sum(total > 0 for total in totals))
        old = [request.checkpoint.slots for request in requests if request.checkpoint is not None]
        freed = {
            name: np.array([slots[name] for slots in old if name in slots], dtype=np.int64)
            for name in self._states
        }
        self._room.check(need, freed)
        for request in requests:
            self.drop(request)
        self._room.make(need)
        for request, total, offset in zip(requests, totals, offsets, strict=True):
            slots = {name: group.pool.allocate(1)[0] for name, group in self._states.items() if total}
            if offset == 0:
                for name, slot in slots.items():
                    self._states[name].copy_state(request, slot)
            request.checkpoint = Checkpoint(total, slots)

    def drop(self, request: Request) -> None:
        """Give up a request's checkpoint, if it has one."""
        if request.checkpoint is not None:
            for name, slot in request.checkpoint.slots.items():
                self._groups[name].free([slot])
            request.checkpoint = None

    def base_of(self, request: Request, num_tokens: int) -> int:
        """The number of tokens that a request really goes back to when so many are taken from it.

        Raises:
            ShapeError: fewer than 0 tokens, or more than the request has.
            KVGroupsError: there is no checkpoint that far back, or a window has let go of what a query there
                would see.
        """
        request.check_live()
        request.check_step(0)
        target = request.num_computed_tokens - num_tokens
        if num_tokens < 0 or target < 0:
            raise ShapeError(
                f"rewind: expected 0 to {request.num_computed_tokens} tokens, what the request has, got {num_tokens}"
            )
        base = target
        if num_tokens and self._states:
            checkpoint = request.checkpoint
            if checkpoint is None or checkpoint.num_tokens > target:
                at = "none" if checkpoint is None else f"one after {checkpoint.num_tokens} tokens"
                raise KVGroupsError(
                    f"rewind: the states after {target} tokens or fewer are needed, and of checkpoints there is {at}; "
                    "raise max_rewind before the tokens are fed"
                )
            base = checkpoint.num_tokens
        for group in self._groups.values():
            group.check_window(request, base, max(self._max_rewind, request.max_rewind))
        return base

    def rewind(self, request: Request, num_tokens: int) -> int:
        """Take tokens back, or raise and change nothing; see `Manager.rewind`."""
        base = self.base_of(request, num_tokens)
        if num_tokens == 0:
            return 0
        shared = [name for name, group in self._groups.items() if group.has_shared_tail(request, base)]
        self._room.check(dict.fromkeys(shared, 1))
        self._room.make(dict.fromkeys(shared, 1))
        if request.cursor is not None:
            self._prefixes.rewind(request.cursor, base)
        for name, group in self._groups.items():
            if name in self._states:
                group.restore_state(request)
                continue
            group.truncate(request, base)
            if name in shared:
                group.own_tail(request)
            elif base % group.config.block_size and not group.demand.ring_blocks:
                group.forget(int(group.row_blocks(request)[-1]))
        request.checkpoint = None  # its slots are the running ones now
        target = request.num_computed_tokens - num_tokens
        request.num_written = max(request.num_written, request.num_computed_tokens)
        request.num_computed_tokens = request.num_allocated_tokens = base
        return target - base
