"""Learn what each layer of a model hands to its cache, by watching it instead of guessing from its config.

Two tokens go through the model on the meta device, so nothing is computed and no memory is taken, then two
more on top of them. What the layers pass to the cache gives shapes and dtypes; what they read of it says how
they can be continued.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, get_layer_types_and_kwargs
from transformers.modeling_utils import AttentionInterface

from kvgroups.errors import UnsupportedModelError
from kvgroups.specs.mamba import StateTensor
from kvgroups.specs.thread_setting import thread_setting
from kvgroups.specs.uncompiled import uncompiled

PROBE_ATTENTION = "kvgroups_probe"
"""The name under which the probe's recording attention function is registered."""

SERVED_LAYER_TYPES = frozenset({
    "full_attention", "sliding_attention", "chunked_attention",
    "linear_attention", "conv", "hybrid", "hybrid_sliding", "dummy",
})  # fmt: skip
"""transformers' layer types that the generic adapters know how to keep."""

_UNSERVED_ATTENTION_ARGUMENTS = ("position_bias", "block_indices", "sinks")
"""Attention arguments that change the scores in ways that the paged kernels do not compute."""

_TOKENS = 2

_lock = threading.RLock()
"""Held by the one probe that runs: it hangs hooks and meta weights on modules, which models may share."""


@dataclass
class LayerFacts:
    """What one cache layer of the model does."""

    index: int
    layer_type: str
    owner: str = "unknown module"
    """Path and class of the module that fed the cache, for messages."""
    mixer: str | None = None
    """Path of the module that keeps the states; None for a layer without."""
    window: int | None = None
    """W in tokens, the query included; None unless the layer is a sliding window."""
    chunk: int | None = None
    """C in tokens; None unless the layer is chunked."""
    key_shape: tuple[int, int] | None = None
    """(num_kv_heads, head_dim) of K as stored; None for a layer without attention."""
    value_shape: tuple[int, int] | None = None
    """(num_kv_heads, head_dim_v) of V as stored."""
    dtype: torch.dtype | None = None
    """Element type of K and V."""
    num_mixers: int = 1
    """How many modules keep states in this layer."""
    states: tuple[StateTensor, ...] = ()
    """The recurrent states; empty for a layer without."""
    reads_gathered: bool = False
    """Whether the layer transforms K or V after storing them, and so needs the whole sequence back."""
    is_exact: bool = True
    """Whether several tokens on a filled state give what one by one gives."""
    attention_calls: int = 0
    """How often attention was called on this layer's K in one forward."""
    refusals: list[str] = field(default_factory=list)
    """Reasons why the layer cannot be served."""


def probe(model: PreTrainedModel) -> list[LayerFacts]:
    """What each cache layer of `model` stores and reads. The model is left as it was.

    Args:
        model: a causal language model of transformers; its weights are not read unless the forward cannot
            run on meta tensors, in which case four tokens go through the real model.

    Raises:
        UnsupportedModelError: naming layer, module and class, if a layer's cache cannot be kept.
    """
    config = model.config.get_text_config(decoder=True)
    layer_types, arguments = get_layer_types_and_kwargs(config)
    for index, layer_type in enumerate(layer_types):
        if layer_type not in SERVED_LAYER_TYPES:
            raise UnsupportedModelError(
                f"{type(model).__name__}: layer {index} has layer type {layer_type!r}, which no adapter serves; "
                f"served are {', '.join(sorted(SERVED_LAYER_TYPES))}"
            )
    with _lock:
        watcher = _watched(model)
    facts = watcher.facts(layer_types, arguments)
    for layer in facts:
        if layer.refusals:
            raise UnsupportedModelError(
                f"{type(model).__name__}: layer {layer.index} ({layer.layer_type}, {layer.owner}) cannot be served: "
                + "; ".join(layer.refusals)
            )
    if watcher.side_attention:
        raise UnsupportedModelError(
            f"{type(model).__name__}: {watcher.side_attention[0]} attends over something that no cache layer stored, "
            "for which no masks are built on a patched model, so no adapter serves it"
        )
    return facts


def _watched(model: PreTrainedModel) -> _Watcher:
    """A watcher that has seen both probing forwards."""
    watcher = _Watcher(model)
    try:
        _watch(watcher, meta=True)
    except Exception:  # data-dependent control flow, which meta tensors cannot follow: the real ones can
        watcher = _Watcher(model)
        try:
            _watch(watcher, meta=False)
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(model).__name__}: {watcher.innermost} cannot run on transformers' Cache without attention masks "
                f"({type(error).__name__}: {error}), so no adapter serves it"
            ) from error
    return watcher


def module_configs(model: PreTrainedModel) -> list[Any]:
    """Every config object that a module of the model reads its settings from, once."""
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}
    return list(configs.values())


@contextmanager
def attention_setting(configs: Sequence[Any], name: str | None) -> Iterator[None]:
    """Have the configs of a model name attention `name`, in this thread alone; None for their own setting."""
    with thread_setting(configs, "_attn_implementation_internal", name):
        yield


def _watch(watcher: _Watcher, *, meta: bool) -> None:
    """Run the two probing forwards under the watcher's eyes."""
    model = watcher.model
    device = torch.device("meta") if meta else model.device
    named = [*model.named_parameters(), *model.named_buffers()]
    weights = {name: torch.empty_like(tensor, device="meta") for name, tensor in named} if meta else {}

    def step(start: int) -> torch.Tensor:
        ids = torch.ones((1, _TOKENS), dtype=torch.long, device=device)
        kwargs = {"input_ids": ids, "cache": watcher.cache, "use_cache": True, "return_dict": True}
        kwargs["position_ids"] = torch.arange(start, start + _TOKENS, device=device)[None]
        kwargs = {key: value for key, value in kwargs.items() if key in watcher.accepted}
        if not meta:
            return model(**kwargs).logits
        return torch.func.functional_call(model, weights, args=(), kwargs=kwargs).logits

    with ExitStack() as stack:
        configs = module_configs(model)
        stack.enter_context(attention_setting(configs, PROBE_ATTENTION))
        # Experts as batched matrix products: the other forms ask tensors for values, which meta tensors lack.
        stack.enter_context(thread_setting(configs, "_experts_implementation_internal", "batched_mm"))
        stack.enter_context(uncompiled())
        stack.enter_context(watcher.watching())
        stack.enter_context(torch.inference_mode(False))
        with torch.no_grad():
            step(0)
        with torch.enable_grad():
            watcher.cache.start_continuation()
            logits = step(_TOKENS)
        watcher.note_unread_states(logits)


class _ProbeCache(DynamicCache):
    """transformers' own cache, with every call reported to the watcher."""

    def __init__(self, watcher: _Watcher, config: Any) -> None:
        super().__init__(config=config)
        self.watcher = watcher
        for index, layer in enumerate(self.layers):
            layer.probe_source = index  # looped models append deep copies of layers: these say whose
        self.leaves: dict[tuple[int, str], torch.Tensor] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.watcher.saw_update(layer_idx, key_states, value_states, keys, values)
        return keys, values

    def start_continuation(self) -> None:
        """Hand out the states as autograd leaves from now on, so that it shows whether they are read."""
        for index, layer in enumerate(self.layers):
            for kind in ("conv", "recurrent"):
                for state_idx, state in getattr(layer, f"{kind}_states", {}).items():
                    if state is not None:
                        leaf = torch.zeros_like(state, requires_grad=True)
                        self.leaves[index, _state_name(kind, state_idx)] = leaf
                        getattr(layer, f"{kind}_states")[state_idx] = leaf.clone()

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        state = super().get_recurrent_state(layer_idx, state_idx)
        return (
            state if state is None else state.clone()
        )  # the update that follows writes the stored one in place

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, **kwargs):
        full = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        self.watcher.saw_state(layer_idx)
        return full

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0, **kwargs):
        state = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        self.watcher.saw_state(layer_idx)
        return state


def _state_name(kind: str, state_idx: int) -> str:
    return kind if state_idx == 0 else f"{kind}_{state_idx}"


class _Watcher:
    """Collects what the layers did, module by module."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache = _ProbeCache(self, model.config.get_text_config(decoder=True))
        self.accepted = _accepted_arguments(model)
        self.by_layer: dict[int, LayerFacts] = {}
        self.stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.stack: list[str] = []
        self.innermost = type(model).__name__  # the module that was entered last, for a failure's message
        self.side_attention: list[str] = []  # modules that attend over what no cache layer stored
        self.thread = threading.get_ident()
        self.waiting: int | None = None  # the layer whose update has not been followed by attention yet

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep track of the running module, and record attention calls, while inside."""
        AttentionInterface.register(PROBE_ATTENTION, self.attention)
        handles = []
        for name, module in self.model.named_modules():
            label = f"{name} {type(module).__name__}" if name else type(module).__name__
            handles.append(module.register_forward_pre_hook(self._enter(label), prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            AttentionInterface._global_mapping.pop(PROBE_ATTENTION, None)

    def _enter(self, label: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            if threading.get_ident() == self.thread:
                self.stack.append(label)
                self.innermost = label

        return enter

    def _leave(self, *_: Any) -> None:
        if threading.get_ident() == self.thread:
            self.stack.pop()

    def layer(self, index: int) -> LayerFacts:
        facts = self.by_layer.setdefault(index, LayerFacts(index=index, layer_type=""))
        if self.stack:
            facts.owner = self.stack[-1]
        return facts

    def saw_update(self, index: int, key: torch.Tensor, value: torch.Tensor, *stored: torch.Tensor) -> None:
        facts = self.layer(index)
        facts.key_shape = (key.shape[1], key.shape[3])
        facts.value_shape = (value.shape[1], value.shape[3])
        facts.dtype = key.dtype
        facts.attention_calls = 0
        if key.shape[1] != value.shape[1]:
            facts.refusals.append(f"K has {key.shape[1]} heads and V {value.shape[1]}")
        self.stored[index] = stored  # type: ignore[assignment]
        self.waiting = index

    def saw_state(self, index: int) -> None:
        facts = self.layer(index)
        mixer = self.stack[-1].partition(" ")[0]
        if facts.mixer not in (None, mixer):
            facts.num_mixers += 1
        facts.mixer = mixer

    def attention(self, module: Any, query, key, value, mask=None, **kwargs):
        """Stands in for attention: notes which layer's K it was given. Its output depends on Q, K and V alike,
        so that a gradient finds its way through."""
        index, is_stored = self._whose(key, value)
        if index is not None:
            facts = self.by_layer[index]
            facts.attention_calls += 1
            facts.reads_gathered |= not is_stored
            self._check_arguments(facts, module, kwargs)
            if index == self.waiting:
                self.waiting = None
        else:
            self.side_attention.append(self.stack[-1])
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return (query.mean() + key.mean() + value.mean()).expand(shape), None

    def _whose(self, key: torch.Tensor, value: torch.Tensor) -> tuple[int | None, bool]:
        for index, (stored_key, stored_value) in self.stored.items():
            if key is stored_key:
                return index, value is stored_value
        if self.waiting is not None and key.shape[2] == self.stored[self.waiting][0].shape[2]:
            return self.waiting, False  # the whole sequence, transformed
        return None, False

    def _check_arguments(self, facts: LayerFacts, module: Any, kwargs: dict[str, Any]) -> None:
        for name in _UNSERVED_ATTENTION_ARGUMENTS:
            if kwargs.get(name) is not None:
                facts.refusals.append(f"its attention takes {name!r}, which the paged kernels do not compute")
        if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
            facts.refusals.append("its attention is not causal")

    def note_unread_states(self, logits: torch.Tensor) -> None:
        """A layer whose stored state has no influence on two further tokens must be fed one by one."""
        leaves = self.cache.leaves
        if not leaves:
            return
        gradients = torch.autograd.grad(logits.sum(), list(leaves.values()), allow_unused=True)
        for (index, _), gradient in zip(leaves, gradients, strict=True):
            if gradient is None:
                self.by_layer[index].is_exact = False

    def facts(self, layer_types: list[str], arguments: list[dict[str, Any]]) -> list[LayerFacts]:
        """One `LayerFacts` per cache layer, the configured and the observed put together."""
        result = []
        for index, layer in enumerate(self.cache.layers):
            layer_type, given = layer_types[layer.probe_source], arguments[layer.probe_source]
            facts = self.by_layer.get(index) or LayerFacts(index=index, layer_type=layer_type)
            facts.layer_type = layer_type
            if layer_type == "chunked_attention":
                facts.chunk = given["sliding_window"]
            else:
                facts.window = given.get("sliding_window")
            facts.states = self._states(index)
            self._check_seen(facts)
            result.append(facts)
        return result

    def _states(self, index: int) -> tuple[StateTensor, ...]:
        layer = self.cache.layers[index]
        return tuple(
            StateTensor(name=_state_name(kind, state_idx), shape=tuple(state.shape[1:]), dtype=state.dtype)
            for kind in ("conv", "recurrent")
            for state_idx, state in getattr(layer, f"{kind}_states", {}).items()
            if state is not None
        )

    def _check_seen(self, facts: LayerFacts) -> None:
        wants_state = facts.layer_type in ("linear_attention", "conv", "hybrid", "hybrid_sliding")
        wants_tokens = facts.layer_type not in ("linear_attention", "conv", "dummy")
        if wants_state and not facts.states:
            facts.refusals.append("it keeps its state somewhere else than in transformers' Cache")
        if wants_tokens and facts.key_shape is None:
            facts.refusals.append("it keeps its K and V somewhere else than in transformers' Cache")
        if facts.key_shape is not None and not facts.attention_calls:
            facts.refusals.append("its attention does not go through transformers' AttentionInterface")


def _accepted_arguments(model: PreTrainedModel) -> set[str]:
    parameters = inspect.signature(type(model).forward).parameters
    names = set(parameters)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        names |= {"use_cache", "return_dict"}
    if "cache" not in names:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its forward takes no `cache` argument, so its layers keep their state elsewhere"
        )
    return names
