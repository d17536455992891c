"""What a row's logits must be, and memory that betrays whoever reads what it does not own."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


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
    """Fill every block and state slot that nobody owns with NaN, the null blocks too.

    Args:
        model: patched. Whatever it computes afterwards is NaN if it reads a block that it does not own.
    """
    context = model.__dict__["_kvgroups"].context
    for group in context.config.groups:
        references = context.manager.pool(group.name).references
        free = [block_id for block_id, count in enumerate(references) if count == 0]
        context.manager.storage(group.name).fill(free, 0xFF)
