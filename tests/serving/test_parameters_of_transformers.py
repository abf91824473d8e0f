"""The tensors that an engine loads hold the parameters that transformers builds of the same config."""

from __future__ import annotations

from typing import Any

import pytest

from staticmem.ir import dtypes
from staticmem.serving.decoder import decoder_of
from staticmem.serving.rules import rules_of
from staticmem.serving.weights import Padding, shares, tensors

RULES = rules_of("vllm").data
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}  # as wide as the config's layers
NARROW = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 48}
LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1, "num_key_value_heads": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"], "shared_intermediate_size": 32, "mamba_expand": 2,
}  # fmt: skip
NEMOTRON = {
    "head_dim": 16, "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "expand": 2,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 16}, "gemma2": {"head_dim": 16}, "gemma3_text": {"head_dim": 16}, "qwen3": {"head_dim": 16},
    "mixtral": EXPERTS, "granitemoe": EXPERTS, "phimoe": {**EXPERTS, "attention_bias": True, "lm_head_bias": True},
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 32}, "granitemoehybrid": {**EXPERTS, **MAMBA},
    "qwen2_moe": {**NARROW, "shared_expert_intermediate_size": 32}, "qwen3_moe": {**NARROW, "head_dim": 16},
    "olmoe": {"num_experts_per_tok": 2, "num_experts": 4}, "glm4": {"head_dim": 8, "attention_bias": True},
    "seed_oss": {"head_dim": 8}, "ministral": {"head_dim": 8}, "nemotron_h": NEMOTRON,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 8},
    "deepseek_v2": LATENT, "deepseek_v3": {**LATENT, "topk_method": "noaux_tc"},
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 48,
        "first_k_dense_replace": 1, "head_dim": 16, "use_qk_norm": True, "attention_bias": True,
    },
    "gpt_oss": {**EXPERTS, "head_dim": 16, "intermediate_size": 64},
    "llama4_text": {
        **EXPERTS, "head_dim": 8, "intermediate_size_mlp": 160, "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
    },
    "falcon": {"alibi": False},
}  # fmt: skip
BESIDE = ("rotary_emb", ".attn", "e_score_correction_bias")  # of the engine, or a buffer in transformers
# bytes that the engine takes in float32: biases of 4 x 4 experts, the rates of 3 and of 2 layers with 8 heads
WIDER = {"gpt_oss": 4 * 4 * (2 * 64 + 64) * 2, "granitemoehybrid": 3 * 8 * 2, "nemotron_h": 2 * 8 * 2}
NOT_BUILT = ("kimi_k2",)  # transformers has no such class: its code is that of deepseek_v3
KINDS = [kind for kind in RULES["models"] if kind not in NOT_BUILT]


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_transformers(kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **MORE.get(kind, {})})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    decoder = decoder_of(config.to_dict(), kind, RULES, dtypes.bfloat16, "")
    (whole,) = shares(decoder.layers, 1, 1)
    listed = [tensor for tensor in tensors(decoder, whole, Padding(64)) if not tensor.module.endswith(BESIDE)]
    assert sum(tensor.nbytes for tensor in listed) == 2 * built + WIDER.get(kind, 0)
