"""Checks of a call, from what the host knows: shapes, dtypes, devices, settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvgroups.errors import OutOfRangeError, ShapeError


class AtLeast(int):
    """A size in an expected shape: this or more."""

    def __repr__(self) -> str:
        return f">={int(self)}" if self > 0 else "*"


ANY = AtLeast(0)
"""A size in an expected shape: any."""

INDEX = (torch.int32, torch.int64)
"""dtypes of rows, slots and start locations."""


def check(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] | None,
    device: torch.device,
) -> None:
    """Raise ShapeError unless the tensor is as expected; `dtypes` None is any floating one."""
    if not isinstance(tensor, Tensor):
        raise _no_tensor(name, tensor)
    # A decode step makes hundreds of these calls: plain comparisons, and those first that fail first.
    sizes = tensor.shape
    if (
        len(sizes) == len(shape)
        and (tensor.dtype in dtypes if dtypes is not None else tensor.is_floating_point())
        and tensor.device == device
        and tensor.layout is torch.strided
    ):
        for size, expected in zip(sizes, shape):  # noqa: B905
            if size != expected and (type(expected) is int or size < expected):
                break
        else:
            return
    expected_dtype = "floating" if dtypes is None else " or ".join(map(dtype_name, dtypes))
    expected_shape = ", ".join(map(repr, shape)) + ("," if len(shape) == 1 else "")
    is_dense, layout = tensor.layout is torch.strided, str(tensor.layout).removeprefix("torch.")
    raise ShapeError(
        f"{name}: expected {'' if is_dense else 'a dense tensor, '}({expected_shape}) {expected_dtype} on {device}, "
        f"got {'' if is_dense else f'{layout}, '}{tuple(tensor.shape)} {dtype_name(tensor.dtype)} on {tensor.device}."
    )


def device_of(name: str, tensor: Tensor) -> torch.device:
    """Where a tensor lies; raise ShapeError if it is none. Asked first: the rest of a call is checked against it."""
    if not isinstance(tensor, Tensor):
        raise _no_tensor(name, tensor)
    return tensor.device


def _no_tensor(name: str, given: object) -> ShapeError:
    return ShapeError(f"{name}: expected a tensor, got {'None' if given is None else type(given).__name__}.")


def out_of_range(error: IndexError, allowed: range, noun: str, **indices: Tensor | None) -> OutOfRangeError:
    """What to raise after a form has failed: it names the first of the indices that is not one of those allowed.

    Looking at their contents beforehand would cost every call. A form that knows what was wrong has named it itself.
    """
    if ": expected " not in str(error):
        for name, tensor in indices.items():
            if tensor is None:
                continue
            outside = ((tensor < allowed.start) | (tensor >= allowed.stop)).nonzero().tolist()
            if outside:
                return OutOfRangeError(
                    f"{name}: expected {noun} from {allowed.start} to {allowed.stop - 1}, got "
                    f"{int(tensor[tuple(outside[0])])} at {outside[0]}. "
                    "They must lie in the tensor that they are passed with."
                )
    return OutOfRangeError(str(error))


@contextmanager
def naming(allowed: range, noun: str, **indices: Tensor | None) -> Iterator[None]:
    """Turn an IndexError of the block into the one that `out_of_range` makes of it."""
    try:
        yield
    except IndexError as error:
        raise out_of_range(error, allowed, noun, **indices) from error


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_mode(group: int, block_size: int, mode: str, ring_blocks: int, cp_interleave: int) -> None:
    """Raise ShapeError unless the slot-mapping settings of one KV-cache group make sense together."""
    if mode not in ("paged", "ring", "token", "none"):
        raise ShapeError(f"modes[{group}]: expected one of paged, ring, token, none, got {mode!r}.")
    if mode == "none":
        return
    if block_size < 1 or (mode == "token" and block_size != 1):
        expected = "1" if mode == "token" else "at least 1"
        raise ShapeError(f"block_sizes[{group}]: expected {expected} in mode {mode!r}, got {block_size}.")
    if mode == "ring" and ring_blocks < 1:
        raise ShapeError(f"ring_blocks[{group}]: expected at least 1 in mode 'ring', got {ring_blocks}.")
    if block_size % cp_interleave:
        raise ShapeError(
            f"cp_interleave: expected a divisor of block_sizes[{group}]={block_size}, got {cp_interleave}. "
            "A rank stores whole runs of tokens in its blocks."
        )


def check_caches(key_cache: Tensor, value_cache: Tensor, layout: str) -> None:
    """Raise ShapeError unless the caches are a pair in a known layout."""
    if layout not in ("NHD", "HND"):
        raise ShapeError(f"layout: expected NHD or HND, got {layout!r}.")
    device = device_of("key_cache", key_cache)
    check("key_cache", key_cache, (ANY, AtLeast(1), AtLeast(1), ANY), None, device)
    check("value_cache", value_cache, (*key_cache.shape[:3], ANY), (key_cache.dtype,), device)


def check_step_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, layout: str) -> None:
    """Raise ShapeError unless this step's keys and values fit the caches."""
    dtypes, device = (key_cache.dtype,), key_cache.device
    num_kv_heads = key_cache.shape[2 if layout == "NHD" else 1]
    check("key", key, (ANY, num_kv_heads, key_cache.shape[3]), dtypes, device)
    check("value", value, (len(key), num_kv_heads, value_cache.shape[3]), dtypes, device)


def block_size_of(cache: Tensor, layout: str) -> int:
    return cache.shape[1 if layout == "NHD" else 2]


def sizes(name: str, tensor: Tensor, num_dims: int) -> tuple[int, ...]:
    """The sizes of a floating tensor of that many dims; raise ShapeError if it is not one."""
    check(name, tensor, (ANY,) * num_dims, None, device_of(name, tensor))
    return tuple(tensor.shape)


def check_convolution(
    channels: int,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    activation: str | None,
    device: torch.device,
) -> None:
    """Raise ShapeError unless weights, states and activation of a convolution fit its channels."""
    check("weight", weight, (channels, AtLeast(1)), None, device)
    if bias is not None:
        check("bias", bias, (channels,), None, device)
    check("states", states, (ANY, channels, weight.shape[1]), None, device)
    if activation not in (None, "silu", "swish"):
        raise ShapeError(
            f"activation: expected silu, swish or None, got {activation!r}. Apply any other one to the result."
        )


def check_scan_slots(
    query_start_loc: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    snapshot_tokens: Tensor | None,
    snapshot_slots: Tensor | None,
    device: torch.device,
) -> None:
    """Raise ShapeError unless each request has tokens and slots, and each snapshot a token and a slot."""
    check("initial_slots", initial_slots, (ANY,), INDEX, device)
    num_reqs = len(initial_slots)
    check("query_start_loc", query_start_loc, (num_reqs + 1,), INDEX, device)
    check("final_slots", final_slots, (num_reqs,), INDEX, device)
    if snapshot_tokens is not None and snapshot_slots is not None:
        check("snapshot_slots", snapshot_slots, (ANY,), INDEX, device)
        check("snapshot_tokens", snapshot_tokens, (len(snapshot_slots),), (torch.int64,), device)
    elif not (snapshot_tokens is snapshot_slots is None):
        missing = "snapshot_tokens" if snapshot_tokens is None else "snapshot_slots"
        raise ShapeError(
            f"{missing}: expected one per snapshot, got None. Pass snapshot_tokens and snapshot_slots, or neither."
        )


def check_scan_options(
    x: Tensor, shape: tuple[int, ...], D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None
) -> None:
    """Raise ShapeError unless D and dt_bias have that shape and the gate z fits x, where there are any."""
    for name, tensor in (("D", D), ("dt_bias", dt_bias)):
        if tensor is not None:
            check(name, tensor, shape, None, x.device)
    if z is not None:
        check("z", z, tuple(x.shape), (x.dtype,), x.device)


def check_ssm_groups(heads: int, groups: int) -> None:
    """Raise ShapeError unless every SSM group of B and C serves the same number of heads."""
    if groups == 0 or heads % groups:
        raise ShapeError(
            f"B: expected a number of SSM groups that divides the {heads} heads of x, got {groups}. "
            "Each SSM group serves the same number of heads."
        )
