"""One table in four forms (dense, CSR, intervals, slots), each tested against the others."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgroups.block_table import BlockTable
from kvgroups.geometry import BatchGeometry
from kvgroups.page_index import csr, intervals, last_page_len

SEQ_LENS = {
    "mixed lengths": [35, 1, 100, 17],
    "sequences end on a block edge": [16, 32, 48, 64],
    "empty row between others": [20, 0, 20, 0],
    "one request": [47],
    "every row full": [128, 128],
    "only the last row full": [3, 128],
    "all rows empty": [0, 0, 0],
    "no row": [],
}


def test_last_page_len_of_a_full_page_is_the_block_size_and_of_nothing_zero():
    lengths = last_page_len(torch.tensor([0, 1, 15, 16, 17, 32, 33], dtype=torch.int32), 16)
    assert lengths.tolist() == [0, 1, 15, 16, 1, 16, 1]
    assert lengths.dtype == torch.int32


def test_csr_is_int32_and_never_longer_than_the_table():
    table = torch.tensor([[7, 3], [5, 0]], dtype=torch.int32)
    kv_indptr, kv_indices, kv_last_page_len = csr(table, torch.tensor([8, 2]), block_size=4)
    assert {tensor.dtype for tensor in (kv_indptr, kv_indices, kv_last_page_len)} == {torch.int32}
    assert kv_indptr.tolist() == [0, 2, 3]
    assert kv_indices.tolist() == [7, 3, 5, 0]  # the unused place is null


def test_csr_needs_no_value_from_the_device():
    # A meta tensor has no values: whatever would wait for one raises.
    table = torch.empty((3, 8), dtype=torch.int32, device="meta")
    kv_indptr, kv_indices, kv_last_page_len = csr(table, torch.empty(3, dtype=torch.int32, device="meta"), 16)
    assert (kv_indptr.shape, kv_indices.shape, kv_last_page_len.shape) == ((4,), (24,), (3,))


@pytest.mark.parametrize(
    ("row_ids", "runs"),
    [
        ([], []),
        ([5], [(5, 1)]),
        ([5, 6, 7], [(5, 3)]),
        ([7, 6, 5], [(7, 1), (6, 1), (5, 1)]),
        ([3, 4, 9, 10, 11, 2], [(3, 2), (9, 3), (2, 1)]),
        ([0, 0, 1, 2], [(0, 1), (0, 1), (1, 2)]),
    ],
)
def test_intervals_are_runs_in_the_order_of_the_row(row_ids, runs):
    assert intervals(np.array(row_ids, dtype=np.int32)) == runs


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("seq_lens", SEQ_LENS.values(), ids=SEQ_LENS)
def test_the_four_forms_agree(seq_lens, block_size):
    assert_the_four_forms_agree(seq_lens, block_size, seed=0)


@settings(max_examples=150, deadline=None)
@given(
    seq_lens=st.lists(st.one_of(st.just(0), st.integers(0, 17), st.integers(0, 128)), max_size=8),
    block_size=st.integers(1, 24),
    seed=st.integers(0, 9),
)
def test_the_four_forms_agree_whatever_the_lengths(seq_lens, block_size, seed):
    assert_the_four_forms_agree(seq_lens, block_size, seed)


def test_csr_of_another_block_size_is_seen():
    """The comparison has teeth: pages counted in blocks of 8 are not those of a table in blocks of 16."""
    table = BlockTable(2, 128, 16)
    table.add_row(0, [5, 9])
    table.commit()
    dense = table.gather(BatchGeometry.build([0], [20], [0]))
    kv_indptr, _, kv_last_page_len = csr(dense, torch.tensor([20]), 8)
    assert (kv_indptr.tolist(), kv_last_page_len.tolist()) == ([0, 3], [4])  # 2 and 4, were it right
    assert csr(dense, torch.tensor([20]), 16)[0].tolist() == [0, 2]


def assert_the_four_forms_agree(seq_lens: list[int], block_size: int, seed: int) -> None:
    num_reqs = len(seq_lens)
    table = BlockTable(max_num_reqs=8, max_model_len=128, block_size=block_size)
    rng = np.random.default_rng(seed)
    rows = rng.permutation(8)[:num_reqs]
    free = rng.permutation(np.arange(1, 2000))  # 8 rows of 128 blocks of one token at most
    for row, seq_len in zip(rows, seq_lens, strict=True):
        taken, free = np.split(free, [-(-seq_len // block_size)])
        table.add_row(row, np.sort(taken) if row % 2 else taken)  # sorted rows have longer runs
    table.commit()
    geometry = BatchGeometry.build(rows, seq_lens, [0] * num_reqs)

    dense = table.gather(geometry)
    kv_indptr, kv_indices, kv_last_page_len = csr(
        dense, torch.tensor(seq_lens, dtype=torch.int32), block_size
    )
    slots = table.compute_slot_mapping(geometry)

    assert kv_indices.shape == (dense.numel(),)
    assert not kv_indices[kv_indptr[-1] :].any()
    for i, seq_len in enumerate(seq_lens):
        pages = kv_indices[kv_indptr[i] : kv_indptr[i + 1]].tolist()
        assert pages == dense[i, : len(pages)].tolist()
        assert not dense[i, len(pages) :].any()
        assert [start + j for start, length in intervals(pages) for j in range(length)] == pages

        tokens = [page * block_size + offset for page in pages for offset in range(block_size)]
        unused = block_size - int(kv_last_page_len[i]) if pages else 0
        of_request = slots[geometry.query_start_loc[i] : geometry.query_start_loc[i + 1]].tolist()
        assert of_request == tokens[: len(tokens) - unused]
        assert len(of_request) == seq_len
