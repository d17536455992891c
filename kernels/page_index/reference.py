"""Block tables in other forms, one block at a time."""

import torch

from kvgroups.constants import NULL_BLOCK_ID


def pack_csr(block_table, seq_lens, *, block_size):
    """See `kvgroups.ops.pack_csr`."""
    starts, indices, lasts = [0], [], []
    for row, seq_len in zip(block_table.tolist(), seq_lens.tolist(), strict=True):
        used = row[: -(-seq_len // block_size)]
        indices += used
        starts.append(len(indices))
        lasts.append(seq_len - (len(used) - 1) * block_size if used else 0)
    indices += [NULL_BLOCK_ID] * (block_table.numel() - len(indices))
    return tuple(
        torch.tensor(each, dtype=torch.int32, device=block_table.device) for each in (starts, indices, lasts)
    )


def pack_intervals(block_table, seq_lens, *, block_size):
    """See `kvgroups.ops.pack_intervals`."""
    intervals = block_table.new_zeros(*block_table.shape, 2)
    counts = torch.zeros_like(seq_lens, dtype=torch.int32)
    for request, (row, seq_len) in enumerate(zip(block_table.tolist(), seq_lens.tolist(), strict=True)):
        runs: list[list[int]] = []
        for block in row[: -(-seq_len // block_size)]:
            if runs and block == sum(runs[-1]) and runs[-1][0] != NULL_BLOCK_ID:
                runs[-1][1] += 1
            else:
                runs.append([block, 1])
        counts[request] = len(runs)
        if runs:
            intervals[request, : len(runs)] = torch.tensor(runs)
    return intervals, counts
