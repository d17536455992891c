"""What the torch forms of the scans share: packed tokens cut into rectangles of (requests, time steps).

All of it is arithmetic on host integers; a rectangle's tokens become a tensor only when it is taken.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.state_slots.torch_impl import scatter_states


class Kept(NamedTuple):
    """The state of `request` after its token `step`, counted from its first of this call, goes to `slot`."""

    request: int
    step: int
    slot: int


def kept_states(starts, final_slots, snapshot_tokens, snapshot_slots):
    """Every state to write: those after each request's last token, and the snapshots.

    Slot 0 is not written, and neither is the final slot of a request without tokens: starts [0, 3, 3, 5] and
    final slots [4, 7, 2] keep the state of request 0 after its step 2 and of request 2 after its step 1.

    Args:
        starts: `query_start_loc` as a list.
        final_slots: (num_reqs,), int32 or int64.
        snapshot_tokens: (num_snapshots,), int64, or None.
        snapshot_slots: (num_snapshots,), int32 or int64, or None.
    """
    kept = [
        Kept(request, stop - start - 1, slot)
        for request, ((start, stop), slot) in enumerate(
            zip(pairwise(starts), final_slots.tolist(), strict=True)
        )
        if start < stop and slot != NULL_BLOCK_ID
    ]
    if snapshot_tokens is not None:
        for token, slot in zip(snapshot_tokens.tolist(), snapshot_slots.tolist(), strict=True):
            if slot != NULL_BLOCK_ID:
                request = bisect_right(starts, token) - 1
                kept.append(Kept(request, token - starts[request], slot))
    return kept


def write_states(states, slots, values):
    """Write the values (num_written, *state_shape), rounded to the dtype of states, to slots, a list."""
    scatter_states(
        states, torch.tensor(slots, dtype=torch.int64, device=states.device), values.to(states.dtype)
    )


@dataclass(frozen=True)
class Rectangle:
    """The same time steps of the rows that have any of them.

    Attributes:
        tokens: (num_rows, num_steps), int64, packed tokens. Past its end a row repeats its last token.
        is_token: (num_rows, num_steps), bool. False past a row's end.
        num_running: how many of the rows, the first ones, have tokens after it.
        kept_steps, kept_rows, kept_slots: the states in it that are written, as lists.
    """

    tokens: torch.Tensor
    is_token: torch.Tensor
    num_running: int
    kept_steps: list[int]
    kept_rows: list[int]
    kept_slots: list[int]


class Ragged:
    """Requests of unequal length, longest first: those that have a token at a step are always the first rows.

    Args:
        starts: `query_start_loc` as a list.
        requests: which requests, in any order. Those without tokens are left out.
        kept: the states to write, of these and other requests.
        device: where the rectangles' tensors lie.
    """

    def __init__(self, starts, requests, kept, device):
        lengths = [stop - start for start, stop in pairwise(starts)]
        self.requests = sorted(
            (request for request in requests if lengths[request]), key=lambda request: -lengths[request]
        )
        self._lengths = [lengths[request] for request in self.requests]
        self._firsts = torch.tensor([starts[request] for request in self.requests], device=device)
        self._lasts = torch.tensor([starts[request + 1] - 1 for request in self.requests], device=device)
        rows = {request: row for row, request in enumerate(self.requests)}
        self._kept = [(each.step, rows[each.request], each.slot) for each in kept if each.request in rows]

    def rectangles(self, max_steps):
        """Rectangles in the order of time; `max_steps(num_rows)` steps in each at most."""
        begin, longest = 0, max(self._lengths, default=0)
        while begin < longest:
            num_rows = sum(length > begin for length in self._lengths)
            end = min(begin + max_steps(num_rows), longest)
            steps = torch.arange(begin, end, device=self._firsts.device)
            tokens = self._firsts[:num_rows, None] + steps
            lasts = self._lasts[:num_rows, None]
            kept = [(step - begin, row, slot) for step, row, slot in self._kept if begin <= step < end]
            yield Rectangle(
                tokens=tokens.minimum(lasts),
                is_token=tokens <= lasts,
                num_running=sum(length > end for length in self._lengths),
                kept_steps=[step for step, _, _ in kept],
                kept_rows=[row for _, row, _ in kept],
                kept_slots=[slot for _, _, slot in kept],
            )
            begin = end
