"""The scan of Mamba-1 over all requests at once, a rectangle of (time steps, requests) at a time.

Shapes in this file: t time steps, r requests, d channels, n state per channel.

What does not depend on the state is computed for a rectangle together; the recurrence itself is one
multiply-add a time step. Past its end a request repeats its last token, and what comes of it is left out.

The roundings are those of transformers' own torch function. Start locations and slots are read once, with
`.tolist()`: on a GPU that is a device-to-host sync.
"""

import torch
import torch.nn.functional as F

from kvgroups.kernels.state_slots.ragged import Ragged, kept_states, write_states
from kvgroups.kernels.state_slots.torch_impl import gather_states

MAX_ELEMENTS = 1 << 18
"""States of a rectangle, in elements: its few tensors of that size stay in a core's cache."""

MAX_STEPS = 64
"""Time steps of a rectangle at most."""


def selective_scan(
    x,
    dt,
    A,
    B,
    C,
    states,
    *,
    query_start_loc,
    initial_slots,
    final_slots,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    snapshot_tokens=None,
    snapshot_slots=None,
):
    """See `kvgroups.ops.selective_scan`."""
    starts = query_start_loc.tolist()
    num_tokens = starts[-1]
    dtype = torch.promote_types(torch.promote_types(x.dtype, states.dtype), torch.float32)
    dt = _step_size(dt[:num_tokens], dt_bias, dt_softplus).to(dtype)
    inputs, A, B = dt * x[:num_tokens].to(dtype), A.to(dtype), B.to(dtype)

    kept = kept_states(starts, final_slots, snapshot_tokens, snapshot_slots)
    ragged = Ragged(starts, range(len(starts) - 1), kept, x.device)
    state = gather_states(states, initial_slots[ragged.requests]).to(dtype)
    output = x.new_zeros(num_tokens, x.shape[1])
    for rectangle in ragged.rectangles(lambda num_rows: _steps(num_rows * A.numel())):
        tokens, is_token = rectangle.tokens.t(), rectangle.is_token.t()
        decay = torch.exp(dt[tokens][..., None] * A)
        entering = inputs[tokens][..., None] * B[tokens][:, :, None]
        state, history = state[: tokens.shape[1]], []
        for step in range(len(tokens)):
            state = torch.addcmul(entering[step], decay[step], state)
            history.append(state)
        history = torch.stack(history)
        result = torch.matmul(history.to(C.dtype), C[tokens][..., None]).squeeze(-1)
        output[tokens[is_token]] = result[is_token]
        write_states(states, rectangle.kept_slots, history[rectangle.kept_steps, rectangle.kept_rows])
    return F.pad(_finish(output, x[:num_tokens], D, z), (0, 0, 0, len(x) - num_tokens))


def _steps(elements):
    """How many time steps of that many elements a rectangle takes."""
    return max(1, min(MAX_STEPS, MAX_ELEMENTS // elements))


def _step_size(dt, dt_bias, dt_softplus):
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    return F.softplus(dt) if dt_softplus else dt


def _finish(output, x, D, z):
    """Add the skip connection, gate, and return to the dtype of x."""
    result = output if D is None else output + x * D
    if z is not None:
        result = result * F.silu(z[: len(x)])
    return result.to(x.dtype)
