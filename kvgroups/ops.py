"""The one dispatch point: every operation on blocks, slots and state slots, whatever computes it.

An operation exists as `reference` (naive, easy to believe), as `torch` (vectorised, runs everywhere) and, most
of them, as `triton` (for GPUs), with one signature. `backend="auto"` takes the first form that serves the call;
a form asked for by name runs or is refused with all its reasons. `use_backend` sets the default for a block of
code.

Shapes, dtypes and devices are checked here, from what the host knows: no check waits for a GPU, so what only
the contents of a tensor could tell (a slot out of range, a position past the table) is the caller's promise.

Conventions: a slot is `block_id * block_size + offset`, a number and not an address; -1 (`PAD_SLOT_ID`) is a
token without a slot; block 0 (`NULL_BLOCK_ID`) holds nothing and is never written; a position is a token's
place in its own request; padding is always a suffix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from kvgroups.errors import BackendUnavailableError, ShapeError
from kvgroups.kernels.causal_conv1d import reference as causal_conv1d_reference
from kvgroups.kernels.causal_conv1d import torch_impl as causal_conv1d_torch
from kvgroups.kernels.gather_kv import reference as gather_kv_reference
from kvgroups.kernels.gather_kv import torch_impl as gather_kv_torch
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
from kvgroups.kernels.state_update import reference as state_update_reference
from kvgroups.kernels.state_update import torch_impl as state_update_torch
from kvgroups.kernels.table_update import reference as table_update_reference
from kvgroups.kernels.table_update import torch_impl as table_update_torch
from kvgroups.kernels.write_kv import reference as write_kv_reference
from kvgroups.kernels.write_kv import torch_impl as write_kv_torch

__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "gather_kv",
    "gather_states",
    "paged_attention",
    "scatter_states",
    "selective_scan",
    "selective_state_update",
    "slot_mapping",
    "ssd_scan",
    "table_update",
    "use_backend",
    "write_kv",
]

Layout = Literal["NHD", "HND"]
SlotMappingMode = Literal["paged", "ring", "token", "none"]
Activation = Literal["silu", "swish"]


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


def table_update(table: Tensor, places: Tensor, block_ids: Tensor, *, backend: str = "auto") -> None:
    """Change entries of a block table on its device, in place.

    Args:
        table: (max_num_reqs, width), int32, contiguous. Block ids.
        places: (num_entries,), int64, distinct. `row * width + column` of each changed entry.
        block_ids: (num_entries,), int32. What the entries become.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or a table that is not contiguous.
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: ours. vLLM copies whole rows, which grow with the longest sequence and not with what changed.

    Example:
        >>> table = torch.zeros(2, 3, dtype=torch.int32)
        >>> table_update(table, torch.tensor([1, 5]), torch.tensor([7, 9], dtype=torch.int32))
        >>> table.tolist()
        [[0, 7, 0], [0, 0, 9]]
    """
    _check("table", table, (_ANY, _ANY), (torch.int32,), table.device)
    _check("places", places, (len(places),), (torch.int64,), table.device)
    _check("block_ids", block_ids, (len(places),), (torch.int32,), table.device)
    if not table.is_contiguous():
        raise ShapeError(
            f"table: expected a contiguous {tuple(table.shape)}, got strides {table.stride()}. "
            "Places count through whole rows."
        )
    _run("table_update", backend, table, places, block_ids)


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

    The torch form reads start locations and counts on the host: on a GPU that is a device-to-host sync. The
    Triton form does not.

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


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    *,
    query_start_loc: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    activation: Activation | None = None,
    snapshot_tokens: Tensor | None = None,
    snapshot_slots: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The short causal convolution of a state layer, for every token of this step.

    The state of a request is its last K inputs, oldest first, zeros where there were fewer. An output looks at
    K inputs, its own included: the oldest input of the initial state is kept, as transformers keeps it, but not
    looked at. A request starts from `initial_slots` and leaves its state in `final_slots`: the same slot for a
    running state, another to start from a snapshot, which is only read. A request without tokens changes no
    slot. No slot is written for one request and read or written for another in the same call.

    The sum is in fp32, rounded to the weight's dtype before the activation. No gradient flows into the states.

    Args:
        x: (num_tokens, channels), floating. The requests' tokens, packed; from `query_start_loc[-1]` on they
            are padding, are not looked at and yield 0.
        weight: (channels, K), floating. Its last column is the token's own.
        bias: (channels,), floating, or None.
        states: (num_slots, channels, K), floating, strided anyhow. Written in place.
        query_start_loc: (num_reqs + 1,), int32 or int64. Where each request's tokens start.
        initial_slots: (num_reqs,), int32 or int64. Where each request's state comes from; 0 is the zero state.
        final_slots: (num_reqs,), int32 or int64. Where the state after each request's last token goes; 0: nowhere.
        activation: `silu` or `swish`, which are one, or None.
        snapshot_tokens: (num_snapshots,), int64. Indices into x: the state after exactly that token is kept.
        snapshot_slots: (num_snapshots,), int32 or int64. Where; 0: nowhere, and its token is not looked at.

    Returns:
        (num_tokens, channels), the dtype of x.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or an unknown activation.
        BackendUnavailableError: if the backend asked for does not serve the call.

    The torch form reads start locations and slots on the host: on a GPU that is a device-to-host sync.

    Source: `causal_conv1d_fn` of the causal-conv1d package; there a state has K - 1 columns and one slot.

    Example:
        Each input plus ten times its own predecessor. The state slot 1 gets the last two inputs:

        >>> states = torch.zeros(2, 1, 2)
        >>> causal_conv1d(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0, 1.0]]), None, states,
        ...               query_start_loc=torch.tensor([0, 3]), initial_slots=torch.tensor([0]),
        ...               final_slots=torch.tensor([1])).flatten().tolist()
        [1.0, 12.0, 23.0]
        >>> states[1].tolist()
        [[2.0, 3.0]]
    """
    device = x.device
    _check("x", x, (_ANY, _ANY), None, device)
    _check_convolution(x.shape[1], weight, bias, states, activation, device)
    _check_scan_slots(query_start_loc, initial_slots, final_slots, snapshot_tokens, snapshot_slots, device)
    return _run(
        "causal_conv1d",
        backend,
        x,
        weight,
        bias,
        states,
        query_start_loc=query_start_loc,
        initial_slots=initial_slots,
        final_slots=final_slots,
        activation=activation,
        snapshot_tokens=snapshot_tokens,
        snapshot_slots=snapshot_slots,
    )


def causal_conv1d_update(
    x: Tensor,
    states: Tensor,
    slots: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: Activation | None = None,
    backend: str = "auto",
) -> Tensor:
    """The short causal convolution for one token per request, in place on the requests' slots.

    `causal_conv1d` with one token a request and equal initial and final slots. A row with slot 0 is padding:
    its output means nothing, and no slot is written.

    Args:
        x: (num_reqs, channels), floating. One token per request.
        states: (num_slots, channels, K), floating, strided anyhow: each request's last K inputs, oldest first.
            Written in place.
        slots: (num_reqs,), int32 or int64. The state slot of each request; those other than 0 are distinct.
        weight: (channels, K), floating. Its last column is the token's own.
        bias: (channels,), floating, or None.
        activation: `silu` or `swish`, which are one, or None.

    Returns:
        (num_reqs, channels), the dtype of x.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or an unknown activation.
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: `causal_conv1d_update` of the causal-conv1d package.

    Example:
        >>> states = torch.tensor([[[0.0, 0.0]], [[1.0, 2.0]]])
        >>> causal_conv1d_update(torch.tensor([[3.0]]), states, torch.tensor([1]),
        ...                      torch.tensor([[10.0, 1.0]]), None)
        tensor([[23.]])
        >>> states[1].tolist()
        [[2.0, 3.0]]
    """
    device = x.device
    _check("x", x, (_ANY, _ANY), None, device)
    _check_convolution(x.shape[1], weight, bias, states, activation, device)
    _check("slots", slots, (len(x),), _INDEX, device)
    return _run("causal_conv1d_update", backend, x, states, slots, weight, bias, activation=activation)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    *,
    query_start_loc: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    snapshot_tokens: Tensor | None = None,
    snapshot_slots: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The scan of Mamba-1, for every token of this step.

    Per channel, with a state h of N numbers:

        h = exp(dt * A) * h + dt * x * B        out = (h . C + D * x) * silu(z)

    A request starts from `initial_slots` and leaves its state in `final_slots`, by the rules of
    `causal_conv1d`. The recurrence is in fp32; a state is rounded to the dtype of states when it is written.
    No gradient flows into the states.

    Args:
        x: (num_tokens, channels), floating. The requests' tokens, packed; from `query_start_loc[-1]` on they
            are padding, are not looked at and yield 0.
        dt: (num_tokens, channels), floating. Step sizes, before bias and softplus.
        A: (channels, N), floating, negative.
        B: (num_tokens, N), the dtype of x.
        C: (num_tokens, N), the dtype of x.
        states: (num_slots, channels, N), floating, strided anyhow. Written in place.
        query_start_loc: (num_reqs + 1,), int32 or int64. Where each request's tokens start.
        initial_slots: (num_reqs,), int32 or int64. Where each request's state comes from; 0 is the zero state.
        final_slots: (num_reqs,), int32 or int64. Where the state after each request's last token goes; 0: nowhere.
        D: (channels,), floating, or None. The skip connection.
        z: (num_tokens, channels), the dtype of x, or None. The gate.
        dt_bias: (channels,), floating, or None. Added to dt.
        dt_softplus: whether softplus is applied to dt, after the bias.
        snapshot_tokens: (num_snapshots,), int64. Indices into x: the state after exactly that token is kept.
        snapshot_slots: (num_snapshots,), int32 or int64. Where; 0: nowhere, and its token is not looked at.

    Returns:
        (num_tokens, channels), the dtype of x.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device.
        BackendUnavailableError: if the backend asked for does not serve the call.

    The torch form reads start locations and slots on the host: on a GPU that is a device-to-host sync.

    Source: Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", algorithm 2.

    Example:
        Nothing decays, so the state is a running sum, here on top of the 10 in slot 2:

        >>> one, states = torch.ones(3, 1), torch.tensor([[[0.0]], [[0.0]], [[10.0]]])
        >>> selective_scan(torch.tensor([[1.0], [2.0], [3.0]]), one, torch.zeros(1, 1), one, one, states,
        ...                query_start_loc=torch.tensor([0, 3]), initial_slots=torch.tensor([2]),
        ...                final_slots=torch.tensor([1])).flatten().tolist()
        [11.0, 13.0, 16.0]
        >>> states.flatten().tolist()
        [0.0, 16.0, 10.0]
    """
    device, (num_tokens, channels) = x.device, _sizes("x", x, 2)
    state_size = _sizes("A", A, 2)[1]
    _check("A", A, (channels, state_size), None, device)
    _check("dt", dt, (num_tokens, channels), None, device)
    for name, tensor in (("B", B), ("C", C)):
        _check(name, tensor, (num_tokens, state_size), (x.dtype,), device)
    _check("states", states, (_ANY, channels, state_size), None, device)
    _check_scan_options(x, (channels,), D, z, dt_bias)
    _check_scan_slots(query_start_loc, initial_slots, final_slots, snapshot_tokens, snapshot_slots, device)
    return _run(
        "selective_scan",
        backend,
        x,
        dt,
        A,
        B,
        C,
        states,
        query_start_loc=query_start_loc,
        initial_slots=initial_slots,
        final_slots=final_slots,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        snapshot_tokens=snapshot_tokens,
        snapshot_slots=snapshot_slots,
    )


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    *,
    chunk_size: int,
    query_start_loc: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    is_limited: Tensor | None = None,
    snapshot_tokens: Tensor | None = None,
    snapshot_slots: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The scan of Mamba-2, for every token of this step.

    Per head, with a state h of (P, N) numbers and one decay for all of them:

        h = exp(dt * A) * h + dt * outer(x, B)        out = (h @ C + D * x) * silu(z)

    Head h uses the SSM group `h // (heads // G)` of B and C. A request starts from `initial_slots` and leaves
    its state in `final_slots`, by the rules of `causal_conv1d`. Everything after the step sizes is in fp32; a
    state is rounded to the dtype of states when it is written. No gradient flows into the states.

    Args:
        x: (num_tokens, heads, P), floating. The requests' tokens, packed; from `query_start_loc[-1]` on they
            are padding, are not looked at and yield 0.
        dt: (num_tokens, heads), floating. Step sizes, before bias, softplus and limit.
        A: (heads,), floating, negative.
        B: (num_tokens, G, N), the dtype of x. G divides heads.
        C: (num_tokens, G, N), the dtype of x.
        states: (num_slots, heads, P, N), floating, strided anyhow. Written in place.
        chunk_size: tokens. A tuning number: the longest chunk, no matter for the result but by rounding.
        query_start_loc: (num_reqs + 1,), int32 or int64. Where each request's tokens start.
        initial_slots: (num_reqs,), int32 or int64. Where each request's state comes from; 0 is the zero state.
        final_slots: (num_reqs,), int32 or int64. Where the state after each request's last token goes; 0: nowhere.
        D: (heads,), floating, or None. The skip connection.
        z: (num_tokens, heads, P), the dtype of x, or None. The gate.
        dt_bias: (heads,), floating, or None. Added to dt.
        dt_softplus: whether softplus is applied to dt, after the bias.
        dt_limit: the least and the greatest step size, clamped to after softplus.
        is_limited: (num_reqs,), bool. Whose step sizes are clamped; None: everyone's. transformers clamps in
            prefill and not in decode, so a step that mixes them needs both.
        snapshot_tokens: (num_snapshots,), int64. Indices into x: the state after exactly that token is kept.
        snapshot_slots: (num_snapshots,), int32 or int64. Where; 0: nowhere, and its token is not looked at.

    Returns:
        (num_tokens, heads, P), float32, or float64 where x or states are: the gated norm that follows works
        in fp32, and transformers rounds after it.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or G that does not divide heads.
        BackendUnavailableError: if the backend asked for does not serve the call.

    The torch form reads start locations and slots on the host: on a GPU that is a device-to-host sync.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 6; `mamba_chunk_scan_combined` of mamba-ssm, where
        the result has the dtype of x.

    Example:
        Nothing decays, so the state is a running sum, here on top of the 10 in slot 2:

        >>> one, states = torch.ones(3, 1, 1), torch.tensor([0.0, 0.0, 10.0]).view(3, 1, 1, 1)
        >>> x = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
        >>> ssd_scan(x, one[:, 0], torch.zeros(1), one, one, states, chunk_size=2,
        ...          query_start_loc=torch.tensor([0, 3]), initial_slots=torch.tensor([2]),
        ...          final_slots=torch.tensor([1])).flatten().tolist()
        [11.0, 13.0, 16.0]
        >>> states.flatten().tolist()
        [0.0, 16.0, 10.0]
    """
    device, (num_tokens, heads, head_dim) = x.device, _sizes("x", x, 3)
    _, groups, state_size = _sizes("B", B, 3)
    _check_ssm_groups(heads, groups)
    _check("dt", dt, (num_tokens, heads), None, device)
    _check("A", A, (heads,), None, device)
    for name, tensor in (("B", B), ("C", C)):
        _check(name, tensor, (num_tokens, groups, state_size), (x.dtype,), device)
    _check("states", states, (_ANY, heads, head_dim, state_size), None, device)
    _check_scan_options(x, (heads,), D, z, dt_bias)
    _check_scan_slots(query_start_loc, initial_slots, final_slots, snapshot_tokens, snapshot_slots, device)
    if is_limited is not None:
        _check("is_limited", is_limited, (len(initial_slots),), (torch.bool,), device)
    if chunk_size < 1:
        raise ShapeError(f"chunk_size: expected at least 1 token, got {chunk_size}.")
    if not dt_limit[0] <= dt_limit[1]:
        raise ShapeError(f"dt_limit: expected the least and the greatest step size, got {dt_limit}.")
    return _run(
        "ssd_scan",
        backend,
        x,
        dt,
        A,
        B,
        C,
        states,
        chunk_size=chunk_size,
        query_start_loc=query_start_loc,
        initial_slots=initial_slots,
        final_slots=final_slots,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        is_limited=is_limited,
        snapshot_tokens=snapshot_tokens,
        snapshot_slots=snapshot_slots,
    )


def selective_state_update(
    states: Tensor,
    slots: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    backend: str = "auto",
) -> Tensor:
    """One token per request through the recurrence of Mamba-1 or Mamba-2, in place on the requests' slots.

    Mamba-1 is `selective_scan`, Mamba-2 `ssd_scan`, for one token a request with equal initial and final slots
    and without a limit on the step size. A row with slot 0 is padding: its output means nothing, and no slot is
    written.

    Args:
        states: Mamba-1 (num_slots, channels, N) or Mamba-2 (num_slots, heads, P, N), floating, strided anyhow.
            Written in place.
        slots: (num_reqs,), int32 or int64. The state slot of each request; those other than 0 are distinct.
        x: (num_reqs, channels) or (num_reqs, heads, P), floating. Its number of dims tells the form.
        dt: like x, floating. Step sizes, before bias and softplus. Mamba-2 has one per head: expand it to P, and
            A, D and dt_bias likewise, without a copy.
        A: (channels, N) or (heads, P, N), floating, negative.
        B: (num_reqs, N) or (num_reqs, G, N), the dtype of x. G divides heads.
        C: like B.
        D: (channels,) or (heads, P), floating, or None. The skip connection.
        z: like x, or None. The gate.
        dt_bias: (channels,) or (heads, P), floating, or None. Added to dt.
        dt_softplus: whether softplus is applied to dt, after the bias.

    Returns:
        Like x.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or G that does not divide heads.
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: `selective_state_update` of mamba-ssm, where the slots are `state_batch_indices`.

    Example:
        >>> one, states = torch.ones(1, 1), torch.tensor([[[0.0]], [[10.0]]])
        >>> selective_state_update(states, torch.tensor([1]), 2 * one, one, 0 * one, one, one)
        tensor([[12.]])
        >>> states.flatten().tolist()
        [0.0, 12.0]
    """
    device, is_mamba1 = x.device, x.dim() == 2
    num_reqs, *inner = _sizes("x", x, 2 if is_mamba1 else 3)
    _, *groups, state_size = _sizes("B", B, x.dim())
    if not is_mamba1:
        _check_ssm_groups(inner[0], groups[0])
    _check("dt", dt, (num_reqs, *inner), None, device)
    _check("A", A, (*inner, state_size), None, device)
    for name, tensor in (("B", B), ("C", C)):
        _check(name, tensor, (num_reqs, *groups, state_size), (x.dtype,), device)
    _check("states", states, (_ANY, *inner, state_size), None, device)
    _check("slots", slots, (num_reqs,), _INDEX, device)
    _check_scan_options(x, tuple(inner), D, z, dt_bias)
    return _run(
        "selective_state_update",
        backend,
        states,
        slots,
        x,
        dt,
        A,
        B,
        C,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
    )


# Choosing a backend.


def _no_refusals(*args: Any, **kwargs: Any) -> list[str]:
    """The reasons against a form that serves every call."""
    return []


@dataclass(frozen=True)
class _Form:
    """One implementation of an operation; `refusals` takes a call and returns the reasons against it."""

    run: Callable[..., Any]
    refusals: Callable[..., list[str]] = _no_refusals
    auto_on: str | None = None
    """The type of device on which `auto` takes this form; None for any."""


def _triton(folder: str, operation: str) -> _Form:
    """The Triton form of an operation. Its module, and with it triton, is imported when it is first asked."""

    def module() -> Any:
        return import_module(f"kvgroups.kernels.{folder}.triton_impl")

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(_first_tensor(args)):  # triton launches on the current device
            return getattr(module(), operation)(*args, **kwargs)

    def refusals(*args: Any, **kwargs: Any) -> list[str]:
        if find_spec("triton") is None:
            return ["needs the package triton, which is not installed"]
        device = _first_tensor(args).device
        if device.type != "cuda" and not (device.type == "cpu" and module().INTERPRETED):
            return [f"needs tensors on a GPU, or on the CPU with Triton's interpreter, got {device}"]
        return getattr(module(), "refusals", _no_refusals)(*args, **kwargs)

    return _Form(run, refusals, auto_on="cuda")


def _first_tensor(args: tuple[Any, ...]) -> Tensor:
    """The tensor whose device is the call's."""
    return next(arg for arg in args if isinstance(arg, Tensor))


_FORMS: dict[str, dict[str, _Form]] = {
    "slot_mapping": {
        "triton": _triton("slot_mapping", "slot_mapping"),
        "torch": _Form(slot_mapping_torch.slot_mapping),
        "reference": _Form(slot_mapping_reference.slot_mapping),
    },
    "table_update": {
        "triton": _triton("table_update", "table_update"),
        "torch": _Form(table_update_torch.table_update),
        "reference": _Form(table_update_reference.table_update),
    },
    "write_kv": {
        "triton": _triton("write_kv", "write_kv"),
        "torch": _Form(write_kv_torch.write_kv),
        "reference": _Form(write_kv_reference.write_kv),
    },
    "paged_attention": {
        "triton": _triton("paged_attention", "paged_attention"),
        "torch": _Form(paged_attention_torch.paged_attention),
        "reference": _Form(paged_attention_reference.paged_attention),
    },
    "gather_kv": {
        "triton": _triton("gather_kv", "gather_kv"),
        "torch": _Form(gather_kv_torch.gather_kv),
        "reference": _Form(gather_kv_reference.gather_kv),
    },
    "gather_states": {
        "triton": _triton("state_slots", "gather_states"),
        "torch": _Form(state_slots_torch.gather_states),
        "reference": _Form(state_slots_reference.gather_states),
    },
    "scatter_states": {
        "triton": _triton("state_slots", "scatter_states"),
        "torch": _Form(state_slots_torch.scatter_states),
        "reference": _Form(state_slots_reference.scatter_states),
    },
    "causal_conv1d": {
        "torch": _Form(causal_conv1d_torch.causal_conv1d),
        "reference": _Form(causal_conv1d_reference.causal_conv1d),
    },
    "causal_conv1d_update": {
        "triton": _triton("causal_conv1d", "causal_conv1d_update"),
        "torch": _Form(causal_conv1d_torch.causal_conv1d_update),
        "reference": _Form(causal_conv1d_reference.causal_conv1d_update),
    },
    "selective_scan": {
        "torch": _Form(selective_scan_torch.selective_scan),
        "reference": _Form(selective_scan_reference.selective_scan),
    },
    "ssd_scan": {
        "torch": _Form(ssd_scan_torch.ssd_scan),
        "reference": _Form(ssd_scan_reference.ssd_scan),
    },
    "selective_state_update": {
        "triton": _triton("state_update", "selective_state_update"),
        "torch": _Form(state_update_torch.selective_state_update),
        "reference": _Form(state_update_reference.selective_state_update),
    },
}
"""Operation -> backend -> form, in the order in which `auto` tries them. It never takes the reference."""

_default_backend: ContextVar[str] = ContextVar("kvgroups_backend", default="auto")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Make `name` the backend of every call in the block that does not ask for one itself.

    An operation that has no such form (not all have a Triton one) goes by `auto`. The default belongs to the
    running thread or task; blocks nest.

    Args:
        name: `auto`, `triton`, `torch` or `reference`.

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
    if backend == "auto":
        default = _default_backend.get()
        backend = default if default in forms else "auto"
    if backend == "auto":
        candidates = _auto_candidates(forms, args)
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
            return forms[name].run(*args, **kwargs)
        reasons.append(f"{name}: {'; '.join(refusals)}")
    raise BackendUnavailableError(
        f"{operation}: backend {backend!r} does not serve this call ({' | '.join(reasons)}). "
        + _advice(forms, args, kwargs)
    )


def _auto_candidates(forms: dict[str, _Form], args: tuple[Any, ...]) -> list[str]:
    """The forms that `auto` may take for tensors on this device."""
    device = _first_tensor(args).device.type
    return [name for name, form in forms.items() if name != "reference" and form.auto_on in (None, device)]


def _advice(forms: dict[str, _Form], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Which backend to ask for instead."""
    names = [*_auto_candidates(forms, args), "reference"]
    serving = [name for name in names if name in forms and not forms[name].refusals(*args, **kwargs)]
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


def _sizes(name: str, tensor: Tensor, num_dims: int) -> tuple[int, ...]:
    """The sizes of a floating tensor of that many dims; raise ShapeError if it is not one."""
    _check(name, tensor, (_ANY,) * num_dims, None, tensor.device)
    return tuple(tensor.shape)


def _check_convolution(
    channels: int,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    activation: str | None,
    device: torch.device,
) -> None:
    """Raise ShapeError unless weights, states and activation of a convolution fit its channels."""
    _check("weight", weight, (channels, _AtLeast(1)), None, device)
    if bias is not None:
        _check("bias", bias, (channels,), None, device)
    _check("states", states, (_ANY, channels, weight.shape[1]), None, device)
    if activation not in (None, "silu", "swish"):
        raise ShapeError(
            f"activation: expected silu, swish or None, got {activation!r}. Apply any other one to the result."
        )


def _check_scan_slots(
    query_start_loc: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    snapshot_tokens: Tensor | None,
    snapshot_slots: Tensor | None,
    device: torch.device,
) -> None:
    """Raise ShapeError unless each request has tokens and slots, and each snapshot a token and a slot."""
    num_reqs = len(initial_slots)
    _check("query_start_loc", query_start_loc, (num_reqs + 1,), _INDEX, device)
    _check("initial_slots", initial_slots, (num_reqs,), _INDEX, device)
    _check("final_slots", final_slots, (num_reqs,), _INDEX, device)
    if snapshot_tokens is not None and snapshot_slots is not None:
        _check("snapshot_tokens", snapshot_tokens, (len(snapshot_slots),), (torch.int64,), device)
        _check("snapshot_slots", snapshot_slots, (len(snapshot_slots),), _INDEX, device)
    elif not (snapshot_tokens is snapshot_slots is None):
        missing = "snapshot_tokens" if snapshot_tokens is None else "snapshot_slots"
        raise ShapeError(
            f"{missing}: expected one per snapshot, got None. Pass snapshot_tokens and snapshot_slots, or neither."
        )


def _check_scan_options(
    x: Tensor, shape: tuple[int, ...], D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None
) -> None:
    """Raise ShapeError unless D and dt_bias have that shape and the gate z fits x, where there are any."""
    for name, tensor in (("D", D), ("dt_bias", dt_bias)):
        if tensor is not None:
            _check(name, tensor, shape, None, x.device)
    if z is not None:
        _check("z", z, tuple(x.shape), (x.dtype,), x.device)


def _check_ssm_groups(heads: int, groups: int) -> None:
    """Raise ShapeError unless every SSM group of B and C serves the same number of heads."""
    if groups == 0 or heads % groups:
        raise ShapeError(
            f"B: expected a number of SSM groups that divides the {heads} heads of x, got {groups}. "
            "Each SSM group serves the same number of heads."
        )
