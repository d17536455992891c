"""A transformers `Cache` whose layers live on the block tables of several KV-cache groups."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DummyLayer

from kvgroups.batch_plan import Pass, merge_outputs, plan_passes, slice_inputs
from kvgroups.block_table import MultiGroupBlockTable
from kvgroups.errors import ShapeError, UnsupportedCallError
from kvgroups.geometry import BatchGeometry
from kvgroups.manager import Manager, Request
from kvgroups.model_adapters import AttentionLayer, GroupStep, HybridLayer, Running, StateLayer, Step
from kvgroups.specs import KVGroupsConfig
from kvgroups.specs.probe import LayerFacts

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names under which a forward may be handed its cache; the last two are transformers' older ones."""


@dataclass
class CacheContext:
    """What all caches of one patched model share."""

    config: KVGroupsConfig
    facts: Sequence[LayerFacts]
    manager: Manager
    parameters: Mapping[str, inspect.Parameter]
    """The parameters of the model's forward, by name."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held during a forward: the model has one attention setting, so two cannot run at once."""

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a recurrent state."""
        return any(layer.states for layer in self.facts)

    @property
    def continues_exactly(self) -> bool:
        """Whether several tokens on a filled state may go through the model at once."""
        return all(layer.is_exact for layer in self.facts)


class GroupedCache(Cache):
    """The cache of a patched model: one row of the block tables for each sequence of the batch.

    `model.generate` on a patched model makes one by itself. Make one by hand to call the model step by step,
    and pass it as `cache`; it is filled from the first forward on. Tokens that the attention mask hides do
    not exist for it: they take no slot and no position and touch no state, so a padded row computes what the
    row alone would.

    `copy.deepcopy` of a cache is a fork: full blocks are shared, the rest is copied.

    Args:
        model: a model that `kvgroups.patch` has patched.

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
    is_croppable = False

    def __init__(self, model: torch.nn.Module) -> None:
        patch = model.__dict__.get("_kvgroups")
        if patch is None:
            raise UnsupportedCallError(
                f"{type(model).__name__} is not patched; call kvgroups.patch(model) before GroupedCache(model)"
            )
        self._setup(patch.context)

    def _setup(self, context: CacheContext) -> None:
        self.context = context
        self.running = Running()
        self.tables: MultiGroupBlockTable | None = None
        self.requests: list[Request] = []
        self.padded_length = 0
        """Columns seen so far, padding included: what transformers calls the cache's length."""
        self._history: list[torch.Tensor | None] = []
        self._mask: np.ndarray | None = None
        self._is_broken = False
        super().__init__(layers=[self._make_layer(facts) for facts in context.facts])
        # Blocks must come back when the cache is dropped, also without close().
        self._finalizer = weakref.finalize(self, _free_requests, context.manager, self.requests)

    def _make_layer(self, facts: LayerFacts) -> AttentionLayer | StateLayer | HybridLayer | DummyLayer:
        manager = self.context.manager
        places: dict[bool, tuple[Any, Any]] = {
            group.is_state: (group, manager.storage(group.name))
            for group in self.context.config.groups
            if facts.index in group.layers
        }
        if not places:
            return DummyLayer()
        if len(places) == 2:
            return HybridLayer(facts, *places[False], *places[True], self.running)
        if True in places:
            return StateLayer(facts, *places[True])
        return AttentionLayer(facts, *places[False], self.running)

    # What a caller may ask

    @property
    def num_tokens(self) -> list[int]:
        """Real tokens of each row, padding not counted."""
        return [request.num_computed_tokens for request in self.requests]

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first forward."""
        return len(self.requests) if self.requests else -1

    @property
    def token_ids(self) -> torch.Tensor | None:
        """(batch_size, padded_length), int64: what was fed so far; None if some of it were embeddings."""
        if not self._history or any(ids is None for ids in self._history):
            return None
        self._history = [torch.cat(self._history, dim=1)]
        return self._history[0]

    def close(self) -> None:
        """Give all blocks back. The cache is empty afterwards and may be used again."""
        _free_requests(self.context.manager, self.requests)
        self.requests.clear()
        self.tables = None
        self.padded_length = 0
        self._history = []
        self._mask = None
        self._is_broken = False

    reset = close

    # What transformers asks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Length of the past, as transformers counts it: columns of the padded batch."""
        return self.padded_length if self.running.step is None else self.running.step.past_len

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

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise UnsupportedCallError("GroupedCache.reorder_cache: beam search is not served; set num_beams=1")

    def crop(self, tokens_to_remove: int) -> None:
        raise UnsupportedCallError(
            "GroupedCache.crop: taking tokens back is not served; copy.deepcopy(cache) before feeding them"
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UnsupportedCallError(
            "GroupedCache.batch_repeat_interleave is not served; repeat the prompt instead"
        )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise UnsupportedCallError(
            "GroupedCache.batch_select_indices is not served; select the prompts instead"
        )

    def activate_past_recording(self) -> None:
        raise UnsupportedCallError(
            "GroupedCache: assisted decoding is not served; call generate without an assistant"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupedCache:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin._setup(self.context)
        if self.tables is not None:
            twin._open_tables(len(self.requests))
            for row, request in enumerate(self.requests):
                twin.requests.append(self.context.manager.fork(request, twin.tables, row))
        twin.padded_length = self.padded_length
        twin._history = list(self._history)
        twin._mask = None if self._mask is None else self._mask.copy()
        twin._is_broken = self._is_broken
        return twin

    # One forward

    def forward(self, model_forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Run the model's own forward over this cache, in as many passes as its rows need.

        Attention layers take a padded batch in one pass. Rows with recurrent states go through the model in
        groups of rows with the same padding, without their padding; token by token where the model's layers
        cannot continue a state otherwise.

        Args:
            model_forward: the model's unpatched forward; called with keyword arguments only.
            inputs: its arguments by name, this cache among them.

        Returns:
            What the model's forward returns for the padded batch; padded positions hold zeros or leftovers.
        """
        tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
        if tokens is None:
            raise ShapeError("input_ids: expected (batch, tokens) int64 or inputs_embeds, got neither")
        batch_size, columns = tokens.shape[:2]
        if batch_size == 0 or columns == 0:
            raise ShapeError(f"input_ids: expected at least one row and one token, got {tuple(tokens.shape)}")
        is_real = self._real_columns(inputs.pop("attention_mask", None), batch_size, columns)
        self._check_rows(batch_size, is_real)
        was_empty = self.padded_length == 0
        passes = plan_passes(
            is_real,
            has_past=np.array(self.num_tokens) > 0,
            splits_rows=self.context.has_states,
            one_token=not self.context.continues_exactly,
        )
        outputs: list[Any] = []
        try:
            for each in passes:
                arguments = slice_inputs(inputs, each, batch_size, columns)
                outputs.append(self._run_pass(model_forward, arguments, each, is_real, columns))
        except BaseException:
            self._recover(was_empty, num_done=len(outputs))
            raise
        if outputs:
            output = merge_outputs(outputs, passes, inputs, batch_size, columns)
        else:  # nothing but padding, as the first chunk of a padded prompt may be: shapes are all that is asked of it
            output = model_forward(**{**inputs, "cache": None, "use_cache": False})
            output["cache"] = self
        self._remember(inputs.get("input_ids"), is_real)
        return output

    def _run_pass(
        self,
        model_forward: Callable[..., Any],
        inputs: dict[str, Any],
        each: Pass,
        is_real: np.ndarray,
        columns: int,
    ) -> Any:
        requests = [self.requests[row] for row in each.rows]
        if each.columns is not None:
            is_real = np.ones((len(requests), len(each.columns)), dtype=bool)
        counts = is_real.sum(1).tolist()
        manager = self.context.manager
        manager.allocate(requests, counts)
        try:
            step = self._step(requests, counts, is_real)
            self._fill_position_ids(inputs, step, is_real)
            with self._running_step(step):
                output = model_forward(**inputs)
                step.finish()
                for layer in self._state_layers():
                    layer.commit(step)
        except BaseException:
            manager.cancel(requests)
            raise
        manager.advance(requests, counts)
        return output

    def _step(self, requests: Sequence[Request], counts: Sequence[int], is_real: np.ndarray) -> Step:
        """Geometry, commit, slot mapping: what all groups share is computed once."""
        assert self.tables is not None
        device = self.context.manager.device
        geometry = BatchGeometry.build(
            rows=[request.row for request in requests],
            query_lens=counts,
            num_computed_tokens=[request.num_computed_tokens for request in requests],
        )
        self.tables.commit()
        slots = self.tables.compute_slot_mapping(geometry)
        groups = {
            group.name: GroupStep(
                config=group,
                block_table=self.tables[group.name].gather(geometry),
                slots=slots[group.name],
                ring_blocks=self.context.config.ring_blocks(group),
            )
            for group in self.context.config.groups
        }
        all_real = bool(is_real.all())
        return Step(
            geometry=geometry,
            query_len=is_real.shape[1],
            past_len=int(geometry.num_computed_tokens.max()) if all_real else self.padded_length,
            token_index=None if all_real else torch.from_numpy(np.flatnonzero(is_real)).to(device),
            groups=groups,
            device=device,
        )

    @contextmanager
    def _running_step(self, step: Step) -> Any:
        self.running.step = step
        try:
            for layer in self._state_layers():
                layer.begin(step)
            yield
        finally:
            self.running.step = None
            step.release()
            for layer in self._state_layers():
                layer.release()

    def _state_layers(self) -> list[StateLayer]:
        return [layer for layer in self.layers if isinstance(layer, StateLayer)]

    # Rows, masks and positions

    def _check_rows(self, batch_size: int, is_real: np.ndarray) -> None:
        """Open the rows at the first forward, and refuse what the tables cannot hold."""
        config = self.context.config
        if self._is_broken:
            raise UnsupportedCallError(
                "this cache saw a forward fail halfway and no longer matches its tokens; make a new one"
            )
        if batch_size > config.max_num_reqs:
            raise ShapeError(
                f"a batch of {batch_size} rows: max_num_reqs is {config.max_num_reqs}; "
                "patch the model with a config whose max_num_reqs is larger"
            )
        if self.requests and batch_size != len(self.requests):
            raise ShapeError(
                f"a batch of {batch_size} rows on a cache of {len(self.requests)}; a cache keeps its rows, make a new one"
            )
        past = self.num_tokens or [0] * batch_size
        longest = int(max(is_real.sum(1) + past))
        if longest > config.max_model_len:
            raise ShapeError(
                f"a row of {longest} tokens: max_model_len is {config.max_model_len}; "
                "patch the model with a config whose max_model_len is larger"
            )
        if not self.requests:
            self._open_tables(batch_size)
            self.requests.extend(self.context.manager.open(self.tables, row) for row in range(batch_size))

    def _open_tables(self, batch_size: int) -> None:
        self.tables = MultiGroupBlockTable.from_config(
            self.context.config, max_num_reqs=batch_size, device=self.context.manager.device
        )

    def _real_columns(self, mask: Any, batch_size: int, columns: int) -> np.ndarray:
        """(batch_size, columns) bool: which of this forward's tokens exist."""
        if mask is None:
            return np.ones((batch_size, columns), dtype=bool)
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise UnsupportedCallError(
                f"attention_mask: expected a 2-D padding mask (batch, tokens), got {shape}; kvgroups sees to "
                "causality and windows itself"
            )
        width = mask.shape[1]
        if mask.shape[0] != batch_size or width not in (columns, self.padded_length + columns):
            raise ShapeError(
                f"attention_mask: expected ({batch_size}, {self.padded_length + columns}) or ({batch_size}, {columns}), "
                f"got {tuple(mask.shape)}"
            )
        host = mask.ne(0).cpu().numpy()
        if width > columns:
            past = self._past_mask(batch_size)
            changed = np.argwhere(host[:, :-columns] != past)
            if len(changed):
                row, column = changed[0].tolist()
                was = "stored" if past[row, column] else "skipped as padding"
                raise UnsupportedCallError(
                    f"attention_mask: column {column} of row {row} was {was} by an earlier forward and the mask now "
                    "says otherwise; pass the mask of that forward for the past (generate without a mask infers one "
                    "from pad_token_id: pass attention_mask)"
                )
        return host[:, -columns:]

    def _past_mask(self, batch_size: int) -> np.ndarray:
        return np.ones((batch_size, self.padded_length), dtype=bool) if self._mask is None else self._mask

    def _fill_position_ids(self, inputs: dict[str, Any], step: Step, is_real: np.ndarray) -> None:
        """Supply positions where none were passed: a row counts its real tokens."""
        given = inputs.get("position_ids")
        if given is not None:
            self._check_position_ids(given, is_real)
            return
        if "position_ids" in self.context.parameters:
            positions = torch.zeros(is_real.shape, dtype=torch.long, device=step.device)
            if step.token_index is None:
                positions = step.tensors.positions.view(is_real.shape)
            else:
                positions.view(-1)[step.token_index] = step.tensors.positions
            inputs["position_ids"] = positions

    def _check_position_ids(self, position_ids: torch.Tensor, is_real: np.ndarray) -> None:
        if is_real.shape[1] == 1:
            return
        host = np.broadcast_to(position_ids.cpu().numpy(), (*position_ids.shape[:-2], *is_real.shape))
        for row, real in enumerate(is_real):
            if (np.diff(host[..., row, real], axis=-1) < 0).any():
                raise UnsupportedCallError(
                    f"position_ids: row {row} goes backwards, as packed sequences do; give each sequence a row of its own"
                )

    def _remember(self, input_ids: torch.Tensor | None, is_real: np.ndarray) -> None:
        if self._mask is not None or not is_real.all():
            self._mask = np.concatenate((self._past_mask(len(is_real)), is_real), axis=1)
        self._history.append(None if input_ids is None else input_ids.detach())
        self.padded_length += is_real.shape[1]

    def _recover(self, was_empty: bool, num_done: int) -> None:
        """After a failed forward: an empty cache is empty again, and one that got halfway says so from now on."""
        if was_empty:
            self.close()
        elif num_done:
            self._is_broken = True


def _free_requests(manager: Manager, requests: list[Request]) -> None:
    for request in requests:
        if request.is_live:
            manager.free(request)


def find_cache(inputs: Mapping[str, Any]) -> Any:
    """The cache among a forward's arguments, under whichever of its names; None if there is none."""
    return next((inputs[name] for name in CACHE_ARGUMENTS if inputs.get(name) is not None), None)
