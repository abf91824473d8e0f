"""The tensors that an engine loads hold the parameters that transformers builds of the same config."""

from __future__ import annotations

from typing import Any

import pytest

from staticmem.ir import dtypes
from staticmem.serving.decoder import decoder_of
from staticmem.serving.rules import rules_of
from staticmem.serving.weights import shares, tensors

MODELS = rules_of("vllm").data["models"]
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}  # as wide as the config's layers
NARROW = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 48}
MORE: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 16}, "gemma2": {"head_dim": 16}, "gemma3_text": {"head_dim": 16}, "qwen3": {"head_dim": 16},
    "mixtral": EXPERTS, "granitemoe": EXPERTS,
    "qwen2_moe": {**NARROW, "shared_expert_intermediate_size": 32}, "qwen3_moe": {**NARROW, "head_dim": 16},
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("kind", MODELS)
def test_parameters_are_those_of_transformers(kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **SIZES, **MORE.get(kind, {}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    decoder = decoder_of(config.to_dict(), kind, MODELS, dtypes.bfloat16, "")
    (whole,) = shares(decoder.layers, 1, 1)
    listed = [tensor for tensor in tensors(decoder, whole, 64) if not tensor.module.endswith(("rotary_emb", ".attn"))]
    assert sum(tensor.nbytes for tensor in listed) == 2 * built
