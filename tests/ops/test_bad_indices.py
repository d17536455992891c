"""Indices that lead beside the tensors: noticed by the form that fails, and named afterwards."""

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import ShapeError

BACKENDS = ("reference", "torch")
"""The C++ forms name them themselves; on a GPU nobody notices."""

CACHE = torch.zeros(3, 1, 2, 4)
"""3 blocks of 2 tokens, HND."""
TABLE = torch.tensor([[1, 7]], dtype=torch.int32)
STATES, SLOT, NEW = torch.zeros(3, 4, 2), torch.tensor([5]), torch.tensor([0])
ROW, TOKEN, PAIR = torch.ones(1, 4), torch.ones(1, 1, 4), torch.ones(1, 2)
STARTS = torch.tensor([0, 1])
LARGE, WIDE = torch.zeros(3, 4, 64, 128), torch.ones(1, 4, 64)


def attention(backend):
    options = {"query_start_loc": STARTS, "num_computed_tokens": torch.tensor([4]), "scale": 1.0}
    ops.paged_attention(TOKEN, TOKEN, TOKEN, CACHE, CACHE, TABLE, **options, backend=backend)


def gather_kv(backend):
    options = {"seq_lens": torch.tensor([4]), "max_seq_len": 4, "layout": "HND"}
    ops.gather_kv(CACHE, CACHE, TABLE, **options, backend=backend)


def write_kv(backend):
    ops.write_kv(TOKEN, TOKEN, CACHE.clone(), CACHE.clone(), torch.tensor([9]), layout="HND", backend=backend)


def convolution(backend, initial=SLOT, final=SLOT):
    slots = {"query_start_loc": STARTS, "initial_slots": initial, "final_slots": final}
    ops.causal_conv1d(ROW, torch.ones(4, 2), None, STATES.clone(), **slots, backend=backend)


def scan(backend):
    slots = {"query_start_loc": STARTS, "initial_slots": SLOT, "final_slots": SLOT}
    ops.selective_scan(ROW, ROW, -torch.ones(4, 2), PAIR, PAIR, STATES.clone(), **slots, backend=backend)


def update_in_place(backend):
    A, B = -torch.ones(4, 64, 128), torch.ones(1, 1, 128)
    ops.selective_state_update(LARGE, SLOT, WIDE, WIDE, A, B, B, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (attention, "block_table: expected block ids from 0 to 2, got 1 to 7"),
        (gather_kv, "block_table: expected block ids from 0 to 2, got 1 to 7"),
        (write_kv, "slot_mapping: expected slots from -1 to 5, got 9 to 9"),
        (lambda backend: ops.gather_states(STATES, SLOT, backend=backend), "slots: expected slots from 0 to 2"),
        (
            lambda backend: ops.scatter_states(STATES.clone(), SLOT, STATES[:1], backend=backend),
            "slots: expected slots from 0 to 2",
        ),
        (
            lambda backend: ops.causal_conv1d_update(
                ROW, STATES.clone(), SLOT, torch.ones(4, 2), None, backend=backend
            ),
            "slots: expected slots from 0 to 2",
        ),
        (convolution, "initial_slots: expected slots from 0 to 2, got 5 to 5"),
        (lambda backend: convolution(backend, initial=NEW), "final_slots: expected slots from 0 to 2, got 5 to 5"),
        (scan, "initial_slots: expected slots from 0 to 2"),
        (update_in_place, "slots: expected slots from 0 to 2, got 5 to 5"),
    ],
    ids=[
        "attention", "gather_kv", "write_kv", "gather_states", "scatter_states", "convolution step",
        "convolution, initial", "convolution, final", "scan", "state update in place",
    ],
)  # fmt: skip
@torch.no_grad()
def test_what_leads_beside_the_tensors_is_named(backend, call, message):
    with pytest.raises(IndexError) as caught:
        call(backend)
    assert str(caught.value).startswith(message)


def test_parts_that_were_not_stacked_are_refused():
    part, lse = torch.ones(1, 1, 4), torch.zeros(1, 1)
    with pytest.raises(ShapeError, match=r"outputs: expected one tensor of all parts, got list\. Join .* torch\.stack"):
        ops.merge_attention([part, part], torch.stack([lse, lse]))
    with pytest.raises(ShapeError, match="lses: expected one tensor of all parts, got list"):
        ops.merge_attention(torch.stack([part, part]), [lse, lse])
