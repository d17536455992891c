"""The one dispatch point: every operation on blocks, slots and state slots, whatever computes it.

An operation exists as `reference` (naive, easy to believe) and `torch` (vectorised, runs everywhere), with
one signature. `backend="auto"` takes the first form that serves the call; a form asked for by name runs or is
refused with all its reasons. `use_backend` sets the default for a block of code.

Shapes, dtypes and devices are checked here, from what the host knows: no check waits for a GPU, so what only
the contents of a tensor could tell (a slot out of range, a position past the table) is the caller's promise.

Conventions: a slot is `block_id * block_size + offset`, a number and not an address; -1 (`PAD_SLOT_ID`) is a
token without a slot; block 0 (`NULL_BLOCK_ID`) holds nothing and is never written; a position is a token's
place in its own request; padding is always a suffix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvgroups.errors import BackendUnavailableError, ShapeError
from kvgroups.kernels.gather_kv import reference as gather_kv_reference
from kvgroups.kernels.gather_kv import torch_impl as gather_kv_torch
from kvgroups.kernels.paged_attention import reference as paged_attention_reference
from kvgroups.kernels.paged_attention import torch_impl as paged_attention_torch
from kvgroups.kernels.slot_mapping import reference as slot_mapping_reference
from kvgroups.kernels.slot_mapping import torch_impl as slot_mapping_torch
from kvgroups.kernels.state_slots import reference as state_slots_reference
from kvgroups.kernels.state_slots import torch_impl as state_slots_torch
from kvgroups.kernels.write_kv import reference as write_kv_reference
from kvgroups.kernels.write_kv import torch_impl as write_kv_torch

__all__ = [
    "gather_kv",
    "gather_states",
    "paged_attention",
    "scatter_states",
    "slot_mapping",
    "use_backend",
    "write_kv",
]

Layout = Literal["NHD", "HND"]
SlotMappingMode = Literal["paged", "ring", "token", "none"]


def slot_mapping(
    block_tables: Sequence[Tensor],
    rows: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    *,
    block_sizes: Sequence[int],
    modes: Sequence[SlotMappingMode],
    ring_blocks: Sequence[int],
    num_padded_tokens: int | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    backend: str = "auto",
) -> Tensor:
    """The slot of each token of this step, in every KV-cache group.

    By the group's mode, with B its block size and R its ring blocks:

    * `paged`: `table[row, pos // B] * B + pos % B`; `token` is the same with B = 1
    * `ring`: `table[row, (pos // B) % R] * B + pos % B` for the last R * B tokens of the row; older tokens of
      this step would land on the same slots and get -1
    * `none`: -1, for groups that store states

    A token whose table entry is the null block gets -1: it has no block because no later query can see it.
    With context parallelism a table entry stands for a virtual block of `B * cp_world_size` tokens dealt out
    to the ranks in runs of `cp_interleave`; a token of another rank gets -1.

    Args:
        block_tables: one per group, (max_num_reqs, width of the group), int32, block ids.
        rows: (num_reqs,), int32 or int64. The table row of each request.
        query_start_loc: (num_reqs + 1,), int32 or int64. Where each request's tokens start in this step; a
            padded request has zero tokens.
        positions: (num_tokens,), int64. May be padded: tokens from `query_start_loc[-1]` on get -1.
        seq_lens: (num_reqs,), int32 or int64, tokens. Counts this step's: `num_computed_tokens + query_len`.
        block_sizes: tokens per block, by group.
        modes: the slot-mapping mode, by group.
        ring_blocks: R by group; 0 where the mode is not `ring`.
        num_padded_tokens: length of the result's rows, `num_tokens` if None. The tail is -1.
        cp_world_size: context-parallel ranks.
        cp_rank: this rank.
        cp_interleave: tokens in a run; divides every block size.

    Returns:
        (num_groups, num_padded_tokens), int64.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or settings that contradict each other.
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: the block table of vLLM v1; ring mode and the null-block rule are ours.

    Example:
        A request in blocks 7, 1023 and 5 of 16 tokens: position 34 is at offset 2 of block 5.

        >>> table = torch.tensor([[7, 1023, 5, 0]], dtype=torch.int32)
        >>> rows, starts, seq_lens = torch.tensor([0]), torch.tensor([0, 2]), torch.tensor([36])
        >>> slot_mapping([table], rows, starts, torch.tensor([34, 35]), seq_lens, block_sizes=[16],
        ...              modes=["paged"], ring_blocks=[0], num_padded_tokens=3)
        tensor([[82, 83, -1]])
    """
    device, num_reqs, num_tokens = positions.device, len(rows), len(positions)
    _check("rows", rows, (num_reqs,), _INDEX, device)
    _check("query_start_loc", query_start_loc, (num_reqs + 1,), _INDEX, device)
    _check("positions", positions, (num_tokens,), (torch.int64,), device)
    _check("seq_lens", seq_lens, (num_reqs,), _INDEX, device)
    for name, settings in (("block_sizes", block_sizes), ("modes", modes), ("ring_blocks", ring_blocks)):
        if len(settings) != len(block_tables):
            raise ShapeError(
                f"{name}: expected one per block table, {len(block_tables)}, got {len(settings)}. "
                "Pass the settings of every KV-cache group, in one order."
            )
    if not 0 <= cp_rank < cp_world_size or cp_interleave < 1:
        raise ShapeError(
            f"cp_rank: expected a rank below cp_world_size={cp_world_size} and runs of at least one token, "
            f"got cp_rank={cp_rank} and cp_interleave={cp_interleave}."
        )
    for group, (table, block_size, mode, ring) in enumerate(
        zip(block_tables, block_sizes, modes, ring_blocks, strict=True)
    ):
        _check_mode(group, block_size, mode, ring, cp_interleave)
        width = _AtLeast(ring if mode == "ring" else 0)
        _check(f"block_tables[{group}]", table, (_ANY, width), (torch.int32,), device)
    if num_padded_tokens is not None and num_padded_tokens < num_tokens:
        raise ShapeError(
            f"num_padded_tokens: expected at least the {num_tokens} of positions, got {num_padded_tokens}."
        )
    return _run(
        "slot_mapping",
        backend,
        block_tables,
        rows,
        query_start_loc,
        positions,
        seq_lens,
        block_sizes=block_sizes,
        modes=modes,
        ring_blocks=ring_blocks,
        num_padded_tokens=num_padded_tokens,
        cp_world_size=cp_world_size,
        cp_rank=cp_rank,
        cp_interleave=cp_interleave,
    )


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: Layout,
    backend: str = "auto",
) -> None:
    """Store this step's keys and values of one layer in their slots, in place.

    Tokens with slot -1 are skipped, and so is the null block. Nothing else is touched, bit for bit. Slots of
    one call are distinct. No gradient flows into the cache, which would keep the graph of every step alive.

    Args:
        key: (num_tokens, num_kv_heads, head_dim), the cache's dtype.
        value: (num_tokens, num_kv_heads, head_dim_v), the cache's dtype.
        key_cache: NHD (num_blocks, block_size, num_kv_heads, head_dim) or HND (num_blocks, num_kv_heads,
            block_size, head_dim). Any stride between blocks.
        value_cache: the same with head_dim_v.
        slot_mapping: (at least num_tokens,), int64. What lies beyond num_tokens is not read.
        layout: `NHD` or `HND`, the order within a block.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device.
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: `reshape_and_cache_flash` of vLLM; there the null block may be written.

    Example:
        >>> cache = torch.zeros(3, 2, 1, 1)                              # 3 blocks of 2 tokens, NHD
        >>> token = torch.tensor([[[5.0]], [[6.0]]])
        >>> write_kv(token, token, cache, cache.clone(), torch.tensor([3, -1]), layout="NHD")
        >>> cache.flatten().tolist()                                     # slot 3: block 1, offset 1
        [0.0, 0.0, 0.0, 5.0, 0.0, 0.0]
    """
    _check_caches(key_cache, value_cache, layout)
    _check_step_kv(key, value, key_cache, value_cache, layout)
    _check("slot_mapping", slot_mapping, (_AtLeast(len(key)),), (torch.int64,), key.device)
    _run("write_kv", backend, key, value, key_cache, value_cache, slot_mapping, layout=layout)


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    block_table: Tensor | None,
    *,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    kv_start_loc: Tensor | None = None,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "HND",
    ring_blocks: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Causal attention of one layer: history from blocks, the step's own keys and values as they come.

    Request i has history at positions 0 .. num_computed_tokens[i] - 1 in its blocks, and step keys
    `key[kv_start_loc[i] : kv_start_loc[i + 1]]` at the positions that follow. Its queries are right-aligned:
    the last query sits on the last step key. A query at position p sees every position up to p, itself
    included, that `window` and `chunk` allow, and nothing behind a null block. One call serves prefill, chunk
    and decode, in any mix.

    The step's own tokens are never read from the blocks, so they may be written before or after the call; in
    a ring only after it, since writing takes the slots of the oldest visible tokens.

    Masked keys and values may be NaN. A query that sees no key yields 0. Softmax is in fp32.

    Args:
        query: (num_query_tokens, num_heads, head_dim). Query head h uses KV head `h // (num_heads //
            num_kv_heads)`. Tokens from `query_start_loc[-1]` on are padding and yield 0.
        key: (num_tokens, num_kv_heads, head_dim), the query's dtype.
        value: (num_tokens, num_kv_heads, head_dim_v), the query's dtype.
        key_cache: NHD (num_blocks, block_size, num_kv_heads, head_dim) or HND (num_blocks, num_kv_heads,
            block_size, head_dim), the query's dtype, any stride between blocks. None if no request has
            history; then value_cache and block_table are None too.
        value_cache: the same with head_dim_v.
        block_table: (num_reqs, width), int32. The table rows of this step's requests, in their order.
        query_start_loc: (num_reqs + 1,), int32 or int64. Where each request's queries start; empty requests
            are fine.
        num_computed_tokens: (num_reqs,), int32 or int64, tokens. The history of each request; all 0 without
            caches.
        kv_start_loc: (num_reqs + 1,), int32 or int64. Where each request's step keys start; None: as the
            queries do.
        scale: factor on the scores.
        window: tokens that a query sees, itself included: `p - window + 1 .. p`. None: all.
        chunk: a query sees positions k with `k // chunk == p // chunk`. None: all.
        softcap: scores become `tanh(score / softcap) * softcap`, after scale and before masking.
        sinks: (num_heads,), floating. One more logit per head in the softmax, with no value.
        layout: `NHD` or `HND`, the order within a block.
        ring_blocks: R > 0 if the table is a ring: position p lies in block `block_table[i, (p // block_size)
            % R]`.

    Returns:
        (num_query_tokens, num_heads, head_dim_v), the query's dtype.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or history without caches (noticed on the
            CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    The torch form reads start locations and counts on the host: on a GPU that is a device-to-host sync.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
        PagedAttention",
    section 4; sinks as in GPT-OSS, softcap as in Gemma 2.

    Example:
        Two tokens of history in block 3, values 1 and 2, and a third token of value 6; the keys are alike:

        >>> keys, values = torch.zeros(4, 1, 2, 1), torch.zeros(4, 1, 2, 1)  # 4 blocks of 2 tokens, HND
        >>> values[3, 0] = torch.tensor([[1.0], [2.0]])
        >>> token, table = torch.zeros(1, 1, 1), torch.tensor([[3]], dtype=torch.int32)
        >>> paged_attention(token, token, token + 6, keys, values, table, scale=1.0,
        ...                 query_start_loc=torch.tensor([0, 1]), num_computed_tokens=torch.tensor([2]))
        tensor([[[3.]]])
    """
    device, num_reqs = query.device, len(num_computed_tokens)
    _check("query", query, (_ANY, _ANY, _ANY), None, device)
    _check("key", key, (_ANY, _ANY, query.shape[2]), (query.dtype,), device)
    _check("value", value, (len(key), key.shape[1], _ANY), (query.dtype,), device)
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ShapeError(
            f"query: expected a multiple of the {num_kv_heads} KV heads of key, got {num_heads} heads. "
            "Each KV head serves the same number of query heads."
        )
    _check("query_start_loc", query_start_loc, (num_reqs + 1,), _INDEX, device)
    _check("num_computed_tokens", num_computed_tokens, (num_reqs,), _INDEX, device)
    if kv_start_loc is not None:
        _check("kv_start_loc", kv_start_loc, (num_reqs + 1,), _INDEX, device)
    elif len(key) != len(query):
        raise ShapeError(
            f"key: expected the {len(query)} tokens of query, got {len(key)}. "
            "Pass kv_start_loc where they differ."
        )
    if sinks is not None:
        _check("sinks", sinks, (num_heads,), None, device)
    for name, setting in (("window", window), ("chunk", chunk), ("softcap", softcap)):
        if setting is not None and not setting > 0:
            raise ShapeError(f"{name}: expected more than 0, or None for no {name}, got {setting}.")
    if ring_blocks < 0:
        raise ShapeError(f"ring_blocks: expected 1 or more, or 0 for a plain table, got {ring_blocks}.")

    if key_cache is not None and value_cache is not None and block_table is not None:
        _check_caches(key_cache, value_cache, layout)
        _check_step_kv(key, value, key_cache, value_cache, layout)
        _check("block_table", block_table, (num_reqs, _AtLeast(max(ring_blocks, 1))), (torch.int32,), device)
    elif not (key_cache is value_cache is block_table is None):
        given = {"key_cache": key_cache, "value_cache": value_cache, "block_table": block_table}
        missing = [name for name, tensor in given.items() if tensor is None]
        raise ShapeError(
            "key_cache: expected key_cache, value_cache and block_table, or None for all three, got None for "
            f"{' and '.join(missing)} only. Without caches no request has history."
        )
    elif num_computed_tokens.device.type == "cpu" and num_computed_tokens.any():
        raise ShapeError(
            "num_computed_tokens: expected all 0 without caches, got a request with history of "
            f"{int(num_computed_tokens.max())} tokens. Pass key_cache, value_cache and block_table."
        )
    return _run(
        "paged_attention",
        backend,
        query,
        key,
        value,
        key_cache,
        value_cache,
        block_table,
        query_start_loc=query_start_loc,
        num_computed_tokens=num_computed_tokens,
        kv_start_loc=kv_start_loc,
        scale=scale,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=sinks,
        layout=layout,
        ring_blocks=ring_blocks,
    )


def gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    *,
    seq_lens: Tensor,
    max_seq_len: int,
    layout: Layout,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The dense history of each request, for layers that transform keys and values after storing them.

    Positions from a request's `seq_len` on and positions behind a null block are 0. Windows and rings do not
    exist
    here: a group of such a layer is `paged` and keeps everything.

    Args:
        key_cache: NHD (num_blocks, block_size, num_kv_heads, head_dim) or HND (num_blocks, num_kv_heads,
            block_size, head_dim). Any stride between blocks.
        value_cache: the same with head_dim_v.
        block_table: (num_reqs, width), int32, width * block_size >= max_seq_len. The table rows of this
            step's requests.
        seq_lens: (num_reqs,), int32 or int64, tokens to read from each request.
        max_seq_len: tokens in the result.
        layout: `NHD` or `HND`, the order within a block.

    Returns:
        key (num_reqs, max_seq_len, num_kv_heads, head_dim) and value (num_reqs, max_seq_len, num_kv_heads,
        head_dim_v), in the cache's dtype.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device.
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: the gathered sequence that multi-latent attention projects up again; DeepSeek-V2, section 2.1.

    Example:
        >>> cache = torch.arange(1.0, 7.0).view(3, 2, 1, 1)              # 3 blocks of 2 tokens, NHD
        >>> key, _ = gather_kv(cache, cache, torch.tensor([[2, 1]], dtype=torch.int32),
        ...                    seq_lens=torch.tensor([3]), max_seq_len=4, layout="NHD")
        >>> key.flatten().tolist()
        [5.0, 6.0, 3.0, 0.0]
    """
    _check_caches(key_cache, value_cache, layout)
    device, num_reqs = key_cache.device, len(block_table)
    width = _AtLeast(-(-max_seq_len // _block_size(key_cache, layout)))
    _check("block_table", block_table, (num_reqs, width), (torch.int32,), device)
    _check("seq_lens", seq_lens, (num_reqs,), _INDEX, device)
    return _run(
        "gather_kv",
        backend,
        key_cache,
        value_cache,
        block_table,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        layout=layout,
    )


def gather_states(states: Tensor, slots: Tensor, *, backend: str = "auto") -> Tensor:
    """The recurrent states of this step's requests, in one dense tensor.

    Slot 0 is the zero state: it reads as zeros and its bytes are never looked at.

    Args:
        states: (num_slots, *state_shape), one state tensor of one layer. Any stride between slots.
        slots: (num_reqs,), int32 or int64. The state slot of each request; 0 for new requests and padding.

    Returns:
        (num_reqs, *state_shape), the dtype of states, contiguous.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device.
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: `state_indices_tensor` of vLLM's Mamba layers; there the pad is -1.

    Example:
        >>> states = torch.tensor([[float("nan")], [1.0], [2.0]])
        >>> gather_states(states, torch.tensor([2, 0])).tolist()
        [[2.0], [0.0]]
    """
    _check("slots", slots, (len(slots),), _INDEX, states.device)
    return _run("gather_states", backend, states, slots)


def scatter_states(states: Tensor, slots: Tensor, values: Tensor, *, backend: str = "auto") -> None:
    """Write the recurrent states of this step's requests to their slots, in place.

    Slot 0 is never written. Slots other than 0 are distinct. No gradient flows into the states.

    Args:
        states: (num_slots, *state_shape), one state tensor of one layer. Any stride between slots.
        slots: (num_reqs,), int32 or int64. The state slot of each request; 0 for padding.
        values: (num_reqs, *state_shape), the dtype of states.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device.
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: as `gather_states`.

    Example:
        >>> states = torch.zeros(3, 1)
        >>> scatter_states(states, torch.tensor([2, 0]), torch.tensor([[7.0], [8.0]]))
        >>> states.tolist()
        [[0.0], [0.0], [7.0]]
    """
    _check("slots", slots, (len(slots),), _INDEX, states.device)
    _check("values", values, (len(slots), *states.shape[1:]), (states.dtype,), states.device)
    _run("scatter_states", backend, states, slots, values)


# Choosing a backend.


def _no_refusals(*args: Any, **kwargs: Any) -> list[str]:
    """The reasons against a form that serves every call."""
    return []


@dataclass(frozen=True)
class _Form:
    """One implementation of an operation; `refusals` takes a call and returns the reasons against it."""

    run: Callable[..., Any]
    refusals: Callable[..., list[str]] = _no_refusals


_FORMS: dict[str, dict[str, _Form]] = {
    "slot_mapping": {
        "torch": _Form(slot_mapping_torch.slot_mapping),
        "reference": _Form(slot_mapping_reference.slot_mapping),
    },
    "write_kv": {
        "torch": _Form(write_kv_torch.write_kv),
        "reference": _Form(write_kv_reference.write_kv),
    },
    "paged_attention": {
        "torch": _Form(paged_attention_torch.paged_attention),
        "reference": _Form(paged_attention_reference.paged_attention),
    },
    "gather_kv": {
        "torch": _Form(gather_kv_torch.gather_kv),
        "reference": _Form(gather_kv_reference.gather_kv),
    },
    "gather_states": {
        "torch": _Form(state_slots_torch.gather_states),
        "reference": _Form(state_slots_reference.gather_states),
    },
    "scatter_states": {
        "torch": _Form(state_slots_torch.scatter_states),
        "reference": _Form(state_slots_reference.scatter_states),
    },
}
"""Operation -> backend -> form. `auto` takes the first that does not refuse, and never the reference."""

_default_backend: ContextVar[str] = ContextVar("kvgroups_backend", default="auto")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Make `name` the backend of every call in the block that does not ask for one itself.

    The default belongs to the running thread or task; blocks nest.

    Args:
        name: `auto`, `torch` or `reference`.

    Raises:
        BackendUnavailableError: if no operation has such a backend.

    Example:
        >>> with use_backend("reference"):
        ...     gather_states(torch.ones(2, 1), torch.tensor([1]))
        tensor([[1.]])
    """
    known = ["auto", *dict.fromkeys(backend for forms in _FORMS.values() for backend in forms)]
    if name not in known:
        raise BackendUnavailableError(f"use_backend: expected one of {', '.join(known)}, got {name!r}.")
    token = _default_backend.set(name)
    try:
        yield
    finally:
        _default_backend.reset(token)


def _run(operation: str, backend: str, *args: Any, **kwargs: Any) -> Any:
    """Run the form of `operation` that `backend` names, or else the first that serves the call."""
    forms = _FORMS[operation]
    asked = _default_backend.get() if backend == "auto" else backend
    if asked == "auto":
        candidates = [name for name in forms if name != "reference"]
    elif asked in forms:
        candidates = [asked]
    else:
        raise BackendUnavailableError(
            f"{operation}: expected a backend among auto, {', '.join(forms)}, got {asked!r}. "
            + _advice(forms, args, kwargs)
        )
    reasons = []
    for name in candidates:
        refusals = forms[name].refusals(*args, **kwargs)
        if not refusals:
            return forms[name].run(*args, **kwargs)
        reasons.append(f"{name}: {'; '.join(refusals)}")
    raise BackendUnavailableError(
        f"{operation}: backend {asked!r} does not serve this call ({' | '.join(reasons)}). "
        + _advice(forms, args, kwargs)
    )


def _advice(forms: dict[str, _Form], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Which backend to ask for instead."""
    serving = [name for name, form in forms.items() if not form.refusals(*args, **kwargs)]
    return f"backend={serving[0]!r} serves it." if serving else "No backend serves it."


# Checking a call.


class _AtLeast(int):
    """A size in an expected shape: this or more."""

    def __repr__(self) -> str:
        return f">={int(self)}" if self > 0 else "*"


_ANY = _AtLeast(0)
_INDEX = (torch.int32, torch.int64)


def _check(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] | None,
    device: torch.device,
) -> None:
    """Raise ShapeError unless the tensor is as expected; `dtypes` None is any floating one."""
    if (
        tensor.dim() == len(shape)
        and all(
            got >= size if isinstance(size, _AtLeast) else got == size
            for got, size in zip(tensor.shape, shape, strict=True)
        )
        and (tensor.is_floating_point() if dtypes is None else tensor.dtype in dtypes)
        and tensor.device == device
    ):
        return
    expected_dtype = "floating" if dtypes is None else " or ".join(map(_dtype_name, dtypes))
    expected_shape = ", ".join(map(repr, shape)) + ("," if len(shape) == 1 else "")
    raise ShapeError(
        f"{name}: expected ({expected_shape}) {expected_dtype} on {device}, "
        f"got {tuple(tensor.shape)} {_dtype_name(tensor.dtype)} on {tensor.device}."
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_mode(group: int, block_size: int, mode: str, ring_blocks: int, cp_interleave: int) -> None:
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


def _check_caches(key_cache: Tensor, value_cache: Tensor, layout: str) -> None:
    """Raise ShapeError unless the caches are a pair in a known layout."""
    if layout not in ("NHD", "HND"):
        raise ShapeError(f"layout: expected NHD or HND, got {layout!r}.")
    _check("key_cache", key_cache, (_ANY, _AtLeast(1), _AtLeast(1), _ANY), None, key_cache.device)
    _check("value_cache", value_cache, (*key_cache.shape[:3], _ANY), (key_cache.dtype,), key_cache.device)


def _check_step_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, layout: str) -> None:
    """Raise ShapeError unless this step's keys and values fit the caches."""
    dtypes, device = (key_cache.dtype,), key_cache.device
    num_kv_heads = key_cache.shape[2 if layout == "NHD" else 1]
    _check("key", key, (_ANY, num_kv_heads, key_cache.shape[3]), dtypes, device)
    _check("value", value, (len(key), num_kv_heads, value_cache.shape[3]), dtypes, device)


def _block_size(cache: Tensor, layout: str) -> int:
    return cache.shape[1 if layout == "NHD" else 2]
