"""Prefix reuse beside the truth: whatever is filed, served, evicted, forked, taken back or flushed, every request
reads the values of its own tokens, and every block is accounted for.

Prompts share prefixes often, memory is short, and each value is made of all tokens before it: a block that serves
another prompt, or is written while it is findable, reads wrong.
"""

from __future__ import annotations

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
from kvgroups.retention import RetentionPolicy

GROUPS = {
    "hybrid": {"full": (4,), "window": (8, 4), "state": (1, 4)},
    "blocks of three sizes": {"full": (8,), "window": (5, 2), "chunk": (6, 4)},
    "states in runs": {"full": (4,), "state": (1280, 8)},
    "windows only": {"window": (6, 4), "window_1": (1, 2)},
}
NUM_ROWS = 4
MAX_LEN = 72

prompts = st.tuples(st.integers(0, 1), st.integers(1, 60), st.integers(2, 3), st.sampled_from([0, 0, 1, 6]))
"""So many tokens of one text, then so many of another: few texts, so that prompts share their beginnings."""

policies = st.sampled_from(
    [RetentionPolicy(), RetentionPolicy.none(), RetentionPolicy.every_tokens(8), RetentionPolicy(max_points=1)]
)  # fmt: skip


def text_of(number: int) -> list[int]:
    return list(range(100 * number, 100 * number + MAX_LEN))


class PrefixesBesideTheTruth(RuleBasedStateMachine):
    worker_class: type  # of the conftest

    @initialize(data=st.data(), groups=st.sampled_from(sorted(GROUPS)), retention=policies)
    def build(self, data, groups, retention):
        groups = GROUPS[groups]
        largest = 6 * 4 * 5 if "state" in groups and groups["state"][0] > 1 else 40
        memory = data.draw(
            st.one_of(
                st.none(),
                st.integers(12, largest).map(lambda slabs: slabs * 1024),
                st.fixed_dictionaries({name: st.integers(4, 40) for name in groups}),
            )
        )
        self.worker = self.worker_class(
            groups,
            retention,
            memory=memory,
            max_rewind=4,
            max_num_reqs=NUM_ROWS,
            max_model_len=MAX_LEN,
            sanitize=data.draw(st.sampled_from([False, False, False, False, True])),
        )
        self.manager = self.worker.manager
        self.has_states = "state" in groups
        self.requests: dict[int, object] = {}
        self.tokens: dict[int, list[int]] = {}  # prompt, and answer so far

    @precondition(lambda self: len(self.requests) < NUM_ROWS)
    @rule(data=st.data(), prompt=prompts, extra=st.sampled_from([None, None, None, "a"]))
    def admit(self, data, prompt, extra):
        text, num_shared, end, num_more = prompt
        tokens = [*text_of(text)[:num_shared], *text_of(end)[:num_more]]
        limit = data.draw(st.one_of(st.none(), st.none(), st.integers(1, 20)))
        row = data.draw(st.sampled_from(sorted(set(range(NUM_ROWS)) - set(self.requests))))
        expected = self.manager.match_prefix(tokens, extra).num_tokens
        request = self.all_or_nothing(self.manager.admit, self.worker.tables, row, tokens, limit, extra)
        if request:
            assert request.hit.num_tokens == expected < len(tokens)
            self.requests[row], self.tokens[row] = request, tokens
            self.worker.assert_reads(request, tokens)
            self.worker.finish_step(request, tokens)

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(),
        limit=st.one_of(st.none(), st.integers(1, 9)),
        is_filed=st.sampled_from([True, True, False]),
    )
    def step(self, data, limit, is_filed):
        """The next chunk of the prompt, or some tokens of the answer, or nothing after all. Answers go on as texts do,
        so that they are prompts, too."""
        row = self.a_row(data)
        request, tokens = self.requests[row], self.tokens[row]
        count = self.manager.next_step(request, limit)
        new = []
        if count == 0:
            here, length = len(tokens), data.draw(st.integers(1, 5))
            new = text_of(data.draw(st.integers(0, 1)))[here : here + length]
            count = len(tokens) + len(new) - request.num_computed_tokens
        if count == 0 or not self.all_or_nothing(self.manager.allocate, [request], [count]):
            return
        if data.draw(st.integers(0, 5)) == 0:
            self.manager.cancel([request])
            return
        tokens += new
        self.worker.write(request, tokens, count)
        self.manager.advance([request], [count])
        if is_filed:
            self.manager.file(request, tokens)

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(), num_drafts=st.integers(1, 4), accepted=st.integers(0, 4), files_drafts=st.booleans()
    )
    def draft(self, data, num_drafts, accepted, files_drafts):
        """Compute drafts and take back those that are not accepted; with states, all of them."""
        row = self.a_row(data)
        request, tokens = self.requests[row], self.tokens[row]
        here = request.num_computed_tokens
        if here < len(tokens) or here + num_drafts > MAX_LEN:
            return
        if self.has_states and not self.all_or_nothing(self.manager.set_checkpoints, [request], [0]):
            return
        if not self.all_or_nothing(self.manager.allocate, [request], [num_drafts]):
            return
        drafted = [*tokens, *text_of(data.draw(st.integers(0, 1)))[here : here + num_drafts]]
        self.worker.write(request, drafted, num_drafts)
        self.manager.advance([request], [num_drafts])
        if files_drafts:
            self.manager.file(request, drafted)
        self.tokens[row] = drafted
        rejected = num_drafts - (0 if self.has_states else min(accepted, num_drafts))
        if self.all_or_nothing(self.manager.check_rewind, request, rejected):
            fed_again = self.all_or_nothing(self.manager.rewind, request, rejected)
            if fed_again is not None:
                assert fed_again in (True, 0)
                self.tokens[row] = drafted[: len(drafted) - rejected]

    @precondition(lambda self: 0 < len(self.requests) < NUM_ROWS)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.a_row(data)
        row = data.draw(st.sampled_from(sorted(set(range(NUM_ROWS)) - set(self.requests))))
        child = self.all_or_nothing(self.manager.fork, self.requests[parent], self.worker.tables, row)
        if child:
            self.requests[row], self.tokens[row] = child, list(self.tokens[parent])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data):
        """The rest of a prompt, filed at every stop, and the end."""
        row = self.a_row(data)
        request, tokens = self.requests[row], self.tokens[row]
        while count := self.manager.next_step(request):
            if not self.all_or_nothing(self.manager.allocate, [request], [count]):
                return
            self.worker.finish_step(request, tokens)
        self.free(row)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def give_up(self, data):
        self.free(self.a_row(data))

    def free(self, row):
        del self.tokens[row]
        self.manager.free(self.requests.pop(row))

    @rule(really=st.integers(0, 11))
    def flush(self, really):
        if really == 0:
            self.manager.flush()
            assert self.manager.usage().cached_bytes == 0

    @invariant()
    def the_accounts_are_right(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        if not self.requests:
            assert set(self.worker.num_used().values()) == {0}
        if isinstance(self.worker.config.memory, int):
            assert self.manager.usage().allocated_bytes <= self.worker.config.memory

    @invariant()
    def every_request_reads_its_own_tokens(self):
        for row, request in getattr(self, "requests", {}).items():
            self.worker.assert_reads(request, self.tokens[row])

    @invariant()
    def every_block_that_can_be_found_holds_what_it_says(self):
        if hasattr(self, "manager"):
            self.worker.assert_findable_is_right()

    def a_row(self, data):
        return data.draw(st.sampled_from(sorted(self.requests)))

    def all_or_nothing(self, call, *arguments):
        """What the call returns, True for nothing; None if it had no room, and so must have changed nothing."""
        before = self.accounts()
        try:
            return call(*arguments) or True
        except OutOfBlocksError:
            assert self.worker.config.memory is not None
            assert self.accounts() == before
            return None

    def accounts(self):
        cached = [group.num_cached for group in self.manager.usage().groups]
        return self.worker.snapshot(), cached, self.manager.prefix_stats.num_evicted_blocks


SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


def test_a_few_hundred_sequences(make_worker):
    PrefixesBesideTheTruth.worker_class = make_worker
    run_state_machine_as_test(
        PrefixesBesideTheTruth, settings=settings(SETTINGS, max_examples=200, stateful_step_count=25)
    )


@pytest.mark.slow
def test_many_long_sequences(make_worker):
    PrefixesBesideTheTruth.worker_class = make_worker
    run_state_machine_as_test(
        PrefixesBesideTheTruth, settings=settings(SETTINGS, max_examples=2000, stateful_step_count=50)
    )
