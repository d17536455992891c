"""Softmax attention over keys and values that lie densely in memory.

Shapes in this file: b requests, t queries each, n keys each, h KV heads, g query heads per KV head, d dim.
"""

import torch
import torch.nn.functional as F

MAX_PACKED_QUERIES = 16
"""Up to here the g query heads of a KV head become rows of one matrix, which reads each key once, not g
times. Beyond it the work is bound by arithmetic, and packing would only make the mask g times larger."""


def attend(query, keys, values, rule, bias=None, is_causal=False):
    """Attention of query (b, h * g, t, d) over keys (b, h, n, d) and values (b, h, n, d_v): (b, t, h * g, d_v).

    Args:
        rule: its scale, softcap and sinks. What a query sees is not asked of it.
        bias: (1, t, n) or, for t = 1, (b, 1, n), the query's dtype: 0 where a query sees a key, else -inf.
        is_causal: every query sees itself and what came before; for t = n and without a bias.

    Returns:
        The query's dtype; if the rule asks for the log-sum-exp, `exact_dtype` of it and one column more. What is not seen
        must be finite, and where a query sees nothing the result is anything.
    """
    # Query heads h * g .. h * g + g - 1 share KV head h.
    if rule.needs_scores:
        return _with_scores(query, keys, values, rule, bias)
    return _fused(query, keys, values, rule.scale, bias, is_causal)


def nothing(query, dim_v, rule, has_sinks=True):
    """The outputs of queries (b, heads, t, d) that see no key; without sinks if they are only padding."""
    b, heads, t, _ = query.shape
    if not rule.returns_lse:
        return query.new_zeros(b, t, heads, dim_v)
    output = query.new_zeros(b, t, heads, dim_v + 1, dtype=exact_dtype(query.dtype))
    output[..., -1] = rule.sinks if has_sinks and rule.sinks is not None else float("-inf")
    return output


def exact_dtype(dtype):
    """What softmax runs in: fp32 or, for fp64, fp64."""
    return torch.promote_types(dtype, torch.float32)


def _fused(query, keys, values, scale, bias, is_causal):
    """PyTorch's kernel."""
    b, heads, t, d = query.shape
    h, d_v = keys.shape[1], values.shape[3]
    if d != d_v:
        # Its fast form wants one width; zeros change neither scores nor the columns that are kept.
        query, keys = F.pad(query, (0, max(d_v - d, 0))), F.pad(keys, (0, max(d_v - d, 0)))
        values = F.pad(values, (0, max(d - d_v, 0)))
    if t <= MAX_PACKED_QUERIES and not (is_causal and t > 1):
        if bias is not None:
            bias = bias[:, None, None].expand(-1, 1, heads // h, -1, -1).flatten(2, 3)
        output = F.scaled_dot_product_attention(_packed(query, h), keys, values, attn_mask=bias, scale=scale)
        output = output.reshape(b, heads, t, -1)
    else:
        output = _unpacked(query, keys, values, scale, bias, is_causal)
    output = output.transpose(1, 2)
    return output if d_v >= d else output[..., :d_v]


def _packed(query, h):
    """Query (b, h * g, t, d) as (b, h, g * t, d)."""
    b, heads, t, d = query.shape
    return query.reshape(b, h, heads // h * t, d)


def _unpacked(query, keys, values, scale, bias, is_causal):
    """Each head as a matrix of its own: (b, h * g, t, d_v)."""
    options = {"attn_mask": None if bias is None else bias[:, None], "is_causal": is_causal, "scale": scale}
    num_per_head = query.shape[1] // keys.shape[1]
    if num_per_head == 1 or _has_shared_heads(query.device):
        return F.scaled_dot_product_attention(query, keys, values, **options, enable_gqa=num_per_head > 1)
    # All heads of a KV head look at one copy, through a stride of zero.
    b, heads, t, d = query.shape
    keys, values = (each.flatten(0, 1)[:, None].expand(-1, num_per_head, -1, -1) for each in (keys, values))
    output = F.scaled_dot_product_attention(query.reshape(-1, num_per_head, t, d), keys, values, **options)
    return output.reshape(b, heads, t, -1)


def _has_shared_heads(device):
    """Whether PyTorch's kernel lets query heads share keys: on the CPU it does, and lays its output out as (b, t, heads, d).
    Elsewhere some of its kernels repeat the keys instead."""
    return device.type == "cpu"


def _with_scores(query, keys, values, rule, bias):
    """Explicit scores in fp32 (fp64 for fp64)."""
    dtype = exact_dtype(query.dtype)
    t, g = query.shape[2], query.shape[1] // keys.shape[1]
    scores = _packed(query, keys.shape[1]).to(dtype) @ keys.to(dtype).mT
    scores = scores.unflatten(2, (g, t)).mul_(rule.scale)
    if rule.softcap is not None:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    if bias is not None:
        scores = scores.masked_fill_((bias < 0)[:, None, None], float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.to(dtype).view(1, -1, g, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat([scores, sinks], dim=4)
    weights = scores.softmax(dim=4)[..., : keys.shape[2]]
    output = (weights.flatten(2, 3) @ values.to(dtype)).unflatten(2, (g, t))
    if rule.returns_lse:
        output = torch.cat([output, scores.logsumexp(dim=4, keepdim=True)], dim=4)
    else:
        output = output.to(query.dtype)
    return output.permute(0, 3, 1, 2, 4).flatten(2, 3)
