"""Whatever is given where a tensor is expected, the operation refuses it by name."""

import numpy
import pytest
import torch

from kvgroups import ops
from kvgroups.errors import ShapeError

TOKEN, CACHE, STATES = torch.ones(1, 2, 4), torch.zeros(3, 2, 2, 4), torch.zeros(3, 4, 2)
ROW, PAIR, WEIGHT = torch.ones(1, 4), torch.ones(1, 2), torch.ones(4, 2)
ONE, STARTS, TABLE = torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([[1]], dtype=torch.int32)
SLOTS = {"initial_slots": ONE, "final_slots": ONE, "snapshot_tokens": ONE - 1, "snapshot_slots": ONE + 1}
SCAN = {"query_start_loc": STARTS, **SLOTS}

CALLS = {
    "write_kv": {
        **{"key": TOKEN, "value": TOKEN, "key_cache": CACHE, "value_cache": CACHE, "slot_mapping": ONE},
        "layout": "HND",
    },
    "paged_attention": {
        **{"query": TOKEN, "key": TOKEN, "value": TOKEN, "key_cache": CACHE, "value_cache": CACHE},
        **{"block_table": TABLE, "query_start_loc": STARTS, "num_computed_tokens": ONE, "kv_start_loc": STARTS},
        **{"sinks": torch.ones(2), "scale": 1.0},
    },
    "merge_attention": {"outputs": TOKEN[None], "lses": TOKEN[None, ..., 0]},
    "gather_kv": {
        **{"key_cache": CACHE, "value_cache": CACHE, "block_table": TABLE, "seq_lens": ONE},
        **{"max_seq_len": 2, "layout": "HND"},
    },
    "gather_states": {"states": STATES, "slots": ONE},
    "scatter_states": {"states": STATES, "slots": ONE, "values": STATES[1:2]},
    "causal_conv1d": {"x": ROW, "weight": WEIGHT, "bias": ROW[0], "states": STATES, **SCAN},
    "causal_conv1d_update": {"x": ROW, "states": STATES, "slots": ONE, "weight": WEIGHT, "bias": ROW[0]},
    "selective_scan": {
        **{"x": ROW, "dt": ROW, "A": -WEIGHT, "B": PAIR, "C": PAIR, "states": STATES, **SCAN},
        **{"D": ROW[0], "z": ROW, "dt_bias": ROW[0]},
    },
    "ssd_scan": {
        **{"x": TOKEN, "dt": PAIR, "A": -PAIR[0], "B": TOKEN, "C": TOKEN, "states": torch.zeros(3, 2, 4, 4), **SCAN},
        **{"D": PAIR[0], "z": TOKEN, "dt_bias": PAIR[0], "is_limited": ONE.bool(), "chunk_size": 4},
    },
    "selective_state_update": {
        **{"states": STATES, "slots": ONE, "x": ROW, "dt": ROW, "A": -WEIGHT, "B": PAIR, "C": PAIR},
        **{"D": ROW[0], "z": ROW, "dt_bias": ROW[0]},
    },
    "slot_mapping": {
        **{"block_tables": [TABLE], "rows": ONE - 1, "query_start_loc": STARTS, "positions": ONE - 1, "seq_lens": ONE},
        **{"block_sizes": [4], "modes": ["paged"], "ring_blocks": [0]},
    },
    "table_update": {"table": TABLE, "places": ONE - 1, "block_ids": TABLE[0].clone()},
    "pack_csr": {"block_table": TABLE, "seq_lens": ONE, "block_size": 4},
    "pack_intervals": {"block_table": TABLE, "seq_lens": ONE, "block_size": 4},
    "copy_blocks": {"blocks": torch.zeros(3, 4, dtype=torch.uint8), "sources": ONE, "targets": ONE + 1},
}  # fmt: skip
"""A right call of every operation, with everything that is optional."""

CASES = [
    (name, argument)
    for name, call in CALLS.items()
    for argument, given in call.items()
    if isinstance(given, torch.Tensor)
]


def test_the_calls_are_right_and_all_that_there_are():
    assert {*CALLS, "use_backend", "SlotMappingMode"} == set(ops.__all__)
    for name, call in CALLS.items():
        getattr(ops, name)(**call)


@pytest.mark.parametrize("grad", [False, True], ids=["remembered", "not remembered"])
@pytest.mark.parametrize(("name", "argument"), CASES, ids=[" of ".join(case[::-1]) for case in CASES])
def test_it_is_named_with_what_it_is(name, argument, grad):
    call, operation = CALLS[name], getattr(ops, name)
    with torch.set_grad_enabled(grad):
        operation(**call)
        for given in (call[argument].tolist(), numpy.ones(call[argument].shape, dtype=numpy.float32), 3):
            with pytest.raises(ShapeError, match=rf"^{argument}: expected .*tensor.*, got {type(given).__name__}\."):
                operation(**{**call, argument: given})
        with pytest.raises(ShapeError, match=argument):  # a number in a tensor has no length
            operation(**{**call, argument: torch.tensor(1)})


def test_a_tensor_that_is_missing_is_called_none():
    with pytest.raises(ShapeError, match=r"^query_start_loc: expected a tensor, got None\."):
        ops.paged_attention(**{**CALLS["paged_attention"], "query_start_loc": None})
    with pytest.raises(ShapeError, match=r"^block_tables\[0\]: expected a tensor, got list\."):
        ops.slot_mapping(**{**CALLS["slot_mapping"], "block_tables": [[[1]]]})
