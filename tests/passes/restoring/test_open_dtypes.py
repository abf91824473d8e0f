"""Dtypes that code takes from tensors, under autocast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_graphs import Builder

import staticmem
from staticmem.ir.dtypes import bfloat16, float32, int64
from staticmem.ir.graph import Frame, Graph, Ref, SourceLine
from staticmem.passes.restoring.upcasts import dtypes_of_lines, ends_of_cast, ends_under_autocast
from staticmem.scenario.step import Scenario

AMP, CAST = Scenario(mode="train", amp=bfloat16), Scenario(mode="train", dtype=bfloat16)


def graph(op: str, *args: object, line: str = "", cls: str = "net.Net") -> Graph:
    b = Builder(x=(4, 4))
    made: Graph = b.graph(b.call(op, *args, name="out"))
    stack = (SourceLine("net.py", 3, "forward", line),) if line else ()
    return replace(made, ops=tuple(replace(op, stack=stack, modules=(Frame("", cls),)) for op in made.ops))


@pytest.mark.parametrize("line", ["", "y = F.one_hot(i).to(z.dtype)", "y = y.type_as(z)", "dtype=z.dtype,"])
def test_a_cast_that_may_be_to_the_dtype_of_a_tensor(line: str) -> None:
    half = ends_under_autocast(graph("to.dtype", Ref("x"), float32, line=line), AMP)
    assert half is not None
    assert half[0].ops[0].args == (Ref("x"), bfloat16)


@pytest.mark.parametrize("line", ["y = self.aggregate(y, z)", "y = aggregate(y, z)"])
def test_a_cast_in_a_function_that_no_trace_shows(line: str) -> None:
    half = ends_under_autocast(graph("to.dtype", Ref("x"), float32, line=line), AMP)
    assert half is not None
    assert half[0].ops[0].args == (Ref("x"), bfloat16)


@pytest.mark.parametrize("line", ["y = y.float()", "y = y.to(torch.float32)", "y = torch.randn(3)"])
def test_a_dtype_that_the_line_names(line: str) -> None:
    assert ends_under_autocast(graph("to.dtype", Ref("x"), float32, line=line), AMP) is None


def test_new_tensors_without_a_line() -> None:
    half = ends_under_autocast(graph("randn", (4, 4)), AMP)
    assert half is not None
    assert half[0].ops[0].kwargs == {"dtype": bfloat16}
    assert ends_under_autocast(graph("full", (4, 4), 1), AMP) is None  # of integers
    assert ends_under_autocast(graph("to.dtype", Ref("x"), int64), AMP) is None


def test_published_code_is_as_it_was_compared() -> None:
    published = graph("to.dtype", Ref("x"), float32, cls="transformers.models.t5.T5")
    assert ends_under_autocast(published, AMP) is None


# -- a model that is cast as a whole -----------------------------------------------------------------------------


def cast(line: str, cls: str = "net.Net") -> Graph:
    b = Builder(x=(4, 4))
    b.parameter("w", 4, 4)
    made: Graph = b.graph(b.call("to.dtype", Ref("x"), float32, name="out"))
    stack = (SourceLine("net.py", 3, "forward", line),) if line else ()
    made = replace(made, ops=tuple(replace(op, stack=stack, modules=(Frame("", cls),)) for op in made.ops))
    return dtypes_of_lines(made, bfloat16)[0]


@pytest.mark.parametrize("line", ["m = F.one_hot(i, 8).to(x.dtype)", "y = y.type_as(z)", "return self.w * h.to(dtype)"])
def test_a_line_that_takes_a_dtype_from_a_tensor_has_that_of_the_model(line: str) -> None:
    graph = cast(line)
    assert graph.ops[0].args == (Ref("x"), bfloat16)
    assert ends_of_cast(graph, CAST) is None


@pytest.mark.parametrize("line", ["y = y.float()", "y = y.to(torch.float32)"])
def test_a_line_that_names_float32_keeps_it(line: str) -> None:
    graph = cast(line)
    assert graph.ops[0].args == (Ref("x"), float32)
    assert graph.named_float32 == {graph.ops[0].name}
    assert ends_of_cast(graph, CAST) is None


@pytest.mark.parametrize("line", ["", "p = scores.float().softmax(-1).to(q.dtype)", "y = aggregate(y.float(), z)"])
def test_where_no_line_tells_the_band_has_both(line: str) -> None:
    graph = cast(line)
    assert graph.ops[0].args == (Ref("x"), float32)
    ends = ends_of_cast(graph, CAST)
    assert ends is not None
    assert ends[0].ops[0].args == (Ref("x"), bfloat16)
    assert ends[1].named_float32 == {graph.ops[0].name}


def test_published_code_is_read_as_it_was_compared() -> None:
    assert ends_of_cast(cast("y = y.float()", cls="transformers.models.t5.T5"), CAST) is None


def mixed() -> Any:
    """A dtype of a tensor, one that the code names, and a cast back."""
    import torch

    class Mixed(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            chosen = torch.nn.functional.one_hot(i, 64).to(x.dtype)
            y = torch.relu(self.first(x + chosen)).float()
            scores = torch.softmax(y, -1)
            return self.second(scores.to(x.dtype))

    return Mixed()


def normed() -> Any:
    """A norm in float32 that returns the dtype of its input, as Gemma's: the export has the cast in its place."""
    import torch

    class Norm(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(64))

        def _norm(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = self._norm(x.float())
            output = output * (1.0 + self.weight.float())
            return output.type_as(x)

    class Normed(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = torch.nn.Linear(64, 64), Norm(), torch.nn.Linear(64, 1024)

        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.first(x))
            return self.second(y)

    return Normed()


@pytest.mark.torch
@pytest.mark.parametrize("made", [mixed, normed])
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_cast_model_is_that_of_its_recording(mode: str, made: Any, tmp_path: Path) -> None:
    """The recording has what the code of the cast module runs."""
    import torch

    inputs = torch.zeros(32, 64), torch.zeros(32, dtype=torch.int64)
    torch.export.save(torch.export.export(made().train(mode == "train"), inputs, strict=False), tmp_path / "plain.pt2")
    staticmem.export(made(), inputs, tmp_path / "recorded.pt2")
    words: dict[str, Any] = {"batch": 32, "dtype": "bf16", "mode": mode}
    words |= {"optimizer": "sgd"} if mode == "train" else {}
    plain, recorded = (staticmem.analyze(tmp_path / f"{name}.pt2", **words).peak for name in ("plain", "recorded"))
    assert plain.live_bytes == recorded.live_bytes
    assert plain.bands["live"].low <= plain.live_bytes <= plain.bands["live"].high
