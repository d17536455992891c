"""Memory as the kernels meet it: views inside a larger tensor, NaN in everything that nobody owns."""

import dataclasses
import inspect
import os
from importlib.util import find_spec, module_from_spec, spec_from_file_location

import pytest
import torch

from kvgroups.kernels.cpu_library import ISAS, cpu_library, isas_up_to
from tests.ops.attention_cases import attend, build, oracle

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _nan_arena(num_blocks, *block_shape, dtype=torch.float32):
    """A NaN-filled tensor and, inside it, a view (num_blocks, *block_shape) that is strided over blocks.

    The margins around each block are the neighbours of a real arena: a kernel that flattens the view over
    blocks or forgets the block stride reads or spoils them.
    """
    size = torch.Size(block_shape).numel()
    arena = torch.full((num_blocks, size + 7), float("nan"), dtype=dtype)
    view = arena[:, 3 : 3 + size].unflatten(1, block_shape)
    assert num_blocks < 2 or not view.is_contiguous()
    return arena, view


@pytest.fixture
def nan_arena():
    return _nan_arena


@pytest.fixture
def assert_same_bits():
    """Compare two tensors bit for bit, so that NaN equals the same NaN."""

    def check(got, expected):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        bits = BITS[got.element_size()]
        assert torch.equal(got.contiguous().view(bits), expected.contiguous().view(bits))

    return check


needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton runs on tensors of the CPU in its interpreter only",
)


@pytest.fixture(params=["reference", "torch", pytest.param("triton", marks=needs_interpreter)])
def backend(request):
    """Every form of an operation keeps the same promise."""
    return request.param


@pytest.fixture(params=[pytest.param("triton", marks=needs_interpreter)])
def triton_backend(request):
    """For what is promised by every form, but shown here for the Triton one alone."""
    return request.param


HERE = isas_up_to(cpu_library().isa) if cpu_library().functions else []
"""Instruction sets that this processor has and the library was built for."""


@pytest.fixture(params=HERE or [0], ids=lambda number: ISAS.get(number, "none"))
def cpu_isa(request, monkeypatch):
    """`cpu_isa(cpu_impl)` makes that form run what the library holds for an instruction set, each in turn, and leave no
    prompt to the torch form."""
    other = dataclasses.replace(cpu_library(), isa=request.param, fast_matrix_types=0)
    return lambda cpu_impl: monkeypatch.setattr(cpu_impl, "cpu_library", lambda: other)


@pytest.fixture
def prepared(nan_arena):
    """`prepared(case, layout, dtype)` -> the batch, the reference's output and the oracle's."""

    def prepare(case, layout="HND", dtype=torch.float32):
        batch = build(case, layout, dtype, nan_arena)
        return batch, attend(batch, "reference"), oracle(case, batch)

    return prepare


@pytest.fixture
def mutant(tmp_path):
    """`mutant(module, old, new)` -> the module as it would be with one piece of its source replaced."""

    def plant(module, old, new):
        source = inspect.getsource(module)
        assert source.count(old) == 1, f"expected {old!r} once in {module.__name__}"
        file = tmp_path / "mutant.py"  # a file, since Triton reads the source of a kernel
        file.write_text(source.replace(old, new))
        spec = spec_from_file_location("mutant", file)
        mutated = module_from_spec(spec)
        spec.loader.exec_module(mutated)
        return mutated

    return plant


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """What `torch.empty` returns is NaN, or the largest integer: an output that is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
