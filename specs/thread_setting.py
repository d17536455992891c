"""Settings of a model's config that hold in one thread and for a while.

A forward reads its attention setting from config objects, and those are shared: by all layers of a model, by models
that were built from one config, by threads. Writing to them would change what everybody else computes. So for as
long as a setting is in force the config's class has one attribute more, a property that answers this thread
with the setting and everybody else with what the config holds; the config's own values are never written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

_SETTINGS = ("_attn_implementation_internal", "_experts_implementation_internal")
"""The attributes that can be set; transformers' properties without `_internal` read them."""

_set_class = vars(object)["__class__"].__set__
_lock = threading.RLock()
_num_users: dict[int, int] = {}
"""id of a config -> how many settings are in force on it, over all threads."""


class _InForce(threading.local):
    """What holds in the current thread."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], Any] = {}


_in_force = _InForce()


@contextmanager
def thread_setting(configs: Sequence[Any], attribute: str, value: str | None) -> Iterator[None]:
    """Have this thread read `value` for one attribute of some configs, and nobody else.

    Args:
        configs: config objects, each once; those without the attribute are left alone.
        attribute: `_attn_implementation_internal` or `_experts_implementation_internal`.
        value: what is read while inside. None for what the config itself holds, whatever is in force outside.
    """
    configs = [config for config in configs if attribute in config.__dict__]
    keys = [(id(config), attribute) for config in configs]
    outer = {key: _in_force.values[key] for key in keys if key in _in_force.values}
    entered = []
    try:
        for config in configs:
            _enter(config)
            entered.append(config)
        for key in keys:
            _in_force.values[key] = value
        yield
    finally:
        for key in keys:
            _in_force.values.pop(key, None)
        _in_force.values.update(outer)
        for config in entered:
            _leave(config)


def _enter(config: Any) -> None:
    with _lock:
        if id(config) not in _num_users:
            plain: Any = type(config)
            _set_class(config, _answering(plain))
        _num_users[id(config)] = _num_users.get(id(config), 0) + 1


def _leave(config: Any) -> None:
    with _lock:
        _num_users[id(config)] -= 1
        if not _num_users[id(config)]:
            del _num_users[id(config)]
            _set_class(config, config.__class__)  # which names the plain class all the while


def _value(config: Any, attribute: str) -> Any:
    inside = _in_force.values.get((id(config), attribute))
    return config.__dict__[attribute] if inside is None else inside


@cache
def _answering(plain: type) -> type:
    """A class that is `plain` in all that one can ask, but answers each thread with its own settings."""

    def reduce(self: Any, protocol: Any) -> Any:
        """Copies and pickles are of the plain class, and hold what this thread reads."""
        make, arguments, state, *rest = super(answering, self).__reduce_ex__(protocol)
        state = {**state, **{name: _value(self, name) for name in _SETTINGS if name in state}}
        return make, (plain, *arguments[1:]), state, *rest

    members: dict[str, Any] = {
        "__class__": property(lambda self: plain),
        "__reduce_ex__": reduce,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }
    for name in _SETTINGS:
        members[name] = _setting(name)
    answering: Any = type(plain)(plain.__name__, (plain,), members)
    return answering


def _setting(name: str) -> property:
    def read(config: Any) -> Any:
        try:
            return _value(config, name)
        except KeyError:
            raise AttributeError(name) from None

    def write(config: Any, value: Any) -> None:
        config.__dict__[name] = value

    return property(read, write)
