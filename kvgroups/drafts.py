"""Drafts that transformers' assisted generation verifies: how many a cache can take back, and no more than those."""

from __future__ import annotations

import weakref
from typing import Any

from kvgroups.cache import GroupedCache
from kvgroups.errors import UnsupportedCallError


def limit_drafts(generator: Any, cache: GroupedCache, max_length: int) -> int:
    """Have a candidate generator draft no more than the cache can take back, nor beyond the answer's end.

    Args:
        generator: transformers' candidate generator, as it was just made; its `get_candidates` is hidden.
        cache: what the drafts are fed to. Allowed to go back by as many tokens as are drafted.
        max_length: tokens of prompt and answer.

    Returns:
        Tokens that a step drafts at most.

    Raises:
        UnsupportedCallError: if the cache cannot take back what is asked for; nothing is taken.
    """
    num_drafts = int(getattr(generator, "num_output_tokens", None) or getattr(generator, "num_assistant_tokens", None) or 0)
    cache.allow_drafts(num_drafts)
    # Not the generator itself: a cycle through it would keep the cache and its blocks until the next collection.
    weak = weakref.ref(generator)

    def get_candidates(input_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        generator = weak()
        assert generator is not None, "it is called through the generator"
        length = input_ids.shape[1]
        most = min(cache.max_rewind, max_length - length - 1)
        if most <= 0:
            return input_ids, None
        if hasattr(generator, "num_assistant_tokens"):  # grows by itself where drafts were right
            generator.num_assistant_tokens = min(generator.num_assistant_tokens, cache.max_rewind)
        candidates, logits = type(generator).get_candidates(generator, input_ids, *args, **kwargs)
        return candidates[:, : length + most], None if logits is None else logits[:, :most]

    generator.get_candidates = get_candidates
    return num_drafts if hasattr(generator, "num_output_tokens") else cache.max_rewind


def check_past(cache: GroupedCache) -> None:
    """Refuse drafts on a cache that holds tokens: transformers feeds the whole prompt again then.

    Raises:
        UnsupportedCallError: if it holds some.
    """
    if cache.get_seq_length():
        raise UnsupportedCallError(
            f"cache: holds {cache.get_seq_length()} tokens a row, and with drafts transformers feeds the whole prompt; "
            "generate this turn without prompt_lookup_num_tokens and assistant_model, or leave `cache` out"
        )
