"""What all KV-cache groups and requests hold together, and the most that they ever held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvgroups.arena import Arena
from kvgroups.group_manager import GroupManager
from kvgroups.request import Request
from kvgroups.usage import RequestUsage, Usage


class Accounts:
    """Adds up what the groups know of themselves.

    Args:
        groups: the groups by name.
        arena: the bytes that they share.
    """

    def __init__(self, groups: Mapping[str, GroupManager], arena: Arena) -> None:
        self._groups = groups
        self._arena = arena
        self._peak_held_bytes = 0

    def note_peak(self) -> None:
        """Remember what is held now if it is more than ever before."""
        for group in self._groups.values():
            group.note_peak()
        held = sum(group.held_bytes for group in self._groups.values())
        self._peak_held_bytes = max(self._peak_held_bytes, held)

    def reset_peak(self) -> None:
        """Forget what was held before."""
        self._peak_held_bytes = 0
        for group in self._groups.values():
            group.peak_held_bytes = 0
        self.note_peak()

    def usage(self, requests: Iterable[Request]) -> Usage:
        """The account of this moment, with these live requests."""
        return Usage(
            groups=tuple(group.usage() for group in self._groups.values()),
            requests=tuple(self._request_usage(request) for request in requests),
            allocated_bytes=self._arena.nbytes,
            peak_held_bytes=self._peak_held_bytes,
            copied_bytes=sum(group.copied_bytes for group in self._groups.values()),
        )

    def held_bytes(self, requests: Iterable[Request]) -> dict[str, int]:
        """Group -> bytes of the blocks that these requests hold; one that several hold counts once."""
        requests = [request for request in requests if request.is_live]
        blocks = {
            name: {block for request in requests for block in group.held_blocks(request).tolist()}
            for name, group in self._groups.items()
        }
        return {name: len(held) * self._groups[name].plan.block_bytes for name, held in blocks.items()}

    def explain(self, request: Request) -> str:
        """Where a request's blocks came from, and why its hit was not longer: a text for people."""
        lines = [f"row {request.row}: {request.num_computed_tokens} tokens are computed"]
        if request.hit is None:
            lines.append("  it was opened without a prompt, so no prefix was looked for")
        else:
            lines += [f"  {line}" for line in request.hit.explain().splitlines()]
        lines += [f"  {group.explain(request)}" for group in self._groups.values()]
        if request.points:
            lines.append(f"  it keeps retention points at {', '.join(map(str, sorted(request.points)))}")
        return "\n".join(lines)

    def _request_usage(self, request: Request) -> RequestUsage:
        held, shared = {}, {}
        for name, group in self._groups.items():
            blocks = group.held_blocks(request)
            held[name] = len(blocks) * group.plan.block_bytes
            shared[name] = int((group.pool.references[blocks] > 1).sum()) * group.plan.block_bytes
        return RequestUsage(request.row, request.num_computed_tokens, held, shared)
