"""A captured step has a fixed shape: what is left of it after the real rows and tokens is padding.

Each operation runs once on a step as it is and once on the same step with rows and tokens behind it, whose lanes hold
poison: NaN in tokens, slot -1, state slot 0, length 0, table 0. What comes out for the real ones, and every byte of
memory, must be the same bit for bit.
"""

from importlib.util import find_spec

import pytest
import torch

from kvgroups import ops
from kvgroups.ops import dispatch

NAN = float("nan")
LENGTHS, COMPUTED = (2, 1, 3), (5, 9, 0)
"""Tokens of each request in the step, and before it: a chunk, a decode and a new prompt."""
TABLE = [[3, 1, 0], [5, 2, 6], [4, 0, 0]]
"""Blocks of 4 tokens for 7, 10 and 3."""
SLOTS = [5, 2, 0]


class Lanes:
    """The arguments of a step of three requests; `pad` more rows, and twice as many tokens, are padding.

    `width` is that of channels and heads. PyTorch computes the last elements of a tensor, those that do not fill a
    vector of the processor, in another way than the rest: at 64 all real ones fill vectors, with padding and without.
    """

    def __init__(self, pad, width):
        self.pad, self.width = pad, width
        self.generator = torch.Generator().manual_seed(0)
        self.memory = []

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def rows(self, values, fill=0, dtype=torch.int32):
        """One value for each row."""
        values = torch.tensor(values, dtype=dtype)
        return torch.cat([values, values.new_full((self.pad, *values.shape[1:]), fill)])

    def row_values(self, *shape):
        return torch.cat([self.draw(3, *shape), torch.full((self.pad, *shape), NAN)])

    def tokens(self, *shape):
        """A drawn value for each token."""
        return torch.cat([self.draw(6, *shape), torch.full((2 * self.pad, *shape), NAN)])

    def starts(self):
        ends = torch.tensor([0, *LENGTHS]).cumsum(0)
        return torch.cat([ends, ends[-1:].expand(self.pad)]).int()

    def arena(self, count, *shape):
        """Blocks or state slots in strided memory, drawn but for number 0, which nobody may look at."""
        size = torch.Size(shape).numel()
        memory = torch.full((count, size + 7), NAN)
        view = memory[:, 3 : 3 + size].unflatten(1, shape)
        view[1:] = self.draw(count - 1, *shape)
        self.memory.append(memory)
        return view

    def scan(self):
        """What the scans over packed tokens ask for beside them, with one snapshot and padded ones."""
        return {
            "query_start_loc": self.starts(),
            "initial_slots": self.rows(SLOTS),
            "final_slots": self.rows([5, 2, 7]),
            "snapshot_tokens": self.rows([1, 4, 0], fill=1 << 40, dtype=torch.int64),
            "snapshot_slots": self.rows([3, 6, 0]),
        }


# One call of each operation. It returns what is promised for the real rows and tokens.


def slot_mapping(lanes, backend):
    positions = torch.tensor([5, 6, 9, 0, 1, 2] + [1 << 40] * (2 * lanes.pad))
    table = lanes.rows(TABLE)
    slots = ops.slot_mapping(
        [table, table], lanes.rows([0, 1, 2]), lanes.starts(), positions, lanes.rows([7, 10, 3]), block_sizes=[4, 4],
        modes=["paged", "ring"], ring_blocks=[0, 2], num_padded_tokens=len(positions) + lanes.pad, backend=backend,
    )  # fmt: skip
    assert (slots[:, 6:] == -1).all()
    return slots[:, :6]


def write_kv(lanes, backend):
    caches = lanes.arena(7, 2, 4, 16), lanes.arena(7, 2, 4, 16)
    slots = torch.tensor([5, 6, 25, 16, 17, 18] + [-1] * (2 * lanes.pad))
    ops.write_kv(lanes.tokens(2, 16), lanes.tokens(2, 16), *caches, slots, layout="HND", backend=backend)
    return ()


def paged_attention(lanes, backend):
    caches = lanes.arena(7, 2, 4, 16), lanes.arena(7, 2, 4, 16)
    output, lse = ops.paged_attention(
        lanes.tokens(4, 16), lanes.tokens(2, 16), lanes.tokens(2, 16), *caches, lanes.rows(TABLE), scale=0.25,
        query_start_loc=lanes.starts(), num_computed_tokens=lanes.rows(COMPUTED), window=6, return_lse=True,
        max_query_len=3, max_seq_len=10, backend=backend,
    )  # fmt: skip
    assert not output[6:].any() and (lse[6:] == -torch.inf).all()
    return output[:6], lse[:6]


def decode_attention(lanes, backend):
    """A step of one token each: another kernel."""
    caches = lanes.arena(7, 2, 4, 16), lanes.arena(7, 2, 4, 16)
    starts = torch.arange(4 + lanes.pad).clamp(max=3).int()
    output = ops.paged_attention(
        lanes.row_values(4, 16), lanes.row_values(2, 16), lanes.row_values(2, 16), *caches, lanes.rows(TABLE),
        scale=0.25, query_start_loc=starts, num_computed_tokens=lanes.rows([6, 9, 2]), max_query_len=1, max_seq_len=10,
        backend=backend,
    )  # fmt: skip
    assert not output[3:].any()
    return output[:3]


def gather_kv(lanes, backend):
    cache, lengths = lanes.arena(7, 2, 4, 16), lanes.rows([7, 10, 3])
    gathered = ops.gather_kv(
        cache, cache, lanes.rows(TABLE), seq_lens=lengths, max_seq_len=10, layout="HND", backend=backend
    )
    return tuple(each[:3] for each in gathered)


def merge_attention(lanes, backend):
    outputs, lses = (torch.stack([lanes.tokens(*shape), lanes.tokens(*shape)]) for shape in ((2, 16), (2,)))
    return tuple(each[:6] for each in ops.merge_attention(outputs, lses, backend=backend))


def gather_states(lanes, backend):
    gathered = ops.gather_states(lanes.arena(8, 5, 4), lanes.rows(SLOTS), backend=backend)
    assert not gathered[2:].any()
    return gathered[:3]


def scatter_states(lanes, backend):
    ops.scatter_states(lanes.arena(8, 5, 4), lanes.rows(SLOTS), lanes.row_values(5, 4), backend=backend)
    return ()


def convolution(lanes):
    return lanes.arena(8, lanes.width, 4), lanes.draw(lanes.width, 4), lanes.draw(lanes.width)


def causal_conv1d(lanes, backend):
    states, weight, bias = convolution(lanes)
    output = ops.causal_conv1d(
        lanes.tokens(lanes.width), weight, bias, states, activation="silu", backend=backend, **lanes.scan()
    )
    assert not output[6:].any()
    return output[:6]


def causal_conv1d_update(lanes, backend):
    states, weight, bias = convolution(lanes)
    slots = lanes.rows([5, 2, 7])
    return ops.causal_conv1d_update(lanes.row_values(lanes.width), states, slots, weight, bias, backend=backend)[:3]


def selective_scan(lanes, backend):
    d = lanes.width
    states, A, D = lanes.arena(8, d, 4), -lanes.draw(d, 4).exp(), lanes.draw(d)
    x, dt, B, C, z = (lanes.tokens(size) for size in (d, d, 4, 4, d))
    given = {"D": D, "z": z, "dt_softplus": True, "backend": backend, **lanes.scan()}
    output = ops.selective_scan(x, dt, A, B, C, states, **given)
    assert not output[6:].any()
    return output[:6]


def ssd_scan(lanes, backend):
    h = lanes.width
    states, A, D = lanes.arena(8, h, 2, 4), -lanes.draw(h).exp(), lanes.draw(h)
    x, dt, B, C, z = (lanes.tokens(*shape) for shape in ((h, 2), (h,), (2, 4), (2, 4), (h, 2)))
    given = {"D": D, "z": z, "dt_softplus": True, "dt_limit": (0.1, 1.0), "backend": backend, **lanes.scan()}
    is_limited = lanes.rows([1, 0, 1], fill=1).bool()
    output = ops.ssd_scan(x, dt, A, B, C, states, chunk_size=2, is_limited=is_limited, **given)
    assert not output[6:].any()
    return output[:6]


def selective_state_update(lanes, backend):
    h = lanes.width
    states, A, D = lanes.arena(8, h, 2, 4), -lanes.draw(h, 2, 4).exp(), lanes.draw(h, 2)
    x, dt, B, C, z = (lanes.row_values(*shape) for shape in ((h, 2), (h, 2), (2, 4), (2, 4), (h, 2)))
    slots = lanes.rows([5, 2, 7])
    given = {"D": D, "z": z, "dt_softplus": True, "backend": backend}
    return ops.selective_state_update(states, slots, x, dt, A, B, C, **given)[:3]


def pack_csr(lanes, backend):
    indptr, indices, last = ops.pack_csr(
        lanes.rows(TABLE), lanes.rows([7, 10, 3]), block_size=4, backend=backend
    )
    assert (indptr[3:] == 6).all() and not indices[6:].any() and not last[3:].any()
    return indptr[:4], indices[:6], last[:3]


def pack_intervals(lanes, backend):
    intervals, counts = ops.pack_intervals(
        lanes.rows(TABLE), lanes.rows([7, 10, 3]), block_size=4, backend=backend
    )
    assert not intervals[3:].any() and not counts[3:].any()
    return intervals[:3], counts[:3]


def copy_blocks(lanes, backend):
    blocks = lanes.arena(8, 16)
    sources, targets = lanes.rows([3, 0, 1], fill=5), lanes.rows([4, 2, 7])
    ops.copy_blocks(blocks.view(torch.uint8), sources, targets, backend=backend)
    return ()


CALLS = {
    call.__name__: call
    for call in (
        slot_mapping, write_kv, paged_attention, gather_kv, merge_attention, gather_states, scatter_states, causal_conv1d,
        causal_conv1d_update, selective_scan, ssd_scan, selective_state_update, pack_csr, pack_intervals, copy_blocks,
    )
}  # fmt: skip
WITHOUT_LANES = {"table_update"}
"""Its list is as long as what changed: it runs before a captured step and is no part of it."""

FORMS = [
    (call, backend)
    for operation, call in [*CALLS.items(), ("paged_attention", decode_attention)]
    for backend in dispatch.FORMS[operation]
    if backend != "triton" or find_spec("triton")
]


def test_every_operation_is_here():
    assert set(CALLS) | WITHOUT_LANES == set(dispatch.FORMS)


def run(call, backend, pad, lanes_class=Lanes):
    """What comes out for the real rows and tokens, and the memory afterwards."""
    lanes = lanes_class(pad, 64 if backend == "torch" else 4)
    outputs = call(lanes, backend)
    return [*(outputs if isinstance(outputs, tuple) else [outputs]), *lanes.memory]


def is_refused(call, backend):
    """Whether this machine has no such form: a C++ one that was not built, Triton without a GPU or its interpreter."""
    try:
        run(call, backend, 0)
    except ops.dispatch.BackendUnavailableError:
        return True
    return False


@pytest.mark.parametrize(("call", "backend"), FORMS, ids=lambda each: getattr(each, "__name__", each))
def test_padding_changes_no_bit(call, backend, assert_same_bits):
    if is_refused(call, backend):
        pytest.skip("this machine has no such form")
    alone, padded = run(call, backend, 0), run(call, backend, 2)
    assert len(alone) == len(padded) > 0
    for ours, theirs in zip(padded, alone, strict=True):
        assert_same_bits(ours, theirs)


# The comparison has teeth: a lane that keeps what it held in an earlier, fuller step must show.


class Stale(Lanes):
    """Padded rows that kept a row's slots and lengths, and padded tokens that are still counted."""

    def rows(self, values, fill=0, dtype=torch.int32):
        values = torch.tensor(values, dtype=dtype)
        return torch.cat([values, (values[:1] + 1).expand(self.pad, *values.shape[1:])])

    def starts(self):
        ends = super().starts()
        ends[4:] += torch.arange(1, self.pad + 1, dtype=torch.int32)
        return ends


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(
    "call",
    [slot_mapping, paged_attention, scatter_states, causal_conv1d, causal_conv1d_update, selective_scan, ssd_scan,
     selective_state_update, pack_csr, pack_intervals, copy_blocks],
)  # fmt: skip
def test_a_stale_lane_shows(call, backend):
    def differs():
        alone = run(call, backend, 0)
        try:
            padded = run(call, backend, 2, Stale)
        except (AssertionError, IndexError):
            return True  # the call itself says what it promises of padding
        return any(
            not torch.equal(ours.nan_to_num(nan=7e7), theirs.nan_to_num(nan=7e7))
            for ours, theirs in zip(padded, alone, strict=True)
        )

    assert differs()
