"""The arguments of a forward by name, refused where Python would refuse them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from kvgroups.cache import CACHE_ARGUMENTS
from kvgroups.errors import UnsupportedCallError


def bind_arguments(
    parameters: Mapping[str, inspect.Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """What a forward was called with, by name, the cache under `cache`.

    Args:
        parameters: of the forward.
        args, kwargs: as passed. The cache may come under one of its older names.

    Raises:
        TypeError: too many arguments, one that is given twice, or one that the forward does not take.
        UnsupportedCallError: two caches under two names.
    """
    renamed = {name: value for name, value in kwargs.items() if name in CACHE_ARGUMENTS and name not in parameters}
    others = {name: value for name, value in kwargs.items() if name not in renamed}
    try:
        bound = inspect.Signature(list(parameters.values())).bind_partial(*args, **others)
    except TypeError as error:
        raise TypeError(f"forward() {error}") from None
    inputs: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            inputs.update(value)
        else:
            inputs[name] = value
    inputs.update(renamed)
    caches = {name: inputs.pop(name) for name in CACHE_ARGUMENTS if name in inputs}
    given = {name: cache for name, cache in caches.items() if cache is not None}
    if len({id(cache) for cache in given.values()}) > 1:
        raise UnsupportedCallError(f"{' and '.join(given)}: got two caches; pass one, as `cache`")
    return {**inputs, "cache": next(iter(given.values()), None)}
