"""Every preset is what inference says of the model built from its public config, without weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from kvgroups import infer_config
from kvgroups.errors import SpecError
from kvgroups.slab_plan import SlabPlan
from kvgroups.specs.presets import Preset, preset, preset_names


@dataclass(frozen=True)
class PublicConfig:
    """What the sources of a preset say, as transformers spells it."""

    billions: float
    """Published parameters of the language model: a wrong layer, head or state shows in them."""
    build: Callable[[], Any]
    is_slow: bool = True


def attention_at(layers: set[int], count: int, attention: str, state: str) -> list[str]:
    return [attention if layer in layers else state for layer in range(count)]


def gemma3(**sizes: int) -> Callable[[], Any]:
    return lambda: transformers.Gemma3TextConfig(**sizes)


CONFIGS = {
    "gemma-3-270m": PublicConfig(0.268, is_slow=False, build=gemma3(
        num_hidden_layers=18, hidden_size=640, intermediate_size=2048, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, sliding_window=512, max_position_embeddings=32768,
    )),
    "gemma-3-1b": PublicConfig(1.0, build=gemma3(
        num_hidden_layers=26, hidden_size=1152, intermediate_size=6912, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, sliding_window=512, max_position_embeddings=32768,
    )),
    "gemma-3-27b": PublicConfig(27.0, build=gemma3(
        num_hidden_layers=62, hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16,
        head_dim=128, sliding_window=1024, max_position_embeddings=131072,
    )),
    "gemma-2-9b": PublicConfig(9.24, build=lambda: transformers.Gemma2Config(
        num_hidden_layers=42, hidden_size=3584, intermediate_size=14336, num_attention_heads=16, num_key_value_heads=8,
        head_dim=256, sliding_window=4096, max_position_embeddings=8192,
    )),
    "gpt-oss-20b": PublicConfig(20.9, is_slow=False, build=lambda: transformers.GptOssConfig(
        num_hidden_layers=24, num_local_experts=32, num_key_value_heads=8, head_dim=64, sliding_window=128,
        max_position_embeddings=131072,
    )),
    "llama-4-scout": PublicConfig(108.0, build=lambda: transformers.Llama4TextConfig(max_position_embeddings=10485760)),
    "jamba-v0.1": PublicConfig(51.6, build=transformers.JambaConfig),
    "bamba-9b": PublicConfig(9.78, is_slow=False, build=lambda: transformers.BambaConfig(
        vocab_size=128256, attn_layer_indices=[9, 18, 27], mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128,
    )),
    "zamba2-7b": PublicConfig(7.36, build=lambda: transformers.Zamba2Config(
        hidden_size=3584, num_hidden_layers=81, num_attention_heads=32, n_mamba_heads=112, mamba_d_state=64,
        mamba_ngroups=2, num_mem_blocks=2, use_mem_rope=True, max_position_embeddings=4096,
        layers_block_type=attention_at({6, *range(11, 78, 6)}, 81, "hybrid", "mamba"),
    )),
    "falcon-h1-7b": PublicConfig(7.59, build=lambda: transformers.FalconH1Config(
        hidden_size=3072, num_hidden_layers=44, intermediate_size=12288, num_attention_heads=12, num_key_value_heads=2,
        head_dim=128, mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128, mamba_d_state=256, mamba_n_groups=1,
        vocab_size=130048, max_position_embeddings=262144,
    )),
    "granite-4.0-h-small": PublicConfig(32.2, build=lambda: transformers.GraniteMoeHybridConfig(
        hidden_size=4096, num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8, intermediate_size=768,
        shared_intermediate_size=1536, num_local_experts=72, num_experts_per_tok=10, mamba_n_heads=128, mamba_d_head=64,
        mamba_d_state=128, layer_types=attention_at({5, 15, 25, 35}, 40, "full_attention", "linear_attention"),
        vocab_size=100352, tie_word_embeddings=True, max_position_embeddings=131072,
    )),
    "nemotron-h-8b": PublicConfig(8.10, build=lambda: transformers.NemotronHConfig(
        layers_block_type=[
            {"M": "linear_attention", "-": "mlp", "*": "full_attention"}[layer]
            for layer in "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
        ],
        max_position_embeddings=8192,
    )),
    "qwen3-next-80b": PublicConfig(79.7, build=lambda: transformers.Qwen3NextConfig(max_position_embeddings=262144)),
    "llama-3.1-8b": PublicConfig(8.03, is_slow=False, build=lambda: transformers.LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072,
    )),
}  # fmt: skip


def test_every_preset_has_its_public_config_here():
    assert sorted(CONFIGS) == list(preset_names())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if public.is_slow else ())
        for name, public in CONFIGS.items()
    ],
)
def test_a_preset_is_what_inference_says_of_the_public_config(name: str):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name].build(), dtype=torch.bfloat16)

    assert preset(name).config == infer_config(model)
    assert preset(name).model_type == model.config.model_type
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert billions == pytest.approx(CONFIGS[name].billions, rel=0.01)


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_names_itself_its_sources_and_its_dtype(name: str):
    chosen = preset(name)

    assert chosen.name == name
    assert all(len(source) > 20 for source in chosen.source)
    assert chosen.dtype == "bfloat16"
    assert Preset.model_validate_json(chosen.model_dump_json()) == chosen


@pytest.mark.parametrize("name", preset_names())
def test_the_slabs_of_a_preset_waste_less_than_two_percent(name: str):
    assert SlabPlan.for_config(preset(name).config).waste < 0.02


@pytest.mark.parametrize(
    ("name", "group", "nbytes"),
    [
        ("llama-3.1-8b", "full", 32 * 2 * 8 * 128 * 2),
        ("gemma-3-27b", "window", 52 * 2 * 16 * 128 * 2),
        ("gemma-3-27b", "full", 10 * 2 * 16 * 128 * 2),
        ("gpt-oss-20b", "window", 12 * 2 * 8 * 64 * 2),
        ("zamba2-7b", "full", 13 * 2 * 32 * 224 * 2),
        ("bamba-9b", "state", 0),
    ],
)
def test_bytes_of_a_token_by_hand(name: str, group: str, nbytes: int):
    """layers x (K and V) x heads x head_dim x two bytes."""
    assert preset(name).config.group(group).bytes_per_token == nbytes


def test_bytes_of_a_state_by_hand():
    """Bamba-9B: 29 layers of a convolution of 8,448 channels and 4 columns, and of 128 heads of 64 x 128 in float32."""
    nbytes = 29 * (8448 * 4 * 2 + 128 * 64 * 128 * 4)
    assert preset("bamba-9b").config.group("state").block_bytes == nbytes == 123_594_752


def test_another_dtype_changes_what_is_in_the_presets_and_nothing_else():
    jamba = preset("jamba-v0.1").with_dtype("torch.float16")

    assert jamba.dtype == "float16"
    state, full = jamba.config.groups
    assert full.spec.dtype == "float16"
    assert [tensor.dtype for tensor in state.spec.states] == ["float16", "float32"]
    assert jamba.config.max_model_len == preset("jamba-v0.1").config.max_model_len


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(SpecError, match="no preset 'gemma'; presets are bamba-9b, .*, zamba2-7b"):
        preset("gemma")


def test_an_unknown_dtype_is_one_complaint():
    with pytest.raises(SpecError, match=r"^Preset.dtype: got 'int4'; expected one of [^;]*$"):
        preset("bamba-9b").with_dtype("int4")
