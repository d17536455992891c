"""A mixer class of one's own can bring its adapter; everything else is decided by what its code calls."""

import pytest
import torch

import kvgroups
from kvgroups.model_adapters import FusedMixer, register_adapter
from kvgroups.model_adapters.fused_state import CONVOLUTION, MAMBA1, MAMBA2, fusable_kernels
from kvgroups.model_adapters.registry import _registered
from kvgroups.testing import tiny

IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))


def mixer(family):
    model = tiny(family)
    context = vars(kvgroups.patch(model))["_kvgroups"].context
    return model.get_submodule(next(layer.mixer for layer in context.facts if layer.mixer))


@pytest.mark.parametrize(
    ("family", "states", "kernels"),
    [
        ("lfm2", {"conv"}, CONVOLUTION),
        ("jamba", {"conv", "recurrent"}, MAMBA1),
        ("bamba", {"conv", "recurrent"}, MAMBA2),
        ("qwen3_next", {"conv", "recurrent"}, None),  # its scan is a delta rule, which has no fused form
        ("jamba", {"conv"}, None),  # a scan, and no state to keep it in: not the layer that we know
    ],
)
def test_what_a_mixer_is_written_around(family, states, kernels):
    found, reasons = fusable_kernels(mixer(family), states)
    assert found == kernels
    assert bool(reasons) == (kernels is None)


def test_an_activation_that_the_kernels_lack():
    module = mixer("bamba")
    module.activation = "gelu"
    found, reasons = fusable_kernels(module, {"conv", "recurrent"})
    assert found is None
    assert "'gelu'" in reasons[0]


def test_a_registered_adapter_is_used(monkeypatch):
    """The factory is asked for each state layer, and its mixer runs instead of the module's own forward."""
    monkeypatch.setattr("kvgroups.model_adapters.registry._registered", dict(_registered))
    made, ran = [], []

    class Counting(FusedMixer):
        def forward(self, *args, **kwargs):
            ran.append(self.index)
            return super().forward(*args, **kwargs)

    def factory(module, index):
        made.append(index)
        return Counting(module, index, MAMBA2)

    model = tiny("bamba")
    want = model.generate(IDS, max_new_tokens=3, do_sample=False)
    register_adapter(type(model.model.layers[0].mamba), factory)
    kvgroups.patch(model)
    assert torch.equal(model.generate(IDS, max_new_tokens=3, do_sample=False), want)
    assert made == [0, 2]
    assert ran == [0, 2] * 3
