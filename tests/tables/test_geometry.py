"""BatchGeometry: one ragged step, derived from who runs and how far each has come."""

import dataclasses

import numpy as np
import pytest
import torch

from kvgroups.errors import ShapeError
from kvgroups.geometry import BatchGeometry


def test_a_mixed_step_of_decode_chunk_and_fresh_prompt():
    geometry = BatchGeometry.build(rows=[5, 0, 2], query_lens=[1, 500, 3], num_computed_tokens=[35, 1000, 0])

    assert (geometry.num_reqs, geometry.num_tokens) == (3, 504)
    assert geometry.query_start_loc.tolist() == [0, 1, 501, 504]
    assert geometry.seq_lens.tolist() == [36, 1500, 3]
    assert geometry.positions.tolist() == [35, *range(1000, 1500), 0, 1, 2]
    assert geometry.query_lens.tolist() == [1, 500, 3]
    assert (geometry.max_query_len, geometry.max_seq_len) == (500, 1500)


def test_dtypes_are_the_ones_that_kernels_take():
    geometry = BatchGeometry.build([1], [2], [3])
    assert {name: getattr(geometry, name).dtype.name for name in ("rows", "query_start_loc", "seq_lens")} == {
        "rows": "int32",
        "query_start_loc": "int32",
        "seq_lens": "int32",
    }
    assert geometry.num_computed_tokens.dtype == np.int32
    assert geometry.positions.dtype == np.int64


def test_a_request_without_tokens_keeps_its_place():
    geometry = BatchGeometry.build(rows=[0, 1, 2], query_lens=[1, 0, 2], num_computed_tokens=[4, 9, 0])
    assert geometry.query_start_loc.tolist() == [0, 1, 1, 3]
    assert geometry.seq_lens.tolist() == [5, 9, 2]
    assert geometry.positions.tolist() == [4, 0, 1]


def test_an_empty_batch_is_a_batch():
    geometry = BatchGeometry.build([], [], [])
    assert (geometry.num_reqs, geometry.num_tokens, geometry.max_query_len, geometry.max_seq_len) == (
        0,
        0,
        0,
        0,
    )
    assert geometry.query_start_loc.tolist() == [0]
    assert geometry.tensors("cpu").positions.shape == (0,)


def test_padding_is_a_suffix_of_requests_without_tokens_and_of_tokens():
    geometry = BatchGeometry.build([3, 1], [1, 2], [7, 0], num_padded_reqs=4, num_padded_tokens=5)
    tensors = geometry.tensors("cpu")

    assert geometry.num_reqs == 2 and geometry.num_tokens == 3  # real ones only
    assert tensors.rows.tolist() == [3, 1, 0, 0]
    assert tensors.query_start_loc.tolist() == [0, 1, 3, 3, 3]
    assert tensors.seq_lens.tolist() == [8, 2, 0, 0]
    assert tensors.num_computed_tokens.tolist() == [7, 0, 0, 0]
    assert tensors.positions.tolist() == [7, 0, 1, 0, 0]
    assert [getattr(tensors, field.name).dtype for field in dataclasses.fields(tensors)] == [
        torch.int32,
        torch.int32,
        torch.int64,
        torch.int32,
        torch.int32,
    ]


def test_tensors_are_made_once_per_device():
    geometry = BatchGeometry.build([0], [1], [0])
    assert geometry.tensors("cpu") is geometry.tensors(torch.device("cpu"))
    assert geometry.tensors("meta") is not geometry.tensors("cpu")


def test_nobody_can_change_a_geometry_between_its_readers():
    rows, query_lens = np.array([0, 1]), np.array([1, 1], dtype=np.int32)
    geometry = BatchGeometry.build(rows, query_lens, [0, 0])
    rows[:] = query_lens[:] = 7
    assert (geometry.rows.tolist(), geometry.query_lens.tolist()) == ([0, 1], [1, 1])
    for array in (geometry.positions, geometry.query_lens):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.num_tokens = 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(([0, 0], [1, 1], [0, 0]), "row 0 more than once", id="two requests in one row"),
        pytest.param(([-1], [1], [0]), "rows from 0", id="negative row"),
        pytest.param(([0], [-1], [0]), "query_lens from 0", id="negative query length"),
        pytest.param(([0], [1], [-1]), "num_computed_tokens from 0", id="negative computed tokens"),
        pytest.param(([0, 1], [1], [0, 0]), "got 2, 1 and 2", id="one query length missing"),
        pytest.param(([0], [1.0], [0]), "integers", id="float length"),
        pytest.param(([0], [True], [0]), "integers", id="mask instead of lengths"),
        pytest.param(([[0]], [1], [0]), r"\(1, 1\)", id="two dimensions"),
        pytest.param(([0], [1], [2**31 - 1]), "within int32", id="sequence leaves int32"),
        pytest.param(([0, 1], [2**31 - 1, 1], [0, 0]), "within int32", id="step leaves int32"),
    ],
)
def test_a_wrong_step_is_refused(arguments, message):
    with pytest.raises(ShapeError, match=message):
        BatchGeometry.build(*arguments)


@pytest.mark.parametrize("padded", [{"num_padded_reqs": 1}, {"num_padded_tokens": 3}])
def test_padding_never_removes(padded):
    with pytest.raises(ShapeError, match=next(iter(padded))):
        BatchGeometry.build([0, 1], [2, 2], [0, 0], **padded)
