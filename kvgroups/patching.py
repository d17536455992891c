"""Put a model's layers on grouped paged caches, and take it off again without a trace."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

from kvgroups import ops
from kvgroups.backward import refuse_backward
from kvgroups.cache import CacheContext, GroupedCache, find_cache
from kvgroups.call_arguments import bind_arguments
from kvgroups.drafts import check_past, limit_drafts
from kvgroups.errors import SpecError, UnsupportedCallError, UnsupportedModelError
from kvgroups.generate_checks import check_prompt
from kvgroups.manager import Manager
from kvgroups.model_adapters import ATTENTION_NAME, find_mixers, register_attention, running_fused
from kvgroups.ops.dispatch import check_backend
from kvgroups.specs import GroupConfig, KVGroupsConfig, MambaSpec
from kvgroups.specs.infer import config_from_facts, layer_specs
from kvgroups.specs.model_kind import check_model
from kvgroups.specs.probe import LayerFacts, attention_setting, module_configs, probe
from kvgroups.specs.uncompiled import uncompiled

Model = TypeVar("Model", bound=PreTrainedModel)

_SERVED_MODES = {
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
}

_REFUSED_INPUTS = ("pixel_values", "pixel_values_videos", "input_features", "image_grid_thw")
"""Inputs that make a model build masks of its own, which our attention would not see."""


def patch(
    model: Model, config: KVGroupsConfig | None = None, *, fused: bool = True, backend: str = "auto"
) -> Model:
    """Make `model.generate` run on block tables, one for each KV-cache group.

    Only forwards whose cache is a `GroupedCache` are changed: `generate` makes one by itself. Everything else,
    training, a forward without a cache or with one of transformers' own, runs as before, bit for bit. A model
    that is patched already is left as it is, unless another config is given.

    Args:
        model: a causal language model of transformers, on one device. Changed in place.
        config: groups and limits; None for `infer_config(model)`.
        fused: whether state layers that can run on their slots in place do. Without, they keep all of their own
            code and see gathered copies of their states; rows with padding then go through one after the other.
        backend: what computes the kernels: `triton`, `cpu` (those that have a form in C++), `torch` or `reference`;
            with `auto` the device decides, or `ops.use_backend` around the call. Whether it serves
            the model's device shows in the first forward over a cache.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: naming layer and class, if a layer's cache cannot be kept, or saying what to pass, if
            it is no causal language model; the model is untouched.
        SpecError: if `config` is not valid or does not describe this model.
        UnsupportedCallError: if `fused` is neither True nor False.
        BackendUnavailableError: if no operation has such a backend.

    Example:
        >>> from kvgroups.testing import tiny
        >>> model = patch(tiny("bamba"))
        >>> model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3).shape
        torch.Size([1, 6])
        >>> unpatch(model) is model
        True
    """
    check_model(model)
    if not isinstance(fused, bool):
        raise UnsupportedCallError(f"fused: expected True or False, got {fused!r}")
    check_backend("patch", backend)
    config = _valid(config)
    present = _patch_of(model)
    if present is not None:
        same = (fused, backend) == (present.is_fused, present.backend) and present.is_current()
        if same and config in (None, present.context.config):
            return model
        unpatch(model)
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread over {', '.join(devices)}; load it on one device"
        )
    facts = probe(model)
    if config is None:
        config = config_from_facts(model, facts, {})
    else:
        _check_config(config, facts)
    _check_modes(config, facts)
    register_attention()
    Patch(model, config, facts, fused=fused, backend=backend).install()
    return model


def unpatch(model: Model) -> Model:
    """Undo `patch`: the model's forward, methods and settings are the very objects that they were.

    A model that is not patched is left as it is. Caches that are still held keep their blocks but cannot be
    used any more.

    Raises:
        UnsupportedModelError: if it is no `torch.nn.Module`.
    """
    present = _patch_of(model)
    if present is not None:
        present.remove()
    return model


def is_patched(model: torch.nn.Module) -> bool:
    """Whether `patch` is in force on this model.

    Raises:
        UnsupportedModelError: if it is no `torch.nn.Module`.
    """
    return _patch_of(model) is not None


class Patch:
    """What `patch` puts on one model.

    Everything is an attribute of the instance that hides one of its class, so that taking it off restores
    the class's own.

    Args:
        model: the model.
        config: checked against `facts`.
        facts: what the probe saw.
        fused: whether state layers that can run fused do.
        backend: what computes the kernels.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: KVGroupsConfig,
        facts: Sequence[LayerFacts],
        *,
        fused: bool,
        backend: str,
    ) -> None:
        self.model = model
        self.is_fused = fused
        self.backend = backend
        self.original_forward = model.forward
        self.original_generate = model.generate
        self.context = CacheContext(
            config=config,
            facts=facts,
            manager=Manager(config, model.device),
            parameters=inspect.signature(model.forward).parameters,
            mixers=find_mixers(model, facts) if fused else (),
        )
        self._configs = module_configs(model)
        self._placement = (model.device, model.dtype)
        self._hidden: dict[str, Any] = {}
        self._running_in: int | None = None
        """The thread in which the model runs over a cache of ours at the moment."""

    def is_current(self) -> bool:
        """Whether the model still has the configs, mixers, device and dtype that it was patched with."""
        modules = set(map(id, self.model.modules()))
        return (
            self._placement == (self.model.device, self.model.dtype)
            and set(map(id, self._configs)) == set(map(id, module_configs(self.model)))
            and all(id(mixer.module) in modules and mixer.is_current() for mixer in self.context.mixers)
        )

    def install(self) -> None:
        """Hide the model's methods behind ours."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.forward(*args, **kwargs)

        # Our own frames are not traced; the model's forward that they call may still be.
        forward = torch.compiler.disable(forward, recursive=False)
        functools.update_wrapper(forward, self.original_forward)  # generate reads the signature

        @functools.wraps(self.original_generate)
        def generate(*args: Any, **kwargs: Any) -> Any:
            return self.generate(*args, **kwargs)

        attributes: dict[str, Any] = {
            "_kvgroups": self,
            "forward": forward,
            "generate": generate,
            "_prepare_cache_for_generation": self.prepare_cache,
            "_prefill": self.prefill,
            "_get_candidate_generator": self.candidate_generator,
            "__deepcopy__": self.deepcopy_model,
            "__getstate__": self.plain_state,
        }
        if type(self.model)._is_stateful and not self.context.splits_rows:
            attributes["_is_stateful"] = False  # transformers refuses to verify drafts on states; ours can go back
        # accelerate and others keep instance attributes of their own: put them back as they were
        self._hidden = {name: self.model.__dict__[name] for name in attributes if name in self.model.__dict__}
        self._installed = tuple(attributes)
        self.model.__dict__.update(attributes)

    def remove(self) -> None:
        """Take our attributes off."""
        for name in self._installed:
            del self.model.__dict__[name]
        self.model.__dict__.update(self._hidden)

    def plain_state(self) -> dict[str, Any]:
        """The model's attributes without ours: what pickling saves, so that a saved model is a plain one."""
        self._check_idle("pickled")
        plain = {name: value for name, value in self.model.__dict__.items() if name not in self._installed}
        return {**plain, **self._hidden}

    def deepcopy_model(self, memo: dict[int, Any]) -> PreTrainedModel:
        """A copy of the model, patched with empty pools of its own."""
        import copy

        self._check_idle("copied")
        model, config = self.model, self.context.config
        self.remove()
        try:
            twin = copy.deepcopy(model, memo)
        finally:
            self.install()
        return patch(twin, config, fused=self.is_fused, backend=self.backend)

    def _check_idle(self, what: str) -> None:
        """Mixers have stand-ins on them during a forward, which no copy may carry on."""
        if self.context.lock.locked():
            raise UnsupportedCallError(f"the model cannot be {what} inside a forward over a kvgroups cache; wait for it")

    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward: its own, unless the cache among the arguments is ours."""
        if any(isinstance(value, GroupedCache) for value in (*args, *kwargs.values())):
            inputs = bind_arguments(self.context.parameters, args, kwargs)
            return self._forward_over(inputs.pop("cache"), inputs)
        cache = find_cache({**dict(zip(self.context.parameters, args, strict=False)), **kwargs})
        if cache is not None and not _is_cache(cache):
            raise UnsupportedCallError(
                f"cache: expected a kvgroups.GroupedCache, a cache of transformers or None, got {type(cache).__name__}"
            )
        with self.plain_settings():
            return self.original_forward(*args, **kwargs)

    @torch.compiler.disable
    def _forward_over(self, cache: GroupedCache, inputs: dict[str, Any]) -> Any:
        self._check_forward(cache, inputs)
        inputs = {name: value for name, value in inputs.items() if value is not None}
        as_dict = inputs.get("return_dict", self.model.config.return_dict)
        inputs.update(cache=cache, return_dict=True)
        if getattr(self.model.config, "output_router_logits", False):
            inputs.setdefault("output_router_logits", True)
        if "use_cache" in self.context.parameters or self._takes_any_keyword():
            inputs["use_cache"] = True
        with self._alone(), torch.no_grad():
            output: ModelOutput = cache.forward(self.original_forward, inputs, self.settings)
        if self._would_have_gradients(inputs):
            refuse_backward(output)
        return output if as_dict else output.to_tuple()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No second forward over a cache of this model's at the same time."""
        is_ours = False
        try:
            with self.context.manager.guard:  # an interrupt waits until it is known who has the lock
                is_ours = self.context.lock.acquire(blocking=False)
            if not is_ours:
                raise UnsupportedCallError("a second forward at the same time on one model; run one after the other")
            yield
        finally:
            if is_ours:
                self.context.lock.release()

    def _would_have_gradients(self, inputs: dict[str, Any]) -> bool:
        """Whether the output of an unpatched model would require gradients."""
        if not torch.is_grad_enabled():
            return False
        embeds = inputs.get("inputs_embeds")
        tensors = self.model.parameters() if embeds is None else (embeds, *self.model.parameters())
        return any(tensor.requires_grad for tensor in tensors)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """What holds in this thread while the model's own forward runs over a cache of ours, and nowhere else."""
        self._running_in = threading.get_ident()
        try:
            with (
                nullcontext() if self.backend == "auto" else ops.use_backend(self.backend),
                uncompiled(),
                attention_setting(self._configs, ATTENTION_NAME),
                running_fused(self.context.mixers),
            ):
                yield
        finally:
            self._running_in = None

    def plain_settings(self) -> AbstractContextManager[None]:
        """What a forward without a cache of ours runs under: the model's own settings, also where a hook of a
        forward over a cache of ours makes it."""
        if self._running_in != threading.get_ident():
            return nullcontext()
        return self._own_settings()

    @contextmanager
    def _own_settings(self) -> Iterator[None]:
        with attention_setting(self._configs, None), running_fused(()):
            yield

    def _takes_any_keyword(self) -> bool:
        return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.context.parameters.values())

    def _check_forward(self, cache: GroupedCache, inputs: dict[str, Any]) -> None:
        if cache.context is not self.context:
            raise UnsupportedCallError(
                "cache: this GroupedCache belongs to another model or an earlier patch; make one with "
                "kvgroups.GroupedCache(model)"
            )
        if self._placement != (self.model.device, self.model.dtype):
            raise UnsupportedCallError(
                f"the model is {self.model.dtype} on {self.model.device} and was patched as {self._placement[1]} on "
                f"{self._placement[0]}, like its pages; kvgroups.unpatch(model), then patch it again"
            )
        if inputs.get("output_attentions") or self.model.config.output_attentions:
            raise UnsupportedCallError(
                "output_attentions: paged attention forms no weights; set output_attentions=False or kvgroups.unpatch(model)"
            )
        for name in _REFUSED_INPUTS:
            if inputs.get(name) is not None:
                raise UnsupportedCallError(
                    f"{name}: a patched model takes text only; leave it out or unpatch the model"
                )
        types = inputs.get("token_type_ids")
        if types is not None and bool(types.any()):
            raise UnsupportedCallError(
                "token_type_ids: blocks that see each other both ways are not served; leave them out or unpatch the model"
            )

    # generate

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, which then asks `prepare_cache` and `prefill`; but not transformers' engine.

        `cache_implementation="paged"` turns off to that engine before a cache is asked for. `generate_batch` is its
        own front door, and runs as on any other model.
        """
        if kwargs.get("cache_implementation") == "paged":
            raise UnsupportedCallError(
                "cache_implementation='paged': transformers' own engine would run, past this model's KV-cache groups; leave "
                "it out, or call model.generate_batch for that engine"
            )
        return self.original_generate(*args, **kwargs)

    def prepare_cache(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Called by `generate` where it would make its own cache: refuse what is not served, else make ours."""
        original = type(self.model)._prepare_cache_for_generation
        if generation_config.use_cache is False or generation_config.is_assistant:
            original(
                self.model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        self._check_generation(generation_config, generation_mode)
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        config = self.context.config
        if rows > config.max_num_reqs:
            raise UnsupportedCallError(
                f"{rows} sequences at once: max_num_reqs is {config.max_num_reqs}; patch the model with a config whose "
                "max_num_reqs is larger, or pass fewer"
            )
        if max_cache_length + 1 > config.max_model_len:
            raise UnsupportedCallError(
                f"max_length {max_cache_length + 1}: max_model_len is {config.max_model_len}; lower max_new_tokens or patch "
                "the model with a config whose max_model_len is larger"
            )
        cache = model_kwargs.get("cache")
        if cache is None:
            model_kwargs["cache"] = GroupedCache(self.model)
        elif not isinstance(cache, GroupedCache) or cache.context is not self.context:
            kind = (
                "a GroupedCache of another model" if isinstance(cache, GroupedCache) else type(cache).__name__
            )
            raise UnsupportedCallError(
                f"cache: generate on a patched model got {kind}; leave `cache` out, pass a kvgroups.GroupedCache of "
                "this model, or kvgroups.unpatch(model)"
            )
        elif cache.batch_size not in (-1, rows):
            raise UnsupportedCallError(
                f"cache: holds {cache.batch_size} rows and generate runs {rows}; pass the batch that it was filled with"
            )
        model_kwargs["cache"]._is_user_defined = cache is not None

    def _check_generation(self, generation_config: Any, mode: GenerationMode) -> None:
        if mode not in _SERVED_MODES:
            raise UnsupportedCallError(
                f"generate: mode {mode.value!r} is not served on a patched model; use greedy search, sampling "
                "or beams without an assistant, pass use_cache=False, or kvgroups.unpatch(model)"
            )
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise UnsupportedCallError(
                f"cache_implementation={implementation!r}: a patched model brings its own cache; leave it out, or "
                "kvgroups.unpatch(model)"
            )
        if generation_config.output_attentions:
            raise UnsupportedCallError(
                "output_attentions: paged attention forms no weights; set output_attentions=False or kvgroups.unpatch(model)"
            )

    def prefill(
        self,
        input_ids: torch.Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Called by `generate` before the first forward, with the whole prompt: the last check before blocks are taken."""
        cache = model_kwargs.get("cache")
        if isinstance(cache, GroupedCache):
            check_prompt(cache, input_ids, generation_config, model_kwargs)
        return type(self.model)._prefill(
            self.model, input_ids, generation_config, model_kwargs, *args, **kwargs
        )

    def candidate_generator(
        self,
        generation_config: Any,
        input_ids: torch.Tensor,
        inputs_tensor: torch.Tensor,
        logits_processor: Any,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Called by `generate` before the first forward with drafts, which goes past `_prefill`."""
        generator = type(self.model)._get_candidate_generator(
            self.model, generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs, *args, **kwargs
        )
        cache = model_kwargs.get("cache")
        if isinstance(cache, GroupedCache):
            check_past(cache)
            num_drafts = limit_drafts(generator, cache, generation_config.max_length)
            check_prompt(cache, input_ids, generation_config, model_kwargs, num_drafts)
        return generator


def _patch_of(model: torch.nn.Module) -> Patch | None:
    """What `patch` has put on a model; None if it is not patched."""
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedModelError(f"expected a model, got {model!r}; pass the model that kvgroups.patch was given")
    return model.__dict__.get("_kvgroups")


def _valid(config: KVGroupsConfig | None) -> KVGroupsConfig | None:
    """The config that a caller handed in, checked again: pydantic has doors that check nothing."""
    if config is None:
        return None
    if not isinstance(config, KVGroupsConfig):
        raise SpecError(
            f"config: expected a KVGroupsConfig, got {config!r}; use kvgroups.infer_config(model, memory=...) to change "
            "what a model gets, or KVGroupsConfig.load(path)"
        )
    return KVGroupsConfig.model_validate(config)


def _is_cache(value: Any) -> bool:
    """Whether layers could store in it; transformers' own paged cache is no `Cache`."""
    return callable(getattr(value, "update", None)) and not isinstance(value, dict)


def _check_config(config: KVGroupsConfig, facts: Sequence[LayerFacts]) -> None:
    """Hold a config that was handed in against what the layers really store."""
    for group in config.groups:
        for index in group.layers:
            if index >= len(facts):
                raise SpecError(
                    f"group {group.name!r}: layer {index}; the model has cache layers 0 to {len(facts) - 1}"
                )
    for layer in facts:
        for needed in layer_specs(layer):
            is_state = isinstance(needed, MambaSpec)
            groups = [g for g in config.groups if layer.index in g.layers and g.is_state == is_state]
            if not groups:
                raise SpecError(
                    f"groups: layer {layer.index} ({layer.owner}) stores {needed.kind} and is in no such group; add it"
                )
            if _essence(groups[0]) != _essence_of(needed):
                raise SpecError(
                    f"group {groups[0].name!r}: layer {layer.index} ({layer.owner}) stores {_essence_of(needed)}, "
                    f"the config says {_essence(groups[0])}"
                )
        kinds = {isinstance(needed, MambaSpec) for needed in layer_specs(layer)}
        for group in config.groups:
            if layer.index in group.layers and group.is_state not in kinds:
                raise SpecError(
                    f"group {group.name!r}: layer {layer.index} ({layer.owner}) stores no {group.spec.kind}"
                )


def _check_modes(config: KVGroupsConfig, facts: Sequence[LayerFacts]) -> None:
    for group in config.groups:
        for index in group.layers:
            if group.slot_mapping == "ring" and facts[index].reads_gathered:
                raise SpecError(
                    f"group {group.name!r}: layer {index} ({facts[index].owner}) reads whole sequences back, which a "
                    "ring does not keep; use slot_mapping 'paged'"
                )


def _essence(group: GroupConfig) -> dict[str, Any]:
    return _essence_of(group.spec)


def _essence_of(spec: Any) -> dict[str, Any]:
    """What must agree between config and model: all but the snapshot grid and the precision of states."""
    if isinstance(spec, MambaSpec):
        return {state.name: state.shape for state in spec.states}
    return {**spec.model_dump(), "head_dim_v": spec.value_dim}
