"""The law of conservation: every block of a group is accounted for, in its slab, its rows and its owners."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.errors import KVGroupsError
from kvgroups.group_manager import GroupManager
from kvgroups.multi_group_block_table import MultiGroupBlockTable
from kvgroups.request import Request
from kvgroups.slab_pool import NULL_OWNER, SlabPool, slabs_of


def check_all(
    slabs: SlabPool, groups: Mapping[str, GroupManager], num_arena_slabs: int, requests: Collection[Request]
) -> None:
    """All of the checks below, for these live requests and the tables that they are in."""
    check_slabs(slabs, groups, num_arena_slabs)
    for group in groups.values():
        check_blocks(group, requests)
        for request in requests:
            check_row(group, request)
    rows: dict[MultiGroupBlockTable, list[int]] = {}
    for request in requests:
        rows.setdefault(request.tables, []).append(request.row)
    for tables, taken in rows.items():
        check_tables(tables, taken)


def check_slabs(slabs: SlabPool, groups: Mapping[str, GroupManager], num_arena_slabs: int) -> None:
    """Every slab is the null slab, free, or leased by the one group that knows of it, and has its bytes.

    Raises:
        KVGroupsError: naming the slab, who it is leased to and who uses it.
    """
    owners: list[str | None] = [None] * slabs.num_slabs
    owners[0] = NULL_OWNER
    for name, group in groups.items():
        for slab in slabs_of(group.plan, group.pool.leases):
            if owners[slab] is not None:
                raise KVGroupsError(f"slab {slab}: used by group {owners[slab]!r} and by group {name!r}")
            owners[slab] = name
    for slab, (used_by, leased_to) in enumerate(zip(owners, slabs.owners, strict=True)):
        if used_by != leased_to:
            raise KVGroupsError(f"slab {slab}: used by group {used_by!r} and leased to group {leased_to!r}")
    num_free = slabs.owners.count(None)
    if num_free != slabs.num_free:
        raise KVGroupsError(f"slabs: {num_free} have no owner and {slabs.num_free} are counted as free")
    if num_arena_slabs != slabs.num_slabs:
        raise KVGroupsError(f"slabs: {slabs.num_slabs} in the accounts and bytes for {num_arena_slabs}")


def check_blocks(group: GroupManager, requests: Collection[Request]) -> None:
    """Owned and free blocks are all there are, in every slab, and each block is in as many rows as it has owners.

    Raises:
        KVGroupsError: naming the group and the block or slab.
    """
    name, pool, plan = group.name, group.pool, group.plan
    uses = np.zeros(len(pool.references), dtype=np.int64)
    for request in requests:
        np.add.at(uses, group.held_blocks(request), 1)
    wrong = np.flatnonzero(uses != pool.references)
    if len(wrong):
        block_id = int(wrong[0])
        raise KVGroupsError(
            f"group {name!r}: block {block_id} is in {uses[block_id]} rows and has {pool.references[block_id]} owners"
        )
    cached = group.cached_blocks()
    group.check_filed()
    leases = pool.leases
    owned = np.flatnonzero(pool.references)
    taken = np.concatenate((owned, cached))
    numbers = dict(zip(*np.unique(taken // plan.blocks_per_lease, return_counts=True), strict=True))
    for lease in sorted({*leases, *numbers}):
        if leases.get(lease) != numbers.get(lease, 0):
            raise KVGroupsError(
                f"group {name!r}: {numbers.get(lease, 0)} blocks of slab {lease * plan.slabs_per_lease} are taken, "
                f"and {leases.get(lease, 'it is not leased')}{' are counted' * (lease in leases)}"
            )
    if len(cached) != pool.num_cached or len(taken) + pool.num_free != pool.num_blocks:
        raise KVGroupsError(
            f"group {name!r}: {len(owned)} owned, {len(cached)} cached and {pool.num_free} free blocks, expected "
            f"{pool.num_blocks} in {len(leases)} leases"
        )
    if pool.max_blocks is not None and len(taken) > pool.max_blocks:
        raise KVGroupsError(
            f"group {name!r}: {len(taken)} blocks are owned or cached, expected at most {pool.max_blocks}"
        )


def check_tables(tables: MultiGroupBlockTable, rows: Collection[int]) -> None:
    """Rows without a request are empty, and the device has the CPU's tables but for what is not committed yet.

    Args:
        tables: the tables.
        rows: those of their rows that requests have.

    Raises:
        KVGroupsError: naming the group, the row and the block.
    """
    for name, table in tables.tables.items():
        for row in np.flatnonzero(table.table.any(axis=1)).tolist():
            if row not in rows:
                raise KVGroupsError(
                    f"group {name!r}: row {row} names block {table.table[row].max()}, and no request has that row"
                )
        try:
            table.check_device()
        except KVGroupsError as error:
            raise KVGroupsError(f"group {name!r}: {error}") from error


def check_row(group: GroupManager, request: Request) -> None:
    """A row has the blocks of its request's tokens, none behind them, and no null one that a query sees.

    Raises:
        KVGroupsError: naming the group and the row.
    """
    where = f"group {group.name!r}: row {request.row}"
    demand, blocks = group.demand, group.row_blocks(request)
    expected = demand.num_logical_blocks(request.num_allocated_tokens)
    if len(blocks) != expected:
        raise KVGroupsError(
            f"{where} has {len(blocks)} blocks, expected {expected} for {request.num_allocated_tokens} tokens"
        )
    if request.tables[group.name].table[request.row, expected:].any():
        raise KVGroupsError(f"{where} names blocks behind its {expected} blocks")
    for num_tokens in (request.num_computed_tokens, request.num_allocated_tokens):
        hidden, stop = demand.num_hidden_blocks(num_tokens), demand.num_logical_blocks(num_tokens)
        missing = np.flatnonzero(blocks[hidden:stop] == NULL_BLOCK_ID)
        if len(missing):
            raise KVGroupsError(
                f"{where} has the null block at column {hidden + missing[0]}, which a query after {num_tokens} "
                "tokens sees"
            )
    released = request.num_released.get(group.name, 0)
    if blocks[:released].any():
        raise KVGroupsError(f"{where} still has blocks among the {released} that it gave up")
