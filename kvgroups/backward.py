"""Outputs of a forward over a cache: right as values, and not to be differentiated.

History lies in pages, and pages carry no gradients: whoever differentiated through them would get what the last step
alone contributes, which looks like a gradient and is none. Forwards without `no_grad` are common at inference, so
they are served; the backward is what is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from kvgroups.errors import UnsupportedCallError


class _RefusedBackward(torch.autograd.Function):
    """The tensor itself, with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)  # neither a copy nor a view: what one may do to logits in place, one still may
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise UnsupportedCallError(
            "backward: a forward over a kvgroups cache has no gradients, since its history lies in pages; call the model "
            "without a GroupedCache to train, which runs as before patch"
        )


def refuse_backward(output: dict[str, Any]) -> None:
    """Have every floating-point tensor of a model's output require gradients, whose computation then raises.

    Args:
        output: of a forward under `no_grad`; changed in place. Its cache is left alone.
    """
    for name, value in output.items():
        output[name] = _marked(value)


def _marked(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_marked(item) for item in value)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    alias = value.new_empty(0).set_(value)  # not a view of what `value` is a view of
    return _RefusedBackward.apply(alias, torch.zeros((), requires_grad=True))
