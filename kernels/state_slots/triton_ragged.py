"""What the Triton forms of the state kernels share: where packed tokens belong, where a state is kept, softplus.

All of it is looked up on the device: nothing waits for the host, and no shape hangs on what a tensor holds.
"""

import torch
import triton
import triton.language as tl

from kvgroups.constants import NULL_BLOCK_ID

NULL: tl.constexpr = tl.constexpr(NULL_BLOCK_ID)

NO_TOKEN = 2**62
"""Where a snapshot lies that is to go nowhere: behind every token."""


def sorted_snapshots(snapshot_tokens, snapshot_slots, like):
    """Snapshots in the order of their tokens, those that go nowhere last.

    Returns:
        tokens: (num_snapshots,), int64.
        slots: (num_snapshots,), int64.
        num_snapshots, and the halvings that `num_below` needs for them. All of it empty, and of the same dtypes,
        where there are no snapshots: a kernel is then not compiled for both.
    """
    if snapshot_tokens is None or not len(snapshot_tokens):
        none = like.new_empty(0, dtype=torch.int64)
        return none, none, 0, 0
    tokens, order = snapshot_tokens.masked_fill(snapshot_slots == NULL_BLOCK_ID, NO_TOKEN).sort()
    return tokens, snapshot_slots.long()[order], len(tokens), len(tokens).bit_length()


@triton.jit
def num_below(values, num_values, num_halvings, bound):
    """How many of the sorted values lie below `bound`, a number or a block of them, by bisection.

    `num_halvings` is `num_values.bit_length()`: enough to single out one of num_values + 1 answers.
    """
    low = (bound * 0).to(tl.int32)
    high = low + num_values
    for _ in range(num_halvings):
        middle = (low + high) // 2
        value = tl.load(values + middle, mask=low < high, other=0)
        is_higher = (low < high) & (value < bound)
        high = tl.where(is_higher, high, tl.where(low < high, middle, high))
        low = tl.where(is_higher, middle + 1, low)
    return low


@triton.jit
def request_of(token, query_start_loc, num_reqs, num_halvings):
    """The first request that ends after the token; `num_reqs` for a padded token, which belongs to none."""
    return num_below(query_start_loc + 1, num_reqs, num_halvings, token + 1)


@triton.jit
def segment_end(segment, first, num_kept, stop, snapshot_tokens):
    """Where a request's segment ends: behind the token of its next snapshot, or behind its last token.

    Tokens 4 to 9 with snapshots after 5 and 9 are the segments [4, 6), [6, 10) and [10, 10).
    """
    is_snapshot = segment < num_kept
    token = tl.load(snapshot_tokens + first + segment, mask=is_snapshot, other=0)
    return tl.where(is_snapshot, token + 1, stop)


@triton.jit
def segment_slot(segment, first, num_kept, final_slot, snapshot_slots):
    """Where the state after a segment goes: the snapshot's slot, or the request's final slot."""
    is_snapshot = segment < num_kept
    slot = tl.load(snapshot_slots + first + segment, mask=is_snapshot, other=NULL)
    return tl.where(is_snapshot, slot, final_slot)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), also where exp(x) would overflow or vanish beside 1."""
    small = tl.exp(-tl.abs(x))
    # Kahan's log1p: what 1 + small rounds away cancels in the quotient.
    rounded = 1 + small
    log1p = tl.where(
        rounded == 1, small, tl.log(rounded) * (small / tl.where(rounded == 1, 1.0, rounded - 1))
    )
    return tl.maximum(x, 0.0) + log1p
