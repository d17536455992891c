"""Pages carry no gradients: values come out right with and without `no_grad`, and a backward is refused."""

import pytest
import torch

import kvgroups
from kvgroups.errors import UnsupportedCallError
from kvgroups.testing import tiny

IDS = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(0))
SOME = ["gemma3_text", "bamba", "jamba", "deepseek_v3", "qwen3_next"]


def uncached(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("family", SOME)
def test_a_forward_that_forgot_no_grad(family):
    """The same bits as under no_grad; logits may be changed in place, as eager's may; the backward raises."""
    model = kvgroups.patch(tiny(family))
    with torch.no_grad():
        want = model(IDS, cache=kvgroups.GroupedCache(model)).logits
    cache = kvgroups.GroupedCache(model)
    first = model(IDS[:, :6], cache=cache)
    logits = model(IDS[:, 6:], cache=cache, output_hidden_states=True)
    assert (torch.cat((first.logits, logits.logits), dim=1) - want).abs().max() < 1e-4
    assert torch.equal(model(IDS, cache=kvgroups.GroupedCache(model)).logits, want)
    assert logits.cache is cache
    for tensor in (logits.logits, logits.hidden_states[0], logits.hidden_states[-1]):
        assert tensor.requires_grad
        with pytest.raises(UnsupportedCallError, match="without a GroupedCache to train"):
            tensor.sum().backward()
    first.logits[:, -1] += 1
    with pytest.raises(UnsupportedCallError, match="no gradients"):
        first.logits.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_over_a_fresh_cache():
    """No past, and still no gradient: the kernels between have none."""
    model = kvgroups.patch(tiny("llama"))
    want = model(IDS, labels=IDS, use_cache=False).loss
    loss = model(IDS, labels=IDS, cache=kvgroups.GroupedCache(model)).loss
    assert (loss - want).abs() < 1e-5
    with pytest.raises(UnsupportedCallError, match="backward"):
        loss.backward()
    want.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_embeddings_that_are_learnt_on_a_frozen_model():
    model = kvgroups.patch(tiny("llama")).requires_grad_(False)
    assert not model(IDS, cache=kvgroups.GroupedCache(model)).logits.requires_grad
    embeds = model.get_input_embeddings()(IDS).clone().requires_grad_()
    logits = model(inputs_embeds=embeds, cache=kvgroups.GroupedCache(model)).logits
    with pytest.raises(UnsupportedCallError, match="backward"):
        logits.sum().backward()


def test_without_gradients_nothing_is_marked():
    model = kvgroups.patch(tiny("llama"))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not model(IDS, cache=kvgroups.GroupedCache(model)).logits.requires_grad


@pytest.mark.parametrize("family", SOME)
def test_gradient_checkpointing(family):
    """Such layers drop their cache where gradients are on, and keep it where they are off: ours are off."""
    model = tiny(family)
    want, tokens = uncached(model), model.generate(IDS, max_new_tokens=4, do_sample=False)
    kvgroups.patch(model)
    model.activation_checkpointing_enable()
    model.train()
    cache = kvgroups.GroupedCache(model)
    got = [model(IDS[:, :6], cache=cache).logits, *(model(IDS[:, at : at + 1], cache=cache).logits for at in range(6, 13))]
    assert (torch.cat(got, dim=1) - want).abs().max() < 1e-4
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), tokens)


def test_gradient_checkpointing_of_a_model_that_drops_the_cache_in_any_case():
    """GPT-2 asks only whether it is training."""
    model = kvgroups.patch(tiny("gpt2", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))
    want = uncached(model)
    model.activation_checkpointing_enable()
    model.train()
    with pytest.raises(UnsupportedCallError, match=r"GPT2Attention \(layer_idx 0\).*gradient checkpointing.*model.eval"):
        model(IDS, cache=kvgroups.GroupedCache(model))
    assert vars(model)["_kvgroups"].context.manager.usage().held_bytes == 0
    model.eval()
    assert (model(IDS, cache=kvgroups.GroupedCache(model)).logits - want).abs().max() < 1e-4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["bamba", "jamba", "lfm2", "qwen3_next", "falcon_h1"])
def test_patch_where_gradients_are_off(family, mode):
    """The probe asks autograd whether states are read, and must be able to wherever it is called."""
    model = tiny(family)
    want, config = model.generate(IDS, max_new_tokens=4, do_sample=False), kvgroups.infer_config(model)
    with mode():
        kvgroups.patch(model)
    context = vars(model)["_kvgroups"].context
    assert context.config == config
    assert [layer.is_exact for layer in context.facts] == [layer.is_exact for layer in _facts(family)]
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), want)


def _facts(family):
    return vars(kvgroups.patch(tiny(family)))["_kvgroups"].context.facts
