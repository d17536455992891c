"""Prefixes as a tree of token steps, found by chained hashes and compared token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from kvgroups.errors import KVGroupsError, ShapeError
from kvgroups.eviction import CachedBlock

Extra = str | bytes | int | tuple["Extra", ...] | None
"""What a prefix depends on beside its tokens: an adapter's name, a tenant's salt, a digest of embeddings."""


@dataclass(eq=False, slots=True)
class Node:
    """One step of a prefix: it stands for all tokens from the root up to its end, `depth` of them."""

    key: bytes
    """Hash of the parent's key and this step's tokens, and so of everything before the end."""
    parent: Node | None
    tokens: bytes
    """This step's ids, for the comparison that a hash cannot replace; a root has its extra key here."""
    depth: int
    blocks: dict[str, CachedBlock] = field(default_factory=dict)
    """KV-cache group -> its block that ends here."""
    num_users: int = 0
    """Children, and cursors that stand here: what keeps a node that has no blocks."""

    def ancestors(self) -> Iterator[Node]:
        """The nodes before this one, nearest first; the root, which has no tokens, is not among them."""
        node = self.parent
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


@dataclass(eq=False)
class Cursor:
    """How far a request has been filed."""

    node: Node
    is_blocked: bool = False
    """A step of the request has the hash of other tokens, so nothing more of it can be filed."""

    @property
    def num_tokens(self) -> int:
        """Tokens up to the end of the last step that was filed."""
        return self.node.depth


class PrefixTree:
    """Steps of `step` tokens; a step's hash covers its tokens, its parent's hash and, at the root, the extra key.

    The hash only finds a node. Parent and tokens are compared again, so a collision cannot serve another prompt;
    the later of two prefixes with one hash is left out. A node lives as long as it has blocks, children or cursors.

    Args:
        step: tokens of one node.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.num_collisions = 0
        self._nodes: dict[bytes, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: Node) -> bool:
        return self._nodes.get(node.key) is node

    def find(self, ids: np.ndarray, extra: Extra) -> list[Node]:
        """The nodes of a prompt's steps, as far as they are known: node i ends after `(i + 1) * step` tokens."""
        content = _encode(extra)
        parent = self._nodes.get(_digest(b"", content))
        found: list[Node] = []
        if parent is None or parent.parent is not None or parent.tokens != content:
            return found
        data, length = ids.tobytes(), self.step * ids.itemsize
        known, digest = self._nodes.get, _digest  # a million tokens come by here 65,536 times
        for start in range(0, len(data) - length + 1, length):
            tokens = data[start : start + length]
            node = known(digest(parent.key, tokens))
            if node is None or node.parent is not parent or node.tokens != tokens:
                break
            found.append(node)
            parent = node
        return found

    def open(self, extra: Extra, node: Node | None = None) -> Cursor:
        """A cursor at `node`, or at the root that belongs to an extra key."""
        if node is None:
            content = _encode(extra)
            node = Node(_digest(b"", content), None, content, depth=0)
            other = self._nodes.setdefault(node.key, node)
            if other.parent is None and other.tokens == content:
                node = other
        node.num_users += 1
        return Cursor(node, is_blocked=node not in self)

    def fork(self, cursor: Cursor) -> Cursor:
        """A second cursor at the same place."""
        cursor.node.num_users += 1
        return Cursor(cursor.node, cursor.is_blocked)

    def close(self, cursor: Cursor) -> None:
        """Give a cursor up."""
        self._leave(cursor.node)

    def advance(self, cursor: Cursor, ids: np.ndarray) -> bool:
        """Move a cursor on by one step; False, with the cursor blocked, if the hash belongs to other tokens."""
        parent, tokens = cursor.node, ids.tobytes()
        node = Node(_digest(parent.key, tokens), parent, tokens, parent.depth + self.step)
        other = self._nodes.setdefault(node.key, node)
        if other is node:
            parent.num_users += 1
        elif other.parent is not parent or other.tokens != tokens:
            self.num_collisions += 1
            cursor.is_blocked = True
            return False
        other.num_users += 1
        cursor.node = other
        self._leave(parent)
        return True

    def rewind(self, cursor: Cursor, num_tokens: int) -> None:
        """Move a cursor back to at most `num_tokens` tokens."""
        node = cursor.node
        while node.depth > num_tokens:
            assert node.parent is not None
            node = node.parent
        node.num_users += 1
        self._leave(cursor.node)
        cursor.node = node

    def prune(self, node: Node) -> None:
        """Drop a node that nothing needs any more, and its parents likewise."""
        while node.num_users == 0 and not node.blocks and node in self:
            del self._nodes[node.key]
            if node.parent is None:
                return
            node = node.parent
            node.num_users -= 1

    def _leave(self, node: Node) -> None:
        node.num_users -= 1
        self.prune(node)

    def check(self, cursors: Iterable[Cursor] = ()) -> None:
        """Raise `KVGroupsError`, naming the prefix, where a node has lost its parent or outlived its use.

        Args:
            cursors: all that are open.
        """
        users = Counter(cursor.node.key for cursor in cursors if cursor.node in self)
        users.update(node.parent.key for node in self._nodes.values() if node.parent is not None)
        for node in self._nodes.values():
            where = f"prefix of {node.depth} tokens"
            if node.parent is not None and node.parent not in self:
                raise KVGroupsError(f"{where}: its parent is not in the tree")
            if node.num_users != users[node.key]:
                raise KVGroupsError(
                    f"{where}: {users[node.key]} children and cursors, and {node.num_users} are counted"
                )
            if node.num_users == 0 and not node.blocks:
                raise KVGroupsError(f"{where}: nothing needs it and it is still there")


def as_ids(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """(num_tokens,), int64. `ShapeError` for what is no list of integers."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ShapeError(f"token_ids: expected (num_tokens,) integers, got {ids.shape} of {ids.dtype}")
    return ids.astype(np.int64)


def _digest(parent: bytes, content: bytes) -> bytes:
    return blake2b(parent + content, digest_size=16).digest()


def _encode(extra: Extra) -> bytes:
    """An extra key as bytes, other bytes for every other key: 1, "1" and ("1",) are three keys."""
    match extra:
        case None:
            return b""
        case tuple():
            parts = [_encode(part) for part in extra]
            return b"t" + b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        case str():
            return b"s" + extra.encode()
        case bytes():
            return b"b" + extra
        case int() if not isinstance(extra, bool):
            return b"i" + str(extra).encode()
    raise ShapeError(f"extra: expected None, str, bytes, int or a tuple of them, got {type(extra).__name__}")
