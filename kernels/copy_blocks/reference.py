"""Copy blocks, one at a time."""

from kvgroups.constants import NULL_BLOCK_ID


def copy_blocks(blocks, sources, targets):
    """See `kvgroups.ops.copy_blocks`."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if target != NULL_BLOCK_ID:
            blocks[target] = 0 if source == NULL_BLOCK_ID else blocks[source].clone()
