"""What a default config of some types lacks: transformers cannot build a model from it as it is, or not run it."""

OPTIONS: dict[str, dict[str, object]] = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000.0}},
    # without any attention their stock classes do not run: the cache asks such a layer how long the text is
    "bamba": {"attn_layer_indices": [2, 10, 18, 26]},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"] * 8},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_shared_experts": 2, "topk_group": 3, "n_group": 8},
}
