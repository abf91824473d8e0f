"""How long Python names hold values: read from an export's stack traces, against a run of the same code."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loading import load_module

torch = pytest.importorskip("torch")

import local_models  # noqa: E402
from prepared import run_step  # noqa: E402
from small_graphs import Builder  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import staticmem  # noqa: E402
from staticmem.frontends.export_program import read_archive  # noqa: E402
from staticmem.ir import dtypes  # noqa: E402
from staticmem.ir.graph import Graph, Parameter, Ref, SourceLine, Value  # noqa: E402
from staticmem.ir.model_file import resolve  # noqa: E402
from staticmem.passes.pipeline import bind  # noqa: E402
from staticmem.passes.variables.releases import kept_by_modules  # noqa: E402
from staticmem.passes.variables.source_lines import held_by_lines  # noqa: E402
from staticmem.scenario.step import Scenario  # noqa: E402

pytestmark = pytest.mark.torch


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Counts calls, and notes for each result after how many calls its tensor is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.gone: dict[tuple[int, int], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for position, tensor in enumerate(result if isinstance(result, (tuple, list)) else [result]):
            weakref.finalize(tensor, self._note, self.calls, position)
        self.calls += 1
        return result

    def _note(self, call: int, position: int) -> None:
        self.gone[call, position] = self.calls


def run_of(model: Any, x: Any) -> tuple[int, dict[tuple[int, int], int]]:
    recorder = Recorder()
    with torch.no_grad(), recorder:
        out = model(x)
        gone = dict(recorder.gone)
    del out
    return recorder.calls, gone


def exported(model: Any, x: Any, path: Path) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model.eval(), (x,), strict=False)
        torch.export.save(program, path)
    archive = read_archive(str(path))
    return bind(archive, resolve(archive))


def ours(graph: Graph) -> dict[tuple[int, int], int]:
    """For each op's results: after how many ops their buffer is gone, of those that go before the end."""
    trace = run_step(graph, Scenario()).trace
    end = trace.marks["forward_end"]
    places = {name: (k, p) for k, op in enumerate(graph.ops) for p, name in enumerate(op.outputs)}
    first: dict[int, int] = {}  # op -> tick of its first allocation
    for buffer in trace.buffers:
        first.setdefault(trace.kernels[buffer.kernel].op, buffer.born)
    starts = [first[k] for k in range(len(graph.ops))]
    return {
        places[b.name]: sum(start < b.died for start in starts)
        for b in trace.buffers
        if b.name in places and b.died is not None and b.died < end
    }


@pytest.mark.parametrize("cls", local_models.MODELS, ids=lambda cls: cls.__name__)
def test_intervals_are_those_of_a_run(cls: Any, tmp_path: Path) -> None:
    model, x = cls(), torch.ones(6, 6)
    calls, expected = run_of(model, x)
    graph = exported(model, x, tmp_path / "m.pt2")
    assert len(graph.ops) == calls
    assert any(op.stack for op in graph.ops)
    assert ours(graph) == expected


def test_the_names_of_a_plain_function_are_not_in_the_file(tmp_path: Path) -> None:
    """torch.export keeps the frames of modules only: `wide` of `helper` is taken to go with its last use."""
    model, x = local_models.Helper(), torch.ones(6, 6)
    _, expected = run_of(model, x)
    assert ours(exported(model, x, tmp_path / "m.pt2")) == {**expected, (1, 0): expected[1, 0] - 1}


_STATEMENTS = """
import torch

class Crowded(torch.nn.Module):
    def forward(self, x):
        {}
"""


def report_of(lines: list[str], folder: Path) -> staticmem.Report:
    """Of a model whose `forward` has these lines."""
    name = f"lines_{len(lines)}"
    source = folder / f"{name}.py"
    source.write_text(_STATEMENTS.format("\n        ".join(lines)), encoding="utf-8")
    module = load_module(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module.Crowded().eval(), (torch.ones(64, 64),), strict=False)
        torch.export.save(program, folder / f"{name}.pt2")
    return staticmem.analyze(folder / f"{name}.pt2")


def test_a_line_with_several_statements_leaves_open_what_names_hold(tmp_path: Path) -> None:
    """The same code on lines of its own has no band, and its peak is in the band of the other."""
    code = ["wide = torch.cat([x, x, x]).exp()", "narrow = wide.sum(0)", "back = torch.cat([narrow, narrow]).sin()"]
    code += ["turned = torch.cat([back, back, back]).cos()", "return turned.sum() + wide.sum()"]
    apart, crowded = report_of(code, tmp_path), report_of(["; ".join(code)], tmp_path)
    assert "live" not in apart.peak.bands or apart.peak.bands["live"].low == apart.peak.bands["live"].high
    band = crowded.peak.bands["live"]
    assert band.low <= apart.peak.live_bytes <= band.high
    assert band.low < band.high
    assert "SM306" in {note.code for note in crowded.assumptions}


# -- by hand -------------------------------------------------------------------------------------------------------


def written(*lines: tuple[str, int], file: str = "m.py") -> Graph:
    """A chain of ops in one function, one after another: (source line, line number)."""
    b = Builder(x=(4,)).within()
    value = Ref("x")
    for text, number in lines:
        b.stack = (SourceLine(file, number, "forward", text),)
        value = b.call("sin", value)
    return b.graph(value)


@pytest.mark.parametrize(("lines", "held"), [
    ([("x = f(x)", 1), ("x = f(x)", 2), ("return f(x)", 3)], {"v0": 1, "v1": 2}),
    ([("a = f(x)", 1), ("b = f(a)", 2), ("return f(b)", 3)], {"v0": 2, "v1": 2}),
    ([("a: Tensor = f(x)", 1), ("return f(a)", 2)], {"v0": 1}),
    ([("if self.pre: x = f(x)", 1), ("x = f(x)", 2), ("return f(x)", 3)], {"v0": 1, "v1": 2}),
    ([("else: x = f(x)", 1), ("return f(x)", 2)], {"v0": 1}),
    ([("a = f(x)", 1), ("a = f(a); b = f(a)", 2), ("a = f(a); b = f(a)", 2), ("return f(b)", 3)], {"v0": 2}),
    ([("a = f(';')", 1), ("return f(a)", 2)], {"v0": 1}),
    ([("a += f(x)", 1), ("a += f(x)", 2), ("return f(a)", 3)], {"v0": 1, "v1": 2}),
    ([("assert f(x) == 1", 1), ("return f(x)", 2)], {}),
    ([("self.x = f(x)", 1), ("_ = f(x)", 2), ("return f(x)", 3)], {}),
    ([("xs = [f(g(x))]", 1), ("xs = [f(g(x))]", 1), ("return f(x)", 2)], {"v1": 2}),
    ([("xs.append(f(x))", 1), ("x = f(x)", 2), ("xs = [f(x)]", 3), ("return f(x)", 4)], {"v0": 2, "v1": 3, "v2": 3}),
])  # fmt: skip
def test_statements(lines: list[tuple[str, int]], held: dict[str, int]) -> None:
    assert held_by_lines(written(*lines)) == held


def test_a_hidden_method_that_calls_several_children_is_one_statement() -> None:
    """`z` lives until `decode` has returned, not until its first child has."""
    b = Builder(x=(4,)).within(root="m.Net")
    line = SourceLine("m.py", 2, "forward", "z = self.decode(z)")
    b.stack = (SourceLine("m.py", 1, "forward", "z = torch.sin(x)"),)
    value = b.call("sin", Ref("x"), name="z")
    for child in ("wide", "up"):
        b.within(f"{child}:m.Child", root="m.Net").stack = (line, SourceLine("m.py", 9, "forward", "return x.exp()"))
        value = b.call("exp", value, name=child)
    b.within(root="m.Net").stack = (SourceLine("m.py", 3, "forward", "return torch.sin(z)"),)
    assert held_by_lines(b.graph(b.call("sin", value, name="out")))["z"] == 2


@pytest.mark.parametrize(("lines", "kept"), [
    ([("self.x = f(x)", 1), ("x = f(x)", 2), ("return f(x)", 3)], {"v0": ("x", 0)}),
    ([("self.x = f(g(x))", 1), ("self.x = f(g(x))", 1), ("return f(x)", 2)], {"v1": ("x", 1)}),
    ([("self.x = f(x)", 1), ("x = f(x)", 2), ("self.x = f(x)", 3), ("return f(x)", 4)], {"v2": ("x", 2)}),
    ([("y, self.x = f(x)", 1), ("return f(x)", 2)], {}),
    ([("self.parts.x = f(x)", 1), ("return f(x)", 2)], {}),
    ([("if self.x == f(x):", 1), ("return f(x)", 2)], {}),
])  # fmt: skip
def test_what_modules_keep(lines: list[tuple[str, int]], kept: dict[str, tuple[str, int]]) -> None:
    """Until their next forward. Code without an op may let go of it, which the lower end of a band takes it to do."""
    graph = written(*lines)
    assert {name: (one.path, one.after) for name, one in kept_by_modules(graph).items()} == kept
    assert kept_by_modules(graph, "last-use") == {}


@pytest.mark.parametrize(("sizes", "kept"), [((4, 4), {}), ((1, 4), {"v0": "x"})])
def test_a_tensor_that_takes_the_place_of_a_buffer_is_kept_where_it_is_larger(
    sizes: tuple[int, ...], kept: dict[str, str]
) -> None:
    """Lines of libraries say so as any other does."""
    graph = written(("self.x = f(x)", 1), ("x = f(x)", 2), ("return f(x)", 3), file="/lib/timm/models/m.py")
    buffer = Parameter(Value("b_x", dtypes.float32, sizes), "x")
    graph = replace(graph, buffers=(buffer,), values={"v0": Value("v0", dtypes.float32, (4, 4))})
    assert {name: one.path for name, one in kept_by_modules(graph).items()} == kept


def test_a_pair_that_a_function_returns_ends_with_the_weights_of_attention() -> None:
    """`return weights @ value, weights` of a function that no trace shows."""
    b = Builder(x=(4, 4), v=(4, 4)).within()
    b.stack = (SourceLine("m.py", 1, "forward", "y, self.weights = attention(x, v)"),)
    scores = b.call("div.Scalar", Ref("x"), 2.0, name="scores")
    weights = b.call("softmax.int", scores, -1, name="weights")
    y = b.call("matmul", weights, Ref("v"), name="y")
    b.stack = (SourceLine("m.py", 2, "forward", "return y.exp()"),)
    graph = b.graph(b.call("exp", y))
    assert {name: one.after for name, one in kept_by_modules(graph).items()} == {"weights": 2}


def test_a_name_that_no_line_assigns_is_another_one_of_what_is_passed() -> None:
    """`low = x` runs no op: `low` holds what `x` meant until it means something else, or the function returns."""
    lines = written(("x = f(z)", 1), ("x = self.up(low)", 2), ("x = f(x)", 3), ("return f(x)", 4))
    assert held_by_lines(lines) == {"v0": 3, "v1": 2, "v2": 3}
    other = written(("x = f(z)", 1), ("x = x / len(low)", 2), ("x = f(x)", 3), ("return f(x)", 4))
    assert held_by_lines(other) == {"v0": 1, "v1": 2, "v2": 3}


def test_a_comprehension_gives_its_name_the_list_when_all_turns_are_done() -> None:
    """`x = [relu(f(x)) for f in fs]`: until then `x` means what every turn reads."""
    b = Builder(x=(4,)).within(":my.Net")
    b.stack = (SourceLine("m.py", 1, "forward", "x = torch.sin(x)"),)
    before = b.call("sin", Ref("x"), name="before")
    for turn in range(3):
        b.within(":my.Net", f"fs.{turn}:my.Child")
        inner = SourceLine("m.py", 9, "forward", "return torch.exp(x)")
        line = SourceLine("m.py", 2, "forward", "x = [torch.relu(f(x)) for f in self.fs]")
        b.stack = (line, inner)
        part = b.call("exp", before)
        b.within(":my.Net").stack = (line,)
        b.call("relu", part, name=f"part{turn}")
    b.within(":my.Net").stack = (SourceLine("m.py", 3, "forward", "return torch.cat(x)"),)
    graph = b.graph(b.call("cat", tuple(Ref(f"part{turn}") for turn in range(3))))
    assert held_by_lines(graph)["before"] == 6
    assert held_by_lines(graph)["part0"] == 7


def test_a_list_lives_as_long_as_the_name_that_is_joined() -> None:
    """`parts.append(x)` runs no op and is in no trace; the line that joins the list names it."""
    b = Builder(x=(4,)).within()
    values = []
    for number in (1, 2):
        b.stack = (SourceLine("m.py", number, "forward", "x = f(x)"),)
        values.append(b.call("sin", Ref("x")))
    b.stack = (SourceLine("m.py", 3, "forward", "x = torch.cat(parts, 1)"),)
    out = b.call("cat", tuple(values), 1)
    b.stack = (SourceLine("m.py", 4, "forward", "return f(x)"),)
    assert held_by_lines(b.graph(b.call("sin", out))) == {"v0": 3, "v1": 3, "v2": 3}


def test_a_list_ends_where_its_name_is_assigned_again() -> None:
    """`dim` is no list of a caller: this frame has none."""
    b = Builder(x=(4,)).within()
    for number, text in enumerate(("x = f(x)", "x = g(x)", "x = torch.cat(parts, dim)", "parts = f(x)", "return f(x)")):
        b.stack = (SourceLine("m.py", number, "forward", text),)
        b.call("cat", (Ref("v0"), Ref("v1"))) if number == 2 else b.call("sin", Ref("x"))
    held = held_by_lines(b.graph(Ref("v4")))
    assert (held["v0"], held["v1"]) == (3, 3)


@pytest.mark.parametrize(
    ("first", "older", "until"),
    [
        ("y = g(x)", True, 4),  # `xs` came with contents: the caller made it
        ("y = g(x)", False, 3),  # all that is in it is the frame's own
        ("xs = [g(x)]", True, 3),  # the frame made it
    ],
)
def test_whose_list_is_joined(first: str, older: bool, until: int) -> None:
    """`h = f(x)`, then `self.conv(h, out)`, whose forward joins `xs` of its own or the caller's `out`."""
    b = Builder(x=(4,)).within()
    b.stack = (SourceLine("m.py", 1, "forward", "h = f(x)"),)
    h = b.call("sin", Ref("x"))
    call = SourceLine("m.py", 2, "forward", "x = self.conv(h, out)")
    b.within("conv:Conv")
    made = []
    for number, text in ((11, first), (12, "z = g(x)")):
        b.stack = (call, SourceLine("m.py", number, "forward", text))
        made.append(b.call("cos", h))
    b.stack = (call, SourceLine("m.py", 13, "forward", "return torch.cat(xs, 1)"))
    b.call("cat", (h, made[0]) if older else tuple(made), 1)
    b.within().stack = (SourceLine("m.py", 3, "forward", "return f(x)"),)
    b.call("sin", Ref("v3"))
    assert held_by_lines(b.graph(Ref("v4")))["v1"] == until


def test_no_traces_no_claims() -> None:
    b = Builder(x=(4,))
    assert held_by_lines(b.graph(b.call("sin", Ref("x")))) == {}
    assert held_by_lines(Builder().graph()) == {}


def test_a_list_that_is_added_up_lives_as_long_as_its_name() -> None:
    """`sum(skips)` adds one value after the other, and the list holds all of them."""
    b = Builder(x=(4,)).within()
    values = []
    for number in (1, 2, 3):
        b.stack = (SourceLine("m.py", number, "forward", "x = f(x)"),)
        values.append(b.call("sin", Ref("x")))
    b.stack = (SourceLine("m.py", 4, "forward", "x = torch.relu(sum(skips))"),)
    out = b.call("relu", b.call("add.Tensor", b.call("add.Tensor", *values[:2]), values[2]))
    b.stack = (SourceLine("m.py", 5, "forward", "return f(x)"),)
    held = held_by_lines(b.graph(b.call("sin", out)))
    assert [held[f"v{k}"] for k in range(3)] == [6, 6, 6]
    assert "v3" not in held
