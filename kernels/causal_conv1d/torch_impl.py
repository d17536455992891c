"""The causal convolution as a few shifted multiply-adds over all tokens of the step at once.

The inputs of all requests are laid out in one matrix, each request behind the K inputs of its state:

    [state of request 0, tokens of request 0, state of request 1, tokens of request 1, ...]

The K rows that end at a token are then its window, wherever they came from: its output is their weighted sum,
and the state after it is those rows themselves. Windows that straddle two requests are summed like the others
and left out.

Start locations and slots are read once, with `.tolist()`: on a GPU that is a device-to-host sync.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F

from kvgroups.kernels.state_slots.ragged import kept_states, write_states
from kvgroups.kernels.state_slots.torch_impl import gather_states, scatter_states


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
    starts, width = query_start_loc.tolist(), weight.shape[1]
    if starts[-1] == 0:
        return torch.zeros_like(x)
    history = gather_states(states, initial_slots).transpose(1, 2)
    rows = torch.cat(
        [part for past, tokens in zip(history, _split(x, starts), strict=True) for part in (past, tokens)]
    )
    # The window that begins at row `token + 1 + request * width` ends at that token.
    begins = [start + 1 + request * width for request, start in enumerate(starts[:-1])]

    summed = _weighted_sum(rows, weight, bias)
    lengths = [stop - start for start, stop in pairwise(starts)]
    summed = torch.cat([summed[begin : begin + n] for begin, n in zip(begins, lengths, strict=True)])

    kept = kept_states(starts, final_slots, snapshot_tokens, snapshot_slots)
    windows = rows.unfold(0, width, 1)[[begins[each.request] + each.step for each in kept]]
    write_states(states, [each.slot for each in kept], windows)
    return F.pad(_finish(summed, weight, activation, x), (0, 0, 0, len(x) - starts[-1]))


def causal_conv1d_update(x, states, slots, weight, bias, *, activation=None):
    """See `kvgroups.ops.causal_conv1d_update`."""
    windows = torch.cat([gather_states(states, slots)[:, :, 1:], x[:, :, None]], dim=2)
    scatter_states(states, slots, windows.to(states.dtype))
    dtype = torch.promote_types(weight.dtype, torch.float32)
    summed = (windows.to(weight.dtype).to(dtype) * weight.to(dtype)).sum(dim=2)
    if bias is not None:
        summed = summed + bias.to(dtype)
    return _finish(summed, weight, activation, x)


def _split(x, starts):
    """The tokens of each request."""
    return [x[start:stop] for start, stop in pairwise(starts)]


def _weighted_sum(rows, weight, bias):
    """The weighted sum of every window, (num_rows - width + 1, channels), in at least fp32."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    rows, taps = rows.to(weight.dtype).to(dtype), weight.to(dtype).t().contiguous()
    count = len(rows) - len(taps) + 1
    summed = rows[:count] * taps[0]
    for shift in range(1, len(taps)):
        summed = summed.addcmul_(rows[shift : shift + count], taps[shift])
    return summed if bias is None else summed.add_(bias.to(dtype))


def _finish(summed, weight, activation, x):
    """Round as a convolution in the weight's dtype does, activate, and return to the dtype of x."""
    rounded = summed.to(weight.dtype)
    return (rounded if activation is None else F.silu(rounded)).to(x.dtype)
