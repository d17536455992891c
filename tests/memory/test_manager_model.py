"""Manager beside a slow model of the truth: every request reads its own tokens, whatever the others do.

The model is a list of numbers per request, one a token. A step writes them through the tables as a forward
would; after every call, each position that the next query sees must hold the request's own number.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvgroups.errors import OutOfBlocksError

GROUPS = {"full": (16,), "window": (10, 4), "window_1": (1, 4), "ring": (10, 4), "chunk": (6, 4), "state": (1280,)}
"""Slabs of 1 KiB hold four blocks of any group of tokens; a state takes a run of five."""

NUM_ROWS = 4
MAX_LEN = 120

memories = st.one_of(
    st.none(),
    st.integers(11, 40).map(lambda slabs: 1024 * slabs + 100),  # bytes: one block of each group takes 11 slabs
    st.fixed_dictionaries({name: st.integers(4, 16) for name in GROUPS}),
)
counts = st.one_of(st.integers(1, 3), st.integers(1, 40))


class ManagerBesideTheTruth(RuleBasedStateMachine):
    bench_class: type  # of the conftest

    @initialize(
        memory=memories,
        max_rewind=st.sampled_from([0, 0, 3]),
        drains_late=st.booleans(),
        sanitize=st.sampled_from([False, False, False, False, True]),
    )
    def build(self, memory, max_rewind, drains_late, sanitize):
        self.drains_late = drains_late
        """Whether copies wait for the next step, whatever is called in between."""
        self.bench = self.bench_class(
            GROUPS,
            memory=memory,
            max_rewind=max_rewind,
            max_num_reqs=NUM_ROWS,
            max_model_len=MAX_LEN,
            sanitize=sanitize,
        )
        self.manager = self.bench.manager
        self.requests: dict[int, object] = {}
        self.truth: dict[int, list[int]] = {}
        self.went_back_to: dict[int, int] = {}
        """Row -> tokens after the last rewind: from there it could not be rewound again."""
        self.next_number = 1

    # What a person does

    @precondition(lambda self: len(self.requests) < NUM_ROWS)
    @rule(data=st.data())
    def open(self, data):
        row = data.draw(st.sampled_from(self.free_rows()))
        self.requests[row] = self.manager.open(self.bench.tables, row)
        self.truth[row] = []
        self.went_back_to[row] = 0

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), succeeds=st.sampled_from([True, True, True, False]))
    def step(self, data, succeeds):
        """Some of the requests compute tokens, or fail to, after they have written some."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.requests)), min_size=1, unique=True))
        new = [min(data.draw(counts), MAX_LEN - len(self.truth[row])) for row in chosen]
        requests = [self.requests[row] for row in chosen]
        if not self.all_or_nothing(self.manager.allocate, requests, new):
            return
        self.manager.check()
        for row, count in zip(chosen, new, strict=True):
            fresh = list(range(self.next_number, self.next_number + count))
            self.next_number += count
            self.write(row, fresh, overwrites_history=succeeds)
            if succeeds:
                self.truth[row] += fresh
        if succeeds:
            self.manager.advance(requests, new)
        else:
            self.manager.cancel(requests)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 4), num_rewound=st.integers(1, 4))
    def draft(self, data, count, num_rewound):
        """A request computes tokens that it then takes back, some or all; its state goes back to before them."""
        row = data.draw(st.sampled_from(sorted(self.requests)))
        request, before = self.requests[row], len(self.truth[row])
        count = min(count, MAX_LEN - before)
        request.max_rewind = count
        if not self.all_or_nothing(self.manager.set_checkpoints, [request], [0]):
            return
        if not self.all_or_nothing(self.manager.allocate, [request], [count]):
            return
        fresh = list(range(self.next_number, self.next_number + count))
        self.next_number += count
        self.write(row, fresh, overwrites_history=True)
        self.manager.advance([request], [count])
        self.truth[row] += fresh
        self.manager.check()
        num_rewound = min(num_rewound, count)
        if count > self.bench.config.max_rewind:
            return  # a ring has written over what a query at the checkpoint would see
        again = self.manager.rewind(request, num_rewound)
        assert again == count - num_rewound
        self.truth[row] = self.truth[row][:before]
        self.went_back_to[row] = before

    @precondition(lambda self: 0 < len(self.requests) < NUM_ROWS)
    @rule(data=st.data())
    def move(self, data):
        row = data.draw(st.sampled_from(sorted(self.requests)))
        target = data.draw(st.sampled_from(self.free_rows()))
        self.manager.move(self.requests[row], self.bench.tables, target)
        self.requests[target] = self.requests.pop(row)
        self.truth[target] = self.truth.pop(row)
        self.went_back_to[target] = self.went_back_to.pop(row)

    @precondition(lambda self: 0 < len(self.requests) < NUM_ROWS)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.requests)))
        row = data.draw(st.sampled_from(self.free_rows()))
        child = self.all_or_nothing(self.manager.fork, self.requests[parent], self.bench.tables, row)
        if child:
            self.requests[row] = child
            self.truth[row] = list(self.truth[parent])
            self.went_back_to[row] = self.went_back_to[parent]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data):
        row = data.draw(st.sampled_from(sorted(self.requests)))
        self.manager.free(self.requests.pop(row))
        del self.truth[row]

    # What must hold after each of it

    @invariant()
    def the_accounts_are_right(self):
        if hasattr(self, "manager"):
            self.manager.check()
            if not self.requests:
                assert sum(self.bench.num_used().values()) == 0
                assert self.manager.usage().leased_bytes == 0
            self.manager.arena.check_null()

    @invariant()
    def every_byte_is_accounted_for(self):
        if hasattr(self, "manager"):
            usage = self.manager.usage()
            for group in usage.groups:
                parts = group.held_bytes + group.cached_bytes + group.free_bytes + group.waste_bytes
                assert parts == group.leased_bytes == 1024 * group.num_leased_slabs
                assert group.held_bytes <= group.peak_held_bytes <= usage.peak_held_bytes
            unleased = 1024 * (self.manager.slabs.num_free + 1)  # the null slab is nobody's
            assert usage.leased_bytes + unleased == usage.allocated_bytes == self.manager.arena.nbytes
            if isinstance(self.bench.config.memory, int):
                assert usage.allocated_bytes == self.bench.config.memory - 100
            held = {row: self.held_bytes(row) for row in self.requests}
            assert {request.row: dict(request.held_bytes) for request in usage.requests} == held

    @invariant()
    def every_request_reads_its_own_tokens(self):
        if hasattr(self, "manager"):
            if self.drains_late and self.manager.pending:
                return
            self.manager.drain()
        for row, numbers in getattr(self, "truth", {}).items():
            for name in GROUPS:
                group = self.bench.config.group(name)
                if not numbers:
                    assert self.bench.row(self.requests[row], name) == []
                elif group.is_state:
                    assert self.state(row) == numbers[-1]
                else:
                    lowest = max(len(numbers) - self.bench.config.max_rewind, self.went_back_to[row])
                    first = group.spec.first_visible(lowest)
                    seen = np.arange(first, len(numbers))
                    assert self.read(row, name, seen).tolist() == numbers[first:], name

    # The means

    def free_rows(self):
        return sorted(set(range(NUM_ROWS)) - set(self.requests))

    def all_or_nothing(self, call, *arguments):
        """What the call returns, True for nothing; None if it had no room, and so must have changed nothing."""
        before = self.bench.snapshot()
        try:
            return call(*arguments) or True
        except OutOfBlocksError:
            assert self.bench.config.memory is not None
            assert self.bench.snapshot() == before
            return None

    def places(self, row, name, positions):
        """Block id and offset of each position, by the definition of the slot mapping."""
        group = self.bench.config.group(name)
        blocks = np.array(self.bench.row(self.requests[row], name))
        columns = positions // group.block_size
        if group.slot_mapping == "ring":
            columns = columns % self.bench.config.ring_blocks(group)
        return blocks[columns], positions % group.block_size

    def view(self, name, tensor):
        layer = self.bench.config.group(name).layers[0]
        return self.manager.storage(name).layer(layer)[tensor].numpy()

    def read(self, row, name, positions):
        blocks, offsets = self.places(row, name, positions)
        assert blocks.all(), f"{name}: a position that the next query sees is in the null block"
        return self.view(name, "key")[blocks, offsets, 0, 0].astype(int)

    def state(self, row):
        (block_id,) = self.bench.row(self.requests[row], "state")
        return int(self.view("state", "recurrent")[block_id, 0])

    def held_bytes(self, row):
        """Bytes of the blocks in a row and of the request's checkpoint, by group."""
        request = self.requests[row]
        num_blocks = {name: sum(block_id != 0 for block_id in self.bench.row(request, name)) for name in GROUPS}
        if request.checkpoint is not None:
            num_blocks["state"] += len(request.checkpoint.slots)
        return {name: count * self.bench.config.group(name).block_bytes for name, count in num_blocks.items()}

    def write(self, row, numbers, overwrites_history):
        """Write as a forward does: tokens without a block are skipped, a ring goes round.

        A ring and a state are overwritten in place, which no `cancel` can undo: `overwrites_history=False`
        stands for a forward that failed before it came to them.
        """
        self.bench.forward([self.requests[row]]) if self.bench.config.sanitize else self.manager.drain()
        if not numbers:
            return
        start = len(self.truth[row])
        positions = np.arange(start, start + len(numbers))
        for name in GROUPS:
            in_place = name in ("ring", "state")
            if in_place and not overwrites_history:
                continue
            if name == "state":
                (block_id,) = self.bench.row(self.requests[row], "state")
                self.view(name, "recurrent")[block_id, 0] = numbers[-1]
                continue
            blocks, offsets = self.places(row, name, positions)
            stored = blocks != 0
            self.view(name, "key")[blocks[stored], offsets[stored], 0, 0] = np.array(numbers)[stored]


QUICK = settings(
    max_examples=200, stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
LONG = settings(QUICK, max_examples=4000, stateful_step_count=50)  # 200,000 calls


@pytest.mark.parametrize(
    "profile", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)], ids=["quick", "long"]
)
def test_every_request_reads_its_own_tokens_after_any_sequence_of_calls(make_bench, profile):
    machine = type("Machine", (ManagerBesideTheTruth,), {"bench_class": make_bench})
    run_state_machine_as_test(machine, settings=profile)
