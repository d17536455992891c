"""Change entries of a block table, one at a time."""


def table_update(table, places, block_ids):
    """See `kvgroups.ops.table_update`."""
    width = table.shape[1]
    for place, block_id in zip(places.tolist(), block_ids.tolist(), strict=True):
        table[place // width, place % width] = block_id
