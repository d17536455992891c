"""The history comes back dense, in order, and zero where there is none."""

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import ShapeError


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size, dim, dim_v", [(1, 8, 8), (3, 5, 7), (4, 80, 16), (16, 8, 8)])
def test_history_of_ragged_rows(block_size, dim, dim_v, layout, backend, nan_arena):
    """Random blocks, NaN in unwritten tails and in others' blocks, a row to a block's edge, an empty row."""
    generator = torch.Generator().manual_seed(block_size)
    seq_lens = [2 * block_size, 0, 5, 7]
    width = -(-max(seq_lens) // block_size) + 1
    num_blocks = len(seq_lens) * width + 2
    inner = (block_size, 2) if layout == "NHD" else (2, block_size)
    _, key_cache = nan_arena(num_blocks, *inner, dim)
    _, value_cache = nan_arena(num_blocks, *inner, dim_v)
    table = (torch.randperm(num_blocks - 1, generator=generator) + 1)[: len(seq_lens) * width]
    table = table.view(len(seq_lens), width).to(torch.int32)

    max_seq_len = max(seq_lens) + 1
    expected_key = torch.zeros(len(seq_lens), max_seq_len, 2, dim)
    expected_value = torch.zeros(len(seq_lens), max_seq_len, 2, dim_v)
    for row, seq_len in enumerate(seq_lens):
        expected_key[row, :seq_len] = torch.randn(seq_len, 2, dim, generator=generator)
        expected_value[row, :seq_len] = torch.randn(seq_len, 2, dim_v, generator=generator)
        for position in range(seq_len):
            block, offset = int(table[row, position // block_size]), position % block_size
            where = (block, offset) if layout == "NHD" else (block, slice(None), offset)
            key_cache[where] = expected_key[row, position]
            value_cache[where] = expected_value[row, position]

    key, value = ops.gather_kv(
        key_cache,
        value_cache,
        table,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        max_seq_len=max_seq_len,
        layout=layout,
        backend=backend,
    )
    assert torch.equal(key, expected_key)
    assert torch.equal(value, expected_value)


def test_null_blocks_read_as_zero_though_their_bytes_are_nan(backend, nan_arena):
    _, cache = nan_arena(3, 1, 2, 1)
    cache[2] = 5.0
    key, value = ops.gather_kv(
        cache,
        cache,
        torch.tensor([[0, 2], [0, 0]], dtype=torch.int32),
        seq_lens=torch.tensor([4, 3]),
        max_seq_len=4,
        layout="HND",
        backend=backend,
    )
    assert key.flatten(1).tolist() == [[0, 0, 5, 5], [0, 0, 0, 0]]
    assert torch.equal(value, key)


@pytest.mark.parametrize("num_reqs, max_seq_len", [(0, 3), (2, 0)], ids=["no requests", "no history"])
def test_nothing_to_gather(num_reqs, max_seq_len, backend, nan_arena):
    _, cache = nan_arena(3, 2, 4, 8)
    key, value = ops.gather_kv(
        cache,
        cache,
        torch.zeros(num_reqs, 1, dtype=torch.int32),
        seq_lens=torch.zeros(num_reqs, dtype=torch.int32),
        max_seq_len=max_seq_len,
        layout="HND",
        backend=backend,
    )
    assert key.shape == value.shape == (num_reqs, max_seq_len, 2, 8)


def test_table_too_narrow_for_the_length_is_refused(nan_arena):
    _, cache = nan_arena(3, 2, 4, 8)
    table = torch.ones(1, 2, dtype=torch.int32)
    with pytest.raises(
        ShapeError, match=r"block_table: expected \(\*, >=3\) int32 on cpu, got \(1, 2\) int32"
    ):
        ops.gather_kv(cache, cache, table, seq_lens=torch.tensor([9]), max_seq_len=9, layout="HND")
