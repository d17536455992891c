"""Copy blocks from where they lie to where they go.

One after another: an indexed copy would lay all of them out a second time, and a block of states alone may have
a hundred MiB. Reading the lists is a device-to-host sync on a GPU.
"""

from kvgroups.constants import NULL_BLOCK_ID


def copy_blocks(blocks, sources, targets):
    """See `kvgroups.ops.copy_blocks`."""
    sources, targets = sources.tolist(), targets.tolist()
    if not all(0 <= block < len(blocks) for block in [*sources, *targets]):  # Python would count negative ones from the end
        raise IndexError(f"expected block ids from 0 to {len(blocks) - 1}")
    for source, target in zip(sources, targets, strict=True):
        if target == NULL_BLOCK_ID:
            continue
        if source == NULL_BLOCK_ID:
            blocks[target].zero_()
        else:
            blocks[target].copy_(blocks[source])
