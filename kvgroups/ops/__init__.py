"""The one dispatch point: every operation on blocks, slots and state slots, whatever computes it.

An operation exists as `reference` (naive, easy to believe), as `torch` (vectorised, runs everywhere), as `triton`
(for GPUs) and, where it pays, as `cpu` (C++, there if it was built), with one signature. `backend="auto"` takes the
first form that serves the call on its device, never the reference;
a form asked for by name runs or is refused with all its reasons. `use_backend` sets the default for a block of
code.

Shapes, dtypes and devices are checked here, from what the host knows: no check waits for a GPU, so what only
the contents of a tensor could tell (a slot out of range, a position past the table) is the caller's promise. A form on the
CPU that fails on one raises OutOfRangeError, which names it.

Conventions: a slot is `block_id * block_size + offset`, a number and not an address; -1 (`PAD_SLOT_ID`) is a
token without a slot; block 0 (`NULL_BLOCK_ID`) holds nothing and is never written; a position is a token's
place in its own request; padding is always a suffix.
"""

from kvgroups.ops.attention import gather_kv, merge_attention, paged_attention, write_kv
from kvgroups.ops.dispatch import use_backend
from kvgroups.ops.states import (
    causal_conv1d,
    causal_conv1d_update,
    gather_states,
    scatter_states,
    selective_scan,
    selective_state_update,
    ssd_scan,
)
from kvgroups.ops.tables import (
    SlotMappingMode,
    copy_blocks,
    pack_csr,
    pack_intervals,
    slot_mapping,
    table_update,
)

__all__ = [
    "SlotMappingMode",
    "causal_conv1d",
    "causal_conv1d_update",
    "copy_blocks",
    "gather_kv",
    "gather_states",
    "merge_attention",
    "pack_csr",
    "pack_intervals",
    "paged_attention",
    "scatter_states",
    "selective_scan",
    "selective_state_update",
    "slot_mapping",
    "ssd_scan",
    "table_update",
    "use_backend",
    "write_kv",
]
