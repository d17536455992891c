"""When the Triton form is taken, and what it says when it is not."""

import subprocess
import sys

import pytest
import torch

from kvgroups import ops
from kvgroups.errors import BackendUnavailableError
from kvgroups.kernels.state_slots import torch_impl
from kvgroups.ops import dispatch

triton_impl = pytest.importorskip("kvgroups.kernels.state_slots.triton_impl")

STATES, SLOTS = torch.ones(2, 1), torch.tensor([1])


@pytest.fixture
def taken(monkeypatch):
    """The forms of `gather_states` that ran, in order."""
    names = []
    for name, module in (("triton", triton_impl), ("torch", torch_impl)):
        monkeypatch.setattr(module, "gather_states", lambda *_, name=name: names.append(name))
    monkeypatch.setitem(dispatch.FORMS["gather_states"], "torch", dispatch.Form(torch_impl.gather_states))
    return names


def test_on_the_cpu_triton_runs_only_when_it_is_named(taken, triton_backend):
    ops.gather_states(STATES, SLOTS)
    ops.gather_states(STATES, SLOTS, backend=triton_backend)
    with ops.use_backend("triton"):
        ops.gather_states(STATES, SLOTS)
        ops.gather_states(STATES, SLOTS, backend="torch")
    assert taken == ["torch", "triton", "triton", "torch"]


def test_outside_the_interpreter_a_cpu_tensor_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(triton_impl, "INTERPRETED", False)
    with pytest.raises(BackendUnavailableError) as refusal:
        ops.gather_states(STATES, SLOTS, backend="triton")
    assert str(refusal.value) == (
        "gather_states: backend 'triton' does not serve this call (triton: needs tensors on a GPU, or on the "
        "CPU with Triton's interpreter, got cpu). backend='torch' serves it."
    )


def test_without_the_package_the_refusal_says_so(monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match="needs the package triton, which is not installed"):
        ops.gather_states(STATES, SLOTS, backend="triton")


def test_auto_asks_the_form_made_for_the_device_first():
    for operation, forms in dispatch.FORMS.items():
        on_a_gpu = [name for name, form in forms.items() if form.auto_on in (None, "cuda")]
        on_the_cpu = [name for name, form in forms.items() if form.auto_on in (None, "cpu")]
        assert on_a_gpu[0] == ("triton" if "triton" in forms else "torch"), operation
        assert on_the_cpu[0] == ("cpu" if "cpu" in forms else "torch"), operation


def test_an_operation_without_a_triton_form_goes_by_auto_in_a_block(triton_backend, monkeypatch):
    monkeypatch.delitem(dispatch.FORMS["causal_conv1d"], "triton")
    x, states = torch.ones(1, 2), torch.zeros(2, 2, 3)
    slots = {"initial_slots": torch.tensor([0]), "final_slots": torch.tensor([1])}
    call = (x, torch.ones(2, 3), None, states)
    starts = torch.tensor([0, 1])
    with ops.use_backend(triton_backend):
        output = ops.causal_conv1d(*call, query_start_loc=starts, **slots)
    assert output.tolist() == [[1, 1]]
    with pytest.raises(BackendUnavailableError, match="expected a backend among auto, torch, reference"):
        ops.causal_conv1d(*call, query_start_loc=starts, **slots, backend=triton_backend)


def test_a_call_on_the_cpu_does_not_import_triton():
    program = (
        "import sys, torch; before = 'triton' in sys.modules; from kvgroups import ops;"
        "ops.gather_states(torch.ones(2, 1), torch.tensor([1]));"
        "assert before or 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# What a kernel does not serve.


def attend(query, pages=None, **options):
    table = None if pages is None else torch.ones(1, 1, dtype=torch.int32)
    return ops.paged_attention(
        query,
        query[:, :1],
        query[:, :1],
        pages,
        pages,
        table,
        query_start_loc=torch.tensor([0, len(query)]),
        num_computed_tokens=torch.tensor([0]),
        scale=1.0,
        backend="triton",
        **options,
    )


@pytest.mark.parametrize(
    "call, reason",
    [
        (lambda: attend(torch.ones(1, 2, 4).double()), "needs float32, bfloat16 or float16, got torch.float64"),
        (lambda: attend(torch.ones(1, 1, 513)), "needs head dims of at most 512, got 513 and 513"),
        (lambda: attend(torch.ones(1, 129, 4)), "needs at most 128 query heads per KV head, got 129"),
        (
            lambda: attend(torch.ones(1, 2, 4), torch.ones(2, 1, 4, 3).transpose(2, 3)),
            "needs value_cache contiguous over its last dimension, got stride 3",
        ),
        (
            lambda: ops.write_kv(
                *[torch.ones(1, 1, 4)] * 2, *[torch.ones(2, 1, 4, 3).mT] * 2, SLOTS, layout="HND", backend="triton"
            ),
            "needs key_cache contiguous over its last dimension, got stride 3",
        ),
        (
            lambda: ops.gather_kv(
                *[torch.ones(2, 1, 4, 3).mT] * 2,
                torch.ones(1, 1, dtype=torch.int32),
                seq_lens=SLOTS,
                max_seq_len=2,
                layout="HND",
                backend="triton",
            ),
            "needs key_cache contiguous over its last dimension, got stride 3",
        ),
        (
            lambda: ops.gather_states(torch.ones(2, 4, 3).mT, SLOTS, backend="triton"),
            r"needs each state contiguous within its slot, got shape \(3, 4\) with strides \(1, 3\)",
        ),
        (
            lambda: ops.selective_state_update(
                torch.ones(2, 3, 4).mT, SLOTS, *[torch.ones(1, 4)] * 2, torch.ones(4, 3), *[torch.ones(1, 3)] * 2,
                backend="triton",
            ),
            "needs states contiguous over their last dimension, got stride 4",
        ),
    ],
    ids=["fp64", "head_dim", "heads", "pages", "write_kv", "gather_kv", "states", "state_update"],
)  # fmt: skip
def test_what_the_kernels_refuse(call, reason, triton_backend):
    with pytest.raises(BackendUnavailableError, match=f"{reason}.*backend='(cpu|torch)' serves it"):
        call()


def test_a_refusal_lists_every_reason_against_attention(triton_backend):
    pages = torch.ones(2, 1, 513, 3).double().mT
    with pytest.raises(BackendUnavailableError) as refusal:
        attend(torch.ones(1, 129, 513).double(), pages)
    assert str(refusal.value) == (
        "paged_attention: backend 'triton' does not serve this call (triton: needs float32, bfloat16 or float16, got "
        "torch.float64; needs head dims of at most 512, got 513 and 513; needs at most 128 query heads per KV head, got "
        "129; needs key_cache contiguous over its last dimension, got stride 3; needs value_cache contiguous over its "
        "last dimension, got stride 3). backend='torch' serves it."
    )


def test_attention_on_a_cpu_tensor_outside_the_interpreter_is_refused(monkeypatch, triton_backend):
    from kvgroups.kernels.paged_attention import triton_impl as attention

    monkeypatch.setattr(attention, "INTERPRETED", False)
    with pytest.raises(BackendUnavailableError, match="needs tensors on a GPU, or on the CPU with Triton's interpreter"):
        attend(torch.ones(1, 2, 4))
