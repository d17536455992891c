"""The sizes of the tiny models: what all share, and what each family needs beside it.

Sizes are as small as they can be with every mechanism still at work: a window (8) shorter than a prompt, two
KV heads for four query heads, a convolution of four taps, two layers of each kind, so that a mix-up shows.
"""

from __future__ import annotations

from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR, CONV, HYBRID = "linear_attention", "conv", "hybrid"

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Ten times the usual, so that logits are far enough apart for greedy text to wander.
    "initializer_range": 0.2,
    # Tied embeddings make a random model repeat its last token for ever.
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    # No stop token: a test decides how long a text is.
    "eos_token_id": None,
    # A padding token would own a row of zeros in the embedding, and zeros hide leaks.
    "pad_token_id": None,
}
"""Shared settings. A family takes those that its config class declares."""

# Without this, rotary frequencies of some classes are scaled for the long contexts of the public models.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA1 = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4}
_MAMBA2 = {
    # heads x head size = 64, the inner width; two SSM groups, so that B and C are not shared by all heads.
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

_WINDOWS: dict[str, Any] = {"layer_types": [SLIDING, FULL] * 2, "sliding_window": 8}
_GEMMA4 = {
    "layer_types": [SLIDING, FULL] * 2,
    "sliding_window": 8,
    # Full-attention heads twice as wide as windowed ones.
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.0,
}
_INDEXER = {
    "mlp_layer_types": ["dense", "sparse"] * 2,
    "index_topk": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
}
_INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    "sliding_window_size": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "d_rel": 4,
    "rel_extent": 16,
    "unpadded_vocab_size": 97,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "route_scale": 1.0,
}

CORE: dict[str, dict[str, Any]] = {
    "llama": {},
    # Softcaps low enough to bend scores of this size; the public ones (50 and 30) would be idle here.
    "gemma2": {
        "layer_types": [SLIDING, FULL] * 2,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, SLIDING, FULL] * 2,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
    },
    "gpt_oss": {
        "layer_types": [SLIDING, FULL] * 2,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": _ROPE,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "jamba": {
        **_MAMBA1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64},
    "lfm2": {
        "layer_types": [CONV, FULL] * 2,
        "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False,
        "rope_parameters": _ROPE,
    },
    "qwen3_next": {
        **_DELTA_NET,
        **_EXPERTS,
        "layer_types": [LINEAR, FULL] * 2,
        "shared_expert_intermediate_size": 16,
    },
}
"""The families that every test of the library runs on."""

MORE: dict[str, dict[str, Any]] = {
    # Full attention in every layer.
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "granite": {},
    "olmo2": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "phi3": {},
    # No rotary embedding in every fourth layer.
    "smollm3": {},
    "diffllama": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "qwen3_moe": {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2},
    # Sliding windows in every layer.
    "mistral": {"sliding_window": 8},
    "starcoder2": {"sliding_window": 8},
    "ministral": {"layer_types": [SLIDING] * 4, "sliding_window": 8, "head_dim": 8},
    # Sliding windows and full attention.
    "qwen3+sliding": {"layer_types": [SLIDING, FULL] * 2, "sliding_window": 8, "use_sliding_window": True},
    "cohere2": {**_WINDOWS, "logit_scale": 1.0},
    "olmo3": _WINDOWS,
    "exaone4": _WINDOWS,
    "cwm": {**_WINDOWS, "rope_parameters": _ROPE},
    "modernbert-decoder": {**_WINDOWS, "local_attention": 16, "pad_token_id": 0, "initializer_range": 0.6},
    "vaultgemma": {
        **_WINDOWS,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 10.0,
    },
    # Attention sinks.
    "granite_swa": {**_WINDOWS, "layer_rope_theta": [10000.0] * 4},
    "flint": {**_WINDOWS, **_EXPERTS, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]},
    # Another number of query heads in each layer.
    "laguna": {
        **_WINDOWS,
        **_EXPERTS,
        "num_attention_heads_per_layer": [4, 2, 2, 4],
        "shared_expert_intermediate_size": 16,
    },
    # Keys wider than values, and sinks in the windowed layers only.
    "mimo_v2_flash": {
        **_WINDOWS,
        "v_head_dim": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    # The last two layers read the keys and values of the two before them.
    "gemma3n_text": {
        "layer_types": [SLIDING, FULL] * 2,
        "sliding_window": 8,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_text+kv_sharing": {**_GEMMA4, "num_kv_shared_layers": 2},
    "gemma4_text+k_eq_v": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    # Chunks of eight tokens; every second layer sees everything and has no rotary embedding.
    "llama4_text": {
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 0, 1, 0],
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
        "moe_layers": [1, 3],
        "intermediate_size": 32,
    },
    # States only.
    "mamba": {"state_size": 8, "time_step_rank": 4, "num_hidden_layers": 3},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4, "num_hidden_layers": 3},
    "mamba2": {
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "state_size": 16,
        "chunk_size": 16,
    },
    # States and attention.
    "zamba": {
        **_MAMBA1,
        "num_key_value_heads": 4,
        "layers_block_type": [LINEAR, HYBRID] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_key_value_heads": 4,
        "layers_block_type": [LINEAR, HYBRID] * 2,
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "chunk_size": 16,
        "adapter_rank": 4,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
    },
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": [LINEAR, FULL] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "nemotron_h": {
        "layers_block_type": [LINEAR, "moe", FULL, "mlp", LINEAR, FULL],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "lfm2_moe": {
        "layer_types": [CONV, FULL] * 2,
        "conv_L_cache": 4,
        **_EXPERTS,
        "num_dense_layers": 1,
        "rope_parameters": _ROPE,
    },
    "lfm3": {"layer_types": [CONV, SLIDING, CONV, FULL], "conv_L_cache": 4, "sliding_window": 8},
    "qwen3_5_text": {**_DELTA_NET, "layer_types": [LINEAR, FULL] * 2},
    "qwen3_5_moe_text": {
        **_DELTA_NET,
        **_EXPERTS,
        "layer_types": [LINEAR, FULL] * 2,
        "shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": {**_DELTA_NET, "linear_num_key_heads": 4, "layer_types": [LINEAR, FULL] * 2},
    "lara_mini": {
        **_DELTA_NET,
        **_EXPERTS,
        "layer_types": [LINEAR, SLIDING, LINEAR, FULL],
        "sliding_window": 8,
        "shared_expert_intermediate_size": 16,
    },
    "kimi_linear": {
        **_LATENT,
        "q_lora_rank": None,
        "layer_types": [LINEAR, FULL] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 16,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "bailing_hybrid": {
        **_LATENT,
        "layer_types": [LINEAR, FULL] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_expert_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_nextn_predict_layers": 0,
    },
    # Convolution, recurrent state and attention in one layer.
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "sliding_window": 8,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "router_hidden_size": 8,
        # Its normalised queries and keys drown out the rest below this.
        "initializer_range": 0.4,
    },
    "inkling_text": {
        **_INKLING,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "n_shared_experts": 1,
        "logits_mup_width_multiplier": 1.0,
    },
    "inkling2_text": {**_INKLING, "n_layers_per_attn_res_block": 2, "log_scaling_n_floor": 8},
    "inkling2_loop_text": {
        **_INKLING,
        "n_layers_per_attn_res_block": 2,
        "log_scaling_n_floor": 8,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
        "loop_gate_rank": 4,
    },
    # Lightning attention; the cache class is its own.
    "minimax": {
        "layer_types": [LINEAR, FULL] * 2,
        "block_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },
    # States that live on the modules.
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 8,
        "lru_width": 32,
        "w_init_variance_scale": 0.16,
        "final_w_init_variance_scale": 1.28,
    },
    # Latent attention.
    "deepseek_v2": {**_LATENT, **_ROUTED, "first_k_dense_replace": 1, "topk_method": "greedy"},
    "deepseek_v3": {**_LATENT, **_ROUTED, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    "glm4_moe_lite": {**_LATENT, **_ROUTED, "mlp_layer_types": ["dense", "sparse"] * 2},
    "minicpm3": {**_LATENT, "scale_emb": 1, "dim_model_base": 32},
    "youtu": {**_LATENT, "embedding_initializer_range": 0.2},
    # Two attention layers in each of its layers.
    "longcat_flash": {
        **_LATENT,
        "num_layers": 2,
        "head_dim": 4,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "routed_scaling_factor": 1.0,
    },
    # Layers that run several times, each time with keys and values of their own.
    "dory": {
        **_WINDOWS,
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "ngpt_alpha_init": 0.5,
        "n_output_layers": 1,
    },
    "hrm_text": {
        "num_hidden_layers": 2,
        "H_cycles": 2,
        "L_cycles": 1,
        "num_key_value_heads": 4,
        "prefix_lm": False,
    },
    # Attention over chosen tokens: an index of its own beside keys and values.
    "deepseek_v32": {**_LATENT, **_ROUTED, **_INDEXER, "n_group": 1, "topk_group": 1},
    "glm_moe_dsa": {**_LATENT, **_ROUTED, **_INDEXER},
    "hy_v4": {**_LATENT, **_ROUTED, **_INDEXER, "indexer_types": ["full", "shared"] * 2, "hc_mult": 2},
    # Attention over compressed, or over chosen, blocks of tokens.
    "deepseek_v4": {
        **_ROUTED,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "q_lora_rank": 16,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["moe"] * 4,
        "sliding_window": 8,
        "partial_rotary_factor": 0.5,
        "qk_rope_head_dim": 4,
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "num_nextn_predict_layers": 0,
    },
    "minimax_m3_vl_text": {
        "layer_types": [FULL, "minimax_m3_sparse"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 16,
        "intermediate_size": 16,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "rotary_dim": 4,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_local_blocks": 1,
    },
    # No attention interface.
    "bloom": {"n_layer": 4, "n_head": 4},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 64},
    "gpt_neo": {
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 8,
        "intermediate_size": 64,
    },
    "mpt": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 4,
        "max_seq_len": 512,
        "use_cache": True,
        "initializer_range": 0.1,
    },
    # A recurrent state, and no cache of transformers' kind.
    "rwkv": {"attention_hidden_size": 32, "context_length": 512},
    # Its query and key width is rounded up to a multiple of 64, and must be half of the hidden size.
    "xlstm": {
        "hidden_size": 128,
        "embedding_dim": 128,
        "num_blocks": 2,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "chunk_size": 16,
    },
}
"""The other families, and variants of a family: what follows a `+` is not part of the model type."""
