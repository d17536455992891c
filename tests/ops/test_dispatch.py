"""One dispatch point: who is asked, who runs, and what a refusal says."""

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import BackendUnavailableError
from kvgroups.ops import dispatch

STATES, SLOTS = torch.ones(2, 1), torch.tensor([1])


@pytest.fixture
def forms(monkeypatch):
    """Replace the forms of `gather_states` by ones that answer with their name or refuse."""

    def plant(**refusals):
        planted = {
            name: dispatch.Form(lambda *args, name=name: name, lambda *args, reasons=reasons: reasons)
            for name, reasons in refusals.items()
        }
        monkeypatch.setitem(dispatch.FORMS, "gather_states", planted)

    return plant


def test_auto_takes_the_first_form_that_serves(forms):
    forms(fast=["needs a GPU"], torch=[], reference=[])
    assert ops.gather_states(STATES, SLOTS) == "torch"


def test_a_form_asked_for_by_name_runs(forms):
    forms(torch=[], reference=[])
    assert ops.gather_states(STATES, SLOTS, backend="reference") == "reference"


def test_auto_never_falls_back_to_the_reference(forms):
    forms(torch=["only today"], reference=[])
    with pytest.raises(BackendUnavailableError, match="torch: only today.*backend='reference' serves it"):
        ops.gather_states(STATES, SLOTS)


def test_a_refusal_says_all_its_reasons_and_what_would_work(forms):
    forms(fast=["needs a GPU", "needs head_dim <= 256"], torch=[], reference=[])
    with pytest.raises(BackendUnavailableError) as refusal:
        ops.gather_states(STATES, SLOTS, backend="fast")
    assert str(refusal.value) == (
        "gather_states: backend 'fast' does not serve this call (fast: needs a GPU; needs head_dim <= 256). "
        "backend='torch' serves it."
    )


def test_a_refusal_says_who_asked_where_it_was_not_the_call(forms):
    forms(fast=["needs a GPU"], torch=[], reference=[])
    asked_by = "gather_states: backend 'fast', asked for by patch or use_backend, does not serve this call"
    with ops.use_backend("fast"), pytest.raises(BackendUnavailableError, match=asked_by):
        ops.gather_states(STATES, SLOTS)
    forms(fast=["needs a GPU"], torch=["only today"], reference=[])
    with pytest.raises(BackendUnavailableError, match="gather_states: backend 'auto' does not serve this call"):
        ops.gather_states(STATES, SLOTS)


def test_an_unknown_backend_is_named_with_those_that_exist():
    with pytest.raises(BackendUnavailableError) as refusal:
        ops.gather_states(STATES, SLOTS, backend="cuda")
    assert str(refusal.value) == (
        "gather_states: expected a backend among auto, triton, torch, reference, got 'cuda'. "
        "backend='torch' serves it."
    )


def test_use_backend_sets_the_default_of_a_block_and_nests(forms):
    forms(torch=[], reference=[])
    with ops.use_backend("reference"):
        assert ops.gather_states(STATES, SLOTS) == "reference"
        assert ops.gather_states(STATES, SLOTS, backend="torch") == "torch"  # the call's own word wins
        with ops.use_backend("auto"):
            assert ops.gather_states(STATES, SLOTS) == "torch"
        assert ops.gather_states(STATES, SLOTS) == "reference"
    assert ops.gather_states(STATES, SLOTS) == "torch"


def test_use_backend_is_undone_by_an_exception(forms):
    forms(torch=[], reference=[])
    with pytest.raises(KeyError), ops.use_backend("reference"):
        raise KeyError
    assert ops.gather_states(STATES, SLOTS) == "torch"


def test_use_backend_refuses_an_unknown_name_before_the_block_runs():
    message = "use_backend: expected a backend among auto, triton, torch, reference, cpu, got 'cuda'"
    with pytest.raises(BackendUnavailableError, match=message):
        ops.use_backend("cuda").__enter__()
