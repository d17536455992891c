"""Calls that stand for what a GPU would be asked to run; see `kvgroups.kernels.compile_case`."""

from kvgroups.kernels.compile_case import CompileCase, int32


def csr(batch):
    from kvgroups.kernels.page_index import triton_impl

    triton_impl.pack_csr(int32(batch.requests, batch.tokens), int32(batch.requests), block_size=16)


def intervals(batch):
    from kvgroups.kernels.page_index import triton_impl

    triton_impl.pack_intervals(int32(batch.requests, batch.tokens), int32(batch.requests), block_size=16)


CASES = [CompileCase("CSR", csr), CompileCase("intervals", intervals)]
