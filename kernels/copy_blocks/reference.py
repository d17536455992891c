"""Copy blocks, one at a time."""

from kvgroups.constants import NULL_BLOCK_ID


def copy_blocks(blocks, sources, targets):
    """See `kvgroups.ops.copy_blocks`."""
    copies = list(zip(sources.tolist(), targets.tolist(), strict=True))
    for source, target in copies:
        if min(source, target) < 0 or max(source, target) >= len(blocks):
            raise IndexError(f"expected block ids from 0 to {len(blocks) - 1}")
    for source, target in copies:
        if target != NULL_BLOCK_ID:
            blocks[target] = 0 if source == NULL_BLOCK_ID else blocks[source].clone()
