"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

from kvgroups.kernels.compile_case import CompileCase, int32, int64


def map_slots(batch):
    from kvgroups.kernels.slot_mapping import triton_impl

    tables = [int32(8, 32) for _ in range(batch.groups)]
    settings = {
        "block_sizes": [16] * batch.groups,
        "modes": ["ring"] * batch.groups,
        "ring_blocks": [4] * batch.groups,
    }
    triton_impl.slot_mapping(
        tables,
        int32(batch.requests),
        int32(batch.requests + 1),
        int64(batch.tokens),
        int32(batch.requests),
        **settings,
    )


CASES = [CompileCase("groups with rings", map_slots)]
