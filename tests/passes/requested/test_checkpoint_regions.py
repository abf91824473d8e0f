"""Checkpoints that source lines of an export show, against the same model with the lever `--checkpoint`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from prepared import run_step  # noqa: E402
from small_graphs import Builder  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint, checkpoint_sequential  # noqa: E402

from staticmem.engine.step import StepResult  # noqa: E402
from staticmem.frontends.export_program import read_archive  # noqa: E402
from staticmem.ir.graph import Graph, Ref, SourceLine  # noqa: E402
from staticmem.ir.model_file import resolve  # noqa: E402
from staticmem.liveness import Lifetimes  # noqa: E402
from staticmem.passes.pipeline import bind  # noqa: E402
from staticmem.passes.requested.regions import written_regions  # noqa: E402
from staticmem.scenario.step import Scenario  # noqa: E402

pytestmark = pytest.mark.torch


def block() -> Any:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.ReLU())


class _Blocks(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(32, 32), nn.ModuleList([block() for _ in range(3)]), block()


class Plain(_Blocks):
    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


class Loop(_Blocks):
    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for b in self.blocks:
            x = checkpoint(b, x, use_reentrant=False)
        return self.head(x)


class Named(_Blocks):
    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return torch.utils.checkpoint.checkpoint(self.head, x, use_reentrant=False)


class Method(_Blocks):
    def _inner(self, x: Any) -> Any:
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return torch.sin(x)

    def forward(self, x: Any) -> Any:
        x = checkpoint(self._inner, x, use_reentrant=False)
        return self.head(x)


class Segments(nn.Module):  # type: ignore[misc]
    def __init__(self, segments: int | None = None) -> None:
        super().__init__()
        self.blocks, self.segments = nn.Sequential(*[block() for _ in range(5)]), segments

    def forward(self, x: Any) -> Any:
        if self.segments:
            return checkpoint_sequential(self.blocks, self.segments, x, use_reentrant=False)
        return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)


class PlainSegments(Segments):
    def forward(self, x: Any) -> Any:
        return self.blocks(x)


def exported(model: Any, path: Path) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(model.train(), (torch.ones(64, 32),), strict=False), path)
    archive = read_archive(str(path))
    return bind(archive, resolve(archive))


def step(graph: Graph, **levers: Any) -> StepResult:
    return run_step(graph, Scenario(mode="train", optimizer="sgd", loss="mean", **levers))


def curve(result: StepResult) -> list[int]:
    return list(Lifetimes(result.trace).live)


@pytest.mark.parametrize(("written", "plain", "lever"), [
    (Loop, Plain, {"checkpoint": ("blocks.*",)}),
    (Named, Plain, {"checkpoint": ("head",)}),
    (Segments, PlainSegments, {"checkpoint_segments": 2}),
], ids=["loop", "named", "segments"])  # fmt: skip
def test_code_and_lever_are_the_same_step(written: Any, plain: Any, lever: dict[str, Any], tmp_path: Path) -> None:
    in_code = step(exported(written(), tmp_path / "written.pt2"))
    by_lever = step(exported(plain(), tmp_path / "plain.pt2"), **lever)
    assert curve(in_code) == curve(by_lever)
    assert in_code.recomputed == by_lever.recomputed
    assert "SM316" in [note.code for note in in_code.notes]
    assert "SM316" not in [note.code for note in by_lever.notes]


def test_code_and_lever_together_are_one_checkpoint(tmp_path: Path) -> None:
    graph = exported(Loop(), tmp_path / "m.pt2")
    assert curve(step(graph, checkpoint=("blocks.*",))) == curve(step(graph))


def test_a_method_is_one_call(tmp_path: Path) -> None:
    graph = exported(Method(), tmp_path / "m.pt2")
    regions, notes = written_regions(graph)
    last = next(k for k, op in enumerate(graph.ops) if op.target == "aten::sin")
    assert [(r.start, r.end, r.depth) for r in regions] == [(0, last + 1, 1)]
    assert [note.code for note in notes] == ["SM316"]


def test_shape_arithmetic_belongs_to_the_module_before_it() -> None:
    """A pass of torch.export adds sizes and their arithmetic with neither a trace nor modules."""
    b = Builder(x=(4,))
    line = (SourceLine("m.py", 7, "forward", "x = checkpoint(b, x, use_reentrant=False)"),)
    for module in ("blocks.0:Block", "", "blocks.0:Block", "", "blocks.1:Block"):
        if module:
            b.within(module).stack = line
            b.call("sin", Ref("x"))
        else:
            b.modules, b.stack = (), ()
            b.call("sym_size.int", Ref("x"), 0)
    regions, _ = written_regions(b.graph(Ref("v4")))
    assert [(r.start, r.end, r.depth, r.name) for r in regions] == [(0, 4, 2, "blocks.0"), (4, 5, 2, "blocks.1")]


def test_segments_that_the_line_does_not_show_are_a_warning(tmp_path: Path) -> None:
    regions, notes = written_regions(exported(Segments(2), tmp_path / "m.pt2"))
    assert regions == []
    assert [(note.kind, note.code) for note in notes] == [("warning", "SM317")]


def test_nothing_is_recomputed_in_inference(tmp_path: Path) -> None:
    result = run_step(exported(Loop(), tmp_path / "m.pt2"), Scenario())
    assert result.recomputed == ()
    assert "SM316" not in [note.code for note in result.notes]
