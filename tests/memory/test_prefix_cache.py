"""PrefixCache: what each kind of group can serve of a prompt, what all of them can together, and what is forgotten.

Tokens are numbers from 0 on unless a test says otherwise, so that `range(64)` is the prompt of 64 tokens whose
prefixes are `range(48)`, `range(32)` and so on.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from kvgroups import prefix_tree
from kvgroups.errors import KVGroupsError, ShapeError
from kvgroups.prefix_cache import PrefixCache
from kvgroups.prefix_tree import Cursor
from kvgroups.specs import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    GroupConfig,
    KVGroupsConfig,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
)

ONE_FLOAT = {"num_kv_heads": 1, "head_dim": 1, "dtype": "float32"}


def make_group(layer: int, name: str, sizes: tuple[int, ...]) -> GroupConfig:
    """ "full" (B,), "window" and "ring" (W, B), "chunk" (C, B), "state" (snapshot interval,)."""
    common: dict[str, Any] = {"name": name, "layers": [layer]}
    match name.partition("_")[0]:
        case "full":
            return GroupConfig(spec=FullAttentionSpec(**ONE_FLOAT), block_size=sizes[0], **common)
        case "window" | "ring" as kind:
            spec = SlidingWindowSpec(sliding_window=sizes[0], **ONE_FLOAT)
            mode = "ring" if kind == "ring" else "paged"
            return GroupConfig(spec=spec, block_size=sizes[1], slot_mapping=mode, **common)
        case "chunk":
            spec = ChunkedAttentionSpec(chunk_size=sizes[0], **ONE_FLOAT)
            return GroupConfig(spec=spec, block_size=sizes[1], **common)
        case _:
            states = [StateTensor(name="recurrent", shape=(1,), dtype="float32")]
            return GroupConfig(spec=MambaSpec(states=states, snapshot_interval=sizes[0]), **common)


class Shelf:
    """A cache, and requests that file what they computed under fresh block ids: 1, 2, 3, ... in every group."""

    def __init__(self, groups: dict[str, tuple[int, ...]], max_model_len: int = 4096) -> None:
        config = KVGroupsConfig(
            groups=[make_group(layer, *item) for layer, item in enumerate(groups.items())],
            max_model_len=max_model_len,
        )
        self.config = config
        self.cache = PrefixCache(config)
        self.cursors: list[Cursor] = []  # of requests that a test has open
        self._last_id = dict.fromkeys(groups, 0)

    def compute(
        self, tokens: Sequence[int], snapshots: Iterable[int] = (), hidden: int = 0, extra: Any = None
    ) -> dict[str, list[int]]:
        """A request computes `tokens`, leaves snapshots, files all and is freed; return its rows.

        Windows have let go of the blocks before token `hidden`.
        """
        cache = self.cache
        cursor = cache.open(extra)
        rows: dict[str, list[int]] = {}
        for group in self.config.groups:
            if not group.is_state:
                num_blocks = -(-len(tokens) // group.block_size)
                num_hidden = 0 if group.name.startswith("full") else hidden // group.block_size
                rows[group.name] = [0] * num_hidden + self.take(group.name, num_blocks - num_hidden)
        states = [group.name for group in self.config.groups if group.is_state]
        for stop in [*sorted(snapshots), len(tokens)]:
            cache.file(cursor, list(tokens[:stop]), rows)
            for name in states if stop in snapshots else []:
                (block_id,) = self.take(name, 1)
                cache.file_snapshot(cursor, name, block_id)
                cache.release(name, [block_id])
        cache.close(cursor)
        cache.tick()
        for name, row in rows.items():
            cache.release(name, [block_id for block_id in row if block_id])
        cache.check(self.cursors)
        return rows

    def take(self, group: str, count: int) -> list[int]:
        first = self._last_id[group] + 1
        self._last_id[group] += count
        return list(range(first, first + count))

    def evict(self, group: str) -> int | None:
        """Evict the block of a group that goes first; its id."""
        first = self.cache.first(group)
        if first is None:
            return None
        self.cache.evict(first[0])
        return first[0].block_id

    def drop(self, group: str, end: int) -> None:
        """Evict the block of a group that ends after `end` tokens."""
        (block,) = [block for block in self.cache.idle_blocks(group) if block.depth == end]
        self.cache.forget(group, block.block_id)
        self.cache.check()

    def hit(self, tokens: Sequence[int], extra: Any = None) -> int:
        return self.cache.match(tokens, extra).num_tokens


# Each kind's rule


@pytest.mark.parametrize(
    ("num_computed", "prompt", "expected"),
    [
        pytest.param(64, range(65), 64, id="all that was computed"),
        pytest.param(64, range(100), 64, id="a longer prompt"),
        pytest.param(
            64, range(64), 48, id="the same prompt: its last token is computed, so its last block is"
        ),
        pytest.param(63, range(100), 48, id="a partial block is never filed"),
        pytest.param(15, range(100), 0, id="less than a block"),
        pytest.param(64, [*range(40), *range(900, 960)], 32, id="parts inside a block"),
        pytest.param(64, range(1, 65), 0, id="another first token"),
        pytest.param(64, range(33), 32, id="a shorter prompt"),
        pytest.param(64, range(16), 0, id="a prompt of one block"),
        pytest.param(64, range(1), 0, id="a prompt of one token"),
        pytest.param(64, range(0), 0, id="no prompt"),
    ],
)
def test_full_attention_goes_from_the_left(num_computed, prompt, expected):
    shelf = Shelf({"full": (16,)})
    rows = shelf.compute(range(num_computed))
    hit = shelf.cache.match(list(prompt))
    assert hit.num_tokens == expected
    assert list(hit.blocks["full"].values()) == rows["full"][: expected // 16]


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [(64, 48), (48, 32), (32, 16), (16, 0)],
    ids=["the last block", "the third", "the second", "the first"],
)
def test_full_attention_stops_at_the_first_block_that_is_gone(dropped, expected):
    shelf = Shelf(
        {"full": (16,), "window": (1, 16)}
    )  # a window of one token needs nothing, and holds the tree
    shelf.compute(range(64))
    shelf.drop("full", dropped)
    hit = shelf.cache.match(range(65))
    assert (hit.num_tokens, hit.limited_by) == (expected, "full")
    assert f"the block of tokens {dropped - 16} to {dropped - 1} is not cached" in hit.explain()


@pytest.mark.parametrize(
    ("sizes", "columns"),
    [
        # The query at 32 sees the W - 1 tokens before it: the last ceil((W - 1) / B) blocks.
        pytest.param((1, 4), [], id="window of one token needs nothing"),
        pytest.param((2, 4), [7], id="one token before the query"),
        pytest.param((5, 4), [7], id="W - 1 is one block"),
        pytest.param((6, 4), [6, 7], id="W - 1 is one token more than a block"),
        pytest.param((10, 4), [5, 6, 7], id="nine tokens lie in three blocks"),
        pytest.param((10, 16), [1], id="block larger than the window"),
        pytest.param((33, 4), [0, 1, 2, 3, 4, 5, 6, 7], id="window that sees all"),
        pytest.param((99, 4), [0, 1, 2, 3, 4, 5, 6, 7], id="window longer than the prompt"),
    ],
)
def test_a_window_needs_its_last_blocks_and_no_more(sizes, columns):
    shelf = Shelf({"window": sizes})
    rows = shelf.compute(range(32))
    hit = shelf.cache.match(range(33))
    assert hit.num_tokens == 32
    assert hit.blocks["window"] == {column: rows["window"][column] for column in columns}
    for column, block_id in enumerate(rows["window"][:-1]):  # the last one carries the tree
        if column not in columns:
            shelf.cache.forget("window", block_id)
    assert shelf.hit(range(33)) == 32


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [
        # W = 10 on blocks of 4: 32 needs the blocks that end at 24, 28 and 32; 20 needs those at 12, 16, 20.
        pytest.param([28], 24, id="24 needs 16, 20 and 24"),
        pytest.param([24], 20, id="20 needs 12, 16 and 20"),
        pytest.param([20], 32, id="out of sight"),
        pytest.param([28, 24, 16], 12, id="12 needs all from the left"),
        pytest.param([28, 20, 12, 4], 0, id="every other one"),
    ],
)
def test_a_window_goes_back_to_where_its_blocks_are_there_in_a_row(dropped, expected):
    shelf = Shelf({"window": (10, 4)})
    shelf.compute(range(32))
    for end in dropped:
        shelf.drop("window", end)
    hit = shelf.cache.match(range(33))
    assert hit.num_tokens == expected
    assert hit.limited_by == (None if expected == 32 else "window")


@pytest.mark.parametrize(
    ("num_computed", "columns"),
    [
        pytest.param(32, {}, id="at the edge of a chunk nothing is seen and nothing needed"),
        pytest.param(36, {8}, id="a block into the chunk"),
        pytest.param(44, {8, 9, 10}, id="three blocks into the chunk"),
    ],
)
def test_a_chunk_needs_its_own_blocks(num_computed, columns):
    shelf = Shelf({"chunk": (16, 4)})
    shelf.compute(range(num_computed))
    hit = shelf.cache.match(range(num_computed + 1))
    assert (hit.num_tokens, set(hit.blocks["chunk"])) == (num_computed, set(columns))


@pytest.mark.parametrize(
    ("snapshots", "prompt_len", "expected"),
    [
        pytest.param([48], 65, 48, id="exactly there"),
        pytest.param([48], 49, 48, id="one token behind it"),
        pytest.param([48], 48, 0, id="the last token is computed, and 32 has none"),
        pytest.param([16, 48], 48, 16, id="the one before"),
        pytest.param([16, 48], 40, 16, id="between two"),
        pytest.param([], 65, 0, id="none"),
    ],
)
def test_a_state_needs_a_snapshot_at_that_very_length(snapshots, prompt_len, expected):
    shelf = Shelf({"state": (16,)})
    shelf.compute(range(64), snapshots=snapshots)
    assert shelf.hit(range(prompt_len)) == expected


def test_a_ring_cannot_be_shared_and_says_so():
    shelf = Shelf({"full": (4,), "ring": (8, 4)})
    shelf.compute(range(32))
    hit = shelf.cache.match(range(33))
    assert (hit.num_tokens, hit.limited_by, hit.limits[0].wanted) == (0, "ring", 32)
    assert "a ring is overwritten in place and cannot be shared" in hit.explain()
    assert len(shelf.cache._tree) == 0  # nothing that no one can use is kept


# All groups together


def test_groups_meet_at_the_longest_prefix_that_each_of_them_has():
    """64 computed tokens in blocks of 16, blocks of 4 and a snapshot at 48: 48 tokens are served."""
    shelf = Shelf({"full": (16,), "window": (10, 4), "state": (16,)})
    rows = shelf.compute(range(64), snapshots=[48])
    hit = shelf.cache.match(range(100))
    assert hit.num_tokens == 48
    assert list(hit.blocks["full"].values()) == rows["full"][:3]
    assert hit.blocks["window"] == {column: rows["window"][column] for column in (9, 10, 11)}
    assert hit.blocks["state"] == {0: 1}
    assert hit.limited_by == "state"
    assert hit.explain() == (
        "48 of 100 tokens are cached\n"
        "  prompt: 64 of 96 tokens, the tokens from 64 on are not cached\n"
        "  group 'state': 48 of 64 tokens, the nearest snapshot is at 48"
    )


@pytest.mark.parametrize(
    ("groups", "num_computed", "expected"),
    [
        pytest.param({"full": (16,), "full_2": (4,)}, 63, 48, id="16 and 4 meet at multiples of 16"),
        pytest.param({"full": (6,), "full_2": (4,)}, 59, 48, id="6 and 4 meet at multiples of 12"),
        pytest.param({"full": (6,), "window": (9, 4)}, 60, 60, id="6 and a window on blocks of 4"),
        pytest.param({"full": (16,), "chunk": (32, 8)}, 60, 48, id="16 and a chunk on blocks of 8"),
        pytest.param({"full": (1,), "window": (9, 4)}, 63, 60, id="a token-wise group and a window"),
        pytest.param(
            {"full": (512,), "window": (9, 4)}, 500, 0, id="one group's block is longer than the prompt"
        ),
    ],
)
def test_block_sizes_meet_at_their_least_common_multiple(groups, num_computed, expected):
    shelf = Shelf(groups)
    shelf.compute(range(num_computed))
    assert shelf.hit(range(1000)) == expected


def test_one_group_sends_the_others_back_and_is_sent_back_by_them():
    """A fixed point: full allows 48, of which the window allows 32, where there is no snapshot, so 16."""
    shelf = Shelf({"full": (16,), "window": (10, 4), "state": (16,)})
    shelf.compute(range(64), snapshots=[16, 48, 64])
    shelf.drop("full", 64)
    shelf.drop("window", 44)
    hit = shelf.cache.match(range(65))
    assert [(limit.group, limit.num_tokens) for limit in hit.limits] == [
        ("full", 48),
        ("window", 32),
        ("state", 16),
    ]


def test_a_later_group_can_send_an_earlier_one_back():
    shelf = Shelf({"window": (10, 4), "state": (4,)})
    shelf.compute(range(32), snapshots=[16, 24, 32])
    shelf.drop("state", 32)
    shelf.drop("window", 20)  # 24 needs it, 32 does not
    hit = shelf.cache.match(range(33))
    assert [(limit.group, limit.num_tokens) for limit in hit.limits] == [("state", 24), ("window", 16)]
    assert hit.num_tokens == 16


@pytest.mark.parametrize(
    ("group", "ends", "expected"),
    [
        pytest.param("full", [16], 12, id="an attention block"),
        pytest.param("state", [16], 12, id="the snapshot at 16 but not the one at 12"),
        pytest.param("window", [12], 8, id="a block inside the window of 16 and of 12"),
        pytest.param("window", [8], 16, id="a block that the window of 16 does not see"),
    ],
)
def test_what_is_left_after_an_eviction(group, ends, expected):
    shelf = Shelf({"full": (4,), "window": (8, 4), "state": (4,)})
    shelf.compute(range(16), snapshots=[4, 8, 12, 16])
    for end in ends:
        shelf.drop(group, end)
    hit = shelf.cache.match(range(17))
    assert (hit.num_tokens, hit.limited_by) == (expected, None if expected == 16 else group)


def can_serve(shelf: Shelf, num_tokens: int) -> bool:
    """The rule as it is written, from what is cached: a slow second opinion."""
    for group in shelf.config.groups:
        ends = {block.depth for block in shelf.cache.idle_blocks(group.name)}
        if group.is_state:
            needed = {num_tokens}
        else:
            seen = range(group.spec.first_visible(num_tokens), num_tokens)
            needed = {(position // group.block_size + 1) * group.block_size for position in seen}
        if not needed <= ends:
            return False
    return True


@pytest.mark.parametrize("seed", range(60))
def test_a_hit_is_the_longest_that_all_groups_can_serve(seed):
    draw = random.Random(seed)
    groups = {"full": (draw.choice([2, 3, 4, 8]),), "window": (draw.randint(1, 14), draw.choice([2, 4, 6]))}
    if draw.random() < 0.5:
        groups["chunk"] = (draw.randint(2, 20), draw.choice([1, 2, 4]))
    if draw.random() < 0.6:
        groups["state"] = (draw.choice([2, 4, 12]),)
    shelf = Shelf(groups)
    unit, length = shelf.cache.unit, 96
    shelf.compute(range(length), snapshots=range(unit, length + 1, unit))
    for _ in range(draw.randint(0, 25)):
        group = draw.choice(list(groups))
        if blocks := shelf.cache.idle_blocks(group):
            shelf.cache.forget(group, draw.choice(blocks).block_id)
    shelf.cache.check()
    for prompt_len in (length + 1, length, draw.randint(1, length)):
        lengths = range((prompt_len - 1) // unit * unit, 0, -unit)
        expected = next((number for number in lengths if can_serve(shelf, number)), 0)
        assert shelf.hit(range(prompt_len)) == expected


@pytest.mark.parametrize("prompt_len", [15, 16, 17, 32, 33])
def test_the_last_token_of_a_prompt_is_always_computed(prompt_len):
    shelf = Shelf({"full": (4,), "window": (8, 4), "state": (4,)})
    for _ in range(3):
        shelf.compute(range(prompt_len), snapshots=range(4, prompt_len, 4))
    assert shelf.hit(range(prompt_len)) == (prompt_len - 1) // 4 * 4


# Never useless without a word


@pytest.mark.parametrize("num_unique", [3, 5, 9, 21])
def test_a_shared_prefix_is_kept_when_it_is_seen_the_second_time(num_unique):
    """A prefix of 16 with other ends: the first leaves a snapshot at its own end only, the second is told where they
    part, and every later one is served."""
    shelf = Shelf({"full": (4,), "state": (4,)})
    prompts = [[*range(16), *range(100 * n, 100 * n + num_unique)] for n in (1, 2, 3)]
    own_end = (16 + num_unique - 1) // 4 * 4
    shelf.compute(prompts[0], snapshots=[own_end])
    hit = shelf.cache.match(prompts[1])
    if own_end == 16:
        assert (hit.num_tokens, hit.branch_point) == (16, None)
    else:
        assert (hit.num_tokens, hit.branch_point, hit.limited_by) == (0, 16, "state")
    shelf.compute(prompts[1], snapshots={16, own_end})
    assert shelf.hit(prompts[2]) == 16


@pytest.mark.parametrize("num_more", [1, 2, 3, 4, 5])
def test_a_turn_that_is_extended_finds_what_its_window_kept(num_more):
    """W = 8 on blocks of 4, 30 tokens at once: blocks 5, 6 and the partial 7 are all that the window stored."""
    shelf = Shelf({"full": (4,), "window": (8, 4)})
    shelf.compute(range(30), hidden=23)
    assert shelf.hit(range(30 + num_more)) == 28 >= 30 - 8 - 4


def test_a_unit_beyond_the_longest_request_is_said_once():
    shelf = Shelf({"full": (16,), "state": (8320,)}, max_model_len=8192)
    with pytest.warns(
        UserWarning, match="multiples of 8320 tokens .*'full' 16, 'state' 8320.* max_model_len is 8192"
    ):
        shelf.hit(range(100))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shelf.hit(range(100)) == 0


def test_the_cache_counts_what_it_served_and_who_limited_it():
    shelf = Shelf({"full": (4,), "state": (4,)})
    shelf.compute(range(16), snapshots=[8])
    shelf.hit(range(17))
    shelf.hit(range(9))
    shelf.hit(range(100, 120))
    stats = shelf.cache.stats
    assert (stats.num_queries, stats.num_query_tokens, stats.num_hit_tokens) == (3, 46, 16)
    assert stats.limited_by == {"state": 1}
    assert stats.num_filed_blocks == 5


# Whose tokens they are


@pytest.mark.parametrize(
    "extra",
    ["german", b"german", 7, ("german", 7), (("german",), 7), ("german", "7"), "", 0, ()],
    ids=repr,
)
def test_an_extra_key_keeps_prefixes_apart(extra):
    shelf = Shelf({"full": (4,)})
    others = [None, "french", b"s", 1, ("french",), ("german",), "german7", ("ger", "man", 7)]
    for other in others:
        shelf.compute(range(16), extra=other)
    assert shelf.hit(range(17), extra=extra) == 0
    shelf.compute(range(16), extra=extra)
    assert shelf.hit(range(17), extra=extra) == 16


@pytest.mark.parametrize(
    ("extra", "name"), [(1.5, "float"), (True, "bool"), ([1], "list"), (("a", {}), "dict")]
)
def test_an_extra_key_that_has_no_bytes_is_refused(extra, name):
    with pytest.raises(
        ShapeError, match=f"extra: expected None, str, bytes, int or a tuple of them, got {name}"
    ):
        Shelf({"full": (4,)}).hit(range(8), extra=extra)


@pytest.mark.parametrize(
    "tokens", [[[1, 2]], ["a"], [1.5, 2.0], 7], ids=["2-D", "words", "floats", "a number"]
)
def test_tokens_that_are_no_list_of_integers_are_refused(tokens):
    with pytest.raises(ShapeError, match="token_ids: expected \\(num_tokens,\\) integers"):
        Shelf({"full": (4,)}).hit(tokens)


@pytest.mark.parametrize("num_bytes", [0, 1])
def test_a_collision_serves_nobody_else(monkeypatch, num_bytes):
    """Hashes of one byte, or of none: every prompt is served its own tokens or nothing."""
    real = prefix_tree._digest

    def weak(parent: bytes, content: bytes) -> bytes:
        return real(parent, content)[:num_bytes]

    monkeypatch.setattr(prefix_tree, "_digest", weak)
    shelf = Shelf({"full": (4,), "window": (6, 4), "state": (4,)})
    draw = random.Random(0)
    owner: dict[tuple[str, int], tuple[int, ...]] = {}
    prompts = [[draw.randrange(3) for _ in range(20)] for _ in range(40)]
    for prompt in prompts:
        before = dict(shelf._last_id)
        shelf.compute(prompt, snapshots=[8, 16])
        for name, last in shelf._last_id.items():
            for block_id in range(before[name] + 1, last + 1):
                if shelf.cache.is_filed(name, block_id):
                    owner[name, block_id] = tuple(prompt[: shelf.cache.block(name, block_id).depth])
    for prompt in prompts:
        hit = shelf.cache.match([*prompt, 0])
        for name, blocks in hit.blocks.items():
            for block_id in blocks.values():
                content = owner[name, block_id]
                assert content == tuple(prompt[: len(content)])
    assert shelf.cache.num_collisions > 0


def test_a_prefix_whose_hash_is_taken_is_left_out_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(
        prefix_tree, "_digest", lambda parent, content: b"same" if parent else content or b"root"
    )
    shelf = Shelf({"full": (4,)})
    shelf.compute(range(4))
    shelf.compute(range(100, 116))
    assert shelf.hit(range(5)) == 4
    assert shelf.hit(range(100, 117)) == 0
    assert shelf.cache.num_idle("full") == 1


def test_changed_parameters_are_said_once_and_a_flush_ends_it():
    shelf = Shelf({"full": (4,)})
    shelf.cache.match(range(17), version=1)
    shelf.cache.match(range(17), version=2)  # nothing was cached yet
    shelf.compute(range(16))
    with pytest.warns(UserWarning, match="parameters changed since prefixes were cached.*call flush"):
        assert shelf.cache.match(range(17), version=3).num_tokens == 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shelf.cache.match(range(17), version=3)
        shelf.cache.match(range(17))
        shelf.cache.flush()
        assert shelf.cache.match(range(17), version=4).num_tokens == 0


# What is forgotten, and when


def test_a_freed_block_stays_findable_until_it_is_evicted():
    shelf = Shelf({"full": (4,)})
    row = shelf.compute(range(15))["full"]
    assert shelf.cache.num_idle("full") == 3  # the partial fourth was never filed
    evicted = [shelf.evict("full") for _ in range(3)]
    assert evicted == [row[2], row[1], row[0]]  # tail before head
    assert shelf.evict("full") is None
    assert shelf.hit(range(15)) == 0
    assert len(shelf.cache._tree) == 0
    assert shelf.cache.stats.num_evicted_blocks == 3


def test_a_hit_takes_its_blocks_out_of_the_order_of_eviction():
    shelf = Shelf({"full": (4,)})
    row = shelf.compute(range(16))["full"]
    hit = shelf.cache.match(range(9))
    shelf.cache.claim("full", hit.blocks["full"].values())
    assert [block.block_id for block in shelf.cache.idle_blocks("full")] == [row[3], row[2]]
    shelf.cache.tick()
    shelf.cache.release("full", hit.blocks["full"].values())
    assert [block.block_id for block in shelf.cache.idle_blocks("full")] == [row[3], row[2], row[1], row[0]]


def test_a_block_that_nobody_knows_is_not_kept():
    shelf = Shelf({"full": (4,)})
    shelf.compute(range(8))
    shelf.cache.release("full", [77])
    assert shelf.cache.num_idle("full") == 2


def test_the_first_to_compute_a_prefix_stays_its_owner():
    shelf = Shelf({"full": (4,), "state": (4,)})
    first = shelf.compute(range(8), snapshots=[8])["full"]
    second = shelf.compute(range(12), snapshots=[8])["full"]
    assert list(shelf.cache.match(range(13)).limits)[-1].group == "state"
    assert shelf.cache.match(range(9)).blocks == {"full": {0: first[0], 1: first[1]}, "state": {0: 1}}
    assert [shelf.cache.is_filed("full", block_id) for block_id in second] == [False, False, True]
    assert not shelf.cache.is_filed("state", 2)


def test_a_prefix_lives_as_long_as_a_request_builds_on_it():
    """A's blocks are evicted while B, which computed the same tokens beside it, goes on: B's later blocks are kept
    in place, and served again when someone computes the head anew."""
    shelf = Shelf({"full": (4,)})
    b = shelf.cache.open()
    shelf.cursors.append(b)
    shelf.compute(range(8))
    row = shelf.take("full", 3)
    shelf.cache.file(b, range(8), {"full": row})
    while shelf.evict("full"):
        pass
    shelf.cache.file(b, range(12), {"full": row})
    shelf.cache.check(shelf.cursors)
    assert shelf.hit(range(13)) == 0
    shelf.compute(range(8))
    assert shelf.hit(range(13)) == 12
    shelf.cache.close(shelf.cursors.pop())
    shelf.cache.check()


def test_a_fork_files_its_own_end():
    shelf = Shelf({"full": (4,)})
    parent = shelf.cache.open()
    row = shelf.take("full", 2)
    shelf.cache.file(parent, range(8), {"full": row})
    child = shelf.cache.fork(parent)
    ends = shelf.take("full", 2)
    shelf.cache.file(parent, [*range(8), 50, 51, 52, 53], {"full": [*row, ends[0]]})
    shelf.cache.file(child, [*range(8), 60, 61, 62, 63], {"full": [*row, ends[1]]})
    assert shelf.cache.match([*range(8), 50, 51, 52, 53, 0]).blocks["full"] == dict(
        enumerate([*row, ends[0]])
    )
    assert shelf.cache.match([*range(8), 60, 61, 62, 63, 0]).blocks["full"] == dict(
        enumerate([*row, ends[1]])
    )
    for cursor in (parent, child):
        shelf.cache.close(cursor)
    shelf.cache.check()


def test_a_request_that_goes_back_files_its_new_tokens():
    shelf = Shelf({"full": (4,)})
    cursor = shelf.cache.open()
    row = shelf.take("full", 3)
    shelf.cache.file(cursor, range(12), {"full": row})
    shelf.cache.forget("full", row[2])  # it will be written again
    shelf.cache.rewind(cursor, 9)
    assert cursor.num_tokens == 8
    shelf.cache.file(cursor, [*range(9), 90, 91, 92], {"full": row})
    assert shelf.hit(range(13)) == 8
    assert shelf.hit([*range(9), 90, 91, 92, 93]) == 12
    shelf.cache.close(cursor)


def test_a_flush_forgets_everything_and_says_what_is_free():
    shelf = Shelf({"full": (4,), "state": (8,)})
    row = shelf.compute(range(16), snapshots=[8])["full"]
    shelf.cache.claim("full", row[:2])
    assert shelf.cache.flush() == {"full": row, "state": [1]}
    assert shelf.hit(range(17)) == 0
    shelf.cache.release("full", row[:2])
    assert shelf.cache.num_idle("full") == 0
    assert len(shelf.cache._tree) == 0


@pytest.mark.parametrize("num_tokens", [0, 4, 12])
def test_a_snapshot_off_the_grid_is_refused(num_tokens):
    shelf = Shelf({"full": (4,), "state": (8,)})
    cursor = shelf.cache.open()
    shelf.cache.file(cursor, range(num_tokens), {"full": shelf.take("full", 3)})
    with pytest.raises(ShapeError, match=f"snapshot after {num_tokens} tokens, expected a multiple of 8"):
        shelf.cache.file_snapshot(cursor, "state", 1)


# What a point is worth


def values(shelf: Shelf, group: str) -> dict[int, int]:
    """Depth of each block -> tokens that it saves."""
    return {block.depth: block.tokens_saved for block in shelf.cache.idle_blocks(group)}


def test_a_snapshot_saves_the_tokens_since_the_one_before():
    shelf = Shelf({"full": (16,), "state": (16,)})
    shelf.compute(range(128), snapshots=[16, 64, 128])
    assert values(shelf, "state") == {16: 16, 64: 48, 128: 64}
    shelf.drop("state", 64)
    assert values(shelf, "state") == {16: 16, 128: 112}
    shelf.drop("state", 16)
    assert values(shelf, "state") == {128: 128}


def test_a_window_keeps_the_tail_of_a_point_longer_than_what_passed_by():
    """W = 9 on blocks of 4, a point at 16: the blocks that end at 12 and 16 are worth the tokens up to there."""
    shelf = Shelf({"full": (4,), "window": (9, 4)})
    cursor = shelf.cache.open()
    rows = {name: shelf.take(name, 8) for name in ("full", "window")}
    shelf.cache.file(cursor, range(16), rows)
    shelf.cache.retain(cursor)
    shelf.cache.file(cursor, range(32), rows)
    shelf.cache.close(cursor)
    shelf.cache.release("window", rows["window"])
    assert values(shelf, "window") == {4: 0, 8: 0, 12: 16, 16: 16, 20: 0, 24: 0, 28: 0, 32: 0}
    for _ in range(6):
        shelf.evict("window")
    assert values(shelf, "window") == {12: 16, 16: 16}
    assert shelf.hit(range(17)) == 16


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        pytest.param(lambda cache: cache._nodes["full"].update({9: cache._nodes["full"][1]}), "block 9 is filed", id="id"),
        pytest.param(lambda cache: cache._nodes["full"].pop(1), "block 1 can be evicted and is not filed", id="queue"),
        pytest.param(lambda cache: cache._nodes["full"][1].blocks.clear(), "block 1 is filed", id="node"),
        pytest.param(lambda cache: setattr(cache._nodes["full"][1], "num_users", 0), "and 0 are counted", id="use"),
        pytest.param(lambda cache: cache._nodes["full"][2].blocks.clear(), "nothing needs it", id="leaf"),
    ],
)  # fmt: skip
def test_check_sees_what_is_broken(break_it, message):
    shelf = Shelf({"full": (4,)})
    shelf.compute(range(8))
    break_it(shelf.cache)
    with pytest.raises(KVGroupsError, match=message):
        shelf.cache.check()
