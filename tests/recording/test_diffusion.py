"""Pipelines of diffusers: what their folders say, the step of the denoiser, and the pipeline in inference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from staticmem.errors import StaticmemError
from staticmem.frontends.architectures import architecture_of, below, model_name, read_pipeline, whole
from staticmem.studies import Request, Study

CLIP = {
    "architectures": ["CLIPTextModel"], "model_type": "clip_text_model", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 100, "max_position_embeddings": 77,
    "projection_dim": 32, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
VAE = {
    "_class_name": "AutoencoderKL", "latent_channels": 4, "block_out_channels": [16, 16], "norm_num_groups": 8,
    "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2, "scaling_factor": 0.18,
}  # fmt: skip
UNET = {
    "_class_name": "UNet2DConditionModel", "sample_size": 32, "in_channels": 4, "out_channels": 4,
    "block_out_channels": [16, 32], "layers_per_block": 1, "cross_attention_dim": 32, "attention_head_dim": 4,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "norm_num_groups": 8,
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}  # fmt: skip
SCHEDULER = {"_class_name": "DDIMScheduler", "num_train_timesteps": 1000, "steps_offset": 1, "clip_sample": False}
PARTS = {
    "scheduler": ["diffusers", "DDIMScheduler"], "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"], "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"], "safety_checker": [None, None], "feature_extractor": [None, None],
}  # fmt: skip


def _pipeline(folder: Path, **index: Any) -> Path:
    """The folder of a small pipeline of Stable Diffusion."""
    files: Mapping[str, Any] = {
        "model_index.json": {
            "_class_name": "StableDiffusionPipeline", "requires_safety_checker": False, **PARTS, **index,
        },
        "text_encoder/config.json": CLIP, "vae/config.json": VAE, "unet/config.json": UNET,
        "scheduler/scheduler_config.json": SCHEDULER,
        # a tokenizer without a limit has 1e30 for one
        "tokenizer/tokenizer_config.json": {"model_max_length": 1000000000000000019884624838656},
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def test_a_folder_says_which_parts_a_pipeline_has(tmp_path: Path) -> None:
    folder = _pipeline(tmp_path / "small")
    content = read_pipeline(str(folder / "model_index.json"))
    assert content["class"] == "StableDiffusionPipeline"
    assert set(content["parts"]) == {"scheduler", "text_encoder", "tokenizer", "unet", "vae"}
    assert content["parts"]["unet"]["config"] == UNET
    assert content["parts"]["tokenizer"] == {
        "library": "transformers", "class": "CLIPTokenizer", "config": None, "length": None,
    }  # fmt: skip
    assert content["settings"]["requires_safety_checker"] is False


def test_a_pipeline_is_named_by_its_folder_with_or_without_the_package(tmp_path: Path) -> None:
    folder = str(_pipeline(tmp_path / "small"))
    for given in (folder, f"diffusers:{folder}", f"diffusers:{folder},size=64,part=vae", f"{folder}/model_index.json"):
        architecture = architecture_of(given)
        assert architecture is not None
        assert architecture.package == "diffusers"
        assert model_name(architecture.path) == "small"
    assert below("/a", "diffusers:b") == "diffusers:/a/b"
    assert whole("diffusers:b").endswith("/b")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("diffusers:nowhere", ["nowhere is no pipeline of diffusers", "There is no nowhere/model_index.json"]),
        ("diffusers:OWNER/NAME", ["hf download OWNER/NAME --include '*.json' --local-dir FOLDER"]),
        ("diffusers:FOLDER,latents=some", ["latents=some", "step, cached"]),
        ("diffusers:FOLDER,seq=3", ["option 'seq'"]),
        ("transformers:FOLDER,tiling=yes", ["option 'tiling'"]),
    ],
)
def test_what_is_no_pipeline_is_refused(given: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(StaticmemError) as caught:
        architecture_of(given.replace("FOLDER", str(_pipeline(tmp_path))) if "hf" not in words[0] else given)
    text = f"{caught.value.what} {caught.value.why} {caught.value.hint}"
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "'_class_name'"),
        ("[]", "no object"),
        ('{"_class_name": "A", "unet": ["a"]}', "'unet' is not [library, class]"),
        ('{"_class_name": "A", "num_layers": 1e9}', "'num_layers'"),
    ],
)
def test_an_index_that_is_none_is_refused(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model_index.json"
    path.write_text(content)
    with pytest.raises(StaticmemError) as caught:
        read_pipeline(str(path))
    assert words in caught.value.why


def _study(given: str, **options: Any) -> Study:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    return Study.open(given, Request(**options))


@pytest.mark.parametrize(
    ("index", "options", "words"),
    [
        ({"_class_name": "NoSuchPipeline"}, "", "NoSuchPipeline"),
        ({"unet": ["diffusers", "NoSuchModel"]}, "", "NoSuchModel"),
        ({"unet": ["my_code", "Net"]}, "", "Net"),
        ({"_class_name": "UNet2DConditionModel"}, "", "is no pipeline"),
        ({}, ",part=scheduler", "part=scheduler is none of its parts"),
    ],
)
def test_a_pipeline_that_is_not_built_says_why(index: dict[str, Any], options: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(StaticmemError) as caught:
        _study(f"diffusers:{_pipeline(tmp_path, **index)}{options}", mode="infer")
    assert words in f"{caught.value.what} {caught.value.why}"


@pytest.mark.parametrize(
    ("options", "mode", "words"),
    [
        (",latents=cached", "infer", "latents= is of training"),
        (",guidance=no", "train", "guidance= is of inference"),
        (",latents=cached,tiling=yes", "train", "tiling= is of the VAE"),
        (",part=vae", "train", "part= is of inference"),
    ],
)
def test_options_that_would_change_nothing_are_refused(options: str, mode: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(StaticmemError) as caught:
        _study(f"diffusers:{_pipeline(tmp_path)}{options}", mode=mode)
    assert words in caught.value.why
