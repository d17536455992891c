"""Read and write recurrent states, one request at a time."""

from kvgroups.constants import NULL_BLOCK_ID


def gather_states(states, slots):
    """See `kvgroups.ops.gather_states`."""
    gathered = states.new_zeros(len(slots), *states.shape[1:])
    for request, slot in enumerate(slots.tolist()):
        if slot != NULL_BLOCK_ID:
            gathered[request] = states[slot]
    return gathered


def scatter_states(states, slots, values):
    """See `kvgroups.ops.scatter_states`."""
    for request, slot in enumerate(slots.tolist()):
        if slot != NULL_BLOCK_ID:
            states[slot] = values[request].detach()
