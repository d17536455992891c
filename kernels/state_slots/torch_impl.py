"""Read and write recurrent states with one indexed copy.

State slot 0 may have no bytes at all, so it is left out rather than read and masked. Leaving requests out
yields a data-dependent shape: on a GPU that is a device-to-host sync.
"""

from kvgroups.constants import NULL_BLOCK_ID


def gather_states(states, slots):
    """See `kvgroups.ops.gather_states`."""
    gathered = states.new_zeros(len(slots), *states.shape[1:])
    request = _requests_with_state(slots)
    return gathered.index_copy_(0, request, states.index_select(0, slots[request]))


def scatter_states(states, slots, values):
    """See `kvgroups.ops.scatter_states`."""
    request = _requests_with_state(slots)
    states.index_copy_(0, slots[request].long(), values[request].detach())


def _requests_with_state(slots):
    """The indices of the requests whose slot is not the zero state's."""
    return (slots != NULL_BLOCK_ID).nonzero().squeeze(1)
