"""Configs of models that many people use are answered: ten of text, five of text beside images or sound.

The figures are those of the published config.json files; the numbers of parameters are those of their checkpoints
(model.safetensors.index.json, model cards), which nothing here knows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from staticmem.recording import kept
from staticmem.studies import Request, Study

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.exhaustive

CLIP_LARGE = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "image_size": 336,
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
}  # fmt: skip
QWEN_VL = {
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
    "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip


def decoder(kind: str, head: str, sizes: str, **more: Any) -> dict[str, Any]:
    """`sizes`: vocabulary, width, inner width, layers, heads, heads of keys and values."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    numbers = dict(zip((*names, "num_key_value_heads"), map(int, sizes.split()), strict=True))
    return {"model_type": kind, "architectures": [head], "dtype": "bfloat16", **numbers, **more}


# by name the config and the parameters of the checkpoint
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, 124_439_808),
    "bert-base-uncased": ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, 109_514_298),
    "distilbert-base-uncased": (
        {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]}, 66_985_530,
    ),
    "roberta-base": (
        {
            "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": 50265,
            "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1,
        },
        124_697_433,
    ),
    "t5-small": (
        {
            "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 32128,
            "decoder_start_token_id": 0,
        },
        60_506_624,
    ),
    "Llama-3.1-8B": (decoder("llama", "LlamaForCausalLM", "128256 4096 14336 32 32 8"), 8_030_261_248),
    "Qwen2.5-7B": (decoder("qwen2", "Qwen2ForCausalLM", "152064 3584 18944 28 28 4"), 7_615_616_512),
    "Mistral-7B-v0.1": (decoder("mistral", "MistralForCausalLM", "32000 4096 14336 32 32 8"), 7_241_732_096),
    "gemma-2-2b": (
        decoder("gemma2", "Gemma2ForCausalLM", "256000 2304 9216 26 8 4", head_dim=256), 2_614_341_888,
    ),
    "Phi-3-mini-4k": (
        decoder("phi3", "Phi3ForCausalLM", "32064 3072 8192 32 32 32", max_position_embeddings=4096), 3_821_079_552,
    ),
    "clip-vit-base-patch32": ({"model_type": "clip", "architectures": ["CLIPModel"]}, 151_277_313),
    "llava-1.5-7b-hf": (
        {
            "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "dtype": "float16",
            "image_token_index": 32000, "vision_config": CLIP_LARGE,
            "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
        },
        7_063_427_072,
    ),
    "Qwen2.5-VL-3B": (
        decoder(
            "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "151936 2048 11008 36 16 2", vision_config=QWEN_VL,
            tie_word_embeddings=True, image_token_id=151655,
            rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        ),
        3_754_622_976,
    ),
    "whisper-small": (
        {
            "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 768,
            "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "vocab_size": 51865, "max_target_positions": 448,
            "decoder_start_token_id": 50258, "pad_token_id": 50257,
        },
        241_734_912,
    ),
    "Qwen2-Audio-7B": (
        {
            "model_type": "qwen2_audio", "architectures": ["Qwen2AudioForConditionalGeneration"], "dtype": "bfloat16",
            "audio_token_index": 151646,
            "audio_config": {"model_type": "qwen2_audio_encoder", "num_mel_bins": 128},
            "text_config": {"model_type": "qwen2", "vocab_size": 156032, "intermediate_size": 11008},
        },
        8_397_094_912,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_many_people_use(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their own loss in training, and in inference; their weights are those of the checkpoint."""
    monkeypatch.setattr(kept, "cache_folder", lambda: str(tmp_path / "cache"))
    content, parameters = CONFIGS[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content), "utf-8")
    study = Study.open(str(path), Request(batch=2, optimizer="adamw"))
    training = study.ask(Request(batch=2, optimizer="adamw")).report
    inference = study.ask(Request(batch=2, mode="infer")).report
    assert training.parameters.count == parameters
    assert training.scenario.loss == "recorded"
    assert training.peak.live_bytes > inference.peak.live_bytes > 2 * parameters
