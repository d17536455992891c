"""Which prefixes are cached, in which blocks of every KV-cache group, and how far a new prompt can use them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np

from kvgroups.constants import NULL_BLOCK_ID
from kvgroups.errors import KVGroupsError, ShapeError
from kvgroups.eviction import CachedBlock, EvictionPolicy, EvictionQueue, Rank
from kvgroups.hit_rules import RingRule, SnapshotRule, TokenRule, hit_rule, hit_unit
from kvgroups.prefix_hit import Limit, PrefixHit, PrefixStats
from kvgroups.prefix_tree import Cursor, Extra, Node, PrefixTree, as_ids
from kvgroups.specs import KVGroupsConfig


class PrefixCache:
    """What is known of the content of blocks, in every group, and in which order it may be forgotten.

    Who owns a block is the pool's business. A filed block that loses its last owner is `release`d: it stays
    findable until someone `evict`s it, because its bytes are needed, or `claim`s it for a hit.

    Args:
        config: the groups.
        policy: the order of eviction.
    """

    def __init__(self, config: KVGroupsConfig, policy: EvictionPolicy | None = None) -> None:
        self.config = config
        self.stats = PrefixStats()
        self.on_filed: Callable[[CachedBlock], None] | None = None
        """Told of every block that can be found from now on."""
        units = [hit_unit(group) for group in config.groups]
        self.unit = math.lcm(*units)
        """Tokens between two lengths at which a prefix can be resumed in all groups."""
        step = math.gcd(*units)
        self._tree = PrefixTree(step)  # every block of every group ends at a node
        # Rings first: where there is one, nothing is known of any prefix, and the others have nothing to look at.
        groups = sorted(config.groups, key=lambda group: group.slot_mapping != "ring")
        self._rules = {group.name: hit_rule(group, self.unit, step) for group in groups}
        rules = self._rules.values()
        self.is_shareable = not any(isinstance(rule, RingRule) for rule in rules)
        """Whether any prefix can ever be reused: not where a group is a ring."""
        self.needs_retention = not all(isinstance(rule, TokenRule) and rule.is_full for rule in rules)
        """Whether there are windows or states, which can be resumed only where something was kept."""
        self._token_rules = [rule for rule in self._rules.values() if isinstance(rule, TokenRule)]
        self._queue = EvictionQueue(policy)
        self._nodes: dict[str, dict[int, Node]] = {name: {} for name in self._rules}
        self._tick = 0
        self._version: Hashable = None
        self._has_warned = False

    @property
    def num_collisions(self) -> int:
        """Steps that had the hash of other tokens. They were neither filed nor served."""
        return self._tree.num_collisions

    # Finding

    def match(
        self, token_ids: Sequence[int] | np.ndarray, extra: Extra = None, version: Hashable = None
    ) -> PrefixHit:
        """The longest prefix that every group can serve. Changes nothing but the counters.

        Each group in turn says how far it can go within what the others left, until nobody takes more: full
        attention needs every block, a window the blocks that its last W - 1 tokens lie in, a state a snapshot at
        exactly that length.

        Args:
            token_ids: (num_tokens,), integers: the prompt.
            extra: what else the cached values depend on.
            version: what identifies the model's parameters; see `note_version`.

        Raises:
            ShapeError: `token_ids` is no list of integers, or `extra` no key.
        """
        self.note_version(version)
        self._warn_if_useless()
        ids = as_ids(token_ids)
        nodes = self._tree.find(ids, extra)
        # The last token is always computed: its logits are what the prompt was sent for.
        wanted = self._on_grid(max(0, len(ids) - 1))
        num_known = len(nodes) * self._tree.step
        num_tokens = min(wanted, self._on_grid(num_known)) if self.is_shareable else wanted
        limits = []
        if num_tokens < wanted:
            limits.append(Limit(None, wanted, num_tokens, f"the tokens from {num_known} on are not cached"))
        num_seen = num_tokens
        limits += self._limits(nodes, num_seen)
        num_tokens = limits[-1].num_tokens if limits else num_seen
        hit = PrefixHit(
            num_tokens=num_tokens,
            num_prompt_tokens=len(ids),
            blocks={name: rule.blocks(nodes, num_tokens) for name, rule in self._rules.items()},
            limits=tuple(limits),
            branch_point=num_seen if num_seen > num_tokens and self.needs_retention else None,
            node=nodes[num_tokens // self._tree.step - 1] if num_tokens else None,
        )
        self._count(hit)
        return hit

    def _limits(self, nodes: Sequence[Node], num_tokens: int) -> list[Limit]:
        """What the groups take from a prefix, in turn, until all of them agree."""
        limits: list[Limit] = []
        changed = True
        while changed:
            changed = False
            for name, rule in self._rules.items():
                got, reason = rule.longest(nodes, num_tokens)
                if got < num_tokens:
                    limits.append(Limit(name, num_tokens, got, reason))
                    num_tokens, changed = got, True
        return limits

    def _count(self, hit: PrefixHit) -> None:
        self.stats.num_queries += 1
        self.stats.num_query_tokens += hit.num_prompt_tokens
        self.stats.num_hit_tokens += hit.num_tokens
        if hit.limited_by is not None:
            self.stats.limited_by[hit.limited_by] += 1

    # Filing

    def open(self, extra: Extra = None, hit: PrefixHit | None = None) -> Cursor:
        """Where a request starts to be filed: behind what it was served. Close the cursor in the end."""
        return self._tree.open(extra, None if hit is None else hit.node)

    def fork(self, cursor: Cursor) -> Cursor:
        """A second cursor at the same place."""
        return self._tree.fork(cursor)

    def close(self, cursor: Cursor) -> None:
        """The request is filed no further."""
        self._tree.close(cursor)

    def rewind(self, cursor: Cursor, num_tokens: int) -> None:
        """The request goes back to `num_tokens` tokens, and on from there with others."""
        self._tree.rewind(cursor, num_tokens)

    def is_due(self, cursor: Cursor, num_tokens: int) -> bool:
        """Whether filing a request of so many tokens would move its cursor on."""
        return (
            num_tokens - cursor.num_tokens >= self._tree.step and not cursor.is_blocked and self.is_shareable
        )

    def file(
        self,
        cursor: Cursor,
        token_ids: Sequence[int] | np.ndarray,
        rows: Mapping[str, Sequence[int] | np.ndarray],
    ) -> list[CachedBlock]:
        """Make the full blocks of a request findable, as far as its tokens are computed.

        A prefix that has a block in a group keeps it. A partial block has no end in the tree and is never filed.

        Args:
            cursor: where the request stands; it is moved on to its last whole step.
            token_ids: (num_tokens,), integers: the request's computed tokens, from the first on. Those before
                the cursor are not looked at.
            rows: group -> (num_blocks,): the request's block ids, null where a window has passed. State groups are
                passed over: see `file_snapshot`.

        Returns:
            Blocks that are findable now and were not before.
        """
        if not self.is_shareable:
            return []
        filed: list[CachedBlock] = []
        step, first = self._tree.step, cursor.num_tokens
        ids = as_ids(token_ids[first:])
        for start in range(0, len(ids) - step + 1, step):
            if cursor.is_blocked or not self._tree.advance(cursor, ids[start : start + step]):
                break
            ends = (self._file_end(rule, cursor.node, rows) for rule in self._token_rules)
            filed += [block for block in ends if block is not None]
        self.stats.num_filed_blocks += len(filed)
        return filed

    def _file_end(
        self, rule: TokenRule, node: Node, rows: Mapping[str, Sequence[int] | np.ndarray]
    ) -> CachedBlock | None:
        row, column = rows[rule.name], node.depth // rule.block_size - 1
        if node.depth % rule.block_size or rule.name in node.blocks or column >= len(row):
            return None
        block_id = int(row[column])
        if block_id == NULL_BLOCK_ID or self.is_filed(rule.name, block_id):
            return None
        # One block of a window lets nobody resume anything; `retain` says which ones together do.
        saved = rule.block_size if rule.is_full else 0
        return self._attach(node, CachedBlock(rule.name, block_id, rule.num_bytes, node.depth, saved))

    def doubles(
        self, cursor: Cursor, since: int, rows: Mapping[str, Sequence[int] | np.ndarray]
    ) -> list[tuple[CachedBlock, int]]:
        """Where a request has a block of its own for tokens that another block is filed under already.

        Args:
            cursor: where the request stands.
            since: tokens up to which it was looked at before.
            rows: see `file`.

        Returns:
            (the filed block, its column), the last column first.
        """
        found = []
        for node in (cursor.node, *cursor.node.ancestors()):
            if node.depth <= since:
                break
            for rule in self._token_rules:
                block, column = node.blocks.get(rule.name), node.depth // rule.block_size - 1
                if block is not None and rows[rule.name][column] not in (NULL_BLOCK_ID, block.block_id):
                    found.append((block, column))
        return found

    def lacks_snapshot(self, cursor: Cursor, group: str) -> bool:
        """Whether a snapshot at the cursor's place would be filed."""
        return self.is_shareable and not cursor.is_blocked and group not in cursor.node.blocks

    def file_snapshot(self, cursor: Cursor, group: str, block_id: int) -> CachedBlock | None:
        """Make a state findable that is the state after exactly the cursor's tokens. File it after the step that
        wrote it, and never write it again.

        Returns:
            What is known of it now; None if that prefix has a snapshot already, or can have none.

        Raises:
            ShapeError: the cursor is not on the grid.
        """
        node = cursor.node
        if not self.lacks_snapshot(cursor, group):
            return None
        if node.depth == 0 or node.depth % self.unit:
            raise ShapeError(
                f"group {group!r}: a snapshot after {node.depth} tokens, expected a multiple of {self.unit}; "
                "end the chunk there"
            )
        rule = self._rules[group]
        assert isinstance(rule, SnapshotRule)
        self.stats.num_filed_blocks += 1
        return self._attach(
            node, CachedBlock(group, block_id, rule.num_bytes, node.depth, self._saved(node, group))
        )

    def retain(self, cursor: Cursor, previous: int = 0) -> list[CachedBlock]:
        """Make the cursor's place a retention point of the windows.

        Each block that a query there sees is worth as much as all of them, since without it the others serve
        nobody: the tokens from the `previous` point to here.

        Returns:
            Those blocks.
        """
        kept: list[CachedBlock] = []
        for rule in [] if cursor.is_blocked else self._token_rules:
            start = rule.needed(cursor.num_tokens).start * rule.block_size
            for node in (cursor.node, *cursor.node.ancestors()):
                if rule.is_full or node.depth <= start:
                    break
                if rule.name in node.blocks:
                    block = node.blocks[rule.name]
                    self._revalue(block, max(block.tokens_saved, cursor.num_tokens - previous))
                    kept.append(block)
        return kept

    def unretain(self, block: CachedBlock) -> None:
        """A window's block belongs to no retention point any more."""
        if self.is_current(block):
            self._revalue(block, 0)

    def _attach(self, node: Node, block: CachedBlock) -> CachedBlock:
        node.blocks[block.group] = block
        self._nodes[block.group][block.block_id] = node
        if self.on_filed is not None:
            self.on_filed(block)
        return block

    def _saved(self, node: Node, group: str) -> int:
        """Tokens from the next shorter prefix with a snapshot to this one."""
        return node.depth - next((above.depth for above in node.ancestors() if group in above.blocks), 0)

    def _revalue(self, block: CachedBlock, tokens_saved: int) -> None:
        block.tokens_saved = tokens_saved
        if block in self._queue:
            self._queue.add(block)

    # Owners and eviction

    def is_filed(self, group: str, block_id: int) -> bool:
        """Whether a block's content is known."""
        return block_id in self._nodes[group]

    def is_current(self, block: CachedBlock) -> bool:
        """Whether what is said of a block still holds: it was not forgotten since."""
        return self.is_filed(block.group, block.block_id) and self.block(block.group, block.block_id) is block

    def block(self, group: str, block_id: int) -> CachedBlock:
        """What is known of a filed block."""
        return self._nodes[group][block_id].blocks[group]

    def tick(self) -> None:
        """Time passes: what is released from now on was used later than what was before."""
        self._tick += 1

    def release(self, group: str, block_ids: Iterable[int]) -> None:
        """Nobody owns these blocks any more. Those that are filed stay findable until they are evicted."""
        for block_id in block_ids:
            if self.is_filed(group, block_id):
                block = self.block(group, block_id)
                block.last_used = self._tick
                self._queue.add(block)

    def claim(self, group: str, block_ids: Iterable[int]) -> None:
        """These filed blocks serve a hit: they have an owner, so they are not to be evicted."""
        for block_id in block_ids:
            block = self.block(group, block_id)
            block.num_hits += 1
            self._queue.remove(block)

    def num_idle(self, group: str) -> int:
        """Blocks that are filed and that nobody owns."""
        return self._queue.count(group)

    def filed_blocks(self, group: str) -> list[int]:
        """The blocks of a group whose content is known, in ascending order."""
        return sorted(self._nodes[group])

    def idle_blocks(self, group: str) -> list[CachedBlock]:
        """Those blocks, in the order in which they would be evicted."""
        return list(self._queue.in_order(group))

    def first(self, group: str) -> tuple[CachedBlock, Rank] | None:
        """The block of a group that is missed least, and its rank; None if there is none."""
        block = self._queue.first(group)
        return None if block is None else (block, self._queue.rank(block))

    def losses(self, group: str, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """What evicting each of a group's blocks would lose, and when each was last used: see `EvictionQueue`."""
        return self._queue.losses(group, num_blocks)

    def evict(self, block: CachedBlock) -> None:
        """Forget a block that nobody owns, to make room."""
        self._queue.evict(block)
        self.stats.num_evicted_blocks += 1
        self.forget(block.group, block.block_id)

    def forget(self, group: str, block_id: int) -> None:
        """A block is about to hold something else: if its content was known, it is not any more."""
        node = self._nodes[group].pop(block_id, None)
        if node is None:
            return
        gone = node.blocks.pop(group)
        self._queue.remove(gone)
        if isinstance(self._rules[group], SnapshotRule):
            self._revalue_behind(gone)
        self._tree.prune(node)

    def _revalue_behind(self, gone: CachedBlock) -> None:
        """The snapshots that counted on resuming from this one save more from now on."""
        for node in self._nodes[gone.group].values():
            block = node.blocks[gone.group]
            if block.depth - block.tokens_saved == gone.depth:
                self._revalue(block, self._saved(node, gone.group))

    def flush(self) -> dict[str, list[int]]:
        """Forget everything, as after a change of the model's parameters.

        Returns:
            Group -> the blocks that were known.
        """
        filed = {name: sorted(nodes) for name, nodes in self._nodes.items()}
        for name, block_ids in filed.items():
            for block_id in block_ids:
                self.forget(name, block_id)
        self._version = None
        return filed

    # Honesty

    def note_version(self, version: Hashable) -> None:
        """Warn if the model's parameters are not those that the cached values were computed with.

        Args:
            version: what identifies the parameters, for example the sum of their `_version` counters; None for
                not known, which is never a change. What is cached is still served: only `flush` forgets it.
        """
        if version is None:
            return
        if self._version is not None and version != self._version and any(self._nodes.values()):
            warnings.warn(
                "the model's parameters changed since prefixes were cached, so a hit mixes values of the old "
                "parameters with new ones; call flush() after every change",
                stacklevel=3,
            )
        self._version = version

    def _warn_if_useless(self) -> None:
        if self._has_warned or self.unit < self.config.max_model_len:
            return
        self._has_warned = True
        units = ", ".join(f"{group.name!r} {hit_unit(group)}" for group in self.config.groups)
        warnings.warn(
            f"no prefix can be reused: prefixes are resumed at multiples of {self.unit} tokens (groups: {units}) "
            f"and max_model_len is {self.config.max_model_len}; choose smaller blocks or a smaller snapshot_interval",
            stacklevel=3,
        )

    def check(self, cursors: Iterable[Cursor] = ()) -> None:
        """Hold the tree and the order of eviction against what is filed.

        Args:
            cursors: all that are open.

        Raises:
            KVGroupsError: naming the group and the block or prefix.
        """
        self._tree.check(cursors)
        for name, nodes in self._nodes.items():
            for block_id, node in nodes.items():
                if (
                    node not in self._tree
                    or name not in node.blocks
                    or node.blocks[name].block_id != block_id
                ):
                    raise KVGroupsError(
                        f"group {name!r}: block {block_id} is filed under a prefix that has another"
                    )
            for block in self._queue.in_order(name):
                if not self.is_filed(name, block.block_id):
                    raise KVGroupsError(
                        f"group {name!r}: block {block.block_id} can be evicted and is not filed"
                    )

    def _on_grid(self, num_tokens: int) -> int:
        return num_tokens // self.unit * self.unit
