"""Operations on K and V in pages."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from kvgroups.constants import PAD_SLOT_ID
from kvgroups.errors import ShapeError
from kvgroups.ops.checks import (
    ANY,
    INDEX,
    AtLeast,
    block_size_of,
    check,
    check_caches,
    check_step_kv,
    device_of,
    naming,
    out_of_range,
)
from kvgroups.ops.dispatch import run
from kvgroups.ops.recall import Calls

Layout = Literal["NHD", "HND"]


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: Layout = "HND",
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
        layout: `NHD` or `HND`, the order within a block. Blocks in the other order are noticed only where
            their shapes do not fit.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device.
        OutOfRangeError: for a slot that the caches do not have (noticed on the CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: `reshape_and_cache_flash` of vLLM; there the null block may be written.

    Example:
        >>> cache = torch.zeros(3, 2, 1, 1)                              # 3 blocks of 2 tokens, NHD
        >>> token = torch.tensor([[[5.0]], [[6.0]]])
        >>> write_kv(token, token, cache, cache.clone(), torch.tensor([3, -1]), layout="NHD")
        >>> cache.flatten().tolist()                                     # slot 3: block 1, offset 1
        [0.0, 0.0, 0.0, 5.0, 0.0, 0.0]
    """
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    write, addresses = _WRITES.serving(backend, tensors, (layout,))
    try:
        write(*tensors, addresses=addresses)
    except IndexError as error:
        allowed = range(PAD_SLOT_ID, len(key_cache) * block_size_of(key_cache, layout))
        raise out_of_range(error, allowed, "slots", slot_mapping=slot_mapping[: len(key)]) from error


def _check_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *, layout: Layout
) -> None:
    check_caches(key_cache, value_cache, layout)
    check_step_kv(key, value, key_cache, value_cache, layout)
    check("slot_mapping", slot_mapping, (AtLeast(len(key)),), (torch.int64,), key.device)


_WRITES = Calls("write_kv", _check_write, 5, settings=("layout",))


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
    return_lse: bool = False,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    backend: str = "auto",
) -> Any:
    """Causal attention of one layer: history from blocks, the step's own keys and values as they come.

    Request i has history at positions 0 .. num_computed_tokens[i] - 1 in its blocks, and step keys
    `key[kv_start_loc[i] : kv_start_loc[i + 1]]` at the positions that follow. Its queries are right-aligned:
    the last query sits on the last step key. A query at position p sees every position up to p, itself
    included, that `window` and `chunk` allow, and nothing behind a null block. One call serves prefill, chunk
    and decode, in any mix.

    The step's own tokens are never read from the blocks, so they may be written before or after the call; in
    a ring only after it, since writing takes the slots of the oldest visible tokens.

    Masked keys and values may be NaN. A query that sees no key yields 0. Softmax is in fp32.

    Gradients flow into query, key, value and sinks, never into the caches. The torch form computes them, and the
    reference; where one is wanted `auto` takes the torch form, and the C++ and Triton forms refuse. Under
    `torch.no_grad()`, or if nothing requires one, `auto` takes the fast form.

    Args:
        query: (num_query_tokens, num_heads, head_dim). Query head h uses KV head `h // (num_heads //
            num_kv_heads)`. Tokens from `query_start_loc[-1]` on are padding and yield 0.
        key: (num_tokens, num_kv_heads, head_dim), the query's dtype.
        value: (num_tokens, num_kv_heads, head_dim_v), the query's dtype.
        key_cache: NHD (num_blocks, block_size, num_kv_heads, head_dim) or HND (num_blocks, num_kv_heads,
            block_size, head_dim), the query's dtype, any stride between blocks. None if no request has
            history; then value_cache and block_table are None too.
        value_cache: the same with head_dim_v.
        block_table: (num_reqs, width), int32. The table rows of this step's requests, in their order. Wide enough
            for each history, `width * block_size` tokens or more, unless it is a ring: that is the caller's promise,
            and forms differ in what they read past a narrower one.
        query_start_loc: (num_reqs + 1,), int32 or int64. Where each request's queries start; empty requests
            are fine.
        num_computed_tokens: (num_reqs,), int32 or int64, tokens. The history of each request; all 0 without
            caches.
        kv_start_loc: (num_reqs + 1,), int32 or int64. Where each request's step keys start; None: as the
            queries do.
        scale: factor on the scores, above 0.
        window: tokens that a query sees, itself included: `p - window + 1 .. p`. None: all.
        chunk: a query sees positions k with `k // chunk == p // chunk`. None: all.
        softcap: scores become `tanh(score / softcap) * softcap`, after scale and before masking.
        sinks: (num_heads,), floating. One more logit per head in the softmax, with no value.
        layout: `NHD` or `HND`, the order within a block. Blocks in the other order are noticed only where
            their shapes do not fit.
        ring_blocks: R > 0 if the table is a ring: position p lies in block `block_table[i, (p // block_size)
            % R]`.
        return_lse: return the log-sum-exp of each query's scores as well, for `merge_attention`.
        max_query_len: the most queries of one request, as far as the host knows. It and max_seq_len decide how
            the work is cut, never what comes out: a wrong one costs time. None: as many as the shapes allow.
        max_seq_len: the longest sequence, this step's tokens included, as far as the host knows.

    Returns:
        (num_query_tokens, num_heads, head_dim_v), the query's dtype. With return_lse a pair: that, and the
        log-sum-exp (num_query_tokens, num_heads) in float32 (float64 for a float64 query): the natural
        logarithm of what the weights were divided by, so a sink counts; -inf for a query that sees neither a
        key nor a sink, and for padding.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device, or history without caches (noticed on the
            CPU only).
        OutOfRangeError: for a block id that the caches do not have, or, in C++, start locations that the tokens do
            not have (noticed on the CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    The torch form reads start locations and counts on the host: on a GPU that is a device-to-host sync. The
    Triton form does not.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
        PagedAttention", section 4; sinks as in GPT-OSS, softcap as in Gemma 2.

    Example:
        Two tokens of history in block 3, values 1 and 2, and a third token of value 6; the keys are alike:

        >>> keys, values = torch.zeros(4, 1, 2, 1), torch.zeros(4, 1, 2, 1)  # 4 blocks of 2 tokens, HND
        >>> values[3, 0] = torch.tensor([[1.0], [2.0]])
        >>> token, table = torch.zeros(1, 1, 1), torch.tensor([[3]], dtype=torch.int32)
        >>> paged_attention(token, token, token + 6, keys, values, table, scale=1.0,
        ...                 query_start_loc=torch.tensor([0, 1]), num_computed_tokens=torch.tensor([2]))
        tensor([[[3.]]])
    """
    tensors = (
        *(query, key, value, key_cache, value_cache, block_table),
        *(query_start_loc, num_computed_tokens, kv_start_loc, sinks),
    )
    settings = (scale, window, chunk, softcap, layout, ring_blocks, return_lse)
    attend, addresses = _ATTENTION.serving(backend, tensors, settings)
    if key_cache is None and num_computed_tokens.is_cpu and num_computed_tokens.any():
        raise ShapeError(
            "num_computed_tokens: expected all 0 without caches, got a request with history of "
            f"{int(num_computed_tokens.max())} tokens. Pass key_cache, value_cache and block_table."
        )
    for name, bound in (("max_query_len", max_query_len), ("max_seq_len", max_seq_len)):
        if bound is not None and bound < 0:
            raise ShapeError(f"{name}: expected 0 or more, or None where the host does not know, got {bound}.")
    try:
        return attend(*tensors, addresses=addresses, max_query_len=max_query_len, max_seq_len=max_seq_len)
    except IndexError as error:
        num_blocks = 0 if key_cache is None else len(key_cache)
        raise out_of_range(error, range(num_blocks), "block ids", block_table=block_table) from error


def _check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    block_table: Tensor | None,
    *,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    kv_start_loc: Tensor | None,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    layout: Layout,
    ring_blocks: int,
    return_lse: bool,
) -> None:
    device = device_of("query", query)
    check("query", query, (ANY, ANY, ANY), None, device)
    check("key", key, (ANY, ANY, query.shape[2]), (query.dtype,), device)
    check("value", value, (len(key), key.shape[1], ANY), (query.dtype,), device)
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ShapeError(
            f"query: expected a multiple of the {num_kv_heads} KV heads of key, got {num_heads} heads. "
            "Each KV head serves the same number of query heads."
        )
    check("num_computed_tokens", num_computed_tokens, (ANY,), INDEX, device)
    num_reqs = len(num_computed_tokens)
    check("query_start_loc", query_start_loc, (num_reqs + 1,), INDEX, device)
    if kv_start_loc is not None:
        check("kv_start_loc", kv_start_loc, (num_reqs + 1,), INDEX, device)
    elif len(key) != len(query):
        raise ShapeError(
            f"key: expected the {len(query)} tokens of query, got {len(key)}. "
            "Pass kv_start_loc where they differ."
        )
    if sinks is not None:
        check("sinks", sinks, (num_heads,), None, device)
    for name, number in (("window", window), ("chunk", chunk), ("ring_blocks", ring_blocks)):
        if number is not None and not hasattr(number, "__index__"):
            raise ShapeError(f"{name}: expected a whole number, got {number!r}.")
    for name, setting in (("window", window), ("chunk", chunk), ("softcap", softcap)):
        if setting is not None and not setting > 0:
            raise ShapeError(f"{name}: expected more than 0, or None for no {name}, got {setting}.")
    if not scale > 0:
        raise ShapeError(f"scale: expected more than 0, got {scale}.")
    if ring_blocks < 0:
        raise ShapeError(f"ring_blocks: expected 1 or more, or 0 for a plain table, got {ring_blocks}.")

    if key_cache is not None and value_cache is not None and block_table is not None:
        check_caches(key_cache, value_cache, layout)
        check_step_kv(key, value, key_cache, value_cache, layout)
        check("block_table", block_table, (num_reqs, AtLeast(max(ring_blocks, 1))), (torch.int32,), device)
    elif not (key_cache is value_cache is block_table is None):
        given = {"key_cache": key_cache, "value_cache": value_cache, "block_table": block_table}
        missing = [name for name, tensor in given.items() if tensor is None]
        raise ShapeError(
            "key_cache: expected key_cache, value_cache and block_table, or None for all three, got None for "
            f"{' and '.join(missing)} only. Without caches no request has history."
        )


_ATTENTION = Calls(
    "paged_attention",
    _check_attention,
    6,
    ("query_start_loc", "num_computed_tokens", "kv_start_loc", "sinks"),
    ("scale", "window", "chunk", "softcap", "layout", "ring_blocks", "return_lse"),
)


def merge_attention(outputs: Tensor, lses: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Join what the same queries saw in disjoint parts of their context into attention over all of it.

    The parts are what context-parallel ranks hold, a prefix that several requests share and the rest of each
    (a cascade), or the splits of a long decode. Part i attended with `return_lse=True`. Sinks go to one part
    only, since each part divides by its own.

    Args:
        outputs: (num_parts, num_tokens, num_heads, head_dim_v), floating. Where a part saw nothing, its entry
            may be anything, NaN too.
        lses: (num_parts, num_tokens, num_heads), float32 or float64. -inf where a part saw nothing.

    Returns:
        output (num_tokens, num_heads, head_dim_v) in the dtype of outputs, 0 where no part saw anything, and its
        log-sum-exp (num_tokens, num_heads) in the dtype of lses, which merges further. Sums are in the dtype
        of lses, in an order that depends on the number of parts only.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device.
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; the parts as in
        Flash-Decoding and in Juravsky et al. 2024, "Hydragen".

    Example:
        Three keys of equal score, values 1 and 2 in one part and 6 in the other:

        >>> outputs, lses = torch.tensor([1.5, 6.0]).view(2, 1, 1, 1), torch.tensor([2.0, 1.0]).log().view(2, 1, 1)
        >>> output, lse = merge_attention(outputs, lses)
        >>> round(output.item(), 4), round(lse.exp().item(), 4)
        (3.0, 3.0)
    """
    for name, tensor in (("outputs", outputs), ("lses", lses)):
        if not isinstance(tensor, Tensor):
            raise ShapeError(
                f"{name}: expected one tensor of all parts, got {type(tensor).__name__}. Join the parts with torch.stack."
            )
    device = outputs.device
    check("outputs", outputs, (AtLeast(1), ANY, ANY, ANY), None, device)
    check("lses", lses, tuple(outputs.shape[:3]), (torch.float32, torch.float64), device)
    return run("merge_attention", backend, outputs, lses)


def gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    *,
    seq_lens: Tensor,
    max_seq_len: int,
    layout: Layout = "HND",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The dense history of each request, for layers that transform keys and values after storing them.

    Positions from a request's `seq_len` on and positions behind a null block are 0. Windows and rings do not
    exist here: a group of such a layer is `paged` and keeps everything.

    Args:
        key_cache: NHD (num_blocks, block_size, num_kv_heads, head_dim) or HND (num_blocks, num_kv_heads,
            block_size, head_dim). Any stride between blocks.
        value_cache: the same with head_dim_v.
        block_table: (num_reqs, width), int32, width * block_size >= max_seq_len. The table rows of this
            step's requests.
        seq_lens: (num_reqs,), int32 or int64, tokens to read from each request.
        max_seq_len: tokens in the result.
        layout: `NHD` or `HND`, the order within a block. Blocks in the other order are noticed only where
            their shapes do not fit.

    Returns:
        key (num_reqs, max_seq_len, num_kv_heads, head_dim) and value (num_reqs, max_seq_len, num_kv_heads,
        head_dim_v), in the cache's dtype.

    Raises:
        ShapeError: for a tensor of another shape, dtype or device.
        OutOfRangeError: for a block id that the caches do not have (noticed on the CPU only).
        BackendUnavailableError: if the backend asked for does not serve the call.

    Source: the gathered sequence that multi-latent attention projects up again; DeepSeek-V2, section 2.1.

    Example:
        >>> cache = torch.arange(1.0, 7.0).view(3, 2, 1, 1)              # 3 blocks of 2 tokens, NHD
        >>> key, _ = gather_kv(cache, cache, torch.tensor([[2, 1]], dtype=torch.int32),
        ...                    seq_lens=torch.tensor([3]), max_seq_len=4, layout="NHD")
        >>> key.flatten().tolist()
        [5.0, 6.0, 3.0, 0.0]
    """
    check_caches(key_cache, value_cache, layout)
    width = AtLeast(-(-max_seq_len // block_size_of(key_cache, layout)))
    check("block_table", block_table, (ANY, width), (torch.int32,), key_cache.device)
    check("seq_lens", seq_lens, (len(block_table),), INDEX, key_cache.device)
    operands = key_cache, value_cache, block_table
    with naming(range(len(key_cache)), "block ids", block_table=block_table):
        return run("gather_kv", backend, *operands, seq_lens=seq_lens, max_seq_len=max_seq_len, layout=layout)
