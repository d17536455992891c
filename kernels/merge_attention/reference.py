"""Join attention over parts of a context, one query and head at a time."""

import torch


def merge_attention(outputs, lses):
    """See `kvgroups.ops.merge_attention`."""
    output, lse = torch.zeros_like(outputs[0]), lses.logsumexp(dim=0)
    for token, head in torch.isfinite(lse).nonzero().tolist():
        merged = outputs.new_zeros(outputs.shape[3], dtype=lses.dtype)
        for part, part_lse in zip(outputs[:, token, head], lses[:, token, head], strict=True):
            if part_lse > float("-inf"):
                merged += part.to(lses.dtype) * (part_lse - lse[token, head]).exp()
        output[token, head] = merged
    return output, lse
