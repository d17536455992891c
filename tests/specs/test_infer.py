"""infer_config: what a model's layers really store, learnt without touching the model."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from transformers.modeling_utils import AttentionInterface

from kvgroups.errors import SpecError, UnsupportedModelError
from kvgroups.specs import KVGroupsConfig
from kvgroups.specs.infer import infer_config
from kvgroups.specs.probe import PROBE_ATTENTION, probe
from kvgroups.testing import tiny, tiny_names

tiny_once = functools.cache(tiny)
"""A model that tests may read and must not change."""
probe_once = functools.cache(lambda family: probe(tiny_once(family)))
infer_once = functools.cache(lambda family: infer_config(tiny_once(family)))


def outline(config: KVGroupsConfig) -> dict[str, tuple[tuple[int, ...], int, str]]:
    """Layers, block size and mode by group."""
    return {group.name: (group.layers, group.block_size, group.slot_mapping) for group in config.groups}


# Layers and groups

WINDOWS_AND_FULL = {"window": ((0, 2), 4, "paged"), "full": ((1, 3), 16, "paged")}
STATES_AND_FULL = {"state": ((0, 2), 1, "none"), "full": ((1, 3), 16, "paged")}


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("llama", {"full": ((0, 1, 2, 3), 16, "paged")}),
        ("gemma2", WINDOWS_AND_FULL),
        ("gemma3_text", {"window": ((0, 1, 3, 4), 4, "paged"), "full": ((2, 5), 16, "paged")}),
        ("gpt_oss", WINDOWS_AND_FULL),
        ("bamba", STATES_AND_FULL),
        ("jamba", STATES_AND_FULL),
        ("lfm2", STATES_AND_FULL),
        ("qwen3_next", STATES_AND_FULL),
        # Attention and a state in every layer.
        ("falcon_h1", {"full": ((0, 1, 2, 3), 16, "paged"), "state": ((0, 1, 2, 3), 1, "none")}),
        # ... and of two kinds.
        ("zaya", {"full": ((0, 2), 16, "paged"), "state": ((0, 1, 2, 3), 1, "none"), "window": ((1, 3), 4, "paged")}),
        ("llama4_text", {"chunk": ((0, 2), 16, "paged"), "full": ((1, 3), 16, "paged")}),
        ("lara_mini", {"state": ((0, 2), 1, "none"), "window": ((1,), 4, "paged"), "full": ((3,), 16, "paged")}),
        # Layers 2 and 3 read what 0 and 1 have stored.
        ("gemma4_text+kv_sharing", {"window": ((0,), 4, "paged"), "full": ((1,), 16, "paged")}),
        # Layers 1 and 3 are feed-forward only.
        ("nemotron_h", {"state": ((0, 4), 1, "none"), "full": ((2, 5), 16, "paged")}),
        # Layers 1 and 2 run twice, and have keys and values of their own each time.
        ("dory", {"window": ((0, 2, 5), 4, "paged"), "full": ((1, 3, 4), 16, "paged")}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_layers_that_remember_alike_share_a_group(family, groups):
    assert outline(infer_once(family)) == groups


def test_every_core_family_is_among_the_cases_above():
    cases = test_layers_that_remember_alike_share_a_group.pytestmark[0].args[1]
    assert set(tiny_names()) <= {family for family, _ in cases}


@pytest.mark.parametrize(
    ("family", "group", "heads_k_v"),
    [
        ("llama", "full", (2, 8, 8)),
        ("gemma4_text+kv_sharing", "window", (2, 8, 8)),
        ("gemma4_text+kv_sharing", "full", (2, 16, 16)),  # full-attention heads are twice as wide
        ("mimo_v2_flash", "full", (2, 8, 4)),  # V is narrower than K
        ("mimo_v2_flash", "window", (4, 8, 4)),  # and windows have more heads
        ("deepseek_v3", "full", (1, 16, 4)),  # the latents: one head of kv_lora_rank, and the rotary part
    ],
)
def test_k_and_v_have_the_shapes_that_the_layer_stores(family, group, heads_k_v):
    spec = infer_once(family).group(group).spec
    assert (spec.num_kv_heads, spec.head_dim, spec.value_dim) == heads_k_v


@pytest.mark.parametrize(
    ("family", "states"),
    [
        ("bamba", {"conv": (128, 4), "recurrent": (8, 8, 16)}),  # 64 inner + 2 x 2 groups of 16; 8 heads of 8
        ("jamba", {"conv": (64, 4), "recurrent": (64, 8)}),
        ("qwen3_next", {"conv": (96, 4), "recurrent": (4, 8, 16)}),
        ("lfm2", {"conv": (32, 4)}),
    ],
)
def test_states_have_the_shapes_that_the_layer_keeps(family, states):
    spec = infer_once(family).group("state").spec
    assert {state.name: state.shape for state in spec.states} == states


def test_a_window_is_the_models():
    assert infer_once("gemma3_text").group("window").spec.sliding_window == 8
    assert infer_once("llama4_text").group("chunk").spec.chunk_size == 8


@pytest.mark.parametrize(
    ("window", "block_size"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (10, 4), (64, 16), (512, 16)]
)
def test_a_windows_block_is_at_most_half_a_window_and_a_power_of_two(window, block_size):
    config = infer_config(tiny("mistral", sliding_window=window))
    assert config.group("window").block_size == block_size


def test_a_bf16_model_keeps_its_recurrent_states_in_float32():
    config = infer_config(tiny("bamba", dtype=torch.bfloat16))
    assert config.group("full").spec.dtype == "bfloat16"
    assert {state.name: state.dtype for state in config.group("state").spec.states} == {
        "conv": "bfloat16",
        "recurrent": "float32",
    }


def test_the_longest_request_is_the_models():
    assert infer_once("llama").max_model_len == 512
    assert infer_once("mamba").max_model_len == 32768  # a Mamba model has no longest position


# Overrides


def test_one_value_is_for_every_group_that_it_fits():
    config = infer_config(tiny_once("lara_mini"), block_size=32, layout="NHD", snapshot_interval=64)
    assert [(group.name, group.block_size, group.layout) for group in config.groups] == [
        ("state", 1, "HND"),
        ("window", 32, "NHD"),
        ("full", 32, "NHD"),
    ]
    assert config.group("state").spec.snapshot_interval == 64


def test_a_dict_is_for_the_groups_that_it_names():
    config = infer_config(tiny_once("lara_mini"), block_size={"full": 64}, layout={"window": "NHD"})
    assert [(group.name, group.block_size, group.layout) for group in config.groups] == [
        ("state", 1, "HND"),
        ("window", 4, "NHD"),
        ("full", 64, "HND"),
    ]


@pytest.mark.parametrize(
    ("slot_mapping", "groups"),
    [
        ("ring", {"window": ((0, 2), 4, "ring"), "full": ((1, 3), 16, "paged")}),
        ({"window": "ring"}, {"window": ((0, 2), 4, "ring"), "full": ((1, 3), 16, "paged")}),
        ("token", {"window": ((0, 2), 1, "token"), "full": ((1, 3), 1, "token")}),
        ({"full": "token"}, {"window": ((0, 2), 4, "paged"), "full": ((1, 3), 1, "token")}),
    ],
)
def test_the_slot_mapping_can_be_chosen(slot_mapping, groups):
    assert outline(infer_config(tiny_once("gemma2"), slot_mapping=slot_mapping)) == groups


def test_limits_and_memory_can_be_chosen():
    config = infer_config(
        tiny_once("gemma2"), max_model_len=64, max_num_reqs=2, memory={"window": 8, "full": 8}, max_rewind=3
    )
    assert (config.max_model_len, config.max_num_reqs, config.max_rewind) == (64, 2, 3)
    assert config.memory == {"window": 8, "full": 8}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"blocksize": 8}, "unknown override blocksize; known are block_size, layout, max_model_len"),
        ({"groups": []}, "unknown override groups"),
        ({"block_size": {"windows": 8}}, "block_size names windows; this model's groups are state, window, full"),
        ({"block_size": {"state": 8}}, "group 'state': block_size 8 with slot_mapping 'none'; must be 1"),
        ({"block_size": 0}, "GroupConfig.block_size: got 0"),
        ({"slot_mapping": {"full": "ring"}}, "group 'full': slot_mapping 'ring' serves sliding windows only"),
        ({"slot_mapping": "none"}, "group 'window': slot_mapping 'none' with a sliding_window spec"),
        ({"slot_mapping": "token", "block_size": 4}, "group 'window': block_size 4 with slot_mapping 'token'"),
        ({"snapshot_interval": 0}, "MambaSpec.snapshot_interval: got 0"),
        ({"snapshot_interval": {"full": 64}}, "snapshot_interval names 'full', which stores tokens"),
        ({"memory": {"full": 8}}, r"must name each of \['full', 'state', 'window'\]"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_wrong_override_is_told_what_would_be_right(overrides, message):
    with pytest.raises(SpecError, match=message):
        infer_config(tiny_once("lara_mini"), **overrides)


# What the probe says of layers


@pytest.mark.parametrize("family", ["bamba", "qwen3_next", "lfm2", "falcon_h1", "zaya", "llama"])
def test_layers_that_take_several_tokens_on_a_filled_state(family):
    assert all(layer.is_exact for layer in probe_once(family))


@pytest.mark.parametrize("family", ["jamba", "mamba", "zamba"])
def test_layers_that_forget_their_state_when_they_get_several_tokens(family):
    """Mamba-1 layers of transformers start anew: such a state is fed token by token."""
    assert not any(layer.is_exact for layer in probe_once(family) if layer.states)


@pytest.mark.parametrize("family", ["deepseek_v3", "diffllama"])
def test_layers_that_transform_what_they_stored(family):
    assert all(layer.reads_gathered for layer in probe_once(family))


@pytest.mark.parametrize("family", [*tiny_names(), "gemma4_text+kv_sharing", "mimo_v2_flash", "zaya"])
def test_layers_that_read_what_they_stored(family):
    assert not any(layer.reads_gathered for layer in probe_once(family))


# The model is left as it was


def facts_of(model: torch.nn.Module) -> dict[str, object]:
    """What a probe could leave behind on a model, the weights aside."""
    return {
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "training": [m.training for m in model.modules()],
        "forward": [vars(m).get("forward") for m in model.modules()],
        "config": copy.deepcopy(model.config.to_dict()),
        "attention": [
            getattr(getattr(m, "config", None), "_attn_implementation_internal", None)
            for m in model.modules()
        ],
        "experts": [
            getattr(getattr(m, "config", None), "_experts_implementation_internal", None)
            for m in model.modules()
        ],
        "gradients": [(parameter.requires_grad, parameter.grad is None) for parameter in model.parameters()],
    }


@pytest.mark.parametrize(
    ("family", "training"), [*((family, False) for family in tiny_names()), ("jamba", True)]
)
def test_the_probe_leaves_the_model_as_it_was(family, training):
    model = tiny(family).train(training)
    facts, weights = facts_of(model), copy.deepcopy(model.state_dict())
    buffers = [buffer.clone() for buffer in model.buffers()]
    random_state = torch.get_rng_state()

    infer_config(model)

    assert facts_of(model) == facts
    assert {name: torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items()} == (
        dict.fromkeys(weights, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert PROBE_ATTENTION not in AttentionInterface._global_mapping


@pytest.mark.parametrize("family", tiny_names())
def test_weights_are_never_read(family):
    assert infer_config(tiny(family).to("meta")) == infer_once(family)


# Where meta tensors cannot follow


def counts_zeros(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    """An operation whose result depends on the data, which a meta tensor does not have."""
    return output + (output == 0).nonzero().shape[0]


def test_a_model_that_asks_for_values_is_probed_with_its_weights():
    model = tiny("gemma2")
    model.model.layers[1].mlp.register_forward_hook(counts_zeros)
    facts = facts_of(model)
    assert infer_config(model) == infer_once("gemma2")
    assert facts_of(model) == facts
    assert PROBE_ATTENTION not in AttentionInterface._global_mapping


def test_a_model_that_fails_in_any_case_is_refused_and_left_as_it_was():
    model = tiny("gemma2")

    def fail(*_):
        raise RuntimeError("no luck")

    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(fail)
    facts = facts_of(model)
    with pytest.raises(
        UnsupportedModelError,
        match=r"Gemma2ForCausalLM: model.layers.1.mlp.down_proj Linear .*\(RuntimeError: no luck\)",
    ):
        infer_config(model)
    assert facts_of(model) == facts
    assert PROBE_ATTENTION not in AttentionInterface._global_mapping


def test_a_layer_type_that_nobody_serves_is_named():
    with pytest.raises(UnsupportedModelError, match="layer 0 has layer type 'indexed_attention'"):
        infer_config(tiny_once("deepseek_v32"))
