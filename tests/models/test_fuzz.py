"""Random lives of caches: ragged turns, chunks, crops, forks and reorders, each forward held against the rows alone."""

import copy
import random

import pytest
import torch

import kvgroups
from kvgroups.errors import UnsupportedCallError
from kvgroups.testing import tiny
from kvgroups.testing.oracle import oracle_logits, poison_free_blocks

TOLERANCE = 1e-4
MAX_REWIND = 5
FAMILIES = ("llama", "gemma3_text", "bamba", "jamba", "lfm2", "falcon_h1", "zamba", "qwen3_next")


class Life:
    """One cache beside what it should hold: for each row its columns, None where there is no token."""

    def __init__(self, world: "World", cache, rows: list[list[int | None]], num_croppable: int) -> None:
        self.world = world
        self.cache = cache
        self.rows = rows
        self.num_croppable = num_croppable

    def feed(self, new: list[list[int | None]], says_past: bool, passes_positions: bool) -> None:
        """One forward; every logit at a token that exists is the oracle's."""
        model, pad = self.world.model, 5
        old = self.rows
        self.rows = [row + more for row, more in zip(old, new, strict=True)]
        ids = torch.tensor([[pad if token is None else token for token in row] for row in new])
        shown = self.rows if says_past else new
        inputs = {"attention_mask": torch.tensor([[int(token is not None) for token in row] for row in shown])}
        if passes_positions:
            mask = torch.tensor([[int(token is not None) for token in row] for row in self.rows])
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        poison_free_blocks(model)
        with torch.no_grad():
            logits = model(ids, cache=self.cache, **inputs).logits
        assert logits.shape[:2] == ids.shape
        self.num_croppable = min(ids.shape[1], self.cache.max_rewind)
        for row, more, got in zip(self.rows, new, logits, strict=True):
            tokens = [token for token in row if token is not None]
            columns = [column for column, token in enumerate(more) if token is not None]
            if columns:
                want = self.world.oracle(tokens)[-len(columns) :]
                assert (got[columns] - want).abs().max().item() < TOLERANCE * want.abs().max().item()
        assert self.cache.num_tokens == [sum(token is not None for token in row) for row in self.rows]
        assert self.cache.get_seq_length() == len(self.rows[0])

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        self.rows = [row[: len(row) - count] for row in self.rows]
        self.num_croppable -= count

    def crop_too_much(self) -> None:
        """Refused, or served by a family that forgets nothing; either way no row is left in between."""
        count = self.num_croppable + 1
        if count > len(self.rows[0]):
            return
        before = self.cache.num_tokens
        try:
            self.cache.crop(-count)
        except UnsupportedCallError:
            assert self.cache.num_tokens == before
        else:
            self.rows = [row[: len(row) - count] for row in self.rows]
            self.num_croppable = 0

    def can_hide(self, has_states: bool) -> bool:
        """Rows that are one must part before they end differently, and the copy of a state has no checkpoint."""
        requests = self.cache.rows.requests
        return self.num_croppable > 0 and not (has_states and len(set(map(id, requests))) < len(requests))

    def hide_tail(self, rng: random.Random) -> bool:
        """Have the next mask hide the last tokens of some rows."""
        self.rows = [list(row) for row in self.rows]
        has_hidden = False
        for row in self.rows:
            for column in range(len(row) - rng.randint(0, self.num_croppable), len(row)):
                has_hidden |= row[column] is not None
                row[column] = None
        return has_hidden

    def reorder(self, parents: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(parents))
        self.rows = [list(self.rows[parent]) for parent in parents]

    def select(self, indices: list[int]) -> None:
        self.cache.batch_select_indices(torch.tensor(indices))
        self.rows = [list(self.rows[index]) for index in indices]

    def fork(self) -> "Life":
        return Life(self.world, copy.deepcopy(self.cache), [list(row) for row in self.rows], 0)


class World:
    """A patched model, its oracle, and the caches that live side by side."""

    def __init__(self, family: str, seed: int) -> None:
        self.rng = random.Random(f"{family} {seed}")
        model = tiny(family)
        config = kvgroups.infer_config(model, max_num_batched_tokens=self.rng.choice([8192, 8192, 7, 16]))
        self.model = kvgroups.patch(model, config)
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def oracle(self, tokens: list[int]) -> torch.Tensor:
        key = tuple(tokens)
        if key not in self.known:
            self.known[key] = oracle_logits(self.model, tokens)
        return self.known[key]

    def columns(self, num_rows: int) -> list[list[int | None]]:
        """New columns: one token each, or a ragged block with padding on either side or in between."""
        rng = self.rng
        width = rng.choice([1, 1, 1, 2, 3, 4, 5, 9, 17])
        few = rng.random() < 0.3  # of few different tokens, so that rows may be equal
        rows: list[list[int | None]] = []
        for _ in range(num_rows):
            row: list[int | None] = [rng.randint(3, 4 if few else 96) for _ in range(width)]
            pads = rng.choice(["none", "none", "left", "right", "any"])
            gone = {"none": [], "left": range(rng.randint(0, width)), "right": range(rng.randint(0, width), width)}
            for column in gone.get(pads, [c for c in range(width) if rng.random() < 0.4]):
                row[column] = None
            rows.append(row)
        return rows

    def live(self, num_steps: int) -> None:
        rng, has_states = self.rng, vars(self.model)["_kvgroups"].context.has_states
        can_crop = not vars(self.model)["_kvgroups"].context.splits_rows
        cache = kvgroups.GroupedCache(self.model, max_rewind=MAX_REWIND if can_crop else 0)
        lives = [Life(self, cache, [[] for _ in range(rng.randint(1, 4))], 0)]
        del cache
        for _ in range(num_steps):
            life = rng.choice(lives)
            act = rng.choice(["feed", "feed", "feed", "crop", "crop", "too much", "hide", "reorder", "select", "fork"])
            if act in ("feed", "hide") or not life.rows[0]:
                hides = act == "hide" and life.can_hide(has_states) and life.hide_tail(rng)
                life.feed(self.columns(len(life.rows)), hides or rng.random() < 0.5, rng.random() < 0.3)
            elif act == "crop" and life.num_croppable:
                life.crop(rng.randint(1, life.num_croppable))
            elif act == "too much" and has_states:
                life.crop_too_much()
            elif act == "reorder":
                life.reorder([rng.randrange(len(life.rows)) for _ in life.rows])
            elif act == "select":
                life.select([rng.randrange(len(life.rows)) for _ in range(rng.randint(1, 4))])
            elif act == "fork" and len(lives) < 3:
                lives.append(life.fork())
            vars(self.model)["_kvgroups"].context.manager.check()
        for life in lives:
            if life.rows[0]:
                life.feed([[7] for _ in life.rows], True, False)
        life = None
        lives.clear()
        assert vars(self.model)["_kvgroups"].context.manager.usage().held_bytes == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_life(family, seed):
    World(family, seed).live(num_steps=14)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_lives(family):
    for seed in range(100, 150):
        World(family, seed).live(num_steps=20)
