"""Example calls of the Triton kernels, from which `kvgroups kernels` learns what is launched.

The folder of each operation with a Triton form has a `compile_cases.py` with a list `CASES`. A case calls the
form itself, on CPU tensors of made-up contents: under the dry driver it compiles what a GPU would launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """What changes from step to step, and must not make a kernel compile again."""

    tokens: int
    requests: int
    groups: int = 4


MANY = Batch(tokens=100, requests=3)
FEW = Batch(tokens=3, requests=3)

OTHER_BATCHES = (
    Batch(1, 1, 1),
    Batch(16, 16, 2),
    Batch(17, 32, 8),
    Batch(48, 1, 1),
    Batch(113, 5, 3),
    Batch(4096, 255, 16),
)
"""Batches that are tried after all cases of an operation: none may compile anything new."""


@dataclass(frozen=True)
class CompileCase:
    """One call, for one specialisation of each kernel that it launches.

    Example: the cases of an operation with one kernel, which has no matrix products and so nothing to check
    beyond spills and shared memory.

        >>> def update(batch):
        ...     from kvgroups.kernels.table_update import triton_impl
        ...     triton_impl.table_update(int32(8, 32), int64(batch.tokens), int32(batch.tokens))
        >>> CASES = [CompileCase("bookkeeping", update)]
    """

    name: str
    """What is special about it, in a few words; unique within the operation."""
    call: Callable[[Batch], object]
    """Calls the Triton form with a batch of that size. Imports it when called: importing a case is light."""
    batch: Batch = MANY
    needs_matrix: bool = False
    """Whether its kernels must use matrix instructions."""
    without_matrix: tuple[str, ...] = ()
    """Its kernels that need none all the same."""
    needs_wide_loads: bool = False
    """Whether each loop with matrix instructions must load 128 bits a thread at a time."""
    may_spill: tuple[str, ...] = ()
    """Targets on which it is known to run out of registers."""
    is_slow: bool = False
    """Left out unless every configuration is asked for."""
    takes_any_batch: bool = True
    """Whether the call takes `OTHER_BATCHES` as well."""


def int32(*sizes: int) -> Tensor:
    """Zeros, as any list of ids or lengths."""
    return torch.zeros(*sizes, dtype=torch.int32)


def int64(*sizes: int) -> Tensor:
    """Zeros, as any list of slots."""
    return torch.zeros(*sizes, dtype=torch.int64)


def heads_first(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """(tokens, heads, dim) as a rotary embedding leaves it: the stride between heads grows with the tokens."""
    return torch.empty(heads, tokens, dim, dtype=dtype).transpose(0, 1)


def packed_slots(batch: Batch) -> dict[str, Tensor | None]:
    """What a scan over packed tokens asks for beside them. One request alone keeps no snapshot."""
    has_snapshots = batch.requests > 1
    return {
        "query_start_loc": int32(batch.requests + 1),
        "initial_slots": int32(batch.requests),
        "final_slots": int32(batch.requests),
        "snapshot_tokens": int64(batch.requests) if has_snapshots else None,
        "snapshot_slots": int64(batch.requests) if has_snapshots else None,
    }
