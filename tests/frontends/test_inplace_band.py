"""The band of a training peak where an ONNX file leaves open what ran in place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from onnx_models import model, node, value, weight

import staticmem
from staticmem import Report
from staticmem.ir.graph import Graph
from staticmem.passes import pipeline

ACTIVATION = 4 * 8 * 16 * 16 * 4  # bytes of what each convolution makes
ALL_TRAINED: dict[str, Any] = {"freeze": "none", "checkpoint": "none"}  # which the file leaves open too


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
    return staticmem.analyze(path, optimizer="sgd", loss="mean", **ALL_TRAINED, **words)


def codes(report: Report) -> set[str]:
    return {note.code for note in report.assumptions}


@pytest.mark.parametrize(("activation", "end"), [("LeakyRelu", "high"), ("Elu", "low")])
def test_ops_that_save_less_in_place_have_a_band(tmp_path: Path, activation: str, end: str) -> None:
    """Out of place both activations save their operands besides what the next convolutions save: two tensors more.

    A network of convolutions is taken to run them in place; `nn.LeakyReLU()` without a slope has no `inplace` either.
    """
    report = analyzed(tmp_path, activation)
    band = report.peak.bands["live"]
    assert band.high - band.low == 2 * ACTIVATION
    assert report.peak.live_bytes == getattr(band, end)
    assert "SM307" in codes(report)


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
    report = staticmem.analyze(path, optimizer="sgd", loss="mean", freeze="^c[12]", checkpoint="none")
    band = report.peak.bands["live"]
    assert report.peak.phase == "forward"
    assert band.low == report.peak.live_bytes
    assert band.high - band.low > ACTIVATION


@pytest.mark.parametrize(("policy", "end"), [("most", "low"), ("least", "high")])
@pytest.mark.parametrize("lost", [0, 1])
def test_an_end_that_does_not_evaluate_is_left_out(
    policy: str, end: str, lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound never refuses a file whose expected step runs. `lost`: an op that the bound's graph lacks."""
    right = analyzed(tmp_path, "LeakyRelu")
    whole = pipeline.for_step

    def broken(graph: Graph, scenario: Any, *others: Any) -> Graph:
        made = whole(graph, scenario, *others)
        if scenario.inplace_activations != policy or pipeline.IN_PLACE in others:
            return made
        return replace(made, ops=(*made.ops[:lost], *made.ops[lost + 1 :]))

    monkeypatch.setattr(pipeline, "for_step", broken)
    report = analyzed(tmp_path, "LeakyRelu")
    left_out = [note.text for note in report.warnings if note.code == "SM381"]
    assert len(left_out) == 1
    assert ("lower" if end == "low" else "upper") in left_out[0]
    assert report.peak.live_bytes == right.peak.live_bytes
    ends = {"low": right.peak.bands["live"].low, "high": right.peak.bands["live"].high, end: right.peak.live_bytes}
    assert (report.peak.bands["live"].low, report.peak.bands["live"].high) == (ends["low"], ends["high"])
    assert "SM307" not in codes(report)
    assert not [note for note in right.warnings if note.code == "SM381"]


@pytest.mark.parametrize("gate", [("Sigmoid",), ("Softplus", "Tanh")])
def test_products_of_the_code_are_the_upper_end(gate: tuple[str, ...], tmp_path: Path) -> None:
    """`x * sigmoid(x)` has the nodes of silu, `x * tanh(softplus(x))` those of mish: what makes the factor is saved."""
    nodes = [node("Conv", ["x", "c1.weight"], ["h"], name="/c1/Conv", kernel_shape=[3, 3], pads=[1] * 4)]
    last = "h"
    for op in gate:
        nodes.append(node(op, [last], [f"{op}.y"], name=f"/{op}"))
        last = f"{op}.y"
    nodes += [
        node("Mul", ["h", last], ["m"], name="/Mul"),
        node("Conv", ["m", "c2.weight"], ["y"], name="/c2/Conv", kernel_shape=[3, 3], pads=[1] * 4),
    ]
    weights = [weight("c1.weight", 8, 1, 3, 3), weight("c2.weight", 8, 8, 3, 3)]
    path = tmp_path / "m.onnx"
    path.write_bytes(model(nodes, [value("x", [4, 1, 16, 16])], ["y"], weights).SerializeToString())
    report = staticmem.analyze(path, optimizer="sgd", loss="mean", **ALL_TRAINED)
    assert report.peak.bands["live"].high >= report.peak.live_bytes + ACTIVATION
    assert "SM264" in {note.code for note in report.assumptions}
