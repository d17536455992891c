"""Copy blocks from where they lie to where they go.

One after another: an indexed copy would lay all of them out a second time, and a block of states alone may have
a hundred MiB. Reading the lists is a device-to-host sync on a GPU.
"""

from kvgroups.constants import NULL_BLOCK_ID


def copy_blocks(blocks, sources, targets):
    """See `kvgroups.ops.copy_blocks`."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if target == NULL_BLOCK_ID:
            continue
        if source == NULL_BLOCK_ID:
            blocks[target].zero_()
        else:
            blocks[target].copy_(blocks[source])
