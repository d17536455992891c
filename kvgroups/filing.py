"""What a request leaves behind for others: its full blocks, and its retention points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvgroups.errors import OutOfBlocksError
from kvgroups.eviction import CachedBlock
from kvgroups.group_manager import GroupManager
from kvgroups.prefix_cache import PrefixCache
from kvgroups.prefix_hit import PrefixHit
from kvgroups.prefix_tree import Cursor
from kvgroups.request import Request
from kvgroups.retention import RetentionPolicy
from kvgroups.room import Room


class Filing:
    """Files requests in the prefix cache.

    Args:
        prefixes: the cache.
        policy: where retention points are kept.
        groups: the groups by name.
        room: makes room for snapshots.
        max_snapshot_bytes: what all snapshots may take together; None for no limit.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        policy: RetentionPolicy,
        groups: Mapping[str, GroupManager],
        room: Room,
        max_snapshot_bytes: int | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._policy = policy
        self._groups = groups
        self._room = room
        self._states = {name: group for name, group in groups.items() if group.config.is_state}
        self._max_snapshot_bytes = max_snapshot_bytes

    def stops(self, hit: PrefixHit) -> tuple[int, ...]:
        """The lengths at which the prefill of a prompt stops to keep a point."""
        if not self._prefixes.needs_retention or not self._prefixes.is_shareable:
            return ()
        return self._policy.prompt_points(
            hit.num_prompt_tokens, self._prefixes.unit, hit.num_tokens, hit.branch_point
        )

    def file(self, request: Request, token_ids: Sequence[int] | np.ndarray) -> None:
        """Make findable what a request has computed since it was last filed, and keep the point that it is at."""
        if request.cursor is None:
            request.cursor = self._prefixes.open(request.extra, request.hit)
        if self._prefixes.is_due(request.cursor, len(token_ids)):
            self._file_blocks(request, request.cursor, token_ids)
        if self._is_at_point(request):
            self._keep_point(request)

    def _file_blocks(self, request: Request, cursor: Cursor, token_ids: Sequence[int] | np.ndarray) -> None:
        since = cursor.num_tokens
        rows = {name: group.row_blocks(request) for name, group in self._groups.items()}
        filed: dict[str, list[int]] = {}
        for block in self._prefixes.file(cursor, token_ids, rows):
            filed.setdefault(block.group, []).append(block.block_id)
        for name, block_ids in filed.items():
            self._groups[name].pool.keep(block_ids)
        # Requests that computed the same side by side, or from an earlier point on, hold it once from here on.
        for block, column in self._prefixes.doubles(cursor, since, rows):
            self._groups[block.group].hold_instead(request, column, block.block_id)

    def _is_at_point(self, request: Request) -> bool:
        here = request.num_computed_tokens
        assert request.cursor is not None
        if not self._prefixes.needs_retention or request.cursor.num_tokens != here or here in request.points:
            return False
        return here in request.stops or (
            here > 0 and self._policy.is_answer_point(here, request.num_prompt_tokens, self._prefixes.unit)
        )

    def _keep_point(self, request: Request) -> None:
        here, cursor = request.num_computed_tokens, request.cursor
        assert cursor is not None
        if any(self._prefixes.lacks_snapshot(cursor, name) for name in self._states):
            try:
                snapshots = self._file_snapshots(request)
            except OutOfBlocksError:
                self._prefixes.stats.num_skipped_snapshots += 1
                return
        else:
            snapshots = []
        served = request.hit.num_tokens if request.hit is not None else 0
        tails = self._prefixes.retain(cursor, previous=max(request.points, default=served))
        request.points[here] = snapshots + tails
        for point in self._policy.surplus(list(request.points)):
            self._give_up(request, point)

    def _file_snapshots(self, request: Request) -> list[CachedBlock]:
        """Copy the running states, in all groups that lack that snapshot, or raise OutOfBlocksError."""
        assert request.cursor is not None
        cursor = request.cursor
        names = [name for name in self._states if self._prefixes.lacks_snapshot(cursor, name)]
        need = dict.fromkeys(names, 1)
        self._check_share(names)
        self._room.check(need)
        self._room.make(need)
        filed = []
        for name in names:
            group = self._states[name]
            (slot,) = group.pool.allocate(1)
            group.copy_state(request, slot)
            block = self._prefixes.file_snapshot(cursor, name, slot)
            assert block is not None
            group.pool.keep([slot])
            group.free([slot])
            filed.append(block)
        return filed

    def _check_share(self, names: Sequence[str]) -> None:
        """Evict older snapshots while they and the new ones are more than the policy's share of the arena."""
        if self._max_snapshot_bytes is None:
            return
        new = sum(self._states[name].plan.stride_bytes for name in names)
        while new + sum(
            group.pool.num_cached * group.plan.stride_bytes for group in self._states.values()
        ) > (self._max_snapshot_bytes):
            first = [
                (loss, name)
                for name, group in self._states.items()
                if (loss := group.first_cached()) is not None
            ]
            if not first or new > self._max_snapshot_bytes:
                raise OutOfBlocksError(
                    f"snapshots: {new} bytes are more than their share, {self._max_snapshot_bytes}"
                )
            self._states[min(first)[1]].evict_first(1)

    def _give_up(self, request: Request, point: int) -> None:
        """Undo a retention point, but for what others have used since or other points need."""
        gone = request.points.pop(point)
        needed = {id(block) for blocks in request.points.values() for block in blocks}
        for block in gone:
            if block.num_hits or id(block) in needed or not self._prefixes.is_current(block):
                continue
            if block.group in self._states:
                self._groups[block.group].forget(block.block_id)
            else:
                self._prefixes.unretain(block)
