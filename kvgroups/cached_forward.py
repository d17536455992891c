"""One call of the model over one cache: rows, passes, geometry, forward, advance."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvgroups.batch_plan import Pass, last_columns, merge_outputs, plan_passes, repeat_rows, slice_inputs
from kvgroups.errors import ShapeError, UnsupportedCallError
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
        tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
        if tokens is None:
            raise ShapeError("input_ids: expected (batch, tokens) int64 or inputs_embeds, got neither")
        self.batch_size, self.num_columns = tokens.shape[:2]
        if self.batch_size == 0 or self.num_columns == 0:
            raise ShapeError(
                f"input_ids: expected at least one row and one token, got {tuple(tokens.shape)}"
            )
        mask = inputs.pop("attention_mask", None)
        self.is_real = cache.history.real_columns(mask, self.batch_size, self.num_columns)
        self.num_new = self.num_columns
        if cache.num_pending:
            self._prepend_pending(cache.num_pending)

    def run(self) -> Any:
        """What the model's forward returns for the padded batch; padded positions hold zeros or leftovers."""
        self._check_limits()
        was_empty = len(self.rows) == 0
        outputs: list[Any] = []
        try:
            output = self._run_rows(outputs)
        except BaseException:
            self._recover(was_empty, has_changed=len(outputs) > 0)
            raise
        ids = self.inputs.get("input_ids")
        self.cache.history.append(None if ids is None else ids[:, -self.num_new :], self.is_real[:, -self.num_new :])
        if self.cache.num_pending:
            self.cache.num_pending = 0
            output = last_columns(output, self.num_new)
        return output

    def _run_rows(self, outputs: list[Any]) -> Any:
        """All passes, their outputs noted in `outputs` as they come, and the one output that they make."""
        if len(self.rows) == 0:
            self.rows.open(self._row_keys())
        else:
            self.rows.part(self._row_keys())
        first, places = self.rows.distinct()
        is_real = self.is_real[first]
        if self.cache.is_croppable:
            self._set_checkpoints([self.rows.requests[row] for row in first], is_real)
        passes = plan_passes(
            is_real,
            has_past=self.rows.num_tokens[first] > 0,
            splits_rows=self.context.splits_rows,
            one_token=not self.context.continues_exactly,
        )
        for each in passes:
            outputs.append(self._run_pass(each, np.array(first)[each.rows], is_real[each.rows]))
        if not outputs:
            # Nothing but padding, as the first chunk of a padded prompt may be: shapes are all that is asked.
            output = self.model_forward(**{**self.inputs, "cache": None, "use_cache": False})
            output["cache"] = self.cache
            return output
        output = merge_outputs(outputs, passes, self.inputs, len(first), self.num_columns)
        return repeat_rows(output, places) if len(first) < self.batch_size else output

    # One pass

    def _run_pass(self, each: Pass, rows: np.ndarray, is_real: np.ndarray) -> Any:
        inputs = slice_inputs(self.inputs, rows, each.columns, self.batch_size, self.num_columns)
        requests = [self.rows.requests[row] for row in rows]
        if each.columns is not None:
            is_real = np.ones((len(rows), len(each.columns)), dtype=bool)
        counts = is_real.sum(1).tolist()
        manager = self.context.manager
        manager.allocate(requests, counts)
        try:
            step = self._step(requests, counts, is_real)
            self._fill_position_ids(inputs, step, is_real)
            self.states_touched = bool(self.context.mixers)
            with self.settings(), self._running(step) as state_layers:
                output = self.model_forward(**inputs)
                step.finish()
                for layer in state_layers:
                    layer.commit(step)
        except BaseException:
            manager.cancel(requests)
            raise
        manager.advance(requests, counts)
        return output

    def _step(self, requests: Sequence[Request], counts: Sequence[int], is_real: np.ndarray) -> Step:
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
        longest_past = int(geometry.num_computed_tokens.max(initial=0))
        return Step(
            geometry=geometry,
            query_len=is_real.shape[1],
            past_len=longest_past if all_real else self.cache.history.num_columns,
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

    def _prepend_pending(self, num_pending: int) -> None:
        """Feed once more what states were taken back beyond, before what is new; its logits are not returned."""
        ids, is_real = self.cache.history.last(num_pending, self.batch_size)
        if self.inputs.get("input_ids") is None or ids is None:
            raise UnsupportedCallError("inputs_embeds: tokens must be fed again after a crop; pass input_ids")
        self.inputs["input_ids"] = torch.cat((ids.to(self.inputs["input_ids"].device), self.inputs["input_ids"]), dim=1)
        self.is_real = np.concatenate((is_real, self.is_real), axis=1)
        self.num_columns += num_pending
        positions = self.inputs.get("position_ids")
        if positions is not None:
            before = positions[..., :1] - torch.arange(num_pending, 0, -1, device=positions.device)
            self.inputs["position_ids"] = torch.cat((before.clamp_min(0), positions), dim=-1)
        keep = self.inputs.get("logits_to_keep")
        if isinstance(keep, torch.Tensor):
            self.inputs["logits_to_keep"] = keep + num_pending

    def _set_checkpoints(self, requests: Sequence[Request], is_real: np.ndarray) -> None:
        """Let the tokens of this forward be taken back: all of the new ones, or the last `max_rewind` of many."""
        num_rewound = min(self.num_new, max(self.cache.max_rewind, 1))
        column = self.num_columns - num_rewound
        for request in requests:
            request.max_rewind = num_rewound
        if self.context.has_states:
            self.context.manager.set_checkpoints(requests, is_real[:, :column].sum(1).tolist())
            self.cache.checkpoint_column = self.cache.history.num_columns - self.cache.num_pending + column

    def _snapshots(self, requests: Sequence[Request], geometry: BatchGeometry) -> dict[str, Any]:
        """Which states the kernels are to keep on the way, for the requests' checkpoints."""
        if not (self.cache.is_croppable and self.context.has_states):
            return {}
        places, slots = [], []
        for request, start in zip(requests, geometry.query_start_loc[:-1].tolist(), strict=True):
            checkpoint = request.checkpoint
            assert checkpoint is not None  # set for this forward
            offset = checkpoint.num_tokens - request.num_computed_tokens
            if offset > 0:
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
        if self.batch_size == 1 or ids is None or is_decode or (positions is not None and positions.ndim > 2):
            return list(range(self.batch_size))
        host = ids.cpu().numpy()
        keys = [(real.tobytes(), row[real].tobytes()) for row, real in zip(host, self.is_real, strict=True)]
        if positions is None or positions.shape[0] == 1:
            return list(keys)
        places = positions.cpu().numpy()
        return [(key, row.tobytes()) for key, row in zip(keys, places, strict=True)]

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

    def _recover(self, was_empty: bool, has_changed: bool) -> None:
        """After a failed forward: an empty cache is empty again. One with a past is as it was before, unless some
        rows had gone through or states had been worked on in place; then it says so from now on."""
        if was_empty:
            self.cache.close()
        elif has_changed or self.states_touched:
            self.cache.is_broken = True
