"""Working memory that a thread keeps: reused, never shared, and given up when it is too large or its thread ends."""

import gc
import threading
import weakref

import pytest
import torch

from kvgroups.kernels import scratch as module
from kvgroups.kernels.scratch import Scratch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    """Each test begins as a thread does, and leaves nothing behind."""
    monkeypatch.setattr(module._kept, "bytes", None, raising=False)


def take(*sizes, dtype=torch.float32, is_kept=True):
    """The addresses of what one call is given."""
    with Scratch(CPU, is_kept) as scratch:
        return [tensor.data_ptr() for tensor in scratch.empty(dtype, *sizes)]


def test_memory_is_used_again_also_for_less_and_for_another_dtype():
    first, second = take(1000, 50)
    assert second - first >= 4000 and second % 64 == 0
    assert take(10)[0] == take(1000, dtype=torch.bfloat16)[0] == first


def test_tensors_of_one_call_do_not_overlap():
    with Scratch(CPU) as scratch:
        tensors = scratch.empty(torch.bfloat16, 3, 33, 0, 7)
        for value, tensor in enumerate(tensors):
            tensor.fill_(value)
    assert [tensor.tolist() for tensor in tensors] == [[0] * 3, [1] * 33, [], [3] * 7]


def test_it_grows_and_rounds_up():
    take(1)
    assert module._kept.bytes.shape == (1 << 20,)
    take(300_000)
    assert module._kept.bytes.shape == (1 << 21,)


def test_what_is_too_large_is_not_kept(monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 1 << 20)
    small = take(10)
    assert take((1 << 18) + 1) != small
    assert module._kept.bytes.shape == (1 << 20,) and take(10) == small


@pytest.mark.parametrize("num_before", [0, 1], ids=["nothing kept", "kept"])
def test_a_call_within_a_call_has_memory_of_its_own(num_before):
    for _ in range(num_before):
        take(100)
    with Scratch(CPU) as outer:
        (mine,) = outer.empty(torch.float32, 100)
        mine.fill_(1)
        with Scratch(CPU) as inner:
            inner.empty(torch.float32, 100)[0].fill_(2)
        assert (mine == 1).all()
    assert take(100)[0] == mine.data_ptr()


def test_memory_comes_back_from_a_call_that_fails():
    first = take(100)
    with pytest.raises(KeyError), Scratch(CPU) as scratch:
        scratch.empty(torch.float32, 100)
        raise KeyError
    assert take(100) == first


def test_it_is_fresh_where_it_is_not_to_be_kept():
    kept = take(100)
    assert take(100, is_kept=False) != kept
    with Scratch(torch.device("meta")) as scratch:
        assert scratch.empty(torch.float32, 100)[0].device.type == "meta"
    assert take(100) == kept


def test_memory_first_taken_in_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        first = take(100)
    assert not module._kept.bytes.is_inference()
    with Scratch(CPU) as scratch:
        (tensor,) = scratch.empty(torch.float32, 100)
        tensor.fill_(1)
    assert tensor.data_ptr() == first[0]


def test_each_thread_has_its_own_until_it_ends():
    mine, theirs = take(100), []

    def attend():
        theirs.extend(take(100))
        theirs.append(weakref.ref(module._kept.bytes))

    thread = threading.Thread(target=attend)
    thread.start()
    thread.join()
    gc.collect()
    assert theirs[0] != mine[0] and theirs[1]() is None
    assert take(100) == mine
