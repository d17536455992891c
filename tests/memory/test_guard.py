"""Ctrl-C waits for the end of a call of the manager, so that pools are never left halfway."""

import copy
import signal
import threading

import pytest
import torch

import kvgroups
from kvgroups.block_pool import BlockPool
from kvgroups.group_manager import GroupManager
from kvgroups.guard import Guard
from kvgroups.testing import tiny
from kvgroups.testing.oracle import oracle_logits

IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """A process that was started in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_is_raised_where_the_outermost_call_ends():
    guard, seen = Guard(print), []
    with pytest.raises(KeyboardInterrupt):
        with guard:
            with guard:
                press_ctrl_c()
                seen.append("inner")
            seen.append("outer")
        seen.append("after")
    assert seen == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):  # and once only
        press_ctrl_c()
    with guard:
        pass


def test_a_handler_of_ones_own_is_called_and_kept(monkeypatch):
    called, guard = [], Guard(print)
    before = signal.signal(signal.SIGINT, lambda *_: called.append("own"))
    try:
        own = signal.getsignal(signal.SIGINT)
        with guard:
            press_ctrl_c()
            assert called == []
        assert called == ["own"]
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_wait_for_the_lock_and_leave_signals_alone():
    guard, inside = Guard(print), []

    def work():
        with guard:
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    with guard:
        thread.start()
        thread.join(timeout=0.1)
        assert inside == []
    thread.join()
    assert inside == [signal.default_int_handler]


@pytest.mark.parametrize(
    ("owner", "name"), [(BlockPool, "allocate"), (GroupManager, "fork_row"), (GroupManager, "truncate")]
)
@pytest.mark.parametrize("family", ["gemma3_text", "bamba"])
def test_an_interrupted_cache_is_right_or_says_so(family, owner, name, monkeypatch):
    """Ctrl-C in the middle of an allocation, of a fork, of a crop: no block is lost, and what runs afterwards is right."""
    model = kvgroups.patch(tiny(family))
    manager = vars(model)["_kvgroups"].context.manager
    cache = kvgroups.GroupedCache(model, max_rewind=3)
    plain = getattr(owner, name)

    def interrupted(self, *args, **kwargs):
        press_ctrl_c()
        return plain(self, *args, **kwargs)

    with torch.no_grad():
        model(IDS[:, :6], cache=cache)
        monkeypatch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            twin = copy.deepcopy(cache)
            twin.close()
            model(IDS[:, 6:], cache=cache)
            cache.crop(-3)
        monkeypatch.undo()
        manager.check()
        at = cache.get_seq_length()
        logits = model(IDS[:, at : at + 1], cache=cache).logits
    for row in range(2):
        want = oracle_logits(model, IDS[row, : at + 1])[-1]
        assert (logits[row, -1] - want).abs().max() < 1e-4 * want.abs().max()
    cache.close()
    manager.check()
    assert manager.usage().held_bytes == 0
