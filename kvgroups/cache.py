"""A transformers `Cache` whose layers live on the block tables of several KV-cache groups."""

from __future__ import annotations

import functools
import inspect
import operator
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DummyLayer

from kvgroups.cached_forward import CachedForward
from kvgroups.errors import KVGroupsError, ShapeError, UnsupportedCallError
from kvgroups.history import TokenHistory
from kvgroups.manager import Manager
from kvgroups.model_adapters import AttentionLayer, FusedMixer, HybridLayer, Running, StateLayer
from kvgroups.rows import CacheRows, drop_all
from kvgroups.sizes import in_units
from kvgroups.specs import KVGroupsConfig, SlidingWindowSpec
from kvgroups.specs.probe import LayerFacts

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names under which a forward may be handed its cache; the last two are transformers' older ones."""

DRAFT_TOKENS = 64
"""Tokens that assisted generation may take back of its first forward; later ones are known by their length."""


@dataclass
class CacheContext:
    """What all caches of one patched model share."""

    config: KVGroupsConfig
    facts: Sequence[LayerFacts]
    manager: Manager
    parameters: Mapping[str, inspect.Parameter]
    """The parameters of the model's forward, by name."""
    mixers: Sequence[FusedMixer] = ()
    """The state layers that run on slots in place; the others get their states gathered."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held during a forward: the model has one attention setting, so two cannot run at once."""

    @property
    def fused_layers(self) -> frozenset[int]:
        """Cache layers whose states are worked on in place."""
        return frozenset(mixer.index for mixer in self.mixers)

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a recurrent state."""
        return any(layer.states for layer in self.facts)

    @property
    def splits_rows(self) -> bool:
        """Whether padding must not reach the model: some layer's states would be touched by it."""
        return any(layer.states and layer.index not in self.fused_layers for layer in self.facts)

    @property
    def continues_exactly(self) -> bool:
        """Whether several tokens on a filled state may go through the model at once."""
        return all(layer.is_exact or layer.index in self.fused_layers for layer in self.facts)


def _whole(verb: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is not interrupted halfway: rows and history change together."""

    @functools.wraps(verb)
    def call(self: GroupedCache, *args: Any, **kwargs: Any) -> Any:
        with self.context.manager.guard:
            return verb(self, *args, **kwargs)

    return call


class GroupedCache(Cache):
    """The cache of a patched model: one row of the block tables for each sequence of the batch.

    `model.generate` on a patched model makes one by itself. Make one by hand to call the model step by step,
    and pass it as `cache`; it is filled from the first forward on. Tokens that the attention mask hides do
    not exist for it: they take no slot and no position and touch no state, so a padded row computes what the
    row alone would.

    `copy.deepcopy` of a cache is a fork, and so is `copy.copy`: full blocks are shared, the rest is copied.

    Pages carry no gradients. Where gradients are on, a forward over the cache gives the same values, and a backward
    through them raises `UnsupportedCallError`; to train, call the model without a cache, which runs as before `patch`.

    Args:
        model: a model that `kvgroups.patch` has patched.
        max_rewind: tokens of the last forward that `crop` must be able to take back; None for the config's.

    Raises:
        UnsupportedCallError: if the model is not patched.

    Example:
        >>> import kvgroups, torch
        >>> from kvgroups.testing import tiny
        >>> model = kvgroups.patch(tiny("gemma3_text"))
        >>> cache = kvgroups.GroupedCache(model)
        >>> output = model(torch.tensor([[5, 6, 7]]), cache=cache)
        >>> cache.get_seq_length(), cache.num_tokens
        (3, [3])
    """

    is_compileable = False  # blocks and views change from step to step

    def __init__(self, model: torch.nn.Module, *, max_rewind: int | None = None) -> None:
        if not isinstance(model, torch.nn.Module):
            raise UnsupportedCallError(f"GroupedCache: expected a patched model, got {model!r}; pass the model itself")
        patch = model.__dict__.get("_kvgroups")
        if patch is None:
            raise UnsupportedCallError(
                f"{type(model).__name__} is not patched; call kvgroups.patch(model) before GroupedCache(model)"
            )
        self._setup(patch.context)
        if max_rewind is not None:
            self.allow_rewind(max_rewind)

    def _setup(self, context: CacheContext) -> None:
        self.context = context
        self.running = Running()
        self.rows = CacheRows(context.manager)
        self.history = TokenHistory()
        self.is_broken = False
        self.max_rewind = 0 if context.splits_rows else context.config.max_rewind
        """Tokens of the last forward that `crop` can take back."""
        self.checkpoint_column: int | None = None
        """Columns fed before the checkpoint that states can be taken back to; None if there is none."""
        super().__init__(layers=[self._make_layer(facts) for facts in context.facts])
        # Blocks must come back when the cache is dropped, also without close().
        self._finalizer = weakref.finalize(self, drop_all, context.manager, self.rows.requests)

    def _make_layer(self, facts: LayerFacts) -> AttentionLayer | StateLayer | HybridLayer | DummyLayer:
        manager = self.context.manager
        places: dict[bool, tuple[Any, Any]] = {
            group.is_state: (group, manager.storage(group.name))
            for group in self.context.config.groups
            if facts.index in group.layers
        }
        if not places:
            return DummyLayer()
        is_fused = facts.index in self.context.fused_layers
        if len(places) == 2:
            return HybridLayer(facts, *places[False], *places[True], self.running, is_fused=is_fused)
        if True in places:
            return StateLayer(facts, *places[True], is_fused=is_fused)
        return AttentionLayer(facts, *places[False], self.running)

    # What a caller may ask

    @property
    def num_tokens(self) -> list[int]:
        """Real tokens of each row, padding not counted."""
        return self.history.num_tokens(len(self.rows))

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first forward."""
        return len(self.rows) or -1

    @property
    def token_ids(self) -> torch.Tensor | None:
        """(batch_size, tokens), int64: what was fed so far, padding included; None if some were embeddings."""
        return self.history.token_ids

    @property
    def held_bytes(self) -> dict[str, int]:
        """KV-cache group -> bytes of the blocks that the rows hold now.

        A block that rows share counts once; one that another cache holds too counts in both.
        """
        return self.context.manager.held_bytes(self.rows.requests)

    def __repr__(self) -> str:
        """`GroupedCache(3 rows, 12 to 40 tokens, 1.2 MiB in full, window)`."""
        held = self.held_bytes
        parts = ["empty"]
        if counts := self.num_tokens:
            fewest, most = min(counts), max(counts)
            tokens = _counted(most, "token")
            parts = [_counted(len(counts), "row"), tokens if fewest == most else f"{fewest} to {tokens}"]
        parts.append(f"{in_units(sum(held.values()))} in {', '.join(held)}")
        if self.is_broken:
            parts.append("broken")
        return f"{type(self).__name__}({', '.join(parts)})"

    @_whole
    def close(self) -> None:
        """Give all blocks back. The cache is empty afterwards and may be used again."""
        self.rows.close()
        self.history = TokenHistory()
        self.is_broken = False
        self.checkpoint_column = None

    reset = close

    # What transformers asks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Length of the past, as transformers counts it: columns of the padded batch."""
        return self.history.num_columns if self.running.step is None else self.running.step.past_len

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask would cover; masks are not built for our attention."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The longest request that the tables were built for, in tokens."""
        return self.context.config.max_model_len

    @property
    def is_linear(self) -> list[bool]:
        """All False, so that `generate` cuts a reused prefix off also for models without attention."""
        return [False] * len(self.layers)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether anything has been computed."""
        return self.get_seq_length() > 0

    def reorder_cache(self, beam_idx: torch.Tensor | Sequence[int]) -> None:
        """Row i goes on from row `beam_idx[i]`, as beam search asks after every step.

        Nothing is copied here: rows are pointed at their parents, and what children of one parent must not
        share is copied when they part.

        Args:
            beam_idx: (batch,), integers.
        """
        parents = _indices("beam_idx", beam_idx)
        if self.rows.requests and len(parents) != len(self.rows):
            raise ShapeError(f"beam_idx: expected ({len(self.rows)},), one parent a row, got ({len(parents)},)")
        self._select(parents)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, copies beside each other.

        Args:
            repeats: at least 1.
        """
        if _integer("repeats", repeats) < 1:
            raise ShapeError(f"repeats: expected at least 1, got {repeats}")
        self._select([row for row in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep the rows with these indices, (n,) integers or (batch,) bool, in this order."""
        chosen = torch.as_tensor(indices).cpu()
        if chosen.dtype == torch.bool and self.rows.requests:
            if chosen.shape != (len(self.rows),):
                raise ShapeError(f"indices: expected ({len(self.rows)},) bool, one a row, got {tuple(chosen.shape)}")
            chosen = chosen.nonzero().squeeze(1)
        self._select(_indices("indices", chosen))

    @_whole
    def _select(self, rows: Sequence[int]) -> None:
        if not self.rows.requests:
            return
        if any(not 0 <= row < len(self.rows) for row in rows) or len(rows) == 0:
            raise ShapeError(f"rows: expected indices from 0 to {len(self.rows) - 1}, at least one, got {list(rows)}")
        self.rows.select(rows)
        self.history.select(rows)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take tokens of the last forward back."""
        return self.max_rewind > 0

    def allow_rewind(self, max_rewind: int) -> None:
        """Have `crop` be able to take back up to `max_rewind` tokens of each forward from now on.

        Windows then keep that many tokens more, and states are checkpointed that many tokens before the end of
        each forward.

        Raises:
            UnsupportedCallError: if a state layer is not fused, so that its states cannot be checkpointed, or if a
                ring is too small for it.
        """
        if _integer("max_rewind", max_rewind) < 0:
            raise UnsupportedCallError(f"max_rewind: expected a number of tokens, 0 or more, got {max_rewind}")
        if max_rewind and self.context.splits_rows:
            raise UnsupportedCallError(
                "max_rewind: this model has state layers that only the generic adapter serves, and their states cannot "
                "be taken back; copy.deepcopy(cache) before feeding tokens that may be wrong"
            )
        if max_rewind > self._ring_slack():
            raise UnsupportedCallError(
                f"max_rewind: {max_rewind} tokens, and a ring keeps {self._ring_slack()} beyond its window; patch the model "
                f"with a config of max_rewind={max_rewind} or slot_mapping 'paged'"
            )
        self.max_rewind = max_rewind

    def activate_past_recording(self) -> None:
        """transformers' word for `allow_rewind`, said before drafts are verified."""
        self.allow_rewind(max(self.max_rewind, min(DRAFT_TOKENS, self._ring_slack())))

    def allow_drafts(self, num_drafts: int) -> None:
        """Have `crop` be able to take back so many drafted tokens, and up to `DRAFT_TOKENS` where that costs nothing.

        Raises:
            UnsupportedCallError: if it cannot; nothing is changed.
        """
        self.allow_rewind(max(self.max_rewind, num_drafts, min(DRAFT_TOKENS, self._ring_slack())))

    def _ring_slack(self) -> int:
        """Tokens that every ring keeps beyond its window."""
        config = self.context.config
        slacks = (
            blocks * group.block_size - group.spec.sliding_window + 1
            for group in config.groups
            if isinstance(group.spec, SlidingWindowSpec) and (blocks := config.ring_blocks(group))
        )
        return min(slacks, default=2**31)

    @_whole
    def crop(self, tokens_to_remove: int) -> None:
        """Take the last columns of every row back, as if they had not been fed.

        Zamba2 and Nemotron-H clamp step sizes in forwards of several tokens only: the token that is fed right after a
        crop goes through in one forward with those that states are fed again, so it is computed as in a prefill, and
        its logits differ by about 2e-4 from those of a decode step.

        Args:
            tokens_to_remove: 0 or a negative number of columns, as transformers counts them.

        Raises:
            UnsupportedCallError: if so much cannot be taken back; nothing is changed.
        """
        num_removed = -_integer("crop", tokens_to_remove)
        if num_removed < 0:
            raise UnsupportedCallError(_crop_to(-num_removed, self.history.num_columns))
        if num_removed > self.history.num_columns:
            raise UnsupportedCallError(
                f"crop: {num_removed} tokens to remove, and the cache holds {self.history.num_columns}"
            )
        if num_removed == 0:
            return
        counts = self.history.stored(num_removed, len(self.rows)).sum(1)
        num_columns = self.history.num_columns - num_removed
        num_fed_again = self._rewind(counts, num_columns, "crop")
        self.history.truncate(num_columns)
        self.history.feed_again(counts > 0, num_fed_again)

    @_whole
    def hide(self, is_hidden: np.ndarray) -> None:
        """Take the last tokens of some rows back, (batch, tokens) bool, which a mask says do not exist after all.

        Raises:
            UnsupportedCallError: if so much cannot be taken back; nothing is changed.
        """
        counts = (is_hidden & self.history.stored(self.history.num_columns, len(self.rows))).sum(1)
        self.rows.part(counts.tolist())  # rows that were one may end differently from now on
        num_fed_again = self._rewind(counts, self.history.num_columns, "attention_mask: tokens are hidden that were fed")
        self.history.hide(is_hidden)
        self.history.feed_again(counts > 0, num_fed_again)

    def _rewind(self, counts: np.ndarray, num_columns: int, call: str) -> int:
        """Take rows back by `counts` stored tokens, (batch,) int64, so that all end within `num_columns` columns.

        Returns:
            Last columns that the rows which went back must be fed again, as far as their tokens exist: states go
            back to their checkpoint.
        """
        if not counts.any():
            return 0
        num_fed_again = 0
        if self.context.has_states:
            if self.checkpoint_column is None:
                raise UnsupportedCallError(
                    f"{call}: there is no checkpoint of the states; make the cache with GroupedCache(model, max_rewind=...) "
                    "and feed the tokens to it, a copy or a cache whose last forward failed has none"
                )
            num_fed_again = max(0, num_columns - self.checkpoint_column)
            if num_fed_again and self.history.last_ids(self.history.num_columns - self.checkpoint_column) is None:
                raise UnsupportedCallError(
                    f"{call}: states go back to their checkpoint, and the embeddings after it cannot be fed again; take "
                    "back all of them, or pass input_ids"
                )
        before = self.rows.num_tokens
        try:
            self.rows.rewind(counts.tolist())
        except KVGroupsError as error:
            self.is_broken = bool((self.rows.num_tokens != before).any())
            raise UnsupportedCallError(
                f"{call}: {error}; make the cache with GroupedCache(model, max_rewind=...)"
            ) from error
        return num_fed_again

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupedCache:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin._setup(self.context)
        twin.rows.copy_from(self.rows)
        twin.history = self.history.copy()
        twin.is_broken = self.is_broken
        twin.max_rewind = self.max_rewind
        return twin

    def __copy__(self) -> GroupedCache:
        return self.__deepcopy__({})  # two caches on one row would free its blocks under each other

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: blocks live in the pools of a model in this process."""
        raise UnsupportedCallError(
            "a GroupedCache cannot be pickled or saved, its blocks belong to a model in this process; keep the tokens and "
            "feed them again, or copy.deepcopy the cache"
        )

    def forward(
        self,
        model_forward: Callable[..., Any],
        inputs: dict[str, Any],
        settings: Callable[[], AbstractContextManager[None]],
    ) -> Any:
        """Run the model's own forward over this cache; see `CachedForward`.

        Raises:
            UnsupportedCallError: if an earlier forward failed after some rows had gone through.
        """
        if self.is_broken:
            raise UnsupportedCallError(
                "this cache saw a forward fail halfway and no longer matches its tokens; make a new one"
            )
        return CachedForward(self, model_forward, inputs, settings).run()


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _crop_to(kept: int, held: int) -> str:
    """What to say of a positive number: it was the length to keep, once."""
    if kept < held:
        right = f"to keep {kept} of the {held} tokens here write crop({kept - held})"
    else:
        right = f"the cache holds {held} tokens, so there is nothing to remove"
    return (
        f"crop: expected minus the number of tokens to remove, got {kept}; older versions of transformers took the length "
        f"to keep: {right}"
    )


def _integer(name: str, value: Any) -> int:
    """A whole number of whatever type, but for bool."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise UnsupportedCallError(f"{name}: expected an int, got {value!r}")


def _indices(name: str, value: torch.Tensor | Sequence[int]) -> list[int]:
    indices = torch.as_tensor(value)
    if indices.ndim != 1 or indices.is_floating_point() or indices.dtype == torch.bool:
        raise ShapeError(f"{name}: expected (rows,) integers, got {tuple(indices.shape)} {indices.dtype}")
    return indices.tolist()


def find_cache(inputs: Mapping[str, Any]) -> Any:
    """The cache among a forward's arguments, under whichever of its names; None if there is none."""
    return next((inputs[name] for name in CACHE_ARGUMENTS if inputs.get(name) is not None), None)
