"""What the scans over packed tokens promise alike: causal_conv1d, selective_scan and ssd_scan.

Each is held against its recurrence, written here in fp64 over a request's whole sequence. A step brings the
rest of that sequence, and its state slots lie in a strided, NaN-filled arena: only what a request may read is
ever filled in, and what it may not write is compared bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from kvgroups import ops

NUM_SLOTS = 12

TOLERANCE = 16
"""In units in the last place of the largest value of a tensor. Errors add up over a sequence."""


class Convolution:
    """A state is the last four inputs of five channels."""

    state_shape = (5, 4)

    def __init__(self, draw):
        self.weight, self.bias = draw(*self.state_shape), draw(5)

    def tokens(self, draw, count):
        return (draw(count, 5),)

    def __call__(self, tokens, states, **options):
        return ops.causal_conv1d(*tokens, self.weight, self.bias, states, activation="silu", **options)

    def recurrence(self, x):
        windows = F.pad(x, (0, 0, 4, 0)).unfold(0, 4, 1)[1:]
        return F.silu((windows * self.weight.double()).sum(-1) + self.bias.double()), windows


class Mamba1:
    """Four channels with a state of three numbers each."""

    state_shape = (4, 3)

    def __init__(self, draw):
        self.A, self.D, self.dt_bias = -draw(4, 3).exp(), draw(4), draw(4)

    def tokens(self, draw, count):
        return tuple(draw(count, size) for size in (4, 4, 3, 3, 4))

    def __call__(self, tokens, states, **options):
        x, dt, B, C, z = tokens
        own = {"D": self.D, "z": z, "dt_bias": self.dt_bias, "dt_softplus": True}
        return ops.selective_scan(x, dt, self.A, B, C, states, **own, **options)

    def recurrence(self, x, dt, B, C, z):
        A, D, dt = self.A.double(), self.D.double(), F.softplus(dt + self.dt_bias.double())
        state, outputs, states = torch.zeros(self.state_shape, dtype=torch.float64), [], []
        for t in range(len(x)):
            state = torch.exp(dt[t, :, None] * A) * state + (dt[t] * x[t])[:, None] * B[t]
            states.append(state)
            outputs.append((state @ C[t] + D * x[t]) * F.silu(z[t]))
        return torch.stack(outputs), torch.stack(states)


class Mamba2:
    """Four heads of two dims and a state of three numbers per dim, in two SSM groups."""

    state_shape = (4, 2, 3)

    def __init__(self, draw):
        self.A, self.D, self.dt_bias = -draw(4).exp(), draw(4), draw(4)

    def tokens(self, draw, count):
        return draw(count, 4, 2), draw(count, 4), draw(count, 2, 3), draw(count, 2, 3), draw(count, 4, 2)

    def __call__(self, tokens, states, **options):
        x, dt, B, C, z = tokens
        own = {"D": self.D, "z": z, "dt_bias": self.dt_bias, "dt_softplus": True, "dt_limit": (0.2, 1.5)}
        return ops.ssd_scan(x, dt, self.A, B, C, states, chunk_size=8, **own, **options)

    def recurrence(self, x, dt, B, C, z):
        A, D, dt = self.A.double(), self.D.double(), F.softplus(dt + self.dt_bias.double()).clamp(0.2, 1.5)
        B, C = B[:, [0, 0, 1, 1]], C[:, [0, 0, 1, 1]]
        state, outputs, states = torch.zeros(self.state_shape, dtype=torch.float64), [], []
        for t in range(len(x)):
            decay, entering = torch.exp(dt[t] * A), (dt[t, :, None] * x[t])[..., None] * B[t, :, None]
            state = decay[:, None, None] * state + entering
            states.append(state)
            outputs.append(((state * C[t, :, None]).sum(-1) + D[:, None] * x[t]) * F.silu(z[t]))
        return torch.stack(outputs), torch.stack(states)


SCANS = [Convolution, Mamba1, Mamba2]


class Request(NamedTuple):
    """One request's share of a step: tokens before it and in it, and its state slots."""

    computed: int
    tokens: int
    initial_slot: int
    final_slot: int


@dataclass(frozen=True)
class Case:
    name: str
    requests: tuple[tuple[int, int, int, int], ...]
    num_padded_tokens: int = 0


CASES = [
    Case("new request", ((0, 9, 0, 5),)),
    Case("rows 0, 1, 2 on slots 5, 2, 9", ((7, 6, 5, 5), (3, 2, 2, 2), (11, 4, 9, 9))),
    Case("suffixes shorter than the conv width", ((8, 1, 5, 5), (8, 2, 2, 2), (8, 3, 9, 9))),
    Case("history shorter than the conv width", ((1, 1, 5, 5), (2, 5, 2, 2), (3, 2, 9, 9))),
    Case("new requests of one token", ((0, 1, 0, 5), (6, 1, 2, 2), (0, 1, 0, 9))),
    Case("decode of one row", ((10, 1, 5, 5),)),
    Case("initial state elsewhere, only read", ((6, 4, 5, 2), (6, 1, 9, 3), (5, 2, 7, 8))),
    Case(
        "requests without tokens keep their slots", ((6, 0, 5, 5), (4, 3, 2, 2), (6, 0, 9, 3), (0, 0, 0, 7))
    ),
    Case("padded rows behind the last", ((4, 3, 2, 2), (0, 0, 0, 0), (0, 0, 0, 6))),
    Case("padded tokens behind the last row", ((4, 3, 2, 2), (0, 5, 0, 9)), num_padded_tokens=3),
    Case("state goes nowhere", ((4, 3, 2, 0), (0, 2, 0, 0))),
    Case("long among short", ((0, 70, 0, 5), (3, 1, 2, 2), (0, 17, 0, 9), (5, 33, 7, 7), (2, 8, 8, 8))),
    Case("no requests", ()),
    Case("no requests, padded tokens", (), num_padded_tokens=2),
    Case("only empty rows", ((0, 0, 0, 5), (5, 0, 2, 2))),
]
NAMED = {case.name: case for case in CASES}


@dataclass
class Step:
    """The arguments of one call, and what it must yield."""

    scan: Callable
    tokens: tuple[torch.Tensor, ...]
    arena: torch.Tensor
    states: torch.Tensor
    slots: dict[str, torch.Tensor]
    outputs: torch.Tensor
    written: dict[int, torch.Tensor]
    """Slot -> the state it must hold. Every other bit of the arena stays as it is."""


def drawing(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def build(scan_class, case, nan_arena, state_dtype=torch.float32, dtype=torch.float32):
    draw = drawing(dtype)
    scan, requests = scan_class(draw), [Request(*request) for request in case.requests]
    arena, states = nan_arena(NUM_SLOTS, *scan.state_shape, dtype=state_dtype)
    step_tokens, outputs, written = [], [], {}
    for request in requests:
        sequence = scan.tokens(draw, request.computed + request.tokens)
        step_tokens.append([tensor[request.computed :] for tensor in sequence])
        if request.computed + request.tokens == 0:
            continue
        all_outputs, all_states = scan.recurrence(*(tensor.double() for tensor in sequence))
        outputs.append(all_outputs[request.computed :])
        if request.computed:
            states[request.initial_slot] = all_states[request.computed - 1].to(state_dtype)
        if request.tokens and request.final_slot:
            written[request.final_slot] = all_states[-1]
    padding = [tensor * float("nan") for tensor in scan.tokens(draw, case.num_padded_tokens)]
    tokens = tuple(torch.cat(tensors) for tensors in zip(*step_tokens, padding, strict=True))
    lengths = torch.tensor([0, *(request.tokens for request in requests)])
    slots = {
        "query_start_loc": lengths.cumsum(0).int(),
        "initial_slots": torch.tensor([request.initial_slot for request in requests], dtype=torch.int32),
        "final_slots": torch.tensor([request.final_slot for request in requests], dtype=torch.int32),
    }
    return Step(scan, tokens, arena, states, slots, torch.cat([*outputs, torch.zeros(0)]), written)


def assert_close(got, expected, what, unit=0.0):
    """Within TOLERANCE units in the last place of the largest expected value, or larger ones relative to it."""
    assert got.shape == expected.shape, what
    unit = max(torch.finfo(got.dtype).eps, unit) * max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    error = (got.double() - expected).abs()
    assert (error <= TOLERANCE * unit).all(), f"{what}: off by {float(error.max()) / unit:.1f} units"


@pytest.fixture
def assert_step(assert_same_bits):
    """Run a step and hold its outputs, its states and all that it may not touch against what they must be."""

    def check(step, run=None, unit=0.0, **options):
        before = step.arena.clone()
        output = (run or step.scan)(step.tokens, step.states, **step.slots, **options)
        num_tokens = int(step.slots["query_start_loc"][-1])
        if num_tokens:
            assert_close(output[:num_tokens], step.outputs, "output", unit)
        assert len(output) == len(step.tokens[0]) and not output[num_tokens:].any(), "padding yields 0"
        for slot, expected in step.written.items():
            assert_close(step.states[slot], expected, f"state in slot {slot}", unit)
        after, size = step.arena.clone(), step.states[0].numel()
        for slot in step.written:
            after[slot, 3 : 3 + size] = before[slot, 3 : 3 + size]
        assert_same_bits(after, before)

    return check


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("scan", SCANS)
def test_outputs_and_states_are_those_of_the_recurrence(scan, case, backend, nan_arena, assert_step):
    assert_step(build(scan, case, nan_arena), backend=backend)


@pytest.mark.parametrize("scan", SCANS)
def test_slots_may_be_int64(scan, backend, nan_arena, assert_step):
    step = build(scan, NAMED["initial state elsewhere, only read"], nan_arena)
    step.slots = {name: tensor.long() for name, tensor in step.slots.items()}
    assert_step(step, backend=backend)


@pytest.mark.parametrize("scan", SCANS)
def test_a_snapshot_is_shared_and_stays_as_it_is(scan, backend, nan_arena, assert_same_bits):
    """STA-3: suffixes of 1, 2 and 3 tokens on one stored prefix, then that prefix once more."""
    draw = drawing()
    scan = scan(draw)
    prefix, suffixes = scan.tokens(draw, 12), [scan.tokens(draw, count) for count in (1, 2, 3, 9)]
    _, states = nan_arena(NUM_SLOTS, *scan.state_shape)
    states[4] = scan.recurrence(*(tensor.double() for tensor in prefix))[1][-1]
    snapshot = states[4].clone()
    got = scan(
        tuple(torch.cat(tensors) for tensors in zip(*suffixes, strict=True)),
        states,
        query_start_loc=torch.tensor([0, 1, 3, 6, 15]),
        initial_slots=torch.tensor([4, 4, 4, 4]),
        final_slots=torch.tensor([1, 2, 3, 5]),
        backend=backend,
    )
    assert_same_bits(states[4], snapshot)
    for output, suffix, slot in zip(got.split([1, 2, 3, 9]), suffixes, (1, 2, 3, 5), strict=True):
        whole = [torch.cat(tensors).double() for tensors in zip(prefix, suffix, strict=True)]
        outputs, after = scan.recurrence(*whole)
        assert_close(output, outputs[12:], "output")
        assert_close(states[slot], after[-1], "state")


@pytest.mark.parametrize("scan", SCANS)
def test_a_snapshot_is_the_state_after_exactly_its_token(scan, backend, nan_arena, assert_step):
    """At the first token, inside a chunk, on its edge, and at a request's last token."""
    step = build(scan, NAMED["long among short"], nan_arena)
    kept = {0: 1, 15: 3, 39: 4, 69: 6, 70: 10, 103: 11}  # token -> slot
    starts, sequences = step.slots["query_start_loc"].tolist(), NAMED["long among short"].requests
    step.slots["snapshot_tokens"] = torch.tensor([*kept, -1, 7, 1 << 40])
    step.slots["snapshot_slots"] = torch.tensor([*kept.values(), 0, 0, 0], dtype=torch.int32)
    for token, slot in kept.items():
        request = max(index for index, start in enumerate(starts[:-1]) if start <= token)
        alone = {
            "query_start_loc": torch.tensor([0, token + 1 - starts[request]]),
            "initial_slots": torch.tensor([sequences[request][2]]),
            "final_slots": torch.tensor([slot]),
        }
        prefix = tuple(tensor[starts[request] : token + 1] for tensor in step.tokens)
        states = step.states.clone()
        step.scan(prefix, states, backend="reference", **alone)
        step.written[slot] = states[slot].double()
    assert_step(step, backend=backend)


@pytest.mark.parametrize("scan", SCANS)
def test_every_cut_of_a_sequence_equals_one_shot(scan, backend, nan_arena):
    """STA-1: 19 requests bring the same 20 tokens, cut after 1, 2, ... 19 of them (interpreted: five)."""
    draw = drawing()
    scan = scan(draw)
    tokens = scan.tokens(draw, 20)
    expected, expected_states = scan.recurrence(*(tensor.double() for tensor in tokens))
    _, states = nan_arena(20, *scan.state_shape)
    cuts = (1, 3, 4, 16, 19) if backend == "triton" else range(1, 20)
    slots = torch.tensor(cuts)

    def step(pieces, initial_slots):
        lengths = torch.tensor([0, *(piece.stop - piece.start for piece in pieces)])
        packed = tuple(torch.cat([tensor[piece] for piece in pieces]) for tensor in tokens)
        starts = {"query_start_loc": lengths.cumsum(0), "initial_slots": initial_slots, "final_slots": slots}
        return scan(packed, states, backend=backend, **starts).split(lengths[1:].tolist())

    first = step([slice(0, cut) for cut in cuts], torch.zeros_like(slots))
    second = step([slice(cut, 20) for cut in cuts], slots)
    for cut, *halves in zip(cuts, first, second, strict=True):
        assert_close(torch.cat(halves), expected, f"cut after {cut}")
        assert_close(states[cut], expected_states[-1], f"state, cut after {cut}")


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_pieces_equal_one_shot(size, scan, backend):
    """STA-1: a sequence in pieces shorter than the conv width."""
    draw = drawing()
    scan = scan(draw)
    count = 7 if backend == "triton" else 20
    tokens = scan.tokens(draw, count)
    expected, _ = scan.recurrence(*(tensor.double() for tensor in tokens))
    states, outputs = torch.full((2, *scan.state_shape), float("nan")), []
    for begin in range(0, count, size):
        piece = tuple(tensor[begin : begin + size] for tensor in tokens)
        slots = {
            "query_start_loc": torch.tensor([0, len(piece[0])]),
            "initial_slots": torch.tensor([1 if begin else 0]),
            "final_slots": torch.tensor([1]),
        }
        outputs.append(scan(piece, states, backend=backend, **slots))
    assert_close(torch.cat(outputs), expected, "output")


@pytest.mark.parametrize("scan", SCANS)
def test_states_of_16_bits_are_rounded_when_written(scan, backend, nan_arena, assert_step):
    step = build(scan, NAMED["new request"], nan_arena, state_dtype=torch.bfloat16)
    assert_step(step, backend=backend)


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_of_16_bits_leave_states_of_32(dtype, scan, triton_backend, nan_arena, assert_step):
    """The other forms round where transformers does, and are held against it in their own tests."""
    step = build(scan, NAMED["initial state elsewhere, only read"], nan_arena, dtype=dtype)
    unit = torch.finfo(torch.float32).eps
    if scan is Mamba2 and dtype == torch.bfloat16:
        unit = 2**-16  # what its matrix products keep of a number that meets bf16
    assert_step(step, backend=triton_backend, unit=unit)


@pytest.mark.parametrize("scan", SCANS)
def test_what_comes_later_does_not_change_what_was_before(scan, backend):
    """STA-5: 70 tokens, the 51st changed."""
    draw = drawing()
    scan = scan(draw)
    tokens = scan.tokens(draw, 70)
    slots = {
        "query_start_loc": torch.tensor([0, 70]),
        "initial_slots": torch.tensor([0]),
        "final_slots": torch.tensor([1]),
    }

    def run():
        return scan(tokens, torch.zeros(2, *scan.state_shape), backend=backend, **slots)

    before = run()
    for tensor in tokens:
        tensor[50] += 1
    after = run()
    assert torch.equal(before[:50], after[:50]) and not torch.equal(before[50], after[50])


@pytest.mark.parametrize("scan", SCANS)
def test_a_request_does_not_see_its_neighbours(scan, backend):
    """All NaN on either side, in one chunk with it."""
    draw = drawing()
    scan = scan(draw)
    tokens = scan.tokens(draw, 11)
    for tensor in tokens:
        tensor[:3], tensor[7:] = float("nan"), float("nan")
    slots = {
        "query_start_loc": torch.tensor([0, 3, 7, 11]),
        "initial_slots": torch.tensor([0, 0, 0]),
        "final_slots": torch.tensor([1, 2, 3]),
    }
    states = torch.zeros(4, *scan.state_shape)
    output = scan(tokens, states, backend=backend, **slots)
    assert output[3:7].isfinite().all() and states[2].isfinite().all()
    assert output[:3].isnan().all() and states[1].isnan().any()


@pytest.mark.parametrize("scan", SCANS)
def test_no_gradient_flows_into_the_states(scan, backend):
    draw = drawing()
    scan = scan(draw)
    tokens = tuple(tensor.requires_grad_() for tensor in scan.tokens(draw, 3))
    states = torch.zeros(2, *scan.state_shape)
    slots = {
        "query_start_loc": torch.tensor([0, 3]),
        "initial_slots": torch.tensor([0]),
        "final_slots": torch.tensor([1]),
    }
    output = scan(tokens, states, backend=backend, **slots)
    assert not states.requires_grad
    if backend == "triton":
        assert not output.requires_grad  # a form for inference
        return
    output.sum().backward()
    assert all(tensor.grad.abs().sum() > 0 for tensor in tokens)


# The table has teeth: each of these is wrong, and some case must show it.


def state_of_the_neighbour(scan, tokens, states, **options):
    return scan(tokens, states, **options | {"initial_slots": options["initial_slots"].roll(1)})


def new_requests_of_one_token_are_taken_for_decodes(scan, tokens, states, **options):
    is_short = options["query_start_loc"].diff() == 1
    slots = torch.where(is_short, options["final_slots"], options["initial_slots"])
    return scan(tokens, states, **options | {"initial_slots": slots})


def every_request_starts_from_zero(scan, tokens, states, **options):
    return scan(tokens, states, **options | {"initial_slots": options["initial_slots"] * 0})


def state_goes_where_it_came_from(scan, tokens, states, **options):
    slots = torch.where(options["initial_slots"] > 0, options["initial_slots"], options["final_slots"])
    return scan(tokens, states, **options | {"final_slots": slots})


def state_is_that_of_one_token_too_few(scan, tokens, states, **options):
    ends, final_slots = options["query_start_loc"][1:].long(), options["final_slots"]
    has_two = options["query_start_loc"].diff() > 1
    early = {"snapshot_tokens": ends - 2, "snapshot_slots": torch.where(has_two, final_slots, 0)}
    return scan(tokens, states, **options | {"final_slots": torch.where(has_two, 0, final_slots)} | early)


def state_of_a_request_without_tokens_is_written(scan, tokens, states, **options):
    output = scan(tokens, states, **options)
    is_empty = options["query_start_loc"].diff() == 0
    for initial_slot, final_slot in zip(
        options["initial_slots"][is_empty], options["final_slots"][is_empty], strict=True
    ):
        if final_slot:
            states[final_slot] = states[initial_slot] if initial_slot else 0.0
    return output


def zero_state_is_written(scan, tokens, states, **options):
    output = scan(tokens, states, **options)
    states[0] = 0.0
    return output


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (state_of_the_neighbour, "rows 0, 1, 2 on slots 5, 2, 9"),
        (new_requests_of_one_token_are_taken_for_decodes, "new requests of one token"),
        (every_request_starts_from_zero, "suffixes shorter than the conv width"),
        (state_goes_where_it_came_from, "initial state elsewhere, only read"),
        (state_is_that_of_one_token_too_few, "rows 0, 1, 2 on slots 5, 2, 9"),
        (state_of_a_request_without_tokens_is_written, "requests without tokens keep their slots"),
        (zero_state_is_written, "padded rows behind the last"),
    ],
)
def test_a_wrong_scan_fails(wrong, name, scan, nan_arena, assert_step):
    assert_step(build(scan, NAMED[name], nan_arena))
    step = build(scan, NAMED[name], nan_arena)
    with pytest.raises(AssertionError):
        assert_step(step, run=lambda *args, **options: wrong(step.scan, *args, **options))
