"""Indices that lead beside the tensors: noticed by the form that fails, and named afterwards."""

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import KVGroupsError, OutOfRangeError, ShapeError
from kvgroups.kernels.cpu_library import cpu_library

BACKENDS = ("reference", "torch", "cpu")
"""On a GPU nobody notices."""

CACHE = torch.zeros(3, 1, 2, 4)
"""3 blocks of 2 tokens, HND."""
TABLE = torch.tensor([[1, 7]], dtype=torch.int32)
STATES, SLOT, NEW = torch.zeros(3, 4, 2), torch.tensor([5]), torch.tensor([0])
ROW, TOKEN, PAIR = torch.ones(1, 4), torch.ones(1, 1, 4), torch.ones(1, 2)
STARTS, BYTES = torch.tensor([0, 1]), torch.zeros(3, 8, dtype=torch.uint8)
LARGE, WIDE = torch.zeros(3, 4, 64, 128), torch.ones(1, 4, 64)


def attention():
    options = {"query_start_loc": STARTS, "num_computed_tokens": torch.tensor([4]), "scale": 1.0}
    ops.paged_attention(TOKEN, TOKEN, TOKEN, CACHE, CACHE, TABLE, **options)


def gather_kv():
    ops.gather_kv(CACHE, CACHE, TABLE, seq_lens=torch.tensor([4]), max_seq_len=4, layout="HND")


def write_kv():
    two = TOKEN.repeat(2, 1, 1)
    ops.write_kv(two, two, CACHE.clone(), CACHE.clone(), torch.tensor([2, 9, 99]), layout="HND")


def convolution(initial=SLOT, final=SLOT):
    slots = {"query_start_loc": STARTS, "initial_slots": initial, "final_slots": final}
    ops.causal_conv1d(ROW, torch.ones(4, 2), None, STATES.clone(), **slots)


def scan():
    slots = {"query_start_loc": STARTS, "initial_slots": SLOT, "final_slots": SLOT}
    ops.selective_scan(ROW, ROW, -torch.ones(4, 2), PAIR, PAIR, STATES.clone(), **slots)


def update_in_place():
    A, B = -torch.ones(4, 64, 128), torch.ones(1, 1, 128)
    ops.selective_state_update(LARGE.clone(), SLOT, WIDE, WIDE, A, B, B)


def slot_mapping(row=0, position=0):
    groups = {"block_sizes": [2], "modes": ["paged"], "ring_blocks": [0]}
    step = torch.tensor([row]), STARTS, torch.tensor([position]), torch.tensor([position + 1])
    ops.slot_mapping([TABLE], *step, **groups)


SLOTS_OF_STATES = "slots: expected slots from 0 to 2, got 5 at [0]. They must lie in the tensor that they are passed with."
CASES = {
    "attention": (attention, "block_table: expected block ids from 0 to 2, got 7 at [0, 1]."),
    "gather_kv": (gather_kv, "block_table: expected block ids from 0 to 2, got 7 at [0, 1]."),
    "write_kv": (write_kv, "slot_mapping: expected slots from -1 to 5, got 9 at [1]."),
    "gather_states": (lambda: ops.gather_states(STATES, SLOT), SLOTS_OF_STATES),
    "scatter_states": (lambda: ops.scatter_states(STATES.clone(), SLOT, STATES[:1]), SLOTS_OF_STATES),
    "convolution step": (
        lambda: ops.causal_conv1d_update(ROW, STATES.clone(), SLOT, torch.ones(4, 2), None),
        SLOTS_OF_STATES,
    ),
    "convolution, initial": (convolution, f"initial_{SLOTS_OF_STATES}"),
    "convolution, final": (lambda: convolution(initial=NEW), f"final_{SLOTS_OF_STATES}"),
    "scan": (scan, f"initial_{SLOTS_OF_STATES}"),
    "state update in place": (update_in_place, SLOTS_OF_STATES),
    "row": (lambda: slot_mapping(row=4), "rows: expected rows from 0 to 0, got 4 at [0]."),
    "position": (lambda: slot_mapping(position=9), "index 4 "),
    "place": (lambda: ops.table_update(TABLE.clone(), SLOT, TABLE[0, :1]), "places: expected places from 0 to 1, got 5"),
    "source": (
        lambda: ops.copy_blocks(BYTES, torch.tensor([1, 9]), torch.tensor([2, 1])),
        "sources: expected block ids from 0 to 2, got 9 at [1].",
    ),
    "target below zero": (
        lambda: ops.copy_blocks(BYTES, torch.tensor([1, 1]), torch.tensor([2, -1])),
        "targets: expected block ids from 0 to 2, got -1 at [1].",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("call", "message"), CASES.values(), ids=CASES)
@torch.no_grad()
def test_what_leads_beside_the_tensors_is_named(backend, call, message):
    with pytest.raises(OutOfRangeError) as caught, ops.use_backend(backend):
        call()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("wrong", [-1, 3])
def test_no_block_is_copied_where_one_is_not_there(backend, wrong):
    blocks = torch.arange(24, dtype=torch.uint8).view(3, 8)
    before = blocks.clone()
    with pytest.raises(OutOfRangeError):
        ops.copy_blocks(blocks, torch.tensor([1, 1]), torch.tensor([2, wrong]), backend=backend)
    assert torch.equal(blocks, before)


def test_it_is_an_error_of_ours_and_an_index_error():
    assert issubclass(OutOfRangeError, KVGroupsError) and issubclass(OutOfRangeError, IndexError)


def test_a_form_that_knows_better_is_believed():
    """Start locations are wrong; that the table also has an entry which nobody reads does not matter."""
    if cpu_library().functions is None:
        pytest.skip(cpu_library().reason)
    options = {"query_start_loc": torch.tensor([0, 7]), "num_computed_tokens": torch.tensor([2]), "scale": 1.0}
    with torch.no_grad(), pytest.raises(OutOfRangeError, match="query_start_loc: expected start locations"):
        ops.paged_attention(TOKEN, TOKEN, TOKEN, CACHE, CACHE, TABLE, **options)


def test_parts_that_were_not_stacked_are_refused():
    part, lse = torch.ones(1, 1, 4), torch.zeros(1, 1)
    with pytest.raises(ShapeError, match=r"outputs: expected one tensor of all parts, got list\. Join .* torch\.stack"):
        ops.merge_attention([part, part], torch.stack([lse, lse]))
    with pytest.raises(ShapeError, match="lses: expected one tensor of all parts, got list"):
        ops.merge_attention(torch.stack([part, part]), [lse, lse])
