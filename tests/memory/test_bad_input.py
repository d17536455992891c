"""What a caller can do wrong: each is refused by a typed error that says what was wrong, and nothing has changed."""

from __future__ import annotations

import pytest

from kvgroups.errors import KVGroupsError, ShapeError

GROUPS = {"full": (16,), "window": (10, 4), "ring": (10, 4), "state": ()}
LONGEST = 64


class Scene:
    """A request of 30 tokens in row 0 with a checkpoint at 28, one that is gone, and one of another manager."""

    def __init__(self, make_bench) -> None:
        self.bench, elsewhere = (
            make_bench(GROUPS, max_model_len=LONGEST, max_rewind=4, memory=None) for _ in range(2)
        )
        self.manager, self.tables = self.bench.manager, self.bench.tables
        self.request = self.bench.open(0, 28)
        self.manager.set_checkpoints([self.request], [0])
        self.bench.step(self.request, 2)
        self.gone = self.bench.open(1, 5)
        self.manager.free(self.gone)
        self.foreign = elsewhere.open(3, 5)
        self.manager.check()


CALLS = {
    "allocate: a request that is none": (
        lambda s: s.manager.allocate([7], [1]), KVGroupsError, "expected what open, admit or fork has returned, got 7"),
    "allocate: a request of another manager": (
        lambda s: s.manager.allocate([s.foreign], [1]), KVGroupsError, "row 3 belongs to another manager"),
    "advance: a request of another manager": (
        lambda s: s.manager.advance([s.foreign], [0]), KVGroupsError, "row 3 belongs to another manager"),
    "free: a request of another manager": (
        lambda s: s.manager.free(s.foreign), KVGroupsError, "row 3 belongs to another manager"),
    "fork: a request of another manager": (
        lambda s: s.manager.fork(s.foreign, s.tables, 1), KVGroupsError, "row 3 belongs to another manager"),
    "free: twice": (lambda s: s.manager.free(s.gone), KVGroupsError, "row 1 was freed before"),
    "allocate: a finished request": (
        lambda s: s.manager.allocate([s.gone], [1]), KVGroupsError, "row 1 was freed before"),
    "advance: a finished request": (
        lambda s: s.manager.advance([s.gone], [0]), KVGroupsError, "row 1 was freed before"),
    "cancel: a finished request": (lambda s: s.manager.cancel([s.gone]), KVGroupsError, "row 1 was freed before"),
    "fork: a finished request": (
        lambda s: s.manager.fork(s.gone, s.tables, 2), KVGroupsError, "row 1 was freed before"),
    "move: a finished request": (
        lambda s: s.manager.move(s.gone, s.tables, 2), KVGroupsError, "row 1 was freed before"),
    "rewind: a finished request": (lambda s: s.manager.rewind(s.gone, 1), KVGroupsError, "row 1 was freed before"),
    "file: a finished request": (lambda s: s.manager.file(s.gone, [1] * 5), KVGroupsError, "row 1 was freed before"),
    "explain: a finished request": (lambda s: s.manager.explain(s.gone), KVGroupsError, "row 1 was freed before"),
    "checkpoint: a finished request": (
        lambda s: s.manager.set_checkpoints([s.gone], [0]), KVGroupsError, "row 1 was freed before"),
    "allocate: a request twice": (
        lambda s: s.manager.allocate([s.request, s.request], [1, 1]), KVGroupsError, "named twice"),
    "allocate: a negative count": (
        lambda s: s.manager.allocate([s.request], [-1]), ShapeError, "expected 0 or more, got -1"),
    "allocate: a count too few": (
        lambda s: s.manager.allocate([s.request], []), ShapeError, "one count for each of 1 requests, got 0"),
    "allocate: more tokens than max_model_len": (
        lambda s: s.manager.allocate([s.request], [LONGEST - 29]), ShapeError, "65 tokens: max_model_len is 64"),
    "advance: a count that was not allocated": (
        lambda s: s.manager.advance([s.request], [1]), KVGroupsError, "a step of 0 tokens, expected 1"),
    "checkpoint: a negative offset": (
        lambda s: s.manager.set_checkpoints([s.request], [-1]), ShapeError, "offsets of 0 tokens or more, got -1"),
    "rewind: a negative count": (
        lambda s: s.manager.rewind(s.request, -1), ShapeError, "expected 0 to 30 tokens, .* got -1"),
    "rewind: past zero": (lambda s: s.manager.rewind(s.request, 31), ShapeError, "expected 0 to 30 tokens, .* got 31"),
    "rewind: past the checkpoint": (
        lambda s: s.manager.rewind(s.request, 3), KVGroupsError, "there is one after 28 tokens; raise max_rewind"),
    "open: a row out of range": (lambda s: s.manager.open(s.tables, 8), ShapeError, "a row from 0 to 7, got 8"),
    "open: a negative row": (lambda s: s.manager.open(s.tables, -1), ShapeError, "a row from 0 to 7, got -1"),
    "open: a row in use": (lambda s: s.manager.open(s.tables, 0), KVGroupsError, "row 0 belongs to another request"),
    "fork: a row out of range": (
        lambda s: s.manager.fork(s.request, s.tables, 8), ShapeError, "a row from 0 to 7, got 8"),
    "move: a row out of range": (
        lambda s: s.manager.move(s.request, s.tables, 8), ShapeError, "a row from 0 to 7, got 8"),
    "admit: a row out of range": (
        lambda s: s.manager.admit(s.tables, 8, [1, 2]), ShapeError, "a row from 0 to 7, got 8"),
    "admit: no prompt": (lambda s: s.manager.admit(s.tables, 2, []), ShapeError, "at least one token, got none"),
    "admit: a prompt of two dimensions": (
        lambda s: s.manager.admit(s.tables, 2, [[1, 2]]), ShapeError, r"\(num_tokens,\) integers, got \(1, 2\)"),
    "admit: more tokens than max_model_len": (
        lambda s: s.manager.admit(s.tables, 2, [1] * 65), ShapeError, "65 tokens: max_model_len is 64"),
    "admit: a first step of no tokens": (
        lambda s: s.manager.admit(s.tables, 2, [1, 2], 0), ShapeError, "max_new_tokens: expected 1 or more, .* got 0"),
    "admit: a first step of negative tokens": (
        lambda s: s.manager.admit(s.tables, 2, [1, 2], -3), ShapeError, "expected 1 or more, .* got -3"),
    "file: fewer tokens than were computed": (
        lambda s: s.manager.file(s.request, [1] * 29), ShapeError, "expected the 30 tokens .* got 29"),
    "check_fits: no requests": (
        lambda s: s.manager.check_fits(0, 5, 9), ShapeError, "one request or more"),
    "check_fits: chunks of no tokens": (
        lambda s: s.manager.check_fits(1, 5, 9, chunk_size=0), ShapeError, "chunks of one or more"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:no prefix can be reused")
@pytest.mark.parametrize(("call", "error", "message"), CALLS.values(), ids=CALLS)
def test_what_is_wrong_is_said_and_nothing_changes(make_bench, call, error, message):
    scene = Scene(make_bench)
    before, pending = scene.bench.snapshot(), len(scene.manager.pending)
    counts = scene.request.num_computed_tokens, scene.request.num_allocated_tokens, scene.request.checkpoint
    with pytest.raises(error, match=message):
        call(scene)
    assert scene.bench.snapshot() == before
    assert len(scene.manager.pending) == pending
    assert counts == (
        scene.request.num_computed_tokens, scene.request.num_allocated_tokens, scene.request.checkpoint,
    )  # fmt: skip
    scene.manager.check()
    scene.bench.step(scene.request, 3)
    scene.manager.check()


def test_a_finished_request_does_not_take_its_rows_next_owner_along(make_bench):
    """The row of a request that is gone has another owner by now; nothing done with the old one reaches it."""
    scene = Scene(make_bench)
    heir = scene.bench.open(1, 20)
    held = {name: scene.bench.row(heir, name) for name in GROUPS}
    for call in (scene.manager.free, lambda gone: scene.manager.cancel([gone])):
        with pytest.raises(KVGroupsError, match="row 1 was freed before"):
            call(scene.gone)
    assert {name: scene.bench.row(heir, name) for name in GROUPS} == held
    scene.manager.check()
