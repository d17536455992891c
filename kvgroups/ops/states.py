"""Operations on state slots."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from kvgroups.errors import ShapeError
from kvgroups.ops.checks import (
    ANY,
    INDEX,
    check,
    check_convolution,
    check_scan_options,
    check_scan_slots,
    check_ssm_groups,
    device_of,
    dtype_name,
    naming,
    out_of_range,
    sizes,
)
from kvgroups.ops.dispatch import run
from kvgroups.ops.recall import Calls

Activation = Literal["silu", "swish"]


def gather_states(states: Tensor, slots: Tensor, *, backend: str = "auto") -> Tensor:
    """The recurrent states of this step's requests, in one dense tensor.

    Slot 0 is the zero state: it reads as zeros and its bytes are never looked at.

    Args:
        states: (num_slots, *state_shape), one state tensor of one layer. Any stride between slots.
        slots: (num_reqs,), int32 or int64. The state slot of each request; 0 for new requests and padding.

    Returns:
        (num_reqs, *state_shape), the dtype of states, contiguous.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device.
        OutOfRangeError: for a slot that states do not have (noticed on the CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: `state_indices_tensor` of vLLM's Mamba layers; there the pad is -1.

    Example:
        >>> states = torch.tensor([[float("nan")], [1.0], [2.0]])
        >>> gather_states(states, torch.tensor([2, 0])).tolist()
        [[2.0], [0.0]]
    """
    _check_slots(states, slots)
    with naming(range(len(states)), "slots", slots=slots):
        return run("gather_states", backend, states, slots)


def scatter_states(states: Tensor, slots: Tensor, values: Tensor, *, backend: str = "auto") -> None:
    """Write the recurrent states of this step's requests to their slots, in place.

    Slot 0 is never written. Slots other than 0 are distinct. No gradient flows into the states.

    Args:
        states: (num_slots, *state_shape), one state tensor of one layer. Any stride between slots.
        slots: (num_reqs,), int32 or int64. The state slot of each request; 0 for padding.
        values: (num_reqs, *state_shape), the dtype of states.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device.
        OutOfRangeError: for a slot that states do not have (noticed on the CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: as `gather_states`.

    Example:
        >>> states = torch.zeros(3, 1)
        >>> scatter_states(states, torch.tensor([2, 0]), torch.tensor([[7.0], [8.0]]))
        >>> states.tolist()
        [[0.0], [0.0], [7.0]]
    """
    _check_slots(states, slots)
    check("values", values, (len(slots), *states.shape[1:]), (states.dtype,), states.device)
    with naming(range(len(states)), "slots", slots=slots):
        run("scatter_states", backend, states, slots, values)


def _check_slots(states: Tensor, slots: Tensor) -> None:
    """Raise ShapeError unless states lie in slots, and slots are indices."""
    check("slots", slots, (ANY,), INDEX, device_of("states", states))
    if states.dim() == 0:
        raise ShapeError(f"states: expected (num_slots, *state_shape), got () {dtype_name(states.dtype)}.")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    *,
    query_start_loc: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    activation: Activation | None = None,
    snapshot_tokens: Tensor | None = None,
    snapshot_slots: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The short causal convolution of a state layer, for every token of this step.

    The state of a request is its last K inputs, oldest first, zeros where there were fewer. An output looks at
    K inputs, its own included: the oldest input of the initial state is kept, as transformers keeps it, but not
    looked at. A request starts from `initial_slots` and leaves its state in `final_slots`: the same slot for a
    running state, another to start from a snapshot, which is only read. A request without tokens changes no
    slot. No slot is written for one request and read or written for another in the same call.

    The sum is in fp32, rounded to the weight's dtype before the activation. No gradient flows into the states.

    Args:
        x: (num_tokens, channels), floating. The requests' tokens, packed; from `query_start_loc[-1]` on they
            are padding, are not looked at and yield 0.
        weight: (channels, K), floating. Its last column is the token's own.
        bias: (channels,), floating, or None.
        states: (num_slots, channels, K), floating, strided anyhow. Written in place.
        query_start_loc: (num_reqs + 1,), int32 or int64. Where each request's tokens start.
        initial_slots: (num_reqs,), int32 or int64. Where each request's state comes from; 0 is the zero state.
        final_slots: (num_reqs,), int32 or int64. Where the state after each request's last token goes; 0: nowhere.
        activation: `silu` or `swish`, which are one, or None.
        snapshot_tokens: (num_snapshots,), int64. Indices into x: the state after exactly that token is kept.
        snapshot_slots: (num_snapshots,), int32 or int64. Where; 0: nowhere, and its token is not looked at.

    Returns:
        (num_tokens, channels), the dtype of x.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or an unknown activation.
        OutOfRangeError: for a slot that states do not have (noticed on the CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    The torch form reads start locations and slots on the host: on a GPU that is a device-to-host sync.

    Source: `causal_conv1d_fn` of the causal-conv1d package; there a state has K - 1 columns and one slot.

    Example:
        Each input plus ten times its own predecessor. The state slot 1 gets the last two inputs:

        >>> states = torch.zeros(2, 1, 2)
        >>> causal_conv1d(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0, 1.0]]), None, states,
        ...               query_start_loc=torch.tensor([0, 3]), initial_slots=torch.tensor([0]),
        ...               final_slots=torch.tensor([1])).flatten().tolist()
        [1.0, 12.0, 23.0]
        >>> states[1].tolist()
        [[2.0, 3.0]]
    """
    device = device_of("x", x)
    check("x", x, (ANY, ANY), None, device)
    check_convolution(x.shape[1], weight, bias, states, activation, device)
    check_scan_slots(query_start_loc, initial_slots, final_slots, snapshot_tokens, snapshot_slots, device)
    slots = {"initial_slots": initial_slots, "final_slots": final_slots, "snapshot_slots": snapshot_slots}
    with naming(range(len(states)), "slots", **slots):
        return run(
            "causal_conv1d",
            backend,
            *(x, weight, bias, states),
            query_start_loc=query_start_loc,
            activation=activation,
            snapshot_tokens=snapshot_tokens,
            **slots,
        )


def causal_conv1d_update(
    x: Tensor,
    states: Tensor,
    slots: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: Activation | None = None,
    backend: str = "auto",
) -> Tensor:
    """The short causal convolution for one token per request, in place on the requests' slots.

    `causal_conv1d` with one token a request and equal initial and final slots. A row with slot 0 is padding:
    its output means nothing, and no slot is written.

    Args:
        x: (num_reqs, channels), floating. One token per request.
        states: (num_slots, channels, K), floating, strided anyhow: each request's last K inputs, oldest first.
            Written in place.
        slots: (num_reqs,), int32 or int64. The state slot of each request; those other than 0 are distinct.
        weight: (channels, K), floating. Its last column is the token's own.
        bias: (channels,), floating, or None.
        activation: `silu` or `swish`, which are one, or None.

    Returns:
        (num_reqs, channels), the dtype of x.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or an unknown activation.
        OutOfRangeError: for a slot that states do not have (noticed on the CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: `causal_conv1d_update` of the causal-conv1d package.

    Example:
        >>> states = torch.tensor([[[0.0, 0.0]], [[1.0, 2.0]]])
        >>> causal_conv1d_update(torch.tensor([[3.0]]), states, torch.tensor([1]),
        ...                      torch.tensor([[10.0, 1.0]]), None)
        tensor([[23.]])
        >>> states[1].tolist()
        [[2.0, 3.0]]
    """
    tensors = (x, states, slots, weight, bias)
    convolve, addresses = _STEPS.serving(backend, tensors, (activation,))
    try:
        return convolve(*tensors, addresses=addresses)
    except IndexError as error:
        raise out_of_range(error, range(len(states)), "slots", slots=slots) from error


def _check_step(
    x: Tensor,
    states: Tensor,
    slots: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: Activation | None,
) -> None:
    device = device_of("x", x)
    check("x", x, (ANY, ANY), None, device)
    check_convolution(x.shape[1], weight, bias, states, activation, device)
    check("slots", slots, (len(x),), INDEX, device)


_STEPS = Calls("causal_conv1d_update", _check_step, 5, settings=("activation",))


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    *,
    query_start_loc: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    snapshot_tokens: Tensor | None = None,
    snapshot_slots: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The scan of Mamba-1, for every token of this step.

    Per channel, with a state h of N numbers:

        h = exp(dt * A) * h + dt * x * B        out = (h . C + D * x) * silu(z)

    A request starts from `initial_slots` and leaves its state in `final_slots`, by the rules of
    `causal_conv1d`. The recurrence is in fp32; a state is rounded to the dtype of states when it is written.
    No gradient flows into the states.

    Args:
        x: (num_tokens, channels), floating. The requests' tokens, packed; from `query_start_loc[-1]` on they
            are padding, are not looked at and yield 0.
        dt: (num_tokens, channels), floating. Step sizes, before bias and softplus.
        A: (channels, N), floating, negative.
        B: (num_tokens, N), the dtype of x.
        C: (num_tokens, N), the dtype of x.
        states: (num_slots, channels, N), floating, strided anyhow. Written in place.
        query_start_loc: (num_reqs + 1,), int32 or int64. Where each request's tokens start.
        initial_slots: (num_reqs,), int32 or int64. Where each request's state comes from; 0 is the zero state.
        final_slots: (num_reqs,), int32 or int64. Where the state after each request's last token goes; 0: nowhere.
        D: (channels,), floating, or None. The skip connection.
        z: (num_tokens, channels), the dtype of x, or None. The gate.
        dt_bias: (channels,), floating, or None. Added to dt.
        dt_softplus: whether softplus is applied to dt, after the bias.
        snapshot_tokens: (num_snapshots,), int64. Indices into x: the state after exactly that token is kept.
        snapshot_slots: (num_snapshots,), int32 or int64. Where; 0: nowhere, and its token is not looked at.

    Returns:
        (num_tokens, channels), the dtype of x.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device.
        OutOfRangeError: for a slot that states do not have (noticed on the CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    The torch form reads start locations and slots on the host: on a GPU that is a device-to-host sync.

    Source: Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", algorithm 2.

    Example:
        Nothing decays, so the state is a running sum, here on top of the 10 in slot 2:

        >>> one, states = torch.ones(3, 1), torch.tensor([[[0.0]], [[0.0]], [[10.0]]])
        >>> selective_scan(torch.tensor([[1.0], [2.0], [3.0]]), one, torch.zeros(1, 1), one, one, states,
        ...                query_start_loc=torch.tensor([0, 3]), initial_slots=torch.tensor([2]),
        ...                final_slots=torch.tensor([1])).flatten().tolist()
        [11.0, 13.0, 16.0]
        >>> states.flatten().tolist()
        [0.0, 16.0, 10.0]
    """
    device, (num_tokens, channels) = device_of("x", x), sizes("x", x, 2)
    state_size = sizes("A", A, 2)[1]
    check("A", A, (channels, state_size), None, device)
    check("dt", dt, (num_tokens, channels), None, device)
    for name, tensor in (("B", B), ("C", C)):
        check(name, tensor, (num_tokens, state_size), (x.dtype,), device)
    check("states", states, (ANY, channels, state_size), None, device)
    check_scan_options(x, (channels,), D, z, dt_bias)
    check_scan_slots(query_start_loc, initial_slots, final_slots, snapshot_tokens, snapshot_slots, device)
    slots = {"initial_slots": initial_slots, "final_slots": final_slots, "snapshot_slots": snapshot_slots}
    with naming(range(len(states)), "slots", **slots):
        return run(
            "selective_scan",
            backend,
            *(x, dt, A, B, C, states),
            query_start_loc=query_start_loc,
            D=D,
            z=z,
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
            snapshot_tokens=snapshot_tokens,
            **slots,
        )


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    *,
    chunk_size: int,
    query_start_loc: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    is_limited: Tensor | None = None,
    snapshot_tokens: Tensor | None = None,
    snapshot_slots: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The scan of Mamba-2, for every token of this step.

    Per head, with a state h of (P, N) numbers and one decay for all of them:

        h = exp(dt * A) * h + dt * outer(x, B)        out = (h @ C + D * x) * silu(z)

    Head h uses the SSM group `h // (heads // G)` of B and C. A request starts from `initial_slots` and leaves
    its state in `final_slots`, by the rules of `causal_conv1d`. Everything after the step sizes is in fp32; a
    state is rounded to the dtype of states when it is written. No gradient flows into the states.

    Args:
        x: (num_tokens, heads, P), floating. The requests' tokens, packed; from `query_start_loc[-1]` on they
            are padding, are not looked at and yield 0.
        dt: (num_tokens, heads), floating. Step sizes, before bias, softplus and limit.
        A: (heads,), floating, negative.
        B: (num_tokens, G, N), the dtype of x. G divides heads.
        C: (num_tokens, G, N), the dtype of x.
        states: (num_slots, heads, P, N), floating, strided anyhow. Written in place.
        chunk_size: tokens. A tuning number: the longest chunk, no matter for the result but by rounding.
        query_start_loc: (num_reqs + 1,), int32 or int64. Where each request's tokens start.
        initial_slots: (num_reqs,), int32 or int64. Where each request's state comes from; 0 is the zero state.
        final_slots: (num_reqs,), int32 or int64. Where the state after each request's last token goes; 0: nowhere.
        D: (heads,), floating, or None. The skip connection.
        z: (num_tokens, heads, P), the dtype of x, or None. The gate.
        dt_bias: (heads,), floating, or None. Added to dt.
        dt_softplus: whether softplus is applied to dt, after the bias.
        dt_limit: the least and the greatest step size, clamped to after softplus.
        is_limited: (num_reqs,), bool. Whose step sizes are clamped; None: everyone's. transformers clamps in
            prefill and not in decode, so a step that mixes them needs both.
        snapshot_tokens: (num_snapshots,), int64. Indices into x: the state after exactly that token is kept.
        snapshot_slots: (num_snapshots,), int32 or int64. Where; 0: nowhere, and its token is not looked at.

    Returns:
        (num_tokens, heads, P), float32, or float64 where x or states are: the gated norm that follows works
        in fp32, and transformers rounds after it.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or G that does not divide heads.
        OutOfRangeError: for a slot that states do not have (noticed on the CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    The torch form reads start locations and slots on the host: on a GPU that is a device-to-host sync.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 6; `mamba_chunk_scan_combined` of mamba-ssm, where
        the result has the dtype of x.

    Example:
        Nothing decays, so the state is a running sum, here on top of the 10 in slot 2:

        >>> one, states = torch.ones(3, 1, 1), torch.tensor([0.0, 0.0, 10.0]).view(3, 1, 1, 1)
        >>> x = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
        >>> ssd_scan(x, one[:, 0], torch.zeros(1), one, one, states, chunk_size=2,
        ...          query_start_loc=torch.tensor([0, 3]), initial_slots=torch.tensor([2]),
        ...          final_slots=torch.tensor([1])).flatten().tolist()
        [11.0, 13.0, 16.0]
        >>> states.flatten().tolist()
        [0.0, 16.0, 10.0]
    """
    device, (num_tokens, heads, head_dim) = device_of("x", x), sizes("x", x, 3)
    _, groups, state_size = sizes("B", B, 3)
    check_ssm_groups(heads, groups)
    check("dt", dt, (num_tokens, heads), None, device)
    check("A", A, (heads,), None, device)
    for name, tensor in (("B", B), ("C", C)):
        check(name, tensor, (num_tokens, groups, state_size), (x.dtype,), device)
    check("states", states, (ANY, heads, head_dim, state_size), None, device)
    check_scan_options(x, (heads,), D, z, dt_bias)
    check_scan_slots(query_start_loc, initial_slots, final_slots, snapshot_tokens, snapshot_slots, device)
    if is_limited is not None:
        check("is_limited", is_limited, (len(initial_slots),), (torch.bool,), device)
    if chunk_size < 1:
        raise ShapeError(f"chunk_size: expected at least 1 token, got {chunk_size}.")
    if not dt_limit[0] <= dt_limit[1]:
        raise ShapeError(f"dt_limit: expected the least and the greatest step size, got {dt_limit}.")
    slots = {"initial_slots": initial_slots, "final_slots": final_slots, "snapshot_slots": snapshot_slots}
    with naming(range(len(states)), "slots", **slots):
        return run(
            "ssd_scan",
            backend,
            *(x, dt, A, B, C, states),
            chunk_size=chunk_size,
            query_start_loc=query_start_loc,
            D=D,
            z=z,
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            is_limited=is_limited,
            snapshot_tokens=snapshot_tokens,
            **slots,
        )


def selective_state_update(
    states: Tensor,
    slots: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    backend: str = "auto",
) -> Tensor:
    """One token per request through the recurrence of Mamba-1 or Mamba-2, in place on the requests' slots.

    Mamba-1 is `selective_scan`, Mamba-2 `ssd_scan`, for one token a request with equal initial and final slots
    and without a limit on the step size. A row with slot 0 is padding: its output means nothing, and no slot is
    written.

    With inputs in 16 bits the torch and the C++ form round where transformers does, for parity with it: the step size, the
    state that C reads, what D and z make of the sum, and for Mamba-2 also `dt * B` and its product with x, so that even
    a state in fp32 takes in 16-bit numbers. The reference and the Triton form keep all of it in fp32 and round the
    output once; on inputs in fp32 all forms do.

    Args:
        states: Mamba-1 (num_slots, channels, N) or Mamba-2 (num_slots, heads, P, N), floating, strided anyhow.
            Written in place.
        slots: (num_reqs,), int32 or int64. The state slot of each request; those other than 0 are distinct.
        x: (num_reqs, channels) or (num_reqs, heads, P), floating. Its number of dims tells the form.
        dt: like x, floating. Step sizes, before bias and softplus. Mamba-2 has one per head: expand it to P, and
            A, D and dt_bias likewise, without a copy.
        A: (channels, N) or (heads, P, N), floating, negative.
        B: (num_reqs, N) or (num_reqs, G, N), the dtype of x. G divides heads.
        C: like B.
        D: (channels,) or (heads, P), floating, or None. The skip connection.
        z: like x, or None. The gate.
        dt_bias: (channels,) or (heads, P), floating, or None. Added to dt.
        dt_softplus: whether softplus is applied to dt, after the bias.

    Returns:
        Like x.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or G that does not divide heads.
        OutOfRangeError: for a slot that states do not have (noticed on the CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: `selective_state_update` of mamba-ssm, where the slots are `state_batch_indices`.

    Example:
        >>> one, states = torch.ones(1, 1), torch.tensor([[[0.0]], [[10.0]]])
        >>> selective_state_update(states, torch.tensor([1]), 2 * one, one, 0 * one, one, one)
        tensor([[12.]])
        >>> states.flatten().tolist()
        [0.0, 12.0]
    """
    tensors = (states, slots, x, dt, A, B, C, D, z, dt_bias)
    advance, addresses = _UPDATES.serving(backend, tensors, (dt_softplus,))
    try:
        return advance(*tensors, addresses=addresses)
    except IndexError as error:
        raise out_of_range(error, range(len(states)), "slots", slots=slots) from error


def _check_update(
    states: Tensor,
    slots: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
) -> None:
    device, is_mamba1 = device_of("x", x), x.dim() == 2
    num_reqs, *inner = sizes("x", x, 2 if is_mamba1 else 3)
    _, *groups, state_size = sizes("B", B, x.dim())
    if not is_mamba1:
        check_ssm_groups(inner[0], groups[0])
    check("dt", dt, (num_reqs, *inner), None, device)
    check("A", A, (*inner, state_size), None, device)
    for name, tensor in (("B", B), ("C", C)):
        check(name, tensor, (num_reqs, *groups, state_size), (x.dtype,), device)
    check("states", states, (ANY, *inner, state_size), None, device)
    check("slots", slots, (num_reqs,), INDEX, device)
    check_scan_options(x, tuple(inner), D, z, dt_bias)


_UPDATES = Calls("selective_state_update", _check_update, 7, ("D", "z", "dt_bias"), ("dt_softplus",))
