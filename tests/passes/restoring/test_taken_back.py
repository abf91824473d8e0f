"""A pass whose result does not evaluate is left out: it never makes a readable file unreadable."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

import staticmem
from staticmem.errors import StaticmemError
from staticmem.ir.graph import Graph
from staticmem.passes import pipeline
from staticmem.passes.edit import Ops
from staticmem.passes.restoring import patterns
from staticmem.passes.restoring.patterns.matcher import Matcher

ROOT = Path(__file__).resolve().parents[3]
BROKEN = pipeline.Pass("broken", "nothing: it is wrong", "this test", "broken_pass:broken")


def save(path: Path) -> str:
    weights = [helper.make_tensor(n, TensorProto.FLOAT, [8, 8], [0.5] * 64) for n in ("fc.weight", "fc2.weight")]
    nodes = [
        helper.make_node("MatMul", ["x", "fc.weight"], ["h"]),
        helper.make_node("Sigmoid", ["h"], ["s"]),
        helper.make_node("Mul", ["h", "s"], ["a"]),
        helper.make_node("MatMul", ["a", "fc2.weight"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 8]) for n in "xy"]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], weights), ir_version=8)
    path.write_bytes(model.SerializeToString())
    return str(path)


def break_passes(monkeypatch: pytest.MonkeyPatch, edit: Callable[[Graph], Graph]) -> None:
    """Adds a pass to those of every ONNX file without texts of its exporter, and forgets what was made without it."""
    whole = pipeline.Pass.edit

    def edited(self: pipeline.Pass, graph: Graph, given: Sequence[object]) -> Graph:
        return edit(graph) if self is BROKEN else whole(self, graph, given)

    monkeypatch.setattr(pipeline.Pass, "edit", edited)
    monkeypatch.setattr(pipeline, "NODES", (*pipeline.NODES[:3], BROKEN, *pipeline.NODES[3:]))


def without_first(graph: Graph) -> Graph:
    return replace(graph, ops=graph.ops[1:])


@pytest.mark.parametrize("options", [{}, {"optimizer": "adam"}])
def test_a_pass_that_loses_an_op_is_taken_back(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = staticmem.analyze(save(tmp_path / "right.onnx"), **options)
    break_passes(monkeypatch, without_first)
    report = staticmem.analyze(save(tmp_path / "model.onnx"), **options)
    assert report.peak.live_bytes == right.peak.live_bytes
    assert report.peak.bands.get("live") == right.peak.bands.get("live")
    taken_back = [note.text for note in report.warnings if note.code == "SM380"]
    assert [text.partition(":")[0] for text in taken_back] == ["broken"]
    assert not [note for note in right.warnings if note.code == "SM380"]


def test_a_group_of_nodes_that_loses_its_result_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(m: Matcher, node: Any) -> bool:
        return m.take(node, [])

    monkeypatch.setattr(patterns, "PATTERNS", (("lost", ("Mul",), "Mul", lose), *patterns.PATTERNS))
    report = staticmem.analyze(save(tmp_path / "model.onnx"), optimizer="sgd")
    assert [note.text.partition(":")[0] for note in report.warnings if note.code == "SM380"] == ["lost"]
    assert "silu" in " ".join(note.text for note in report.notes)  # the other groups are found


def test_what_a_request_asks_for_is_never_left_out(tmp_path: Path) -> None:
    """A file whose fault is its own is refused as before, and no pass of the request goes."""
    asked = {each.name for each in pipeline.STEP if not each.may_be_left_out}
    assert {"frozen parameters", "adapters", "quantised weights", "loss of the last linear layer"} <= asked
    nodes = [helper.make_node("MatMul", ["x", "lost"], ["y"])]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 8]) for n in "xy"]
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:])).SerializeToString())
    with pytest.raises(StaticmemError):
        staticmem.analyze(str(path))


def test_only_the_passes_to_blame_are_left_out() -> None:
    for blamed in (frozenset(["gelu"]), frozenset(["views", "losses"]), frozenset(["chunk", "statistics", "in place"])):
        asked: list[frozenset[str]] = []

        def works(
            without: frozenset[str], blamed: frozenset[str] = blamed, asked: list[frozenset[str]] = asked
        ) -> bool:
            asked.append(without)
            return blamed <= without

        assert pipeline.passes_to_leave_out(works) == blamed
        assert len(asked) < 50
    assert pipeline.passes_to_leave_out(lambda without: False) is None


def test_random_graphs_with_a_pass_that_loses_any_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a pass does to a valid graph, it is answered as if the pass were not there, or refused as then."""
    archive = zipfile.ZipFile(ROOT / "tests" / "data" / "random_graphs.zip")
    members = [name for name in archive.namelist() if name.startswith("valid")][::5]
    paths = []
    for name in members:
        paths.append(tmp_path / name)
        paths[-1].write_bytes(archive.read(name))
    right = [figure(path) for path in paths]

    def lose(graph: Graph) -> Graph:
        ops = Ops(graph.ops)
        if graph.ops:
            ops.drop(random.Random(len(graph.ops)).choice(graph.ops))
        return replace(graph, ops=tuple(ops.done()))

    break_passes(monkeypatch, lose)
    for path, expected in zip(paths, right, strict=True):
        other = path.with_suffix(".other.onnx")
        other.write_bytes(path.read_bytes())
        assert (figure(other) is None) <= (expected is None), path.name


def figure(path: Path) -> int | None:
    try:
        return staticmem.analyze(str(path)).peak.live_bytes
    except StaticmemError:
        return None
