"""Change entries of a block table, a tile of entries a program."""

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on the CPU: it decides when it is imported."""

ENTRIES_PER_PROGRAM = 256


def table_update(table, places, block_ids):
    """See `kvgroups.ops.table_update`."""
    num_entries = len(places)
    if num_entries:
        grid = (triton.cdiv(num_entries, ENTRIES_PER_PROGRAM),)
        _table_update_kernel[grid](table, places, block_ids, num_entries, TILE=ENTRIES_PER_PROGRAM)


# places and block_ids are two parts of one transfer: where the second begins depends on how much changed.
@triton.jit(do_not_specialize=["num_entries"], do_not_specialize_on_alignment=["places", "block_ids"])
def _table_update_kernel(table, places, block_ids, num_entries, TILE: tl.constexpr):
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_entry = entry < num_entries
    place = tl.load(places + entry, mask=is_entry, other=0)
    block_id = tl.load(block_ids + entry, mask=is_entry, other=0)
    tl.store(table + place, block_id, mask=is_entry)
