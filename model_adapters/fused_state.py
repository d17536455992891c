"""State layers on our kernels, in place on state slots, ragged batches and all: the fused tier.

transformers' mixers are written around a handful of named kernels: the causal convolution and the scan, each
for a whole sequence and for one token. A fused mixer is the mixer's own code, its projections, norms and gates,
with those names bound to kernels that know the step: which tokens belong to which request, and which slot holds
whose state. So it also is right where the mixer's own kernels are not: Mamba-1's scan starts from zero however
filled the state is, ours starts from the slot.

The mixer sees the real tokens only: packed as one row (1, num_tokens) where some request feeds more than one,
or as (num_reqs, 1) where each feeds one, which is the form in which it takes its single-step path.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvgroups import ops
from kvgroups.errors import UnsupportedCallError
from kvgroups.model_adapters.base import CAUSES, Running, Step
from kvgroups.model_adapters.generic_state import StateLayer

CONVOLUTION = frozenset({"causal_conv1d_fn", "causal_conv1d_update"})
MAMBA1 = CONVOLUTION | {"mamba_selective_scan", "mamba_selective_state_update"}
MAMBA2 = CONVOLUTION | {"mamba2_chunk_scan", "mamba2_selective_state_update"}
_ACTIVATIONS = (None, "silu", "swish")


def _outside_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as it is written: under autocast its products would have another dtype than its states."""

    @functools.wraps(kernel)
    def run(self: FusedMixer, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(first.device.type):
            return kernel(self, first, *args, **kwargs)
        with torch.autocast(first.device.type, enabled=False):
            return kernel(self, first, *args, **kwargs)

    return run


class FusedMixer:
    """One mixer of a model, run on state slots.

    Args:
        module: the mixer.
        index: its cache layer.
        kernels: the names that its code calls: one of CONVOLUTION, MAMBA1, MAMBA2.
    """

    continuation = "exact"
    """Several tokens on a filled state give what one by one gives."""

    def __init__(self, module: torch.nn.Module, index: int, kernels: frozenset[str]) -> None:
        self.module = module
        self.index = index
        self.instance_forward = module.__dict__.get("forward")
        own = inspect.unwrap(type(module).forward)
        namespace = {**own.__globals__, **{name: getattr(self, name) for name in kernels}}
        rebound = types.FunctionType(own.__code__, namespace, own.__name__, own.__defaults__, own.__closure__)
        rebound.__kwdefaults__ = own.__kwdefaults__
        self.own_forward = types.MethodType(rebound, module)
        self.parameters = list(inspect.signature(self.own_forward).parameters)

    def is_current(self) -> bool:
        """Whether the module has the forward that it had when it was patched. For use between forwards."""
        return self.module.__dict__.get("forward") is self.instance_forward

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stands in for the mixer's forward while a cache of ours is running.

        Takes the mixer's own arguments, `hidden_states` (batch, query_len, hidden) and the cache among them.

        Returns:
            (batch, query_len, hidden), 0 where there is padding.
        """
        arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        hidden_states, cache = arguments.pop("hidden_states"), arguments.pop("cache", None)
        arguments.pop("attention_mask", None)
        if not isinstance(getattr(cache, "running", None), Running):
            raise UnsupportedCallError(
                f"{type(self.module).__name__} (cache layer {self.index}): inside a forward over a kvgroups cache, it was "
                f"called with {type(cache).__name__} for its cache; {CAUSES}"
            )
        self.layer: StateLayer = cache.layers[self.index]
        self.step: Step = cache.running.require()
        self.layer.was_used = True
        self.num_scans = 0
        batch_size, query_len, hidden = hidden_states.shape
        tokens = hidden_states.reshape(-1, hidden)
        index = self.step.token_index
        if index is not None:
            tokens = tokens.index_select(0, index)
        if not len(tokens):
            return torch.zeros_like(hidden_states)
        tokens = tokens[:, None] if self.step.is_decode else tokens[None]
        output = self.own_forward(tokens, cache=_SlotCache(self), **arguments).reshape(-1, hidden)
        if index is not None:
            output = output.new_zeros((batch_size * query_len, hidden)).index_copy_(0, index, output)
        return output.view(batch_size, query_len, hidden)

    # The kernels that the mixer's code calls, under the names that it calls them by. Tensors have the mixer's
    # shapes: a leading dimension of 1 and the tokens as the last or second.

    @_outside_autocast
    def causal_conv1d_fn(self, x, weight, bias=None, activation=None, **_):
        output = ops.causal_conv1d(x[0].mT, weight, bias, self._states("conv"), activation=activation, **self._slots())
        return output.mT[None]

    @_outside_autocast
    def causal_conv1d_update(self, x, conv_state, weight, bias=None, activation=None, **_):
        slots = self._slots()["final_slots"]
        return ops.causal_conv1d_update(x[..., 0], conv_state, slots, weight, bias, activation=activation)[..., None]

    @_outside_autocast
    def mamba_selective_scan(self, x, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, **_):
        x, B, C, z = _widest(x, B, C, z)
        states = self._states("recurrent")
        if states.ndim == 4:  # heads of their own, scanned one after the other
            states = states[:, self.num_scans]
        self.num_scans += 1
        output = ops.selective_scan(
            x[0].mT, dt[0].mT, A, B[0].mT, C[0].mT, states,
            D=D, z=None if z is None else z[0].mT, dt_bias=delta_bias, dt_softplus=delta_softplus, **self._slots(),
        )  # fmt: skip
        return output.mT[None], output.new_empty(0)  # the final state is in its slot already

    @_outside_autocast
    def mamba_selective_state_update(self, state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, **_):
        x, B, C, z = _widest(x, B, C, z)
        slots = self._slots()["final_slots"]
        return ops.selective_state_update(
            state, slots, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus
        )

    mamba2_selective_state_update = mamba_selective_state_update

    @_outside_autocast
    def mamba2_chunk_scan(
        self, x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, float("inf")), **_
    ):
        x, B, C, z = _widest(x, B, C, z)
        output = ops.ssd_scan(
            x[0], dt[0], A, B[0], C[0], self._states("recurrent"),
            chunk_size=chunk_size, D=D, z=None if z is None else z[0], dt_bias=dt_bias, dt_softplus=dt_softplus,
            dt_limit=dt_limit, is_limited=self.step.is_prefill, **self._slots(),
        )  # fmt: skip
        return output[None], output.new_empty(0)

    def _states(self, kind: str) -> torch.Tensor:
        return self.layer.view(kind)

    def _slots(self) -> dict[str, torch.Tensor]:
        group = self.layer.state_group.name
        initial, final = self.step.state_slots(group)
        return {
            "query_start_loc": self.step.tensors.query_start_loc,
            "initial_slots": initial,
            "final_slots": final,
            "snapshot_tokens": self.step.snapshot_tokens,
            "snapshot_slots": self.step.snapshot_slots.get(group),
        }


def _widest(*tensors: torch.Tensor | None) -> list[Any]:
    """The tensors in the widest of their dtypes: under autocast, projections and norms leave different ones."""
    dtypes = [tensor.dtype for tensor in tensors if tensor is not None]
    dtype = functools.reduce(torch.promote_types, dtypes)
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


class _SlotCache:
    """What a fused mixer takes for its cache: states are named, not handed over."""

    def __init__(self, mixer: FusedMixer) -> None:
        self.mixer = mixer

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.mixer._states("conv") if self.mixer.step.is_decode else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.mixer._states("recurrent") if self.mixer.step.is_decode else None

    def update_conv_state(self, conv_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return conv_states  # the convolution reads and writes the slots itself

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def fusable_kernels(module: torch.nn.Module, states: set[str]) -> tuple[frozenset[str] | None, list[str]]:
    """Which set of kernels a mixer is written around, or every reason why it cannot be fused.

    Args:
        module: the mixer.
        states: the names of its states. A mixer with a recurrent state must scan it with a kernel we know.

    Returns:
        The set, and no reasons; or None, and the reasons.
    """
    called = set(inspect.unwrap(type(module).forward).__code__.co_names)
    kernels = (MAMBA1 | MAMBA2) & called
    wanted = {("conv",): (CONVOLUTION,), ("conv", "recurrent"): (MAMBA1, MAMBA2)}.get(tuple(sorted(states)), ())
    reasons = []
    if kernels not in wanted:
        names = ", ".join(sorted(kernels)) or "no kernels"
        reasons.append(f"its forward calls {names} that have a fused form, and it keeps {', '.join(sorted(states))}")
    if getattr(module, "activation", None) not in _ACTIVATIONS:
        reasons.append(f"the activation of its convolution is {module.activation!r}, not silu")
    return (None, reasons) if reasons else (kernels, [])


class _InForce(threading.local):
    """The fused mixers of the forward that runs in the current thread, by the id of their module."""

    def __init__(self) -> None:
        self.mixers: Mapping[int, FusedMixer] = {}


_in_force = _InForce()
_lock = threading.RLock()
_num_users: dict[int, int] = {}
"""id of a module -> how many forwards, over all threads, run it fused."""
_hidden: dict[int, Any] = {}
"""id of such a module -> the forward that was an attribute of the instance itself, if there was one."""


@contextmanager
def running_fused(mixers: Sequence[FusedMixer]) -> Iterator[None]:
    """Run the mixers' modules fused in this thread, and nowhere else; with none, run all modules as they are.

    Modules are shared between threads, and between models that were put together from the same parts. What stands
    in for their forward asks who calls, and the last forward that needs it takes it off.
    """
    outer, entered = _in_force.mixers, []
    try:
        for mixer in mixers:
            _enter(mixer)
            entered.append(mixer.module)
        _in_force.mixers = {id(mixer.module): mixer for mixer in mixers}
        yield
    finally:
        _in_force.mixers = outer
        for module in entered:
            _leave(module)


def _enter(mixer: FusedMixer) -> None:
    module = mixer.module
    with _lock:
        key = id(module)
        if key not in _num_users:
            if not mixer.is_current():
                raise UnsupportedCallError(
                    f"{type(module).__name__} (cache layer {mixer.index}): something has put a forward of its own on it "
                    "after patch, which it would not run fused; kvgroups.unpatch(model), then patch it again"
                )
            if "forward" in module.__dict__:
                _hidden[key] = module.__dict__["forward"]
            module.__dict__["forward"] = _stand_in(module, module.forward)
        _num_users[key] = _num_users.get(key, 0) + 1


def _leave(module: torch.nn.Module) -> None:
    with _lock:
        key = id(module)
        _num_users[key] -= 1
        if _num_users[key]:
            return
        del _num_users[key]
        if key in _hidden:
            module.__dict__["forward"] = _hidden.pop(key)
        else:
            del module.__dict__["forward"]


def _stand_in(module: torch.nn.Module, own_forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        mixer = _in_force.mixers.get(id(module))
        return own_forward(*args, **kwargs) if mixer is None else mixer.forward(*args, **kwargs)

    return forward
