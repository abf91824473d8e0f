"""The band of a training peak where an ONNX file leaves open what ran in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from onnx_models import model, node, value, weight

import staticmem
from staticmem import Report

ACTIVATION = 4 * 8 * 16 * 16 * 4  # bytes of what each convolution makes


def analyzed(folder: Path, activation: str, **words: Any) -> Report:
    """Three convolutions with two activations between them, in the manner of the TorchScript exporter."""
    nodes, last = [], "x"
    for index in (1, 2, 3):
        inputs = [last, f"c{index}.weight"]
        nodes.append(node("Conv", inputs, [f"h{index}"], name=f"/c{index}/Conv", kernel_shape=[3, 3], pads=[1] * 4))
        last = f"h{index}"
        if index < 3:
            nodes.append(node(activation, [last], [f"a{index}"], name=f"/act{index}/{activation}"))
            last = f"a{index}"
    weights = [weight("c1.weight", 8, 1, 3, 3), weight("c2.weight", 8, 8, 3, 3), weight("c3.weight", 8, 8, 3, 3)]
    path = folder / "m.onnx"
    path.write_bytes(model(nodes, [value("x", [4, 1, 16, 16])], [last], weights).SerializeToString())
    return staticmem.analyze(path, optimizer="sgd", loss="mean", **words)


def codes(report: Report) -> set[str]:
    return {note.code for note in report.assumptions}


@pytest.mark.parametrize("activation", ["LeakyRelu", "Elu"])
def test_ops_that_save_less_in_place_have_a_band(tmp_path: Path, activation: str) -> None:
    """Out of place both activations save their operands besides what the next convolutions save: two tensors more."""
    report = analyzed(tmp_path, activation)
    band = report.peak.bands["live"]
    assert band.high - band.low == 2 * ACTIVATION
    assert report.peak.live_bytes == band.low  # a network of convolutions: taken to run in place
    assert {"SM254", "SM307"} <= codes(report)


@pytest.mark.parametrize(("policy", "end"), [("all", "low"), ("none", "high")])
def test_the_ends_are_what_the_flag_gives(tmp_path: Path, policy: str, end: str) -> None:
    band = analyzed(tmp_path, "LeakyRelu").peak.bands["live"]
    report = analyzed(tmp_path, "LeakyRelu", inplace_activations=policy)
    assert report.peak.live_bytes == getattr(band, end)
    assert report.peak.bands["live"].low == report.peak.bands["live"].high
    assert "SM307" not in codes(report)


def test_ops_that_save_as_much_either_way_move_the_forward_alone(tmp_path: Path) -> None:
    """`relu` saves its result, in place or not; the peak is in backward, unless out of place variables hold it all."""
    report = analyzed(tmp_path, "Relu")
    band = report.peak.bands["live"]
    assert (report.peak.phase, band.low) == ("backward", report.peak.live_bytes)
    assert band.high - band.low < ACTIVATION
    assert {"SM254", "SM306", "SM307"} <= codes(report)
    assert report.assumptions[0].code == "SM308"


def test_a_peak_in_the_forward_pass_has_a_band(tmp_path: Path) -> None:
    """Frozen layers save nothing. The second convolution holds its input and a result of twice the size, the `relu`
    after it two of those if it runs out of place: one input more, and variables may hold all of it."""
    nodes, last = [], "x"
    for index, activation in ((1, "Relu"), (2, "Relu"), (3, "")):
        inputs = [last, f"c{index}.weight"]
        nodes.append(node("Conv", inputs, [f"h{index}"], name=f"/c{index}/Conv", kernel_shape=[3, 3], pads=[1] * 4))
        last = f"h{index}"
        if activation:
            nodes.append(node(activation, [last], [f"a{index}"], name=f"/act{index}/{activation}"))
            last = f"a{index}"
    weights = [weight("c1.weight", 8, 1, 3, 3), weight("c2.weight", 16, 8, 3, 3), weight("c3.weight", 1, 16, 3, 3)]
    path = tmp_path / "m.onnx"
    path.write_bytes(model(nodes, [value("x", [4, 1, 16, 16])], [last], weights).SerializeToString())
    report = staticmem.analyze(path, optimizer="sgd", loss="mean", freeze="^c[12]")
    band = report.peak.bands["live"]
    assert report.peak.phase == "forward"
    assert band.low == report.peak.live_bytes
    assert band.high - band.low > ACTIVATION
