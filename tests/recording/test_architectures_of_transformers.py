"""A sample of the architectures of the installed transformers is answered by its configs, each of two layers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.exhaustive

SCRIPTS = Path(__file__).parents[2] / "scripts" / "readings"
# of text, images, sound, pairs of them, detectors, encoders with decoders
SAMPLE = (
    "llama", "bert", "distilbert", "t5", "bart", "vit", "resnet", "segformer", "detr", "clip", "blip-2", "whisper",
    "wav2vec2", "qwen2_audio", "llava", "decision_transformer",
)  # fmt: skip


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module("transformers_architectures")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_sample_of_the_architectures(script: Any, kind: str) -> None:
    name = script.architectures()[kind]
    assert script.tried(kind, name) == {"inference": "", "training": ""}
