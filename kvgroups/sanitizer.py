"""A debug mode that knows what every block ought to hold, and speaks up before a step uses one against the rules."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from kvgroups.constants import NULL_BLOCK_ID, PAD_SLOT_ID
from kvgroups.errors import SanitizerError
from kvgroups.eviction import CachedBlock
from kvgroups.geometry import BatchGeometry
from kvgroups.group_manager import GroupManager
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.pending_ops import PendingOps
from kvgroups.request import Request
from kvgroups.shadow import UNKNOWN, Shadow
from kvgroups.specs import MambaSpec


class Sanitizer:
    """Gives every token that is computed a number, follows the numbers through writes, copies, forks and hits, and
    holds each step's slots and tables against them.

    The manager tells it what it does; tables ask it before a step uses what they computed. It derives what must be
    from positions and specs alone, not from the code that it watches. `docs/sanitizer.md` lists the rules.

    Args:
        groups: the groups by name.
        requests: the live requests; looked at whenever it is asked.
        pending: where it writes down the poison of freed blocks.
    """

    def __init__(
        self, groups: Mapping[str, GroupManager], requests: Iterable[Request], pending: PendingOps
    ) -> None:
        self._groups = groups
        self._requests = requests
        self._pending = pending
        self._shadows = {
            name: Shadow(group.config, group.demand.ring_blocks) for name, group in groups.items()
        }
        self._histories: dict[Request, dict[str, np.ndarray]] = {}
        """Request -> group -> (num_computed_tokens,), int64: the number of each of its tokens there."""
        self._filed: dict[tuple[str, int], tuple[bytes, np.ndarray]] = {}
        """Group and block -> digest of the tokens that it is filed under, and the numbers that it held then."""
        self._filing: tuple[Request, np.ndarray] | None = None
        self._digests: list[bytes] = []
        self._next_number = UNKNOWN + 1

    # What the manager tells

    def opened(self, request: Request) -> None:
        """A request has an empty row."""
        request.tables.inspector = self
        self._histories[request] = {name: np.zeros(0, dtype=np.int64) for name in self._groups}

    def admitted(self, request: Request, token_ids: np.ndarray) -> None:
        """A request begins behind a hit: its past is what the hit's blocks hold.

        Raises:
            SanitizerError: if a block of the hit is not what the prompt asks for.
        """
        self.opened(request)
        assert request.hit is not None
        num_tokens = request.hit.num_tokens
        digests = _digests(token_ids[:num_tokens])
        for name, blocks in request.hit.blocks.items():
            history = np.full(num_tokens, UNKNOWN, dtype=np.int64)
            size = self._groups[name].config.block_size
            for column, block_id in blocks.items():
                stop = num_tokens if self._is_state(name) else (column + 1) * size
                history[stop - size : stop] = self._check_hit(request, name, block_id, stop, digests[stop])
            self._histories[request][name] = history

    def forked(self, parent: Request, child: Request) -> None:
        """A request has another's past."""
        child.tables.inspector = self
        self._histories[child] = dict(self._histories[parent])

    def moved(self, request: Request) -> None:
        """A request has a row elsewhere."""
        request.tables.inspector = self

    def advanced(self, requests: Iterable[Request], counts: Iterable[int]) -> None:
        """Tokens were computed and written where the slot mapping sends them. Before they are counted."""
        for request, count in zip(requests, counts, strict=True):
            numbers = np.arange(self._next_number, self._next_number + count)
            self._next_number += count
            histories = self._histories[request]
            for name, group in self._groups.items():
                histories[name] = np.concatenate((histories[name], numbers))
                if not self._is_state(name):
                    slots = self._slots_to_write(name, request)
                    self._shadows[name].write(slots, numbers)
                elif count:
                    self._shadows[name].block(int(group.row_blocks(request)[0]))[:] = numbers[-1]
                    self._write_checkpoint(name, request, count)

    def rewound(self, request: Request) -> None:
        """A request went back to `num_computed_tokens`."""
        histories = self._histories[request]
        self._histories[request] = {name: h[: request.num_computed_tokens] for name, h in histories.items()}

    def freed(self, request: Request) -> None:
        """A request is gone."""
        del self._histories[request]

    def copied(self, group: str, source: int, target: int) -> None:
        """A block is copied to another.

        Raises:
            SanitizerError: if nobody has the source, or somebody else the target too.
        """
        pool = self._groups[group].pool
        if not pool.references[source] and not pool.is_kept[source]:
            self._fail("copies", group, source, "is copied, and nobody has it")
        if pool.references[target] != 1 or pool.is_kept[target]:
            self._fail("copies", group, target, f"is copied to, and {self._owners(group, target)}")
        self._shadows[group].copy(source, target)

    def replaced(self, group: str, request: Request, column: int, block_id: int) -> None:
        """While it is filed, a request comes to hold a block that was filed before in the place of its own.

        Raises:
            SanitizerError: if that block is not filed under the request's tokens, or was changed since.
        """
        assert self._filing is not None
        size = self._groups[group].config.block_size
        stop = (column + 1) * size
        self._digests = self._digests or _digests(self._filing[1])
        history = self._histories[request][group].copy()  # a fork may have the same one
        history[stop - size : stop] = self._check_hit(request, group, block_id, stop, self._digests[stop])
        self._histories[request][group] = history

    def released(self, group: str, block_ids: np.ndarray) -> None:
        """Blocks are free: poison them."""
        self._shadows[group].forget(block_ids)
        self._pending.poison(group, block_ids)

    @contextmanager
    def filing(self, request: Request, token_ids: np.ndarray) -> Iterator[None]:
        """Within it, `filed` is called for blocks of this request, which has these tokens."""
        self._filing, self._digests = (request, token_ids), []
        try:
            yield
        finally:
            self._filing = None

    def filed(self, block: CachedBlock) -> None:
        """A block can be found from now on.

        Raises:
            SanitizerError: if it does not hold what it is filed as.
        """
        assert self._filing is not None
        request, token_ids = self._filing
        name, stop, size = block.group, block.depth, self._groups[block.group].config.block_size
        held = self._shadows[name].block(block.block_id)
        history = self._histories[request][name]
        expected = history[stop - size : stop]
        if len(expected) < size or not np.array_equal(held, expected):
            self._fail(
                "filed blocks",
                name,
                block.block_id,
                f"is filed as {self._span(name, stop)} of the request in row {request.row}, and holds "
                f"{self._content(name, block.block_id)}; only what is computed to its end is filed, under that end",
            )
        self._digests = self._digests or _digests(token_ids)  # once for all blocks that are filed together
        self._filed[name, block.block_id] = self._digests[stop], held.copy()

    # What tables ask

    def check_slots(
        self, tables: MultiGroupBlockTable, geometry: BatchGeometry, slots: Mapping[str, torch.Tensor]
    ) -> None:
        """Hold a step's slot mapping against the definition, and every block that it writes to against its owners.

        Raises:
            SanitizerError: naming the rule, the group, the block and the request.
        """
        requests = self._requests_of(tables, geometry)
        for name, mapping in slots.items():
            found = mapping.cpu().numpy()
            if self._is_state(name):
                self._check_padding(name, found)
                continue
            self._check_padding(name, found[geometry.num_tokens :])
            for i, request in enumerate(requests):
                start, stop = geometry.query_start_loc[i : i + 2]
                self._check_writes(name, request, found[start:stop])

    def check_rows(
        self, tables: MultiGroupBlockTable, geometry: BatchGeometry, gathered: Mapping[str, torch.Tensor]
    ) -> None:
        """Hold a step's rows against what its queries see.

        Raises:
            SanitizerError: naming the rule, the group, the block and the request.
        """
        requests = self._requests_of(tables, geometry)
        for name, rows in gathered.items():
            self._check_owned_rows(name, tables)
            found = rows.cpu().numpy()
            if found[geometry.num_reqs :].any():
                block_id = int(found[geometry.num_reqs :].max())
                self._fail("padding", name, block_id, "is in the row of a padded request, expected null blocks")
            for request, row, count in zip(requests, found, geometry.query_lens, strict=False):
                if not count:
                    continue
                if self._is_state(name):
                    self._check_state(name, request, int(row[0]))
                else:
                    self._check_reads(name, request, row)

    # The rules

    def _check_hit(
        self, request: Request, name: str, block_id: int, stop: int, digest: bytes
    ) -> np.ndarray:
        """The numbers of a block that serves the `stop` first tokens of a prompt."""
        filed_digest, filed_numbers = self._filed.get((name, block_id), (b"", np.zeros(0, dtype=np.int64)))
        serves = f"serves {self._span(name, stop)} of the prompt in row {request.row}"
        if filed_digest != digest:
            self._fail("hits", name, block_id, f"{serves}, and is not filed under these tokens")
        held = self._shadows[name].block(block_id)
        if not np.array_equal(held, filed_numbers):
            self._fail(
                "hits", name, block_id, f"{serves}, and was changed since: {self._content(name, block_id)}"
            )
        return held

    def _check_padding(self, name: str, slots: np.ndarray) -> None:
        written = slots[slots != PAD_SLOT_ID]
        if len(written):
            size = self._groups[name].config.block_size
            self._fail(
                "padding", name, int(written[0]) // size, f"is written by padding, slot {written[0]}, expected -1"
            )

    def _check_writes(self, name: str, request: Request, slots: np.ndarray) -> None:
        group, size = self._groups[name], self._groups[name].config.block_size
        expected = self._slots_to_write(name, request)
        where = f"the request in row {request.row}"
        if len(slots) != len(expected):
            raise SanitizerError(
                f"sanitizer, slots: group {name!r}: {where} has {len(slots)} slots, expected {len(expected)} for its step"
            )
        wrong = np.flatnonzero(slots != expected)
        if len(wrong):
            position = request.num_computed_tokens + int(wrong[0])
            slot, right = int(slots[wrong[0]]), int(expected[wrong[0]])
            self._fail(
                "slots",
                name,
                (right if slot == PAD_SLOT_ID else slot) // size,
                f"token {position} of {where} has slot {slot}, expected {right} "
                f"({group.config.slot_mapping}, blocks of {size})",
            )
        for block_id in np.unique(slots[slots != PAD_SLOT_ID] // size).tolist():
            if group.pool.references[block_id] != 1:
                self._fail(
                    "one writer", name, block_id, f"is written by {where}, and {self._owners(name, block_id)}"
                )
            if group.pool.is_kept[block_id]:
                self._fail("one writer", name, block_id, f"is written by {where}, and can be found by others")

    def _check_owned_rows(self, name: str, tables: MultiGroupBlockTable) -> None:
        """Rows hold blocks that their request owns; a row of nobody holds none."""
        group, table = self._groups[name], tables[name].table
        owners = {request.row: request for request in self._requests if request.tables is tables}
        for row in np.flatnonzero(table.any(axis=1)).tolist():
            if row not in owners:
                self._fail("rows", name, int(table[row].max()), f"is in row {row}, which no request has")
        uses = np.zeros(len(group.pool.references), dtype=np.int64)
        for request in self._requests:
            np.add.at(uses, group.held_blocks(request), 1)
        wrong = np.flatnonzero(uses > group.pool.references)
        if len(wrong):
            block_id = int(wrong[0])
            self._fail("rows", name, block_id, self._owners(name, block_id))

    def _check_reads(self, name: str, request: Request, row: np.ndarray) -> None:
        """Every token that the step's first query sees lies where its row says."""
        shadow, spec = self._shadows[name], self._groups[name].config.spec
        assert not isinstance(spec, MambaSpec)
        computed = request.num_computed_tokens
        positions = np.arange(spec.first_visible(computed), computed)
        slots = shadow.slots(row, positions, computed)
        held = np.where(slots == PAD_SLOT_ID, UNKNOWN, shadow.read(np.maximum(slots, 0)))
        expected = self._histories[request][name][positions]
        wrong = np.flatnonzero((held != expected) | (expected == UNKNOWN))
        if len(wrong):
            position, slot = int(positions[wrong[0]]), int(slots[wrong[0]])
            block_id = slot // shadow.group.block_size if slot != PAD_SLOT_ID else NULL_BLOCK_ID
            self._fail(
                "visible tokens",
                name,
                block_id,
                f"is where the query at {computed} of the request in row {request.row} looks for token {position}, "
                f"and it holds {self._content(name, block_id)}",
            )

    def _check_state(self, name: str, request: Request, slot: int) -> None:
        pool, where = self._groups[name].pool, f"the request in row {request.row}"
        if slot == NULL_BLOCK_ID or pool.references[slot] != 1 or pool.is_kept[slot]:
            findable = " and can be found by others" * bool(pool.is_kept[slot])
            self._fail("one writer", name, slot, f"is written by {where}, and {self._owners(name, slot)}{findable}")
        computed = request.num_computed_tokens
        if computed and self._shadows[name].block(slot)[0] != self._histories[request][name][computed - 1]:
            self._fail(
                "visible tokens",
                name,
                slot,
                f"is where {where} looks for its state after {computed} tokens, and it holds {self._content(name, slot)}",
            )

    # The means

    def _is_state(self, name: str) -> bool:
        return self._groups[name].config.is_state

    def _slots_to_write(self, name: str, request: Request) -> np.ndarray:
        total = request.num_allocated_tokens
        positions = np.arange(request.num_computed_tokens, total)
        return self._shadows[name].slots(self._groups[name].row_blocks(request), positions, total)

    def _write_checkpoint(self, name: str, request: Request, count: int) -> None:
        """The step that came to a checkpoint's token has written its slot."""
        checkpoint, computed = request.checkpoint, request.num_computed_tokens
        if checkpoint is not None and computed < checkpoint.num_tokens <= computed + count:
            number = self._histories[request][name][checkpoint.num_tokens - 1]
            self._shadows[name].block(checkpoint.slots[name])[:] = number

    def _requests_of(self, tables: MultiGroupBlockTable, geometry: BatchGeometry) -> list[Request]:
        """The request of each row of a step, which must be in the step that the geometry describes."""
        owners = {request.row: request for request in self._requests if request.tables is tables}
        requests = []
        for row, computed, count in zip(
            geometry.rows.tolist(), geometry.num_computed_tokens, geometry.query_lens, strict=True
        ):
            if row not in owners:
                raise SanitizerError(f"sanitizer, rows: the step names row {row}, which no request has")
            request = owners[row]
            if (request.num_computed_tokens, request.num_allocated_tokens) != (computed, computed + count):
                raise SanitizerError(
                    f"sanitizer, geometry: row {row} computes {count} tokens after {computed}, and its request has blocks "
                    f"for tokens {request.num_computed_tokens} to {request.num_allocated_tokens - 1}"
                )
            requests.append(request)
        return requests

    def _owners(self, name: str, block_id: int) -> str:
        group = self._groups[name]
        rows = [r.row for r in self._requests if block_id and block_id in group.held_blocks(r)]
        held = f"is held by the requests in rows {rows}" if rows else "is held by no request"
        return f"{held} and has {group.pool.references[block_id]} owners"

    def _span(self, name: str, stop: int) -> str:
        if self._is_state(name):
            return f"the state after {stop} tokens"
        return f"tokens {stop - self._groups[name].config.block_size} to {stop - 1}"

    def _content(self, name: str, block_id: int) -> str:
        """What a block holds, for people: whose tokens, and which."""
        if block_id == NULL_BLOCK_ID:
            return "nothing: it is the null block"
        numbers = self._shadows[name].block(block_id)
        numbers = numbers[numbers != UNKNOWN]
        if not len(numbers):
            return f"nothing: it is free or was never written, and {self._owners(name, block_id)}"
        for request in self._requests:
            found = np.flatnonzero(np.isin(self._histories[request][name], numbers))
            if len(found):
                what = f"tokens {found[0]} to {found[-1]}"
                if self._is_state(name):
                    what = f"the state after {found[-1] + 1} tokens"
                return f"{what} of the request in row {request.row}"
        return "tokens that no request has any more"

    def _fail(self, rule: str, name: str, block_id: int, what: str) -> None:
        raise SanitizerError(f"sanitizer, {rule}: group {name!r}: block {block_id}: {what}")


def _digests(token_ids: np.ndarray) -> list[bytes]:
    """(num_tokens + 1,): a digest of the first n tokens, for each n."""
    hasher = hashlib.blake2b(digest_size=16)
    digests = [hasher.digest()]
    for token in np.asarray(token_ids, dtype=np.int64):
        hasher.update(token.tobytes())
        digests.append(hasher.copy().digest())
    return digests
