"""What `generate` is about to do with a cache of ours: the last checks before blocks are taken."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch

from kvgroups.cache import GroupedCache
from kvgroups.errors import UnsupportedCallError
from kvgroups.prospect import check_prospect, foresee


def check_prompt(
    cache: GroupedCache,
    input_ids: torch.Tensor,
    generation_config: Any,
    model_kwargs: Mapping[str, Any],
    num_drafts: int = 0,
) -> None:
    """Refuse a prompt that the cache does not go on to, or one that cannot be answered to the end.

    Args:
        cache: what the prompt is fed to; it may hold the beginning of it.
        input_ids: (rows, tokens), int64: the whole prompt, beams and samples as rows of their own; without tokens
            if the prompt comes as `inputs_embeds`.
        generation_config: says how far the answer goes and how the prompt is cut.
        model_kwargs: `attention_mask` and `inputs_embeds` are read.
        num_drafts: tokens that every step drafts at most.

    Raises:
        UnsupportedCallError: naming what does not fit together.
        OutOfBlocksError: naming the group, the need and what there is.
    """
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    if mask is not None and mask.ndim == 2 and bool((mask[:, -1] == 0).any()):
        row = int((mask[:, -1] == 0).nonzero()[0])
        raise UnsupportedCallError(
            f"attention_mask: row {row} ends in padding, so generate would read its first token at a pad; pad on "
            "the left (tokenizer.padding_side = 'left')"
        )
    seen = cache.history.num_columns
    prompt_len = input_ids.shape[1] if embeds is None else embeds.shape[1]
    if seen:
        _check_reused(cache, input_ids if embeds is None else None, prompt_len)
    if cache.context.config.memory is None or (mask is not None and mask.ndim != 2):
        return
    num_new = prompt_len - seen
    is_real = cache.history.real_columns(mask, len(input_ids), num_new)
    chunk_size = generation_config.prefill_chunk_size
    prospect = foresee(
        _keys(cache, input_ids if embeds is None else None, is_real, chunk_size),
        _computed(cache, mask, len(input_ids), num_new),
        is_real if cache.history.pending is None else np.concatenate((cache.history.pending, is_real), axis=1),
        num_decodes=max(0, generation_config.max_length - 1 - prompt_len),
        chunk_size=chunk_size,
        max_tokens=cache.context.config.max_num_batched_tokens,
        splits_rows=cache.context.splits_rows,
        drafted=num_drafts,
        max_rewind=cache.max_rewind,
    )
    check_prospect(cache.context.manager, cache.rows, prospect)


def _check_reused(cache: GroupedCache, input_ids: torch.Tensor | None, prompt_len: int) -> None:
    seen = cache.history.num_columns
    if prompt_len <= seen:
        raise UnsupportedCallError(
            f"cache: holds {seen} tokens a row and the prompt has {prompt_len}; pass the whole conversation, "
            "what the cache holds and at least one token more"
        )
    known = cache.token_ids
    if known is None or input_ids is None:
        return
    differs = (known.to(input_ids.device) != input_ids[:, :seen]).nonzero()
    if len(differs):
        row, column = differs[0].tolist()
        raise UnsupportedCallError(
            f"cache: was filled with another prompt: row {row} differs at token {column}; pass the prompt that "
            "it was filled with, or leave `cache` out"
        )


def _computed(cache: GroupedCache, mask: torch.Tensor | None, batch_size: int, num_new: int) -> np.ndarray:
    """(batch,), int64: tokens that each row will go on from."""
    if not len(cache.rows):
        return np.zeros(batch_size, dtype=np.int64)
    hidden = cache.history.hidden_tail(mask, num_new)
    return cache.rows.num_tokens - (0 if hidden is None else hidden.sum(1))


def _keys(
    cache: GroupedCache, input_ids: torch.Tensor | None, is_real: np.ndarray, chunk_size: int | None
) -> list[Hashable]:
    """One a row, equal for rows that stay one request until the prompt has been computed."""
    batch_size, num_new = is_real.shape
    requests = [id(request) for request in cache.rows.requests] or [0] * batch_size
    parts_at_once = len(cache.rows) > 0 and 1 in (num_new, chunk_size)
    if input_ids is None or parts_at_once:
        return list(range(batch_size))
    new = input_ids[:, -num_new:].cpu().numpy()
    return [
        (request, real.tobytes(), ids[real].tobytes()) for request, real, ids in zip(requests, is_real, new, strict=True)
    ]
