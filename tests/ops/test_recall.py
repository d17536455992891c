"""A call like an earlier one is not checked again, and one that differs in anything that matters is."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from kvgroups import ops
from kvgroups.errors import BackendUnavailableError, ShapeError
from kvgroups.kernels import signature
from kvgroups.kernels.paged_attention import torch_impl
from kvgroups.ops import attention, dispatch, recall

KNOWN = attention._ATTENTION.known


@pytest.fixture(autouse=True, params=["described by DLPack", "described in Python"])
def nothing_known(request, monkeypatch):
    """However tensors are described, the rules are the same."""
    if request.param == "described in Python":
        monkeypatch.setattr(signature, "_describe", lambda: None)
    elif signature._describe() is None:
        pytest.skip("the CPU kernels were not built, or PyTorch has no DLPack exchange interface")
    KNOWN.clear()
    with torch.no_grad():
        yield
    KNOWN.clear()


def call(num_reqs=2, history=3, **changes):
    """Arguments of a decode step; blocks of 4 tokens, 2 KV heads of 8."""
    operands = {
        "query": torch.randn(num_reqs, 4, 8),
        "key": torch.randn(num_reqs, 2, 8),
        "value": torch.randn(num_reqs, 2, 8),
        "key_cache": torch.randn(num_reqs + 1, 2, 4, 8),
        "value_cache": torch.randn(num_reqs + 1, 2, 4, 8),
        "block_table": torch.arange(1, num_reqs + 1, dtype=torch.int32)[:, None],
        "query_start_loc": torch.arange(num_reqs + 1, dtype=torch.int32),
        "num_computed_tokens": torch.full((num_reqs,), history, dtype=torch.int32),
        "scale": 0.5,
    }
    return operands | changes


def test_a_call_like_an_earlier_one_is_not_checked_again(monkeypatch):
    ops.paged_attention(**call())
    monkeypatch.setattr(attention._ATTENTION, "check", lambda *args, **options: pytest.fail("checked"))
    ops.paged_attention(**call())
    with pytest.raises(pytest.fail.Exception, match="checked"):
        ops.paged_attention(**call(num_reqs=3))


def test_its_result_is_that_of_its_own_tensors():
    ops.paged_attention(**call())
    second = call(num_computed_tokens=torch.tensor([0, 2], dtype=torch.int32))
    attended = ops.paged_attention(**second)
    assert len(KNOWN) == 1
    torch.testing.assert_close(attended, ops.paged_attention(**second, backend="reference"))


WRONG = {
    "query": torch.randn(2, 3, 8),
    "key": torch.randn(2, 2, 8, dtype=torch.float64),
    "value": torch.randn(3, 2, 8),
    "key_cache": torch.randn(3, 2, 4, 8, device="meta"),
    "key_cache, sparse": torch.randn(3, 2, 4, 8).to_sparse(),
    "value_cache": torch.randn(3, 2, 5, 8),
    "block_table": torch.ones(2, 1, dtype=torch.int64),
    "query_start_loc": torch.arange(2, dtype=torch.int32),
    "num_computed_tokens": torch.full((2,), 3.0),
    "kv_start_loc": torch.arange(4, dtype=torch.int32),
    "sinks": torch.zeros(3),
    "scale": -1.0,
    "window": 0,
    "chunk": -4,
    "softcap": 0.0,
    "layout": "HDN",
    "ring_blocks": 2,
    "max_query_len": -1,
    "max_seq_len": -1,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_after_a_right_one(name):
    ops.paged_attention(**call())
    for _ in range(2):  # and is not remembered as a right one
        with pytest.raises(ShapeError):
            ops.paged_attention(**call(**{name.split(",")[0]: WRONG[name]}))


@pytest.mark.parametrize("name", ["query", "key_cache", "block_table", "num_computed_tokens"])
def test_a_tensor_without_memory_is_an_error_and_not_a_crash(name):
    """Fake tensors have a device and, as PyTorch tells it, an address."""
    given = call()
    ops.paged_attention(**given)
    fake = FakeTensorMode().from_tensor(given[name])
    with pytest.raises(BackendUnavailableError, match="cpu: needs tensors that lie in memory, got FakeTensor"):
        ops.paged_attention(**given | {name: fake}, backend="cpu")
    with pytest.raises((AssertionError, RuntimeError)):  # of PyTorch
        ops.paged_attention(**given | {name: fake})


class Logged(torch.Tensor):
    """A tensor whose operations are its own class's affair, which keeps another one's memory."""

    @staticmethod
    def __new__(cls, inner):
        outer = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        outer.inner = inner
        return outer

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Logged, lambda outer: outer.inner, (args, kwargs or {}))
        return function(*args, **kwargs)


def test_tensors_around_others_go_to_the_torch_form():
    given = call()
    expected = ops.paged_attention(**given)
    torch.testing.assert_close(ops.paged_attention(**given | {"query": Logged(given["query"])}), expected)


def test_history_without_caches_is_refused_though_a_call_without_it_was_right():
    """The one check that looks into a tensor."""
    nothing = {"key_cache": None, "value_cache": None, "block_table": None}
    ops.paged_attention(**call(**nothing, history=0))
    with pytest.raises(ShapeError, match="expected all 0 without caches"):
        ops.paged_attention(**call(**nothing, history=1))


def test_the_form_is_chosen_anew_for_other_strides():
    """The C++ form wants contiguous rows, so that a transposed query goes to another one."""
    transposed = torch.randn(2, 8, 4).transpose(1, 2)
    ops.paged_attention(**call())
    arguments = call(query=transposed)
    attended = ops.paged_attention(**arguments)
    torch.testing.assert_close(attended, ops.paged_attention(**arguments, backend="reference"))
    assert len(KNOWN) == 3


def test_a_backend_is_remembered_for_those_who_asked_for_it():
    ops.paged_attention(**call(), backend="torch")
    ops.paged_attention(**call())
    with ops.use_backend("reference"):
        ops.paged_attention(**call())
    assert [known.name for known in KNOWN.values()][::2] == ["torch", "reference"]
    for _ in range(2):
        with pytest.raises(BackendUnavailableError):
            ops.paged_attention(**call(), backend="no such backend")


def test_a_form_that_was_replaced_is_not_remembered(monkeypatch):
    ops.paged_attention(**call(), backend="torch")
    planted = dispatch.Form(lambda *args, **options: "planted")
    monkeypatch.setitem(dispatch.FORMS["paged_attention"], "torch", planted)
    assert ops.paged_attention(**call(), backend="torch") == "planted"


def test_a_gradient_is_not_lost_to_a_call_that_wanted_none():
    ops.paged_attention(**call())
    with torch.enable_grad():
        arguments = call(query=torch.randn(2, 4, 8, requires_grad=True))
        assert ops.paged_attention(**arguments).requires_grad
        with pytest.raises(BackendUnavailableError, match="computes no gradients"):
            ops.paged_attention(**arguments, backend="cpu")


def test_a_setting_that_is_a_tensor_is_read_each_time():
    scale = torch.tensor(0.5)
    arguments = call(scale=scale)
    ops.paged_attention(**arguments)
    scale.fill_(2.0)
    expected = torch_impl.paged_attention(*[*arguments.values()][:6], **dict([*arguments.items()][6:8]), scale=2.0)
    torch.testing.assert_close(ops.paged_attention(**arguments), expected)


def test_there_is_a_limit_to_what_is_remembered(monkeypatch):
    monkeypatch.setattr(recall, "MAX_KNOWN", 4)
    for num_reqs in range(1, 12):
        ops.paged_attention(**call(num_reqs=num_reqs))
        assert 1 <= len(KNOWN) <= 4
