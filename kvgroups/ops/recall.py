"""Calls that are like an earlier one are not checked again: a decode step makes the same call for every layer.

Whether a call is right, and which form serves it, follows from shapes, strides, dtypes, devices and settings, and
never from what is in the tensors. Over a short context the checks would take longer than attention itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvgroups.kernels.signature import signature
from kvgroups.ops import dispatch

MAX_KNOWN = 512
"""Calls of an operation that are remembered; when there are more, all are forgotten."""


class _Known(NamedTuple):
    """What serves a kind of call."""

    name: str
    form: dispatch.Form
    run: Callable[..., Any]
    """`form` as a function of the tensors alone, in their order; of where they lie, `addresses`, which may be None; and of
    what only says how to cut the work."""


class Calls:
    """The calls of one operation that were found to be right.

    Args:
        operation: a key of `dispatch.FORMS`.
        check: raises what is wrong with a call, `check(*operands, **tensors, **settings)`.
        num_operands: tensors that forms take by position.
        tensors: names of the others, in their order.
        settings: names of what is no tensor, in their order.
    """

    def __init__(
        self,
        operation: str,
        check: Callable[..., None],
        num_operands: int,
        tensors: tuple[str, ...] = (),
        settings: tuple[str, ...] = (),
    ) -> None:
        self.operation, self.check = operation, check
        self.num_operands, self.tensors, self.settings = num_operands, tensors, settings
        self.known: dict[Any, _Known] = {}

    def serving(
        self, backend: str, tensors: tuple[Tensor | None, ...], settings: tuple[Any, ...]
    ) -> tuple[Callable[..., Any], bytes | None]:
        """The form that serves a call, to be called as `form(*tensors, addresses=addresses)`, and those addresses.

        Raises:
            BackendUnavailableError: if the backend asked for does not serve the call.
        """
        backend = dispatch.backend_asked_for(self.operation, backend)
        if torch.is_grad_enabled():  # then it also matters which tensors want a gradient
            return self._find(backend, tensors, settings).run, None
        described, addresses = signature(tensors)
        call = (described, backend, settings)
        found = self.known.get(call)
        if found is None or dispatch.FORMS[self.operation].get(found.name) is not found.form:
            found = self._find(backend, tensors, settings)
            if not any(isinstance(setting, Tensor) for setting in settings):
                if len(self.known) >= MAX_KNOWN:
                    self.known.clear()
                self.known[call] = found
        return found.run, addresses

    def _find(self, backend: str, tensors: tuple[Tensor | None, ...], settings: tuple[Any, ...]) -> _Known:
        count, set_to = self.num_operands, dict(zip(self.settings, settings, strict=True))
        operands, named = tensors[:count], dict(zip(self.tensors, tensors[count:], strict=True))
        self.check(*operands, **named, **set_to)
        name, form = dispatch.form_for(self.operation, backend, *operands, **named, **set_to)
        if form.prepare is not None:
            return _Known(name, form, form.prepare(*operands, **named, **set_to))

        def run(*tensors: Tensor | None, addresses: bytes | None = None, **hints: Any) -> Any:
            named = dict(zip(self.tensors, tensors[count:], strict=True))
            return form.run(*tensors[:count], **named, **set_to, **hints)

        return _Known(name, form, run)
