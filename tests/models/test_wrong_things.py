"""Things that are no causal language model, no config and no patched model: each is told what to pass instead."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPTNeoXConfig,
    GPTNeoXModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    ModernBertConfig,
    ModernBertModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

import kvgroups
from kvgroups.errors import KVGroupsError, SpecError, UnsupportedCallError, UnsupportedModelError
from kvgroups.testing import tiny

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
T5 = {"vocab_size": 97, "d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4}

NO_CAUSAL_LM = {
    "text": (lambda: "llama", r"got the str 'llama'; load it: AutoModelForCausalLM.from_pretrained\('llama'\)"),
    "a config": (lambda: LlamaConfig(**SMALL), "got its LlamaConfig; make one: AutoModelForCausalLM.from_config"),
    "a class": (lambda: LlamaForCausalLM, "got the class LlamaForCausalLM; pass an instance"),
    "nothing": (lambda: None, "NoneType is no transformers PreTrainedModel"),
    "another module": (lambda: torch.nn.Linear(2, 2), "Linear is no transformers PreTrainedModel"),
    "no head": (lambda: LlamaModel(LlamaConfig(**SMALL)), "no language-model head.*pass the LlamaForCausalLM that holds it"),
    "no head, no decoder by its config": (
        lambda: GPTNeoXModel(GPTNeoXConfig(**SMALL)), "no language-model head.*pass the GPTNeoXForCausalLM that holds it",
    ),
    "another head": (
        lambda: LlamaForSequenceClassification(LlamaConfig(**SMALL)), "no language-model head.*pass a LlamaForCausalLM$",
    ),
    "an encoder": (lambda: BertModel(BertConfig(**SMALL)), "encoders are not served, .*BertSelfAttention sees tokens on"),
    "an encoder with a head": (lambda: BertForMaskedLM(BertConfig(**SMALL)), "encoders are not served"),
    "an encoder of a kind that has no other": (
        lambda: ModernBertModel(ModernBertConfig(**SMALL, pad_token_id=0)), "has no causal language model of its kind",
    ),
    "half of two": (lambda: T5EncoderModel(T5Config(**T5)), "encoders are not served"),
    "encoder and decoder": (
        lambda: T5ForConditionalGeneration(T5Config(**T5)), "encoder-decoder models are not served",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), NO_CAUSAL_LM.values(), ids=NO_CAUSAL_LM)
def test_what_is_no_causal_language_model(make, message):
    thing = make()
    for call in (kvgroups.patch, kvgroups.infer_config):
        with pytest.raises(UnsupportedModelError, match=message):
            call(thing)


def test_the_config_of_a_model_without_weights():
    """As the refusal of a config says: under the meta device a model takes no memory, and its config is the same."""
    model = tiny("llama")
    with torch.device("meta"):
        empty = LlamaForCausalLM(model.config)
    assert kvgroups.infer_config(empty) == kvgroups.infer_config(model)


@pytest.mark.parametrize("thing", ["x", None, 3])
def test_what_is_no_model_at_all(thing):
    for call in (kvgroups.is_patched, kvgroups.unpatch, kvgroups.GroupedCache):
        with pytest.raises(KVGroupsError, match=f"model, got {thing!r}"):
            call(thing)


def test_a_module_that_patch_does_not_know_is_not_patched():
    module = torch.nn.Linear(2, 2)
    assert not kvgroups.is_patched(module)
    assert kvgroups.unpatch(module) is module
    with pytest.raises(UnsupportedCallError, match="Linear is not patched"):
        kvgroups.GroupedCache(module)


@pytest.mark.parametrize("thing", [{"memory": 1}, "groups.yaml", 3])
def test_what_is_no_config(thing):
    model = tiny("llama")
    with pytest.raises(SpecError, match="config: expected a KVGroupsConfig, got .*infer_config"):
        kvgroups.patch(model, thing)
    assert not kvgroups.is_patched(model)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("memory", "a lot", "memory: got 'a lot'; expected a size"),
        ("max_num_reqs", -3, "max_num_reqs: got -3"),
        ("blok_size", 64, "blok_size: unknown field"),
    ],
)
def test_a_config_that_nothing_has_checked(field, value, message):
    """Past pydantic's checks, which no door of ours does."""
    model = tiny("llama")
    config = kvgroups.infer_config(model)
    config.__dict__[field] = value
    with pytest.raises(SpecError, match=message):
        kvgroups.patch(model, config)
    assert not kvgroups.is_patched(model)


def test_memory_as_text_is_what_a_patched_model_gets():
    model = kvgroups.patch(tiny("llama"), kvgroups.infer_config(tiny("llama"), memory="1.5 MiB"))
    manager = vars(model)["_kvgroups"].context.manager
    assert manager.config.memory == 1_572_864
    assert 1_400_000 < manager.usage().allocated_bytes <= 1_572_864
