"""KV sanitizer: classic faults, each planted in one function, are named before they do harm; nothing else is.

Every fault is a function that patches one other, the scenario in which it shows, and what the sanitizer says.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvgroups import multi_group_block_table, ops
from kvgroups.block_table import BlockTable
from kvgroups.demand import GroupDemand
from kvgroups.errors import SanitizerError
from kvgroups.filing import Filing
from kvgroups.group_manager import GroupManager
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.prefix_cache import PrefixCache
from kvgroups.prefix_tree import Cursor

HYBRID = {"full": (16,), "window": (8, 4), "state": (1, 16)}
RING = {"full": (16,), "ring": (10, 4), "state": ()}

TEXT = list(range(100, 200))


def decoding(worker):
    """A prompt of 30 tokens beside one of 5, and 14 tokens of an answer: windows pass by blocks, rings go round."""
    worker.prefill(1, TEXT[50:55])
    request = worker.prefill(0, TEXT[:30])
    worker.decode(request, TEXT[:44], 30)


def moving(worker):
    request = worker.prefill(0, TEXT[:30])
    worker.manager.move(request, worker.tables, 5)
    worker.decode(request, TEXT[:31], 30)


def forking(worker):
    request = worker.prefill(0, TEXT[:21])
    twin = worker.manager.fork(request, worker.tables, 1)
    worker.decode(twin, [*TEXT[:21], 7, 8], 21)
    worker.decode(request, TEXT[:23], 21)


def reusing(worker):
    """A prompt is served, evicted in part by others, and served again."""
    assert worker.serve(0, TEXT[:37]) == 0
    assert worker.serve(0, TEXT[:37]) == 32
    assert worker.serve(1, [*TEXT[:33], 7]) == 32


def drafting(worker):
    """Four drafted tokens, the last three of which are taken back, over the edge of a block."""
    request = worker.prefill(0, TEXT[:30])
    worker.manager.set_checkpoints([request], [0])
    request.max_rewind = 4
    worker.manager.allocate([request], [4])
    worker.finish_step(request, TEXT[:34])
    again = worker.manager.rewind(request, 3)
    tokens = [*TEXT[:31], 7, 8]
    worker.manager.allocate([request], [again + 2])
    worker.finish_step(request, tokens)
    worker.assert_reads(request, tokens)


# The faults


def a_stale_row_after_a_move(patch):
    patch.setattr(MultiGroupBlockTable, "clear_row", lambda self, row: None)


def a_freed_block_kept_in_a_table(patch):
    patch.setattr(BlockTable, "null_range", lambda self, row, start, stop: None)


def a_snapshot_filed_one_block_late(patch):
    """The state after 32 tokens, under the prefix of 16."""
    original = PrefixCache.file_snapshot

    def late(self, cursor, group, block_id):
        node = next(above for above in cursor.node.ancestors() if above.depth == cursor.num_tokens - 16)
        return original(self, Cursor(node), group, block_id)

    patch.setattr(PrefixCache, "file_snapshot", late)


def a_window_released_one_block_early(patch):
    original = GroupDemand.num_hidden_blocks

    def early(self, num_tokens, rewind=0):
        hidden = original(self, num_tokens, rewind)
        return hidden if self.keeps_all else hidden + 1

    patch.setattr(GroupDemand, "num_hidden_blocks", early)


def a_tail_shared_at_a_fork(patch):
    patch.setattr(GroupManager, "private_columns", lambda self, request: [])


def a_pad_written_to_block_0(patch):
    original = multi_group_block_table.slot_mappings
    patch.setattr(multi_group_block_table, "slot_mappings", lambda *args: original(*args).clamp(min=0))


def a_ring_index_off_by_one(patch):
    original = ops.slot_mapping

    def shorter(*args, ring_blocks, **kwargs):
        return original(*args, ring_blocks=[max(0, blocks - 1) for blocks in ring_blocks], **kwargs)

    patch.setattr(ops, "slot_mapping", shorter)


def a_hash_of_a_partial_block(patch):
    original = Filing.file

    def rounded_up(self, request, token_ids):
        original(self, request, np.append(token_ids, np.zeros(-len(token_ids) % 16, dtype=np.int64)))

    patch.setattr(Filing, "file", rounded_up)


def a_wrong_groups_block_size(patch):
    original = ops.slot_mapping

    def same(*args, block_sizes, **kwargs):
        return original(*args, block_sizes=[4 if size == 16 else size for size in block_sizes], **kwargs)

    patch.setattr(ops, "slot_mapping", same)


def swapped_groups(patch):
    original = multi_group_block_table.slot_mappings
    patch.setattr(multi_group_block_table, "slot_mappings", lambda *args: original(*args).flip(0))


def a_copy_that_was_forgotten(patch):
    patch.setattr(GroupManager, "copy_block", lambda self, source, target: None)


def a_block_of_another_request(patch):
    """Two rows of the device's table are exchanged on the way to the kernel."""
    original = BlockTable.gather

    def beside(self, geometry, out=None):
        rows = original(self, geometry, out)
        rows[: geometry.num_reqs] = self.device_table[1, : rows.shape[1]]
        return rows

    patch.setattr(BlockTable, "gather", beside)


def a_commit_that_moves_nothing(patch):
    def forget(self):
        for table in self.tables.values():
            table.note_committed(len(table.changes()[0]))

    patch.setattr(MultiGroupBlockTable, "commit", forget)


def a_filed_block_written_again(patch):
    patch.setattr(GroupManager, "forget", lambda self, block_id: None)


def a_state_that_was_not_taken_back(patch):
    patch.setattr(GroupManager, "restore_state", lambda self, request: None)


FAULTS = [
    (a_stale_row_after_a_move, HYBRID, moving, r"rows: group 'full': block \d+: is in row 0, which no request has"),
    (a_freed_block_kept_in_a_table, HYBRID, decoding,
     r"rows: group 'window': block \d+: is held by the requests in rows \[0\] and has 0 owners"),
    (a_snapshot_filed_one_block_late, HYBRID, reusing,
     r"filed blocks: group 'state': block \d+: is filed as the state after 16 tokens of the request in row 0, and "
     r"holds the state after 32 tokens"),
    (a_window_released_one_block_early, HYBRID, decoding,
     r"visible tokens: group 'window': block 0: is where the query at \d+ of the request in row 0 looks for token \d+, "
     r"and it holds nothing: it is the null block"),
    (a_tail_shared_at_a_fork, HYBRID, forking,
     r"one writer: group 'full': block \d+: is written by the request in row 1, and is held by the requests in rows "
     r"\[0, 1\] and has 2 owners"),
    (a_pad_written_to_block_0, HYBRID, decoding, r"padding: group 'full': block 0: is written by padding, slot 0"),
    (a_ring_index_off_by_one, RING, decoding,
     r"slots: group 'ring': block \d+: token \d+ of the request in row \d has slot -?\d+, expected \d+ \(ring, blocks of 4"),
    (a_hash_of_a_partial_block, {"full": (16,)}, reusing,
     r"filed blocks: group 'full': block \d+: is filed as tokens 32 to 47 of the request in row 0, and holds tokens 32 "
     r"to 36"),
    (a_wrong_groups_block_size, HYBRID, decoding,
     r"slots: group 'full': block \d+: token \d+ of the request in row \d has slot \d+, expected \d+ \(paged, blocks of 16"),
    (swapped_groups, {"full": (16,), "window": (8, 4)}, decoding, r"slots: group 'full': block \d+: token"),
    (a_copy_that_was_forgotten, {"full": (16,), "window": (8, 4)}, forking,
     r"visible tokens: group 'full': block \d+: is where the query at 21 of the request in row 1 looks for token 16, "
     r"and it holds nothing"),
    (a_block_of_another_request, {"full": (16,)}, decoding,
     r"visible tokens: group 'full': block \d+: is where the query at \d+ of the request in row 0 looks for token 0, "
     r"and it holds tokens 0 to 4 of the request in row 1"),
    (a_commit_that_moves_nothing, {"full": (16,)}, decoding, r"group 'full': block \d+: token 0 of .* has slot -1"),
    (a_filed_block_written_again, {"full": (16,), "window": (8, 4)}, drafting,
     r"one writer: group '\w+': block \d+: is written by the request in row 0, and can be found by others"),
    (a_state_that_was_not_taken_back, HYBRID, drafting,
     r"visible tokens: group 'state': block \d+: is where the request in row 0 looks for its state after 30 tokens"),
]  # fmt: skip


@pytest.fixture
def sanitized(make_worker):
    return lambda groups, scenario=None: make_worker(
        groups, sanitize=True, max_rewind=4 if scenario is drafting else 0
    )


@pytest.mark.parametrize(("plant", "groups", "scenario", "message"), FAULTS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_planted_fault_is_named(sanitized, monkeypatch, plant, groups, scenario, message):
    plant(monkeypatch)
    with pytest.raises(SanitizerError, match=message):
        scenario(sanitized(groups, scenario))


@pytest.mark.parametrize(
    ("groups", "scenario"),
    [
        (HYBRID, reusing),  # the other groups are resumed elsewhere
        *product(
            [HYBRID, RING, {"full": (16,)}, {"chunk": (6, 4), "full": (8,)}], [decoding, moving, forking, drafting]
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None) or " ".join(value),
)
def test_nothing_is_said_where_nothing_is_wrong(sanitized, groups, scenario):
    worker = sanitized(groups, scenario)
    scenario(worker)
    worker.manager.check()


def test_freed_blocks_read_as_nan_and_owned_ones_do_not(sanitized):
    worker = sanitized({"full": (16,)})
    request, other = worker.prefill(0, TEXT[:40]), worker.prefill(1, TEXT[60:80])
    freed, kept = worker.row(request, "full"), worker.row(other, "full")
    worker.manager.flush()
    worker.manager.free(request)
    worker.manager.drain()
    keys = worker.keys(worker.config.groups[0])
    assert np.isnan(keys[freed]).all()
    assert not np.isnan(keys[kept][:, :4]).any()
    assert not np.isnan(keys[0]).any()  # the null block stays zero


def test_an_arena_begins_and_grows_as_nan(sanitized):
    worker = sanitized({"full": (16,)})
    arena = worker.manager.arena
    for row, num_tokens in enumerate((5, 100, 100)):
        request = worker.prefill(row, TEXT[:num_tokens])
        keys = worker.keys(worker.config.groups[0])[worker.row(request, "full")[-1]]
        assert np.isnan(keys).tolist() == [offset >= num_tokens % 16 for offset in range(16)]
    arena.check_null()


def test_off_is_the_default_and_watches_nothing(make_worker):
    worker = make_worker(HYBRID)
    decoding(worker)
    assert worker.tables.inspector is None and worker.manager._sanitizer is None
