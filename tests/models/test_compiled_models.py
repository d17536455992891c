"""torch.compile around a patched model: over our cache it steps out of the graph, elsewhere it stays in."""

import pytest
import torch

import kvgroups
from kvgroups.testing import tiny

IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs(counter):
    """A backend that runs what it is given and counts it."""

    def backend(module, inputs):
        counter.append(1)
        return module.forward

    return backend


def around(model, backend):
    return torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def forward_only(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def layer_by_layer(model, backend):
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model


def assert_serves(model, compiled, tokens, uncached, counter):
    cache = kvgroups.GroupedCache(model)
    with torch.no_grad():
        first = compiled(IDS[:, :6], cache=cache).logits
        rest = [compiled(IDS[:, at : at + 1], cache=cache).logits for at in (6, 7, 8)]
    assert (torch.cat([first, *rest], dim=1) - uncached).abs().max() < 1e-4
    assert torch.equal(compiled.generate(IDS, max_new_tokens=4, do_sample=False), tokens)
    assert not counter, "a forward over our cache was compiled"
    with torch.no_grad():
        assert (compiled(IDS, use_cache=False).logits - uncached).abs().max() < 1e-4
    assert counter, "a forward without a cache was not compiled"


def assert_compiles(family, compile_model, patch_first):
    model, counter = tiny(family), []
    with torch.no_grad():
        uncached, tokens = model(IDS, use_cache=False).logits, model.generate(IDS, max_new_tokens=4, do_sample=False)
    if patch_first:
        kvgroups.patch(model)
        compiled = compile_model(model, graphs(counter))
    else:
        compiled = compile_model(model, graphs(counter))
        kvgroups.patch(model)
    assert not counter, "the probe was compiled"
    assert_serves(model, compiled, tokens, uncached, counter)


@pytest.mark.parametrize(
    ("compile_model", "patch_first"), [(in_place, True), (layer_by_layer, True), (layer_by_layer, False)]
)
def test_compile(compile_model, patch_first):
    assert_compiles("llama", compile_model, patch_first)


@pytest.mark.slow
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("compile_model", [around, in_place, forward_only, layer_by_layer])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba"])
def test_compile_in_every_way(family, compile_model, patch_first):
    assert_compiles(family, compile_model, patch_first)
