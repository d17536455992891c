"""Join attention over parts of a context in one weighted sum."""


def merge_attention(outputs, lses):
    """See `kvgroups.ops.merge_attention`."""
    lse = lses.logsumexp(dim=0)
    is_empty = lses == float("-inf")
    # -inf - -inf is NaN, and so is 0 times whatever lies in an empty part: both are filled over.
    weights = (lses - lse).exp().masked_fill_(is_empty, 0)[..., None]
    parts = outputs.to(lses.dtype).masked_fill(is_empty[..., None], 0)
    return (parts * weights).sum(dim=0).to(outputs.dtype), lse
