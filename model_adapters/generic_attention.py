"""Any attention layer that uses transformers' Cache and AttentionInterface, without a line for its family.

The cache object is the adapter. `update` files the step's K and V in pages and leaves a handle: on the key
tensor that it returns, which the layer passes on to attention untouched, or, for layers that transform K and V
after storing them (multi-latent attention), in the keyword arguments. Our attention function finds the handle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_utils import AttentionInterface

from kvgroups import ops
from kvgroups.errors import UnsupportedCallError
from kvgroups.model_adapters.base import CAUSES, HANDLE, Running, Step
from kvgroups.specs import GroupConfig
from kvgroups.specs.probe import LayerFacts
from kvgroups.storage import GroupStorage

ATTENTION_NAME = "kvgroups"
"""The name of our attention function in transformers' AttentionInterface."""


class AttentionLayer(CacheLayerMixin):
    """One layer's K and V in pages, with the interface of a transformers cache layer."""

    is_compileable = False

    def __init__(
        self, facts: LayerFacts, group: GroupConfig, storage: GroupStorage, running: Running
    ) -> None:
        super().__init__()
        self.facts = facts
        self.group = group
        self.storage = storage
        self.running = running
        self.is_initialized = True
        self.is_sliding = facts.window is not None or facts.chunk is not None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_: Any,
        kwargs: dict[str, Any] | None = None,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """File the step's K and V.

        Args:
            key_states: (num_reqs, num_kv_heads, query_len, head_dim), the step's K, padding included.
            value_states: (num_reqs, num_kv_heads, query_len, head_dim_v).
            kwargs: the keyword arguments that the layer will pass on to attention.

        Returns:
            The same tensors, the key carrying a handle; or the whole sequences (num_reqs, num_kv_heads,
            max_seq_len, dim), zero beyond each row's end, for a layer that transforms them further.
        """
        step = self.running.require()
        self._check_dtype(key_states, value_states)
        dtype = self.facts.dtype
        handle = StepKV(self, step, step.pack(key_states).to(dtype), step.pack(value_states).to(dtype))
        step.attended[self.facts.index] = False
        if not self.facts.reads_gathered:
            handle.write()
            setattr(key_states, HANDLE, handle)
            step.tagged.append(key_states)
            return key_states, value_states
        if kwargs is None:
            raise UnsupportedCallError(
                f"layer {self.facts.index} ({self.facts.owner}) transforms K and V after storing them and passes "
                "the cache no keyword arguments, so its attention cannot be told which cache layer it reads"
            )
        gathered = handle.gather()
        handle.write()
        kwargs[HANDLE] = handle
        return gathered

    def _check_dtype(self, *states: torch.Tensor) -> None:
        """Pages have the dtype that the probe saw. Autocast changes it call by call, and then pages keep the wider one."""
        for tensor in states:
            if tensor.dtype != self.facts.dtype and not torch.is_autocast_enabled(tensor.device.type):
                raise UnsupportedCallError(
                    f"layer {self.facts.index} ({self.facts.owner}): its pages hold {self.facts.dtype} and it stores "
                    f"{tensor.dtype}; after a change of dtype, kvgroups.unpatch(model), then patch it again"
                )

    @property
    def keys(self) -> None:
        """There is no such tensor; the model's own code has no business with it."""
        raise UnsupportedCallError(
            f"layer {self.facts.index} ({self.facts.owner}): K and V lie in pages, and something reads "
            "cache.layers[i].keys or .values; kvgroups.unpatch(model) to run code that does"
        )

    @keys.setter
    def keys(self, value: None) -> None:
        """transformers' constructor clears what is not there."""

    values = keys

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: pages exist before the forward starts."""

    def get_seq_length(self) -> int:
        """Tokens of the past, as the model is told."""
        return 0 if self.running.step is None else self.running.step.past_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask would cover."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum of its own: `max_model_len` is checked before the forward."""
        return -1


@dataclass
class StepKV:
    """One layer's K and V of one pass: the handle between `update` and attention."""

    layer: AttentionLayer
    step: Step
    key: torch.Tensor
    """(num_tokens, num_kv_heads, head_dim), the real tokens."""
    value: torch.Tensor
    """(num_tokens, num_kv_heads, head_dim_v)."""

    def write(self) -> None:
        """Put K and V into pages: now, or, in a ring, once the last layer has read what they overwrite."""
        if self.step.groups[self.layer.group.name].ring_blocks:
            self.step.after_forward.append(self._write)
        else:
            self._write()

    def _write(self) -> None:
        views = self.layer.storage.layer(self.layer.facts.index)
        ops.write_kv(
            self.key.detach(),
            self.value.detach(),
            views["key"],
            views["value"],
            self.step.groups[self.layer.group.name].slots,
            layout=self.layer.group.layout,
        )

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole sequences as rectangles: history from pages, then the step's own tokens."""
        step, views = self.step, self.layer.storage.layer(self.layer.facts.index)
        key, value = ops.gather_kv(
            views["key"],
            views["value"],
            step.groups[self.layer.group.name].block_table,
            seq_lens=step.tensors.num_computed_tokens,
            max_seq_len=step.geometry.max_seq_len,
            layout=self.layer.group.layout,
        )
        row = torch.repeat_interleave(
            torch.arange(step.geometry.num_reqs, device=step.device),
            step.tensors.query_start_loc.diff(),
            output_size=step.geometry.num_tokens,
        )
        key[row, step.tensors.positions] = self.key
        value[row, step.tensors.positions] = self.value
        return rearrange(key, "b l h d -> b h l d"), rearrange(value, "b l h d -> b h l d")

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **scores: Any
    ) -> torch.Tensor:
        """Attention of the step's queries over history and the step itself.

        Args:
            query: (num_reqs, num_heads, columns, head_dim), the last columns of the step.
            key, value: what the layer passed on: the step's own, or transformed whole sequences.
            **scores: scale, softcap and sinks of the call.

        Returns:
            (num_reqs, columns, num_heads, head_dim_v); 0 where there is padding.
        """
        step, facts = self.step, self.layer.facts
        step.attended[facts.index] = True
        packed, query_start_loc, index = step.queries(query)
        common = {
            "query_start_loc": query_start_loc,
            "window": facts.window,
            "chunk": facts.chunk,
            "max_query_len": step.geometry.max_query_len,
            "max_seq_len": step.geometry.max_seq_len,
            **scores,
        }
        if facts.reads_gathered:
            output = self._attend_gathered(packed, key, value, common)
        else:
            group = step.groups[self.layer.group.name]
            has_past = not step.is_fresh
            views = self.layer.storage.layer(facts.index)
            output = ops.paged_attention(
                packed,
                self.key,
                self.value,
                views["key"] if has_past else None,
                views["value"] if has_past else None,
                group.block_table if has_past else None,
                kv_start_loc=step.tensors.query_start_loc,
                num_computed_tokens=step.tensors.num_computed_tokens,
                layout=self.layer.group.layout,
                ring_blocks=group.ring_blocks,
                **common,
            )
        num_reqs, num_heads, columns, _ = query.shape
        if index is not None:
            padded = output.new_zeros((num_reqs * columns, num_heads, output.shape[-1]))
            output = padded.index_copy_(0, index, output)
        return output.reshape(num_reqs, columns, *output.shape[1:])

    def _attend_gathered(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, common: dict[str, Any]
    ) -> torch.Tensor:
        """Whole sequences are one long step without history; the queries are its last tokens."""
        step = self.step
        lengths = step.tensors.seq_lens
        is_real = torch.arange(key.shape[2], device=step.device) < lengths[:, None]
        index = is_real.view(-1).nonzero().squeeze(1)
        kv_start_loc = torch.zeros_like(step.tensors.query_start_loc)
        kv_start_loc[1:] = lengths.cumsum(0)
        return ops.paged_attention(
            query,
            rearrange(key, "b h l d -> (b l) h d").index_select(0, index),
            rearrange(value, "b h l d -> (b l) h d").index_select(0, index),
            None,
            None,
            None,
            kv_start_loc=kv_start_loc,
            num_computed_tokens=torch.zeros_like(lengths),
            layout=self.layer.group.layout,
            **common,
        )


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over grouped pages. Masks are not read: what a row holds is in its tables.

    Args:
        module: the attention layer that calls.
        query: (num_reqs, num_heads, columns, head_dim).
        key: (num_reqs, num_kv_heads, tokens, head_dim), carrying a handle unless `kwargs` does.
        value: (num_reqs, num_kv_heads, tokens, head_dim_v).
        attention_mask: not read.
        scaling: factor on the scores; None means `head_dim ** -0.5`.
        dropout: must be 0; a cache is for inference.
        softcap: soft cap of the scores, None for none.
        s_aux: (num_heads,), one sink logit a head, None for none.

    Returns:
        Output (num_reqs, columns, num_heads, head_dim_v), and no weights.

    Raises:
        UnsupportedCallError: if K was not filed by a cache layer of ours. The probe lets no model through that
            attends over anything else, so the layer was not handed its cache, or is not the model's.
    """
    handle = kwargs.pop(HANDLE, None) or getattr(key, HANDLE, None)
    if handle is None:
        raise UnsupportedCallError(
            f"{type(module).__name__} (layer_idx {getattr(module, 'layer_idx', None)}): its attention was called with K "
            f"that is in no kvgroups cache; {CAUSES}"
        )
    if dropout:
        raise UnsupportedCallError("attention dropout with a kvgroups cache; call model.eval() first")
    scores = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.reshape(-1),
    }
    if torch.is_autocast_enabled(query.device.type):
        return _attend_as_stored(handle, query, key, value, scores=scores), None
    return handle.attend(query, key, value, **scores), None


def _attend_as_stored(handle: StepKV, *states: torch.Tensor, scores: dict[str, Any]) -> torch.Tensor:
    """Attention in the pages' dtype, where autocast would have the kernels mix two."""
    with torch.autocast(states[0].device.type, enabled=False):
        output = handle.attend(*(tensor.to(handle.layer.facts.dtype) for tensor in states), **scores)
    return output.to(states[0].dtype)


def register_attention() -> None:
    """Make `attention_forward` known to transformers, without a mask function, so that none is built for it."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
