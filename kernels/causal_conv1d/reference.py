"""The causal convolution, one token at a time over a request's last inputs."""

from itertools import pairwise

import torch
from einops import einsum

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.kernels.state_slots.reference import gather_states, scatter_states


def causal_conv1d(
    x,
    weight,
    bias,
    states,
    *,
    query_start_loc,
    initial_slots,
    final_slots,
    activation=None,
    snapshot_tokens=None,
    snapshot_slots=None,
):
    """See `kvgroups.ops.causal_conv1d`."""
    output = torch.zeros_like(x)
    initial_windows = gather_states(states, initial_slots)
    for request, (start, stop) in enumerate(pairwise(query_start_loc.tolist())):
        window = initial_windows[request]
        for token in range(start, stop):
            window = _shift(window, x[token])
            output[token] = _convolve(window, weight, bias, activation)
            if snapshot_tokens is not None:
                here = snapshot_slots[snapshot_tokens == token]
                scatter_states(states, here, window.expand(len(here), *window.shape).to(states.dtype))
        if start < stop and final_slots[request] != NULL_BLOCK_ID:
            states[final_slots[request]] = window.detach().to(states.dtype)
    return output


def causal_conv1d_update(x, states, slots, weight, bias, *, activation=None):
    """See `kvgroups.ops.causal_conv1d_update`."""
    windows = [_shift(window, new) for window, new in zip(gather_states(states, slots), x, strict=True)]
    output = torch.zeros_like(x)
    for request, window in enumerate(windows):
        output[request] = _convolve(window, weight, bias, activation)
        if slots[request] != NULL_BLOCK_ID:
            states[slots[request]] = window.detach().to(states.dtype)
    return output


def _shift(window, new):
    """The window (channels, width) one token on: the oldest input leaves, the new one (channels,) enters."""
    return torch.cat([window[:, 1:], new[:, None]], dim=1)


def _convolve(window, weight, bias, activation):
    """The output (channels,) at the window's last input, in fp32 or, for fp64, in fp64."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    result = einsum(window.to(dtype), weight.to(dtype), "channel k, channel k -> channel")
    if bias is not None:
        result = result + bias.to(dtype)
    return result if activation is None else torch.nn.functional.silu(result)
