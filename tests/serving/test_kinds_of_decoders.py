"""Kinds of decoders beside plain ones: their published numbers of parameters, their caches and their encoders by hand.

Configs have the figures of the models' own config.json, numbers of parameters are those of the models' own pages
(safetensors), which count the table of positions of no model.
"""

from __future__ import annotations

from typing import Any

import pytest

from staticmem.devices.gpus import find
from staticmem.ir import dtypes
from staticmem.serving.cache import cache_of
from staticmem.serving.decoder import Decoder, decoder_of
from staticmem.serving.engine import Asked, Engine
from staticmem.serving.packing import kv_item_of, packed_of
from staticmem.serving.rules import rules_of
from staticmem.serving.weights import Padding, shares, tensors
from staticmem.units import GIB

RULES = rules_of("vllm")
NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"


def config(kind: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **dict(zip([*NAMES.split(), "max_position_embeddings"], sizes, strict=True)), **more}


LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
}  # fmt: skip
SCOUT = config(
    "llama4_text", (5120, 8192, 48, 40, 8, 202048, 131072), head_dim=128, intermediate_size_mlp=16384,
    num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=8192,
)  # fmt: skip
HYBRID: dict[str, Any] = {
    "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_n_groups": 1,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "position_embedding_type": "nope", "shared_intermediate_size": 1536, "tie_word_embeddings": True,
}  # fmt: skip
OSS = config(
    "gpt_oss", (2880, 2880, 24, 64, 8, 201088, 131072), head_dim=64, num_local_experts=32, num_experts_per_tok=4,
    sliding_window=128, attention_bias=True, quantization_config={"quant_method": "mxfp4"},
)  # fmt: skip
QWEN_SEES = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": config(
        "deepseek_v2", (2048, 10944, 27, 16, 16, 102400, 163840), **LATENT, q_lora_rank=None, n_routed_experts=64,
        num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1,
    ),
    "DeepSeek-V3": config(
        "deepseek_v3", (7168, 18432, 61, 128, 128, 129280, 163840), **LATENT, q_lora_rank=1536, n_routed_experts=256,
        num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3,
        topk_method="noaux_tc",
    ),
    "granite-4.0-h-small": config(
        "granitemoehybrid", (4096, 768, 40, 32, 8, 100352, 131072), **HYBRID, num_local_experts=72,
        num_experts_per_tok=10,
    ),
    "gemma-3-12b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
            "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14},
    },
    "Mistral-Small-3.1-24B": {
        "model_type": "mistral3", "spatial_merge_size": 2, "vision_config": {"model_type": "pixtral"},
        "text_config": config("mistral", (5120, 32768, 40, 32, 8, 131072, 131072), head_dim=128),
    },
    "Qwen2.5-VL-7B": config(
        "qwen2_5_vl", (3584, 18944, 28, 28, 4, 152064, 128000), vision_config=QWEN_SEES, tie_word_embeddings=False,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
    ),
    "Llama-4-Scout": {
        "model_type": "llama4", "text_config": SCOUT, "vision_config": {"model_type": "llama4_vision_model"},
    },
    "command-r7b": config(
        "cohere2", (4096, 14336, 32, 32, 8, 256000, 132096), head_dim=128, sliding_window=4096,
        tie_word_embeddings=True,
    ),
    "falcon-7b": {
        "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "vocab_size": 65024, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False,
    },
    "Phi-3.5-MoE": config(
        "phimoe", (4096, 6400, 32, 32, 8, 32064, 131072), num_local_experts=16, num_experts_per_tok=2,
        attention_bias=True, lm_head_bias=True,
    ),
}  # fmt: skip


def decoder(content: dict[str, Any]) -> Decoder:
    return decoder_of(content, "config.json", RULES.data, dtypes.bfloat16, "")


def engine(content: dict[str, Any], card: str = "h100", length: int = 8192, ranks: int = 1) -> Engine:
    return Engine(decoder(content), find(card), RULES, Asked(0.95, length, 1024, 8192, 2, False, ranks, 1))


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("DeepSeek-V2-Lite", 15_706_484_224),
        ("DeepSeek-V3", 671_026_419_200),  # without the layer that predicts two tokens
        ("gemma-3-12b", 12_187_325_040),
        ("Mistral-Small-3.1-24B", 24_011_361_280),
        ("Qwen2.5-VL-7B", 8_292_166_656),
        ("Llama-4-Scout", 108_641_793_536),
        ("command-r7b", 8_027_901_952),
        ("falcon-7b", 6_921_720_704),
        ("Phi-3.5-MoE", 41_873_153_344),
    ],
)
def test_published_parameters(name: str, published: int) -> None:
    """Within 0.1 %: encoders keep small tensors as they like, and the rates of Mamba are float32 here."""
    one = decoder(MODELS[name])
    (whole,) = shares(one.layers, 1, 1)
    listed = [
        tensor for tensor in tensors(one, whole, Padding(1)) if not tensor.module.endswith(("rotary_emb", ".attn"))
    ]
    assert abs(sum(tensor.nbytes for tensor in listed) / 2 / published - 1) <= 0.001


def test_cache_of_latent_attention() -> None:
    """DeepSeek-V2: 512 + 64 numbers of a token in a layer (its paper, section 2.1.3), on every rank the same."""
    for ranks in (1, 8):
        cache = cache_of(decoder(MODELS["DeepSeek-V2-Lite"]), ranks, 2, 16)
        assert cache.block_bytes(shares(27, ranks, 1)[0]) == 16 * (512 + 64) * 2 * 27


def test_cache_beside_state_space_layers() -> None:
    """A state has 3 x (8192 + 2 x 128) numbers of the convolution and 128 x 64 x 128 others, 2,147,840 bytes. A token
    takes 4,096, so 33 times 16 tokens hold it; 36 layers are nine groups of four beside that of attention. A request
    of 4,096 tokens has 8 blocks of attention, and one of each other group."""
    cache = cache_of(decoder(MODELS["granite-4.0-h-small"]), 1, 2, 16)
    assert cache.groups[0].spec.page == cache.groups[-1].spec.page == 33 * 16 * 4096
    assert [len(group.layers) for group in cache.groups] == [4] * 10
    assert cache.blocks_of_request(4096, 8192) == 8 + 9
    assert cache.tokens(100) == 100 // 10 * 528


def test_gpt_oss_by_hand() -> None:
    """On an H100 inputs of 2,880 are 2,944: 0.5 bytes of each and 1/32 of a scale, biases in float32, 24 x 32 experts.
    On an A100 Marlin's kernel has 3,072 and 2,944. Half of the layers have windows; 83 sizes are captured."""
    hopper = 24 * 32 * ((5760 + 2880) * 2944 * (1 / 2 + 1 / 32) + 4 * (5760 + 2880))
    marlin = 24 * 32 * ((5888 * 3072 + 3072 * 2944) * (1 / 2 + 1 / 32) + 4 * (5888 + 3072))
    for card, expected in (("h100", hopper), ("a100-sxm-80gb", marlin)):
        padding = Padding(64, *RULES.padding_of_mxfp4(find(card)))
        listed = tensors(decoder(OSS), shares(24, 1, 1)[0], padding)
        assert sum(tensor.nbytes for tensor in listed if ".experts." in tensor.module) == expected
    one = engine(OSS)
    assert [(len(group.layers), group.spec.window) for group in one.cache.groups] == [(12, 128), (12, 0)]
    assert len(one.captured) == 83
    assert one.stages[0].weights.expected / GIB == pytest.approx(13.07, abs=0.03)


def test_llama_4_has_no_groups() -> None:
    """The engine switches groups off for attention in chunks (config/vllm.py): all 48 layers keep all tokens."""
    one = engine(MODELS["Llama-4-Scout"], ranks=4)
    assert [len(group.layers) for group in one.cache.groups] == [48]


@pytest.mark.parametrize(
    ("name", "length", "patches", "images"),
    [
        ("gemma-3-12b", 8192, 4096, 8192 // 256),
        ("Mistral-Small-3.1-24B", 8192, 110 * 110, 8192 // (55 * 56)),  # 55 rows, each with a token that ends it
        ("Qwen2.5-VL-7B", 8192, 65536, 1),  # 16,384 tokens of one image are more than a step has
        ("Qwen2.5-VL-7B", 128000, 65536, 7),  # a video of 14 frames, in pairs
        ("Llama-4-Scout", 8192, 17 * 24 * 24, 8192 // (17 * 144)),
    ],
)
def test_images_of_the_profile_run(name: str, length: int, patches: int, images: int) -> None:
    encoder = decoder(MODELS[name]).encoder
    assert encoder is not None
    assert encoder.patches == patches
    assert encoder.images(8192, 1024, length) == images


def test_an_encoder_is_in_the_run() -> None:
    """A long request lets a video in: its encoder is the peak. A short one leaves its pixels beside the sampler: 65,536
    patches of 1,176 numbers, and 16,384 tokens of 3,584."""
    long, short = (engine(MODELS["Qwen2.5-VL-7B"], length=length).stages[0] for length in (128000, 8192))
    text = config("qwen2", (3584, 18944, 28, 28, 4, 152064, 128000))
    assert long.phase.value == "the encoder of images"
    assert short.phase.value == "the sampler"
    beside = short.activation.expected - engine(text).stages[0].activation.expected
    assert beside == pytest.approx(2 * (65536 * 1176 + 16384 * 3584), rel=0.05)


def test_a_checkpoint_says_the_type_of_its_cache() -> None:
    scheme = {"num_bits": 8, "type": "float"}
    assert kv_item_of({"quantization_config": {"kv_cache_scheme": scheme}}) == 1
    assert kv_item_of({"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}}) == 1
    assert kv_item_of({"quantization_config": {"quant_method": "fp8"}}) == kv_item_of({}) == 0


@pytest.mark.parametrize(
    ("ignored", "whole"),
    [
        (["model.layers.1.self_attn.q_proj"], ["layers.1.self_attn.qkv_proj"]),
        (["re:.*self_attn.*"], ["layers.0.self_attn.o_proj", "layers.1.self_attn.qkv_proj"]),
        (["re:.*mlp.gate$"], []),
        (["re:.*", "lm_head", "re:vision_tower.*"], []),
    ],
)
def test_modules_that_stay_whole(ignored: list[str], whole: list[str]) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    packing = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}, "ignore": ignored}
    packed = packed_of({"quantization_config": packing}, "config.json", "")
    places = ["layers.0.self_attn.o_proj", "layers.1.self_attn.qkv_proj", "layers.1.mlp.gate_up_proj"]
    assert [place for place in places if packed.leaves(place)] == whole
    assert list(packed.tensors(128, 256, dtypes.bfloat16)) == [128 * 128, 128 * 16]  # scales of 8 bits
