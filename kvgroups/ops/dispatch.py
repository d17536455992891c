"""Choosing a backend: which forms an operation has, and which of them serves a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvgroups.errors import BackendUnavailableError
from kvgroups.kernels.causal_conv1d import cpu_impl as causal_conv1d_cpu
from kvgroups.kernels.causal_conv1d import reference as causal_conv1d_reference
from kvgroups.kernels.causal_conv1d import torch_impl as causal_conv1d_torch
from kvgroups.kernels.copy_blocks import reference as copy_blocks_reference
from kvgroups.kernels.copy_blocks import torch_impl as copy_blocks_torch
from kvgroups.kernels.cpu_library import ISAS, cpu_library
from kvgroups.kernels.cpu_operand import ELEMENT_TYPES
from kvgroups.kernels.gather_kv import reference as gather_kv_reference
from kvgroups.kernels.gather_kv import torch_impl as gather_kv_torch
from kvgroups.kernels.merge_attention import reference as merge_attention_reference
from kvgroups.kernels.merge_attention import torch_impl as merge_attention_torch
from kvgroups.kernels.page_index import reference as page_index_reference
from kvgroups.kernels.page_index import torch_impl as page_index_torch
from kvgroups.kernels.paged_attention import cpu_impl as paged_attention_cpu
from kvgroups.kernels.paged_attention import reference as paged_attention_reference
from kvgroups.kernels.paged_attention import torch_impl as paged_attention_torch
from kvgroups.kernels.selective_scan import reference as selective_scan_reference
from kvgroups.kernels.selective_scan import torch_impl as selective_scan_torch
from kvgroups.kernels.slot_mapping import reference as slot_mapping_reference
from kvgroups.kernels.slot_mapping import torch_impl as slot_mapping_torch
from kvgroups.kernels.ssd_scan import reference as ssd_scan_reference
from kvgroups.kernels.ssd_scan import torch_impl as ssd_scan_torch
from kvgroups.kernels.state_slots import reference as state_slots_reference
from kvgroups.kernels.state_slots import torch_impl as state_slots_torch
from kvgroups.kernels.state_update import cpu_impl as state_update_cpu
from kvgroups.kernels.state_update import reference as state_update_reference
from kvgroups.kernels.state_update import torch_impl as state_update_torch
from kvgroups.kernels.table_update import reference as table_update_reference
from kvgroups.kernels.table_update import torch_impl as table_update_torch
from kvgroups.kernels.write_kv import cpu_impl as write_kv_cpu
from kvgroups.kernels.write_kv import reference as write_kv_reference
from kvgroups.kernels.write_kv import torch_impl as write_kv_torch
from kvgroups.ops.checks import dtype_name


def _no_refusals(*args: Any, **kwargs: Any) -> list[str]:
    """The reasons against a form that serves every call."""
    return []


@dataclass(frozen=True)
class Form:
    """One implementation of an operation; `refusals` takes a call and returns the reasons against it."""

    run: Callable[..., Any]
    refusals: Callable[..., list[str]] = _no_refusals
    auto_on: str | None = None
    """The type of device on which `auto` takes this form; None for any."""
    absences: Callable[[torch.device], list[str]] = _no_refusals
    """The reasons against it for any call on a device of this machine; `refusals` holds them too."""
    prepare: Callable[..., Callable[..., Any]] | None = None
    """Of a call, what runs every call with the same shapes, strides, dtypes and settings, as a function of the tensors in
    their order; None: `run` does."""


def _triton(folder: str, operation: str) -> Form:
    """The Triton form of an operation. Its module, and with it triton, is imported when it is first asked."""

    def module() -> Any:
        return import_module(f"kvgroups.kernels.{folder}.triton_impl")

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(_first_tensor(args)):  # triton launches on the current device
            return getattr(module(), operation)(*args, **kwargs)

    def absences(device: torch.device) -> list[str]:
        if find_spec("triton") is None:
            return ["needs the package triton, which is not installed"]
        if device.type != "cuda" and not (device.type == "cpu" and module().INTERPRETED):
            return [f"needs tensors on a GPU, or on the CPU with Triton's interpreter, got {device}"]
        return []

    def refusals(*args: Any, **kwargs: Any) -> list[str]:
        reasons = absences(_first_tensor(args).device)
        return reasons or getattr(module(), "refusals", _no_refusals)(*args, **kwargs)

    return Form(run, refusals, auto_on="cuda", absences=absences)


def _cpu(module: ModuleType, operation: str) -> Form:
    """The C++ form of an operation, which is there if it was built."""

    def absences(device: torch.device) -> list[str]:
        reasons = [] if device.type == "cpu" else [f"needs tensors on the CPU, got {device}"]
        return reasons if cpu_library().functions else [*reasons, cpu_library().reason]

    def refusals(*args: Any, **kwargs: Any) -> list[str]:
        given = _without_memory(*args, *kwargs.values())
        return absences(_first_tensor(args).device) + given + module.refusals(*args, **kwargs)

    prepare: Callable[..., Callable[..., Any]] | None = getattr(module, f"prepare_{operation}", None)

    def run(*args: Any, **kwargs: Any) -> Any:
        found = getattr(module, operation) if prepare is None else prepare(*args, **kwargs)
        return found(*args, **kwargs)

    return Form(run, refusals, auto_on="cpu", absences=absences, prepare=prepare)


def _without_memory(*args: Any) -> list[str]:
    """The reason against a C++ form if tensors are of classes that run PyTorch's operations themselves: these need not
    lie in memory, and PyTorch's fake tensors do not."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    names = sorted({type(t).__name__ for t in tensors if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__})
    return [f"needs tensors that lie in memory, got {', '.join(names)}"] if names else []


def _first_tensor(args: tuple[Any, ...]) -> Tensor:
    """The tensor whose device is the call's."""
    return next(arg for arg in args if isinstance(arg, Tensor))


FORMS: dict[str, dict[str, Form]] = {
    "slot_mapping": {
        "triton": _triton("slot_mapping", "slot_mapping"),
        "torch": Form(slot_mapping_torch.slot_mapping),
        "reference": Form(slot_mapping_reference.slot_mapping),
    },
    "table_update": {
        "triton": _triton("table_update", "table_update"),
        "torch": Form(table_update_torch.table_update),
        "reference": Form(table_update_reference.table_update),
    },
    "pack_csr": {
        "triton": _triton("page_index", "pack_csr"),
        "torch": Form(page_index_torch.pack_csr),
        "reference": Form(page_index_reference.pack_csr),
    },
    "pack_intervals": {
        "triton": _triton("page_index", "pack_intervals"),
        "torch": Form(page_index_torch.pack_intervals),
        "reference": Form(page_index_reference.pack_intervals),
    },
    "copy_blocks": {
        "triton": _triton("copy_blocks", "copy_blocks"),
        "torch": Form(copy_blocks_torch.copy_blocks),
        "reference": Form(copy_blocks_reference.copy_blocks),
    },
    "write_kv": {
        "triton": _triton("write_kv", "write_kv"),
        "cpu": _cpu(write_kv_cpu, "write_kv"),
        "torch": Form(write_kv_torch.write_kv),
        "reference": Form(write_kv_reference.write_kv),
    },
    "paged_attention": {
        "triton": _triton("paged_attention", "paged_attention"),
        "cpu": _cpu(paged_attention_cpu, "paged_attention"),
        "torch": Form(paged_attention_torch.paged_attention),
        "reference": Form(paged_attention_reference.paged_attention),
    },
    "merge_attention": {
        "triton": _triton("merge_attention", "merge_attention"),
        "torch": Form(merge_attention_torch.merge_attention),
        "reference": Form(merge_attention_reference.merge_attention),
    },
    "gather_kv": {
        "triton": _triton("gather_kv", "gather_kv"),
        "torch": Form(gather_kv_torch.gather_kv),
        "reference": Form(gather_kv_reference.gather_kv),
    },
    "gather_states": {
        "triton": _triton("state_slots", "gather_states"),
        "torch": Form(state_slots_torch.gather_states),
        "reference": Form(state_slots_reference.gather_states),
    },
    "scatter_states": {
        "triton": _triton("state_slots", "scatter_states"),
        "torch": Form(state_slots_torch.scatter_states),
        "reference": Form(state_slots_reference.scatter_states),
    },
    "causal_conv1d": {
        "triton": _triton("causal_conv1d", "causal_conv1d"),
        "torch": Form(causal_conv1d_torch.causal_conv1d),
        "reference": Form(causal_conv1d_reference.causal_conv1d),
    },
    "causal_conv1d_update": {
        "triton": _triton("causal_conv1d", "causal_conv1d_update"),
        "cpu": _cpu(causal_conv1d_cpu, "causal_conv1d_update"),
        "torch": Form(causal_conv1d_torch.causal_conv1d_update),
        "reference": Form(causal_conv1d_reference.causal_conv1d_update),
    },
    "selective_scan": {
        "triton": _triton("selective_scan", "selective_scan"),
        "torch": Form(selective_scan_torch.selective_scan),
        "reference": Form(selective_scan_reference.selective_scan),
    },
    "ssd_scan": {
        "triton": _triton("ssd_scan", "ssd_scan"),
        "torch": Form(ssd_scan_torch.ssd_scan),
        "reference": Form(ssd_scan_reference.ssd_scan),
    },
    "selective_state_update": {
        "triton": _triton("state_update", "selective_state_update"),
        "cpu": _cpu(state_update_cpu, "selective_state_update"),
        "torch": Form(state_update_torch.selective_state_update),
        "reference": Form(state_update_reference.selective_state_update),
    },
}
"""Operation -> backend -> form, in the order in which `auto` tries them. It never takes the reference."""

_default_backend: ContextVar[str] = ContextVar("kvgroups_backend", default="auto")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Make `name` the backend of every call in the block that does not ask for one itself.

    An operation that has no such form (few have one in C++) goes by `auto`. The default belongs to the
    running thread or task; blocks nest.

    Args:
        name: `auto`, `triton`, `cpu`, `torch` or `reference`.

    Raises:
        BackendUnavailableError: if no operation has such a backend.

    Example:
        >>> from kvgroups import ops
        >>> with ops.use_backend("reference"):
        ...     ops.gather_states(torch.ones(2, 1), torch.tensor([1]))
        tensor([[1.]])
    """
    check_backend("use_backend", name)
    token = _default_backend.set(name)
    try:
        yield
    finally:
        _default_backend.reset(token)


def check_backend(asked_by: str, name: str) -> None:
    """Raise BackendUnavailableError unless there is such a backend, whatever operations have it."""
    known = ["auto", *dict.fromkeys(backend for forms in FORMS.values() for backend in forms)]
    if name not in known:
        raise BackendUnavailableError(f"{asked_by}: expected a backend among {', '.join(known)}, got {name!r}.")


def run(operation: str, backend: str, *args: Any, **kwargs: Any) -> Any:
    """Run the form of `operation` that `backend` names, or else the first that serves the call."""
    _, form = form_for(operation, backend_asked_for(operation, backend), *args, **kwargs)
    return form.run(*args, **kwargs)


def backend_asked_for(operation: str, backend: str) -> str:
    """The backend of a call: the one it names, or else that of `use_backend` if the operation has it."""
    if backend == "auto":
        default = _default_backend.get()
        return default if default in FORMS[operation] else "auto"
    return backend


def form_for(operation: str, backend: str, *args: Any, **kwargs: Any) -> tuple[str, Form]:
    """The form of `operation` that `backend` names, or else the first that serves the call, and its name."""
    forms = FORMS[operation]
    if backend == "auto":
        candidates = _auto_candidates(forms, _first_tensor(args).device)
    elif backend in forms:
        candidates = [backend]
    else:
        raise BackendUnavailableError(
            f"{operation}: expected a backend among auto, {', '.join(forms)}, got {backend!r}. "
            + _advice(forms, args, kwargs)
        )
    reasons = []
    for name in candidates:
        refusals = forms[name].refusals(*args, **kwargs)
        if not refusals:
            return name, forms[name]
        reasons.append(f"{name}: {'; '.join(refusals)}")
    asked_by = ", asked for by patch or use_backend," if backend == _default_backend.get() != "auto" else ""
    raise BackendUnavailableError(
        f"{operation}: backend {backend!r}{asked_by} does not serve this call ({' | '.join(reasons)}). "
        + _advice(forms, args, kwargs)
    )


def cpu_kernels() -> dict[str, Any]:
    """Whether the C++ forms were built, the instruction set that they run, and, if there are none, the reason; in which
    dtypes they leave attention of long prompts to the torch form."""
    library = cpu_library()
    return {
        "isa": ISAS.get(library.isa),
        "has_torch_threads": library.has_openmp,
        "long_prompts_in_torch": [
            dtype_name(dtype)
            for dtype, number in ELEMENT_TYPES.items()
            if library.fast_matrix_types >> number & 1
        ],
        "reason": library.reason,
    }


def choices(operation: str, device: torch.device) -> dict[str, list[str]]:
    """The forms of an operation, in the order in which `auto` tries them on a device, and what speaks against each.

    Returns:
        Backend -> reasons that hold for every call on that device; none for those that `auto` takes. A call
        may be refused for reasons of its own.
    """
    forms, candidates = FORMS[operation], _auto_candidates(FORMS[operation], device)
    found = {name: list(form.absences(device)) for name, form in forms.items()}
    for name in forms.keys() - set(candidates):
        found[name] = found[name] or ["only if it is asked for by name"]
    return found


def _auto_candidates(forms: dict[str, Form], device: torch.device) -> list[str]:
    """The forms that `auto` may take for tensors on this device."""
    return [name for name, form in forms.items() if name != "reference" and form.auto_on in (None, device.type)]


def _advice(forms: dict[str, Form], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Which backend to ask for instead."""
    names = [*_auto_candidates(forms, _first_tensor(args).device), "reference"]
    serving = [name for name in names if name in forms and not forms[name].refusals(*args, **kwargs)]
    return f"backend={serving[0]!r} serves it." if serving else "No backend serves it."
