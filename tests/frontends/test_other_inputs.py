"""What people give in place of a model file: the error says what it is, and what to do."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import pytest

from staticmem.errors import ModelFileError
from staticmem.frontends import open_model

NOISE = bytes(range(200, 256)) * 4


def safetensors() -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("weights", safetensors(), "safetensors"),
        ("lite", b"\x1c\0\0\0TFL3" + bytes(40), "TensorFlow Lite"),
        ("model.safetensors", NOISE, "safetensors"),
        ("model.engine", NOISE, "TensorRT"),
        ("model.tflite", NOISE, "TensorFlow Lite"),
        ("model.onnx.data", NOISE, "weights of an ONNX model"),
        ("model.keras", NOISE, "Keras"),
        ("model.gguf", NOISE, "GGUF"),
        ("model.bin", NOISE, "PyTorch"),
        ("model.py", b"import torch\n", "Python code"),
        ("model.txt", b"hello\n", "a text file"),
        ("model.xyz", NOISE, "neither"),
    ],
)
def test_a_file_of_another_format_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        open_model(str(path))
    assert said in caught.value.why
    assert caught.value.code == "SM107"
    assert caught.value.hint


def test_a_zip_of_keras_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", "{}")
    with pytest.raises(ModelFileError, match="Keras"):
        open_model(str(path))


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("Qwen/Qwen3-8B", "hf:Qwen/Qwen3-8B"),
        ("model.py:build", "staticmem export model.py:build"),
        ("resnet50", "torchvision:resnet50"),
        ("https://example.org/m.onnx", "Download the file"),
        ("some/folder/model.onnx", "Check the path."),
    ],
)
def test_a_name_of_no_file_has_advice(given: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError) as caught:
        open_model(given)
    assert hint in caught.value.hint
    assert caught.value.code == "SM101"


def test_a_file_of_a_similar_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("resnet50.onnx").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"Did you mean 'resnet50\.onnx'\?"):
        open_model("resnet50.onx")


def test_a_pipeline_of_diffusers_has_advice(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ModelFileError, match="is a pipeline of diffusers") as caught:
        open_model(str(tmp_path))
    assert "staticmem export" in caught.value.hint


def test_options_stand_after_the_name_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    with pytest.raises(ModelFileError) as caught:
        open_model("config.json,seq=1024")
    assert caught.value.hint.endswith("transformers:config.json,seq=1024")


def test_a_name_of_the_hub_while_nothing_may_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelFileError) as caught:
        open_model("Qwen/Qwen3-8B")
    assert "HF_HUB_OFFLINE" in caught.value.hint
