"""One call of the model over one cache: rows, passes, geometry, forward, advance."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvgroups.batch_plan import Pass, last_columns, merge_outputs, plan_passes, repeat_rows, slice_inputs
from kvgroups.errors import ShapeError, UnsupportedCallError
from kvgroups.forward_inputs import (
    PER_TOKEN,
    batch_shape,
    check_fed_again,
    check_losses,
    kept_columns,
    prepend_pending,
)
from kvgroups.geometry import BatchGeometry
from kvgroups.manager import Request
from kvgroups.model_adapters import GroupStep, StateLayer, Step

if TYPE_CHECKING:
    from kvgroups.cache import GroupedCache


class CachedForward:
    """Runs the model's own forward over a cache, in as many passes as its rows need.

    Attention layers take a padded batch in one pass. Rows with recurrent states go through the model in groups
    of rows with the same padding, without their padding; token by token where the model's layers cannot
    continue a state otherwise. Rows that have seen and are fed the same tokens go through once.

    Args:
        cache: where the rows live.
        model_forward: the model's unpatched forward; called with keyword arguments only.
        inputs: its arguments by name for the padded batch, the cache among them; the mask is taken out.
        settings: what must hold while the forward runs over the cache.
    """

    def __init__(
        self,
        cache: GroupedCache,
        model_forward: Callable[..., Any],
        inputs: dict[str, Any],
        settings: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.settings = settings
        self.cache = cache
        self.context = cache.context
        self.rows = cache.rows
        self.model_forward = model_forward
        self.inputs = inputs
        self.states_touched = False
        self.checkpoints_moved = False
        self.batch_size, self.num_new = batch_shape(inputs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = kept_columns(inputs["logits_to_keep"])
        mask = inputs.pop("attention_mask", None)
        self.is_real = cache.history.real_columns(mask, self.batch_size, self.num_new)
        self.is_hidden = cache.history.hidden_tail(mask, self.num_new)
        self.num_columns = self.num_new
        check_losses(inputs, self.is_real)

    def run(self) -> Any:
        """What the model's forward returns for the padded batch; padded positions hold zeros or leftovers."""
        self._check_limits()
        history = self.cache.history
        new_ids, new_is_real = self.inputs.get("input_ids"), self.is_real
        self._check_position_ids()
        if self.is_hidden is not None:
            if self.context.has_states:
                check_fed_again(self.inputs)  # refused before a token is taken back
            self.cache.hide(self.is_hidden)
        if history.num_pending:
            self.is_real = prepend_pending(self.inputs, history, self.rows.num_tokens, self.is_real)
            self.num_columns = self.is_real.shape[1]
        was_empty = len(self.rows) == 0
        outputs: list[Any] = []
        try:
            output = self._run_rows(outputs)
            history.append(new_ids, new_is_real, self._named_positions())
        except BaseException:
            self._recover(was_empty, has_changed=len(outputs) > 0)
            raise
        return output

    def _run_rows(self, outputs: list[Any]) -> Any:
        """All passes, their outputs noted in `outputs` as they come, and the one output that they make."""
        if len(self.rows) == 0:
            self.rows.open(self._row_keys())
        else:
            self.rows.part(self._row_keys())
        first, places = self.rows.distinct()
        is_real = self.is_real[first]
        passes = plan_passes(
            is_real,
            has_past=self.rows.num_tokens[first] > 0,
            splits_rows=self.context.splits_rows,
            one_token=not self.context.continues_exactly,
            max_tokens=self.context.config.max_num_batched_tokens,
        )
        self._check_passes(passes)
        if self.cache.is_croppable:
            self._set_checkpoints([self.rows.requests[row] for row in first], is_real)
        else:
            self.cache.checkpoint_column = None
        for each in passes:
            rows, columns = each.rows, slice(None) if each.columns is None else each.columns
            outputs.append(self._run_pass(each, np.array(first)[rows], is_real[rows][:, columns]))
        if not outputs:
            # Nothing but padding, as the first chunk of a padded prompt may be: shapes are all that is asked.
            output = self.model_forward(**{**self.inputs, "cache": None, "use_cache": False})
            output["cache"] = self.cache
            return output
        output = merge_outputs(outputs, passes, self.inputs, len(first), self.num_columns)
        if len(first) < self.batch_size:
            output = repeat_rows(output, places)
        if self.num_columns > self.num_new:
            output = last_columns(output, self.num_new, keeps=isinstance(self.inputs.get("logits_to_keep"), torch.Tensor))
        return output

    def _check_passes(self, passes: Sequence[Pass]) -> None:
        if self.inputs.get("output_router_logits") and (len(passes) > 1 or passes[0].columns is not None):
            raise UnsupportedCallError(
                "output_router_logits: this batch goes through the model in several passes, whose router logits cannot be "
                "put together; set it to False or pass fewer tokens"
            )

    # One pass

    def _run_pass(self, each: Pass, rows: np.ndarray, is_real: np.ndarray) -> Any:
        inputs = slice_inputs(self.inputs, rows, each.columns, self.batch_size, self.num_columns)
        requests = [self.rows.requests[row] for row in rows]
        counts = is_real.sum(1).tolist()
        manager = self.context.manager
        try:
            manager.allocate(requests, counts)
            step = self._step(requests, counts, is_real, first_column=0 if each.columns is None else int(each.columns[0]))
            self._fill_position_ids(inputs, step, is_real)
            self.states_touched = bool(self.context.mixers)
            with self.settings(), self._running(step) as state_layers:
                output = self.model_forward(**inputs)
                step.check_served()
                for layer in state_layers:
                    layer.check_used()
                self.states_touched = True  # an interrupt between two writes leaves neither before nor after
                step.finish()
                for layer in state_layers:
                    layer.commit(step)
            if step.is_decode and step.snapshot_slots:
                self._keep_states(requests)
        except BaseException:
            manager.cancel(requests)
            raise
        manager.advance(requests, counts)
        return output

    def _step(
        self, requests: Sequence[Request], counts: Sequence[int], is_real: np.ndarray, first_column: int
    ) -> Step:
        """Geometry, commit, slot mapping: what all groups share is computed once."""
        tables, device = self.rows.tables, self.context.manager.device
        assert tables is not None
        geometry = BatchGeometry.build(
            rows=[request.row for request in requests],
            query_lens=counts,
            num_computed_tokens=[request.num_computed_tokens for request in requests],
        )
        self.context.manager.drain()
        tables.commit()
        slots = tables.compute_slot_mapping(geometry)
        rows = tables.gather(geometry)
        groups = {
            group.name: GroupStep(
                config=group,
                block_table=rows[group.name],
                slots=slots[group.name],
                ring_blocks=self.context.config.ring_blocks(group),
            )
            for group in self.context.config.groups
        }
        all_real = bool(is_real.all())
        history = self.cache.history
        longest_past = int(geometry.num_computed_tokens.max(initial=0))
        return Step(
            geometry=geometry,
            query_len=is_real.shape[1],
            past_len=longest_past if all_real else history.num_columns - history.num_pending + first_column,
            token_index=None if all_real else torch.from_numpy(np.flatnonzero(is_real)).to(device),
            groups=groups,
            device=device,
            **self._snapshots(requests, geometry),
        )

    @contextmanager
    def _running(self, step: Step) -> Iterator[list[StateLayer]]:
        state_layers = [layer for layer in self.cache.layers if isinstance(layer, StateLayer)]
        self.cache.running.step = step
        try:
            for layer in state_layers:
                layer.begin(step)
            yield state_layers
        finally:
            self.cache.running.step = None
            step.release()
            for layer in state_layers:
                layer.release()

    # Going back

    def _set_checkpoints(self, requests: Sequence[Request], is_real: np.ndarray) -> None:
        """Let the tokens of this forward be taken back: all of the new ones, or the last `max_rewind` of many."""
        num_rewound = min(self.num_new, max(self.cache.max_rewind, 1))
        column = self.num_columns - num_rewound
        for request in requests:
            request.max_rewind = num_rewound
        if self.context.has_states:
            self.context.manager.set_checkpoints(requests, is_real[:, :column].sum(1).tolist())
            self.checkpoints_moved = True
            self.cache.checkpoint_column = self.cache.history.num_columns + self.num_new - num_rewound

    def _snapshots(self, requests: Sequence[Request], geometry: BatchGeometry) -> dict[str, Any]:
        """Which states the kernels are to keep on the way, for the requests' checkpoints."""
        if not (self.cache.is_croppable and self.context.has_states):
            return {}
        places, slots = [], []
        starts, counts = geometry.query_start_loc[:-1].tolist(), geometry.query_lens.tolist()
        for request, start, count in zip(requests, starts, counts, strict=True):
            checkpoint = request.checkpoint
            assert checkpoint is not None  # set for this forward
            offset = checkpoint.num_tokens - request.num_computed_tokens
            if 0 < offset <= count:
                places.append(start + offset - 1)
                slots.append(checkpoint.slots)
        if not places:
            return {}
        device = self.context.manager.device
        groups = [group.name for group in self.context.config.groups if group.is_state]
        return {
            "snapshot_tokens": torch.tensor(places, device=device),
            "snapshot_slots": {name: torch.tensor([slot[name] for slot in slots], device=device) for name in groups},
        }

    def _keep_states(self, requests: Sequence[Request]) -> None:
        """Copy states to checkpoints after a pass of one token each, whose kernels keep none on the way."""
        copies: dict[str, list[tuple[int, int]]] = {}
        for request in requests:
            checkpoint = request.checkpoint
            assert checkpoint is not None  # set for this forward
            if checkpoint.num_tokens == request.num_computed_tokens + 1:
                for name, slot in checkpoint.slots.items():
                    running = int(request.tables[name].table[request.row, 0])
                    copies.setdefault(name, []).append((running, slot))
        for name, pairs in copies.items():
            sources, targets = zip(*pairs, strict=True)
            self.context.manager.storage(name).copy_blocks(sources, targets)

    # Rows and positions

    def _check_limits(self) -> None:
        """Refuse what the tables cannot hold."""
        config = self.context.config
        if self.batch_size > config.max_num_reqs:
            raise ShapeError(
                f"a batch of {self.batch_size} rows: max_num_reqs is {config.max_num_reqs}; "
                "patch the model with a config whose max_num_reqs is larger"
            )
        if len(self.rows) not in (0, self.batch_size):
            raise ShapeError(
                f"a batch of {self.batch_size} rows on a cache of {len(self.rows)}; a cache keeps its rows, make a new one"
            )
        past = self.rows.num_tokens if len(self.rows) else np.zeros(self.batch_size, dtype=np.int64)
        if (pending := self.cache.history.pending) is not None:
            past = past + pending.sum(1)
        if self.is_hidden is not None:
            past = past - self.is_hidden.sum(1)
        longest = int((self.is_real.sum(1) + past).max())
        if longest > config.max_model_len:
            raise ShapeError(
                f"a row of {longest} tokens: max_model_len is {config.max_model_len}; "
                "patch the model with a config whose max_model_len is larger"
            )

    def _row_keys(self) -> list[Hashable]:
        """What each row is fed, equal for rows that may go on as one request.

        A decode step always parts its rows: asking a GPU for its tokens would cost more than it saves.
        """
        ids, positions = self.inputs.get("input_ids"), self.inputs.get("position_ids")
        is_decode = self.num_columns == 1 and len(self.rows) > 0
        is_shareable = not self._wants_all_rows() and (positions is None or positions.ndim == 2)
        if self.batch_size == 1 or is_decode or ids is None or not is_shareable:
            return list(range(self.batch_size))
        host = ids.cpu().numpy()
        keys = [(real.tobytes(), row[real].tobytes()) for row, real in zip(host, self.is_real, strict=True)]
        if positions is None or positions.shape[0] == 1:
            return list(keys)
        places = positions.cpu().numpy()
        return [(key, row.tobytes()) for key, row in zip(keys, places, strict=True)]

    def _wants_all_rows(self) -> bool:
        """Whether rows that are equal must go through one by one: what is asked or passed is not known to be by row."""
        known = (*PER_TOKEN, "logits_to_keep")
        others = (name for name, value in self.inputs.items() if isinstance(value, torch.Tensor) and name not in known)
        return bool(self.inputs.get("output_router_logits")) or any(others)

    def _named_positions(self) -> torch.Tensor | None:
        """(..., batch, columns): the positions that the caller named, if they may be asked for again."""
        positions = self.inputs.get("position_ids")
        if positions is None or not (self.cache.is_croppable and self.context.has_states):
            return None
        return positions.expand(*positions.shape[:-2], self.batch_size, -1)

    def _fill_position_ids(self, inputs: dict[str, Any], step: Step, is_real: np.ndarray) -> None:
        """Supply positions where none were passed: a row counts its real tokens."""
        if inputs.get("position_ids") is None and "position_ids" in self.context.parameters:
            positions = torch.zeros(is_real.shape, dtype=torch.long, device=step.device)
            if step.token_index is None:
                positions = step.tensors.positions.view(is_real.shape)
            else:
                positions.view(-1)[step.token_index] = step.tensors.positions
            inputs["position_ids"] = positions

    def _check_position_ids(self) -> None:
        positions = self.inputs.get("position_ids")
        if positions is None or self.num_new == 1:
            return
        host = np.broadcast_to(positions.cpu().numpy(), (*positions.shape[:-2], *self.is_real.shape))
        for row, real in enumerate(self.is_real):
            if (np.diff(host[..., row, real], axis=-1) < 0).any():
                raise UnsupportedCallError(
                    f"position_ids: row {row} goes backwards, as packed sequences do; give each sequence a row of its own"
                )

    def _recover(self, was_empty: bool, has_changed: bool) -> None:
        """After a failed forward: an empty cache is empty again. One with a past is as it was before, unless some
        rows had gone through or states had been worked on in place; then it says so from now on."""
        if was_empty:
            self.cache.close()
        elif has_changed or self.states_touched:
            self.cache.is_broken = True
        elif self.checkpoints_moved:
            self.cache.checkpoint_column = None  # what was to be kept there never was
