"""Two calls have one signature exactly where everything but addresses and contents is the same."""

import struct

import pytest
import torch

from kvgroups.kernels import cpu_library, signature
from kvgroups.kernels.signature import addresses

BASE = torch.zeros(6, 8)
DIFFERENT = {
    "shape": torch.zeros(6, 7),
    "number of dimensions": torch.zeros(6, 8, 1),
    "order of strides": torch.zeros(8, 6).T,
    "row stride": torch.zeros(6, 16)[:, :8],
    "stride of zero": torch.zeros(1, 8).expand(6, 8),
    "float16": BASE.half(),
    "bfloat16": BASE.bfloat16(),
    "float64": BASE.double(),
    "int32": BASE.int(),
    "device": BASE.to("meta"),
    "layout": BASE.to_sparse(),
}


@pytest.fixture(params=["dlpack", "python"])
def described(request, monkeypatch):
    """`signature`, both ways."""
    if request.param == "python":
        monkeypatch.setattr(signature, "_describe", lambda: None)
    elif signature._describe() is None:
        pytest.skip("the CPU kernels were not built, or PyTorch has no DLPack exchange interface")
    return lambda *tensors: signature.signature(tensors)


def test_it_is_the_same_for_other_contents_and_places(described):
    stored = torch.randn(7, 8)
    assert described(BASE, None)[0] == described(stored[1:], None)[0]
    assert described(torch.nn.Parameter(BASE))[0] == described(BASE)[0]


@pytest.mark.parametrize("name", [*DIFFERENT])
def test_it_differs_where_a_tensor_does(described, name):
    assert described(DIFFERENT[name])[0] != described(BASE)[0]
    assert described(BASE, DIFFERENT[name])[0] != described(DIFFERENT[name], BASE)[0]


def test_it_differs_where_a_tensor_is_missing(described):
    assert described(BASE, None)[0] != described(None, BASE)[0]
    assert described(None)[0] != described(None, None)[0]


@pytest.mark.parametrize("wrong", [[1.0], 3, "text", BASE.numpy()], ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_tensor_is_described_as_none(described, wrong):
    """The checks of the call refuse it."""
    assert described(BASE, wrong)[0] not in (described(BASE, BASE)[0], described(BASE, None)[0])


def test_addresses_are_those_of_the_first_elements():
    if signature._describe() is None:
        pytest.skip("the CPU kernels were not built, or PyTorch has no DLPack exchange interface")
    given = (BASE[2:], None, BASE.T, torch.empty(0), BASE[:, 3])
    _, found = signature.signature(given)
    assert found == addresses(*given)
    assert struct.unpack("5Q", found)[:2] == (BASE.data_ptr() + 2 * 8 * 4, 0)


def test_a_pytorch_or_a_build_without_it_is_described_in_python(monkeypatch):
    without = cpu_library.CpuLibrary(reason="not built")
    monkeypatch.setattr(signature, "cpu_library", lambda: without)
    assert signature._describe.__wrapped__() is None
    monkeypatch.undo()
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
    assert signature._describe.__wrapped__() is None
