"""The kernels read and write where they should and nowhere else, also far out in a large arena."""

from importlib import import_module

import numpy as np
import pytest
import torch

from kvgroups import ops
from kvgroups.ops import dispatch

pytestmark = pytest.mark.usefixtures("triton_backend")

SLOTS = torch.tensor([2, 0, 1], dtype=torch.int32)


def drawing():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


# One small call of each operation, on memory that `make(*shape)` provides for what lies in the arena.


def slot_mapping(make, backend):
    return ops.slot_mapping(
        [torch.tensor([[9, 8], [3, 5]], dtype=torch.int32), torch.tensor([[7], [4]], dtype=torch.int32)],
        torch.tensor([1, 0]),
        torch.tensor([0, 3, 4]),
        torch.tensor([3, 4, 5, 0, 0, 0]),
        torch.tensor([6, 1]),
        block_sizes=[4, 2],
        modes=["paged", "ring"],
        ring_blocks=[0, 1],
        num_padded_tokens=6,
        backend=backend,
    )


def table_update(make, backend):
    table = make(4, 8).to(torch.int32)
    ops.table_update(
        table, torch.tensor([3, 30, 8]), torch.tensor([5, 6, 7], dtype=torch.int32), backend=backend
    )
    return table


def used_rows():
    """Rows of 3, 0 and 5 used blocks: two runs, a null block, and block 1 after it."""
    table = torch.tensor([[7, 2, 3, 9, 9], [9, 9, 9, 9, 9], [3, 4, 5, 0, 1]], dtype=torch.int32)
    return table, torch.tensor([6, 0, 9], dtype=torch.int32)


def pack_csr(make, backend):
    return ops.pack_csr(*used_rows(), block_size=2, backend=backend)


def pack_intervals(make, backend):
    return ops.pack_intervals(*used_rows(), block_size=2, backend=backend)


def copy_blocks(make, backend):
    blocks = make(4, 16)
    blocks[1:] = drawing()(3, 16)
    sources, targets = torch.tensor([1, 0, 2]), torch.tensor([3, 2, 0])
    ops.copy_blocks(blocks.view(torch.uint8), sources, targets, backend=backend)
    return blocks


def write_kv(make, backend):
    draw, key_cache, value_cache = drawing(), make(3, 2, 4, 16), make(3, 2, 4, 32)
    key, value = draw(3, 2, 16).to(key_cache.dtype), draw(3, 2, 32).to(key_cache.dtype)
    slots = torch.tensor([9, -1, 4])
    ops.write_kv(key, value, key_cache, value_cache, slots, layout="HND", backend=backend)
    return key_cache, value_cache


def gather_kv(make, backend):
    cache, table = make(3, 2, 4, 16), torch.tensor([[2, 1], [1, 0]], dtype=torch.int32)
    cache[1:] = drawing()(2, 2, 4, 16)
    seq_lens = torch.tensor([6, 5])
    return ops.gather_kv(cache, cache, table, seq_lens=seq_lens, max_seq_len=7, layout="HND", backend=backend)


def paged_attention(make, backend):
    draw, key_cache, value_cache = drawing(), make(3, 2, 4, 16), make(3, 2, 4, 32)
    key_cache[1:], value_cache[1:] = draw(2, 2, 4, 16), draw(2, 2, 4, 32)
    query, key, value = (make(3, *heads_dim) for heads_dim in ((4, 16), (2, 16), (2, 32)))
    for operand in (query, key, value):
        operand[:] = draw(*operand.shape)
    return ops.paged_attention(
        query,
        key,
        value,
        key_cache,
        value_cache,
        torch.tensor([[2], [1]], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 2, 3]),
        num_computed_tokens=torch.tensor([4, 3]),
        scale=0.25,
        backend=backend,
    )


def merge_attention(make, backend):
    draw, outputs = drawing(), make(3, 2, 2, 16)
    outputs[:] = draw(3, 2, 2, 16)
    lses = draw(3, 2, 2)
    lses[1, 0] = float("-inf")
    return ops.merge_attention(outputs, lses, backend=backend)


def gather_states(make, backend):
    states = make(3, 5, 4)
    states[1:] = drawing()(2, 5, 4)
    return ops.gather_states(states, SLOTS, backend=backend)


def scatter_states(make, backend):
    states = make(3, 5, 4)
    ops.scatter_states(states, SLOTS, drawing()(3, 5, 4).to(states.dtype), backend=backend)
    return states


def causal_conv1d_update(make, backend):
    draw, states = drawing(), make(3, 5, 4)
    states[1:] = draw(2, 5, 4)
    output = ops.causal_conv1d_update(
        draw(3, 5), states, SLOTS, draw(5, 4), draw(5), activation="silu", backend=backend
    )
    return output[[0, 2]], states


def selective_state_update(make, backend):
    draw, states = drawing(), make(3, 2, 4, 16)
    states[1:] = draw(2, 2, 4, 16)
    x, dt, A = draw(3, 2, 4), draw(3, 2, 4).exp(), -draw(2, 4, 16).exp()
    output = ops.selective_state_update(
        states,
        SLOTS,
        x,
        dt,
        A,
        draw(3, 1, 16),
        draw(3, 1, 16),
        D=draw(2, 4),
        z=draw(3, 2, 4),
        backend=backend,
    )
    return output[[0, 2]], states


def packed(make, *state_shape):
    """States of two requests and the options of a scan: 2 tokens from slot 2 on, 3 of a new one, one padded."""
    states = make(3, *state_shape)
    states[1:] = drawing()(2, *state_shape)
    slots = {"initial_slots": SLOTS[:2], "final_slots": SLOTS[[0, 2]]}
    return states, {"query_start_loc": torch.tensor([0, 2, 5], dtype=torch.int32), **slots}


def causal_conv1d(make, backend):
    draw, (states, options) = drawing(), packed(make, 5, 4)
    output = ops.causal_conv1d(
        draw(6, 5), draw(5, 4), draw(5), states, activation="silu", backend=backend, **options
    )
    return output, states


def selective_scan(make, backend):
    draw, (states, options) = drawing(), packed(make, 5, 16)
    x, dt, A, B, C = draw(6, 5), draw(6, 5).exp(), -draw(5, 16).exp(), draw(6, 16), draw(6, 16)
    given = {"D": draw(5), "z": draw(6, 5), "backend": backend}
    return ops.selective_scan(x, dt, A, B, C, states, **given, **options), states


def ssd_scan(make, backend):
    draw, (states, options) = drawing(), packed(make, 2, 4, 16)
    x, dt, A, B, C = draw(6, 2, 4), draw(6, 2).exp(), -draw(2).exp(), draw(6, 1, 16), draw(6, 1, 16)
    given = {"D": draw(2), "z": draw(6, 2, 4), "chunk_size": 64, "backend": backend}
    return ops.ssd_scan(x, dt, A, B, C, states, **given, **options), states


CALLS = [
    slot_mapping, table_update, pack_csr, pack_intervals, copy_blocks,
    write_kv, gather_kv, paged_attention, merge_attention, gather_states, scatter_states,
    causal_conv1d, causal_conv1d_update, selective_scan, ssd_scan, selective_state_update,
]  # fmt: skip
IN_THE_ARENA = [
    call for call in CALLS if call not in (slot_mapping, table_update, pack_csr, pack_intervals)
]


def test_every_triton_form_is_called_here():
    assert {call.__name__ for call in CALLS} == {
        name for name, forms in dispatch.FORMS.items() if "triton" in forms
    }


def assert_same(got, expected):
    for ours, theirs in zip(*((each,) if isinstance(each, torch.Tensor) else each for each in (got, expected)),
                            strict=True):  # fmt: skip
        tolerance = {"atol": 2e-3, "rtol": 2e-3} if ours.dtype == torch.float16 else {}
        torch.testing.assert_close(ours, theirs, equal_nan=True, **tolerance)


def in_the_open(*shape):
    """Blocks or slots one after another: their strides have a common unit. Number 0 is all 7, and stays so."""
    memory = torch.zeros(shape)
    memory[0] = 7.0
    return memory


@pytest.mark.parametrize("call", CALLS)
def test_outputs_keep_to_themselves(call, monkeypatch):
    """Every tensor that a wrapper makes lies inside a larger one, whose margins must stay as they were."""
    arenas = []

    def guarded(make):
        def empty(*args, **kwargs):
            tensor = make(*args, **kwargs)
            arena = torch.full((tensor.numel() + 128,), 77, dtype=tensor.dtype)
            arenas.append(arena)
            return arena[64:-64].view(tensor.shape)

        return empty

    expected = call(in_the_open, "reference")
    with monkeypatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, guarded(getattr(owner, name)))
        got = call(in_the_open, "triton")
    assert_same(got, expected)
    for arena in arenas:
        assert (arena[:64] == 77).all() and (arena[-64:] == 77).all()


@pytest.fixture
def far_apart():
    """`make(*shape)`: fp16 blocks or slots 2**30 elements apart, so that number 2 lies beyond int32.

    The memory in between is asked for and never touched.
    """

    def make(*shape):
        try:
            memory = np.empty(((shape[0] - 1) << 30) + (1 << 20), dtype=np.int16)
        except MemoryError:
            pytest.skip("the system does not lend 4 GiB of addresses")
        memory = torch.from_numpy(memory).view(torch.float16)
        size = torch.Size(shape[1:]).numel()
        view = memory.as_strided((shape[0], size), (1 << 30, 1)).unflatten(1, shape[1:])
        view.fill_(0)
        return view

    return make


@pytest.mark.parametrize("call", IN_THE_ARENA)
def test_offsets_beyond_int32(call, far_apart):
    assert_same(call(far_apart, "triton"), call(far_apart, "reference"))


# The comparison has teeth: each of these changes is wrong, and it must show.


@pytest.mark.parametrize(
    "call, folder, old, new",
    [
        (slot_mapping, "slot_mapping", "token >= end", "token > end"),
        (slot_mapping, "slot_mapping", "position >= seq_len", "position > seq_len"),
        (table_update, "table_update", "entry < num_entries", "entry < num_entries - 1"),
        (pack_csr, "page_index", "(entry >= total)", "(entry > total)"),
        (pack_csr, "page_index", "tl.maximum(num_blocks - 1, 0)", "(num_blocks - 1)"),
        (pack_intervals, "page_index", "(before == NULL) | (block", "(block"),
        (pack_intervals, "page_index", "column + 1 < num_blocks", "column + 2 < num_blocks"),
        (copy_blocks, "copy_blocks", "tl.where(source != NULL, size, 0)", "size"),
        (copy_blocks, "copy_blocks", "tl.where(target != NULL, size, 0)", "size"),
        (write_kv, "write_kv", "slot // BLOCK_SIZE", "slot // BLOCK_SIZE - 1"),
        (write_kv, "write_kv", "(dim_v < DIM_V)", "(dim_v < DIM)"),
        (gather_kv, "gather_kv", "is_held & (block != NULL)", "is_held"),
        (gather_kv, "gather_kv", "mask=is_position[:, None]", "mask=is_held[:, None]"),
        (merge_attention, "merge_attention", "mask=part < num_parts", "mask=part < num_parts - 1"),
        (merge_attention, "merge_attention", "query * DIM_V + dim, merged", "query * DIM_V + dim + 1, merged"),
        (gather_states, "state_slots", "num_read = tl.where(slot != NULL, size, 0)", "num_read = size"),
        (scatter_states, "state_slots", "element < num_written)\n", "element < num_written - 1)\n"),
        (causal_conv1d_update, "causal_conv1d", "(column - 1) * column_stride, moved", "column * column_stride, moved"),
        (causal_conv1d_update, "causal_conv1d", "1 + tl.exp(-summed)", "1 + tl.exp(summed)"),
        (causal_conv1d, "causal_conv1d", "is_token & (step < back) &", "is_token & (step < back - 1) &"),
        (causal_conv1d, "causal_conv1d", "is_token & (step >= back)", "is_token"),
        (causal_conv1d, "causal_conv1d", "num_read = tl.where(slot != NULL, WIDTH, 0)", "num_read = WIDTH"),
        (causal_conv1d, "causal_conv1d", "source = token - start + 1 + column", "source = token - start + column"),
        (selective_scan, "selective_scan", "tl.exp2(step[None, :] * a) * state", "state"),
        (selective_scan, "selective_scan", "tl.where(initial_slot != NULL, STATE_SIZE, 0)", "STATE_SIZE"),
        (selective_scan, "selective_scan", "range(start, num_tokens, CLEARED)", "range(start, start, CLEARED)"),
        (ssd_scan, "ssd_scan", "t[:, None] >= t[None, :]", "t[:, None] > t[None, :]"),
        (ssd_scan, "ssd_scan", "left = step * tl.exp(", "left = tl.exp("),
        (ssd_scan, "ssd_scan", "tl.where(initial_slot != NULL, HEAD_DIM, 0)", "HEAD_DIM"),
        (ssd_scan, "ssd_scan", "range(start, num_tokens, CLEARED)", "range(start, start, CLEARED)"),
        (selective_state_update, "state_update", "decay * state +", "state +"),
        (selective_state_update, "state_update", "tl.where(slot != NULL, HEAD_DIM, 0)", "HEAD_DIM"),
    ],
)  # fmt: skip
def test_a_wrong_kernel_shows(call, folder, old, new, mutant, monkeypatch):
    name = call.__name__
    wrong = mutant(import_module(f"kvgroups.kernels.{folder}.triton_impl"), old, new)
    monkeypatch.setitem(dispatch.FORMS[name], "triton", dispatch.Form(getattr(wrong, name)))
    with pytest.raises(AssertionError):
        assert_same(call(in_the_open, "triton"), call(in_the_open, "reference"))


@pytest.mark.parametrize(
    "call, folder, old",
    [
        (causal_conv1d_update, "causal_conv1d", "slot = tl.load(slots + request).to(tl.int64)"),
        (selective_scan, "selective_scan", "initial_slot = tl.load(initial_slots + request).to(tl.int64)"),
        (ssd_scan, "ssd_scan", "initial_slot = tl.load(initial_slots + request).to(tl.int64)"),
        (paged_attention, "paged_attention", "mask=first < end, other=NULL).to(tl.int64)"),
        (paged_attention, "paged_attention", "(key_start + fresh - num_computed).to(tl.int64)"),
    ],
)
def test_an_offset_in_int32_is_noticed(call, folder, old, far_apart, mutant, monkeypatch):
    """The interpreter looks for overflow only because tests/conftest.py asks it to."""
    wrong = mutant(
        import_module(f"kvgroups.kernels.{folder}.triton_impl"), old, old.removesuffix(".to(tl.int64)")
    )
    monkeypatch.setitem(dispatch.FORMS[call.__name__], "triton", dispatch.Form(getattr(wrong, call.__name__)))
    with pytest.raises(Exception, match="overflow"):
        call(far_apart, "triton")
