"""What a row's logits must be, and memory that betrays whoever reads what it does not own."""

from __future__ import annotations

import inspect

import torch
from transformers import DynamicCache, PreTrainedModel

from kvgroups.constants import NULL_BLOCK_ID


@torch.no_grad()
def oracle_logits(model: PreTrainedModel, token_ids: list[int] | torch.Tensor) -> torch.Tensor:
    """One forward of one unpadded row without any cache.

    Args:
        model: patched or not; a forward without a cache is never changed.
        token_ids: (num_tokens,), the row.

    Returns:
        (num_tokens, vocab_size), the model's logits dtype.
    """
    ids = torch.as_tensor(token_ids, device=model.device)[None]
    return model(input_ids=ids, use_cache=False).logits[0]


def poison_free_blocks(model: PreTrainedModel) -> None:
    """Fill every block and state slot that nobody owns with NaN, the null blocks and the free slabs too.

    Args:
        model: patched. Whatever it computes afterwards is NaN if it reads a block that it does not own.
    """
    context = model.__dict__["_kvgroups"].context
    manager = context.manager
    manager.drain()  # a copy may wait to be made from a block that is free by now
    for group in context.config.groups:
        free = manager.pool(group.name).free_blocks()
        manager.storage(group.name).fill([NULL_BLOCK_ID, *free], 0xFF)
    manager.arena.fill(manager.slabs.free_slabs(), 0xFF)


def without_dt_floor(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, its Mamba-2 mixers never clamping their step sizes.

    Zamba2 and Nemotron-H clamp in prefill only, so that a token computes something else in a chunk than on its
    own. Without the clamp one uncached forward is the oracle for them too, however a row was fed.
    """
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return model


@torch.no_grad()
def cached_logits(model: PreTrainedModel, token_ids: list[int], prompt_len: int) -> torch.Tensor:
    """What transformers' own cache gives: the prompt in one forward, then one token at a time.

    For models whose prefill and decode differ by design (Zamba2 and Nemotron-H floor dt in prefill only), where
    one uncached forward is not what decoding should give.

    Args:
        model: patched or not; a forward with another cache than ours is never changed.
        token_ids: (num_tokens,), the row.
        prompt_len: tokens of the first forward.

    Returns:
        (num_tokens, vocab_size), the model's logits dtype.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    logits = []
    for start, stop in [(0, prompt_len), *((at, at + 1) for at in range(prompt_len, len(token_ids)))]:
        ids = torch.tensor([token_ids[start:stop]], device=model.device)
        positions = torch.arange(start, stop, device=model.device)[None]
        accepts = "position_ids" in inspect.signature(model.forward).parameters
        extra = {"position_ids": positions} if accepts else {}
        logits.append(model(input_ids=ids, cache=cache, **extra).logits[0])
    return torch.cat(logits)
