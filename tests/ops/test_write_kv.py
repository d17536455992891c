"""Tokens land in their slots, and nothing else moves."""

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import OutOfRangeError, ShapeError
from kvgroups.kernels.cpu_library import cpu_library
from tests.ops.conftest import needs_interpreter

NUM_BLOCKS = 7


@pytest.fixture(params=["reference", "torch", "cpu", pytest.param("triton", marks=needs_interpreter)])
def backend(request):
    """The forms of `conftest.py` and the C++ one."""
    if request.param == "cpu" and cpu_library().functions is None:
        pytest.skip(cpu_library().reason)
    return request.param


@pytest.fixture(params=["NHD", "HND"])
def layout(request):
    return request.param


@pytest.fixture
def caches(nan_arena, layout):
    """`make(block_size, heads, dim, dim_v, dtype)` -> (key arena, key cache, value arena, value cache)."""

    def make(block_size, heads, dim, dim_v, dtype=torch.float32):
        inner = (block_size, heads) if layout == "NHD" else (heads, block_size)
        key_arena, key_cache = nan_arena(NUM_BLOCKS, *inner, dim, dtype=dtype)
        value_arena, value_cache = nan_arena(NUM_BLOCKS, *inner, dim_v, dtype=dtype)
        return key_arena, key_cache, value_arena, value_cache

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size, dim, dim_v", [(1, 8, 8), (3, 5, 5), (4, 8, 12), (16, 80, 64)])
def test_write_touches_its_slots_only(
    block_size, dim, dim_v, dtype, layout, backend, caches, assert_same_bits
):
    generator = torch.Generator().manual_seed(block_size)
    num_tokens = min(9, 5 * block_size)
    key = torch.randn(num_tokens, 2, dim, generator=generator).to(dtype)
    value = torch.randn(num_tokens, 2, dim_v, generator=generator).to(dtype)
    slots = torch.randperm((NUM_BLOCKS - 1) * block_size, generator=generator)[:num_tokens] + block_size
    slots[1::3] = -1
    key_arena, key_cache, value_arena, value_cache = caches(block_size, 2, dim, dim_v, dtype)
    expected_key, expected_value = key_arena.clone(), value_arena.clone()

    ops.write_kv(key, value, key_cache, value_cache, slots, layout=layout, backend=backend)

    # The same cells in the flat arena, by hand: block, three elements of margin, then the cell in the block.
    for token, slot in enumerate(slots.tolist()):
        if slot == -1:
            continue
        block, offset = divmod(slot, block_size)
        for head in range(2):
            cell = offset * 2 + head if layout == "NHD" else head * block_size + offset
            expected_key[block, 3 + cell * dim : 3 + (cell + 1) * dim] = key[token, head]
            expected_value[block, 3 + cell * dim_v : 3 + (cell + 1) * dim_v] = value[token, head]
    assert_same_bits(key_arena, expected_key)
    assert_same_bits(value_arena, expected_value)


@pytest.mark.parametrize(
    "slots",
    [[-1, -1, -1], [-1, -1, -1, 9], [0, 3, 1]],
    ids=["only padding", "slots beyond the tokens are not read", "the null block is never written"],
)
def test_nothing_is_written(slots, layout, backend, caches, assert_same_bits):
    key_arena, key_cache, value_arena, value_cache = caches(4, 2, 8, 8)
    before = key_arena.clone()
    token = torch.ones(3, 2, 8)
    ops.write_kv(token, token, key_cache, value_cache, torch.tensor(slots), layout=layout, backend=backend)
    assert_same_bits(key_arena, before)
    assert_same_bits(value_arena, before)


def test_no_gradient_flows_into_the_cache(layout, backend, caches):
    """Else a model called outside `torch.no_grad` keeps the graph of every step alive."""
    _, key_cache, _, value_cache = caches(4, 2, 8, 8)
    token = torch.ones(1, 2, 8, requires_grad=True)
    ops.write_kv(token, token, key_cache, value_cache, torch.tensor([5]), layout=layout, backend=backend)
    assert not key_cache.requires_grad and not value_cache.requires_grad


def test_no_tokens(layout, backend, caches):
    _, key_cache, _, value_cache = caches(4, 2, 8, 8)
    empty, slots = torch.zeros(0, 2, 8), torch.zeros(0, dtype=torch.int64)
    ops.write_kv(empty, empty, key_cache, value_cache, slots, layout=layout, backend=backend)
    assert key_cache.isnan().all()


def test_key_of_another_dtype_is_refused_and_nothing_is_written(layout, caches):
    _, key_cache, _, value_cache = caches(4, 2, 8, 8, torch.bfloat16)
    token = torch.ones(1, 2, 8)
    with pytest.raises(
        ShapeError, match=r"key: expected \(\*, 2, 8\) bfloat16 on cpu, got \(1, 2, 8\) float32"
    ):
        ops.write_kv(token, token, key_cache, value_cache, torch.tensor([5]), layout=layout)
    assert key_cache.isnan().all() and value_cache.isnan().all()


def test_too_few_slots_are_refused(layout, caches):
    _, key_cache, _, value_cache = caches(4, 2, 8, 8)
    token = torch.ones(3, 2, 8)
    with pytest.raises(ShapeError, match=r"slot_mapping: expected \(>=3,\) int64 on cpu, got \(2,\) int64"):
        ops.write_kv(token, token, key_cache, value_cache, torch.tensor([5, 6]), layout=layout)


def test_unknown_layout_is_refused(caches):
    _, key_cache, _, value_cache = caches(4, 2, 8, 8)
    token = torch.ones(1, 2, 8)
    with pytest.raises(ShapeError, match="layout: expected NHD or HND, got 'DHN'"):
        ops.write_kv(token, token, key_cache, value_cache, torch.tensor([5]), layout="DHN")


def test_blocks_are_hnd_unless_another_layout_is_named(backend):
    cache, token = torch.zeros(3, 2, 4, 8), torch.randn(1, 2, 8)
    table = torch.tensor([[2]], dtype=torch.int32)
    with ops.use_backend(backend):
        ops.write_kv(token, token, cache, cache.clone(), torch.tensor([9]))
        key, _ = ops.gather_kv(cache, cache, table, seq_lens=torch.tensor([2]), max_seq_len=2)
    assert torch.equal(cache[2, :, 1], token[0]) and torch.equal(key[0, 1], token[0])


def test_the_cpu_form_writes_nothing_if_a_slot_does_not_exist(layout, caches, assert_same_bits):
    if cpu_library().functions is None:
        pytest.skip(cpu_library().reason)
    key_arena, key_cache, value_arena, value_cache = caches(4, 2, 8, 8)
    before = key_arena.clone(), value_arena.clone()
    token = torch.ones(2, 2, 8)
    with pytest.raises(OutOfRangeError, match=r"slot_mapping: expected slots from -1 to 27, got 28 at \[1\]\."):
        ops.write_kv(token, token, key_cache, value_cache, torch.tensor([5, 28]), layout=layout, backend="cpu")
    assert_same_bits(key_arena, before[0])
    assert_same_bits(value_arena, before[1])
