"""Code that picks boxes by what a network found, which is drawn, and torchvision's detectors."""

from __future__ import annotations

import json
from typing import Any

import pytest

import staticmem
from staticmem.errors import StaticmemError
from staticmem.frontends.recorded import RecordedModel
from staticmem.recording.example_inputs import Example
from staticmem.recording.record import record

torch = pytest.importorskip("torch")
nn = torch.nn

CELLS = 64 * 64


class Finds(nn.Module):  # type: ignore[misc, name-defined]
    """Keeps the cells in which it finds something, at most `most` of them, and looks at each."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.body, self.head, self.look, self.most = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 1, 1), nn.Linear(8, 100), most

    def forward(self, x: Any) -> Any:
        features = self.body(x)
        found = torch.where(self.head(features).flatten().sigmoid() > 0.5)[0][: self.most]
        cells = features.permute(0, 2, 3, 1).reshape(-1, 8)[found]
        for _ in range(found.numel() // self.most):  # one round where there are as many as it takes
            cells = cells + 1
        return self.look(cells)


def found(most: int) -> tuple[int, dict[str, Any]]:
    module = Finds(most)
    document = record(module, (torch.zeros(1, 3, 64, 64),), axes=[{}], spread=1.0)
    program = next(p for p in document["programs"] if [False, None] in p["modes"])
    return program["output_shapes"][0][0], document


def test_findings_are_drawn_and_followed() -> None:
    """Half of the numbers of a normal distribution around 0 are above 0: with 4,096 of them, within 4 sigma 128."""
    count, document = found(CELLS)
    assert abs(count - CELLS // 2) <= 128
    assert any("in Finds.forward" in place for place in document["drawn_values"])
    assert "other_call" not in str(document["programs"])
    notes = RecordedModel("<m>", document, "recording").notes
    assert [note.code for note in notes] == ["SM392"]
    assert "drawn at random" in notes[0].text


def test_a_limit_of_the_code_decides() -> None:
    assert found(100)[0] == 100


def test_limits_of_a_file_are_read() -> None:
    """With what was recorded, and the least."""
    document = found(100)[1]
    document["limits"] = {"detections": [100, 1]}
    document["sizes"]["example"]["detections"] = 100
    document["sizes"]["conditions"].append("Eq(detections,100)")
    model = RecordedModel("<m>", document, "recording")
    assert model.limits == {"detections": (100, 1)}


class TestTorchvision:
    """Figures of the package itself; sizes as in its models/detection."""

    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("torchvision")

    @staticmethod
    def built(name: str, **sizes: int) -> Any:
        from torchvision import models

        from staticmem.recording.architecture_child import _on_meta
        from staticmem.recording.detectors import as_by_default, detector

        model = _on_meta(lambda: as_by_default(models.get_model_builder(name)))
        return detector(model, Example({"sizes": sizes, "options": {}}), torch.float32)

    def test_limits_are_those_of_the_model(self) -> None:
        """100 detections of an image (Mask R-CNN, 2017)."""
        built = self.built("maskrcnn_resnet50_fpn", batch=1)
        assert built.limits == {"detections": (100, 1)}
        assert built.module.roi_heads.detections_per_img == 100
        assert self.built("retinanet_resnet50_fpn").limits == {"detections": (300, 1)}
        assert self.built("ssd300_vgg16").kwargs["images"].shape == (2, 3, 300, 300)

    def test_norms_are_frozen_as_by_default(self) -> None:
        """A backbone that was trained before has frozen norms, and trains three of its five parts."""
        module = self.built("fasterrcnn_resnet50_fpn").module
        assert {type(m).__name__ for m in module.modules() if "BatchNorm" in type(m).__name__} == {"FrozenBatchNorm2d"}
        assert not module.backbone.body.conv1.weight.requires_grad
        assert module.backbone.body.layer2[0].conv1.weight.requires_grad

    def test_targets_have_what_heads_read(self) -> None:
        parts = self.built("fasterrcnn_resnet50_fpn", batch=1, boxes=5).kwargs["targets"][0]
        assert {name: tuple(part.shape) for name, part in parts.items()} == {"boxes": (5, 4), "labels": (5,)}

    def test_detections_have_a_band(self, capsys: pytest.CaptureFixture[str]) -> None:
        from staticmem.cli.main import main

        name = "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn"
        command = ["analyze", name, "--mode", "infer", "--batch", "1", "--format", "json"]
        assert main(command) == 0
        report = json.loads(capsys.readouterr().out)
        assert any(n["code"] == "SM326" and "detections" in n["text"] for n in report["assumptions"])
        assert main([*command, "--dim", "detections=5"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert not any(n["code"] == "SM326" for n in report["assumptions"])
        assert report["model"]["outputs"][0]["shape"] == [5, 4]

    def test_videos_are_refused(self) -> None:
        with pytest.raises(StaticmemError, match="video"):
            staticmem.analyze("torchvision:r3d_18")
