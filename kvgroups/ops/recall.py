"""Calls that are like an earlier one are not checked again: a decode step makes the same call for every layer.

Whether a call is right, and which form serves it, follows from shapes, strides, dtypes, devices and settings, and
never from what is in the tensors. Checking takes three times as long as attention over a short context does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvgroups.ops import dispatch

MAX_KNOWN = 1024
"""Calls that are remembered; when there are more, all are forgotten. Each takes about 2 KiB."""

_known: dict[Any, tuple[str, dispatch.Form, Callable[..., Any]]] = {}


def serving(
    operation: str,
    backend: str,
    check: Callable[..., None],
    operands: tuple[Tensor | None, ...],
    tensors: dict[str, Tensor | None],
    settings: dict[str, Any],
) -> Callable[..., Any]:
    """The form that serves a call, as a function for all calls like it.

    Args:
        check: raises what is wrong with `check(*operands, **tensors, **settings)`; not asked about a call like an
            earlier one.
        operands, tensors, settings: the call, without what only says how to cut the work.

    Raises:
        BackendUnavailableError: if the backend asked for does not serve the call.
    """
    backend = dispatch.backend_asked_for(operation, backend)
    signature = None
    if not torch.is_grad_enabled():  # under autograd it also matters which tensors want a gradient
        given = (*operands, *tensors.values())
        described = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in given]
        signature = (operation, backend, *settings.values(), *described)
        known = _known.get(signature)
        if known is not None and dispatch.FORMS[operation].get(known[0]) is known[1]:
            return known[2]
    check(*operands, **tensors, **settings)
    name, form = dispatch.form_for(operation, backend, *operands, **tensors, **settings)
    run = form.run if form.prepare is None else form.prepare(*operands, **tensors, **settings)
    if signature is not None and not any(isinstance(setting, Tensor) for setting in settings.values()):
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[signature] = name, form, run
    return run
