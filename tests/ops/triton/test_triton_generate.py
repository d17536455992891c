"""Whole models on the Triton kernels, in the interpreter: the tokens are those of the torch forms."""

from dataclasses import replace

import pytest
import torch

import kvgroups
from kvgroups import ops
from kvgroups.ops import dispatch
from kvgroups.testing import tiny


@pytest.mark.parametrize(
    "model_type, expected",
    [
        ("gpt_oss", {"slot_mapping", "table_update", "write_kv", "paged_attention"}),
        (
            "bamba",
            {"paged_attention", "causal_conv1d", "causal_conv1d_update", "ssd_scan", "selective_state_update"},
        ),
    ],
)
def test_generate_on_triton_kernels(model_type, expected, monkeypatch, triton_backend):
    launched = set()

    def noting(operation, form):
        def run(*args, **kwargs):
            launched.add(operation)
            return form.run(*args, **kwargs)

        return replace(form, run=run)

    for operation, forms in dispatch.FORMS.items():
        if "triton" in forms:
            monkeypatch.setitem(forms, "triton", noting(operation, forms["triton"]))

    model = kvgroups.patch(tiny(model_type))
    prompts = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompts)
    mask[0, :4] = 0  # ragged: 7 tokens and 11, in windows of 8
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    tokens = model.generate(prompts, **options)
    assert not launched
    with ops.use_backend(triton_backend):
        assert torch.equal(model.generate(prompts, **options), tokens)
    assert expected <= launched
