"""A step whose rules are repeated from records is that of the rules: every buffer, kernel, hold, and what is said."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from prepared import run_step

from staticmem.engine import call_records
from staticmem.engine.call_records import CallRecords, signature_of
from staticmem.engine.step import StepResult
from staticmem.errors import DimensionError
from staticmem.frontends import open_model
from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Op, Parameter, Ref, Value
from staticmem.ir.model_file import resolve
from staticmem.ops import lookup
from staticmem.passes.pipeline import bind
from staticmem.scenario.step import Scenario

MODELS = Path(__file__).parents[2] / "models"
SCENARIOS = {
    "adam": Scenario(mode="train", optimizer="adam"),
    "infer": Scenario(mode="infer"),
    "amp": Scenario(mode="train", optimizer="adamw", amp=dtypes.bfloat16),
    "bf16": Scenario(mode="train", optimizer="sgd", dtype=dtypes.bfloat16),
    "accumulate": Scenario(mode="train", optimizer="adam", accumulate=2, set_to_none=False),
    "segments": Scenario(mode="train", optimizer="adam", checkpoint_segments=2),
    "freeze": Scenario(mode="train", optimizer="adam", freeze="layer1|features"),
}


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_records, "_records", {})


def everything(result: StepResult) -> tuple[Any, ...]:
    trace = result.trace
    return (
        list(trace.kernels), list(trace.buffers), list(trace.holds), trace.phases, trace.marks, trace.reads,
        trace.ticks, result.notes, result.covered, result.unknown, result.unknown_bytes,
        result.output_shapes, result.output_dtypes, result.trained, result.recomputed,
    )  # fmt: skip


def by_rules(graph: Graph, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> StepResult:
    with monkeypatch.context() as patch:
        patch.setattr(CallRecords, "note", lambda *_: None)
        return run_step(graph, scenario)


@cache
def graph_of(model: str) -> Graph:
    file = open_model(str(MODELS / model))
    return bind(file, resolve(file, batch=2))


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("model", ["resnet18.pt2", "mobilenet_v2.onnx", "vgg16.pt2", "seed.pt2"])
def test_real_exports(model: str, scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, asked = graph_of(model), SCENARIOS[scenario]
    if asked.checkpoint_segments and model != "vgg16.pt2":
        pytest.skip("has no Sequential that a forward calls as a whole")
    expected = everything(by_rules(graph, asked, monkeypatch))
    assert not any(known.calls for known in call_records._records.values())
    for _ in range(3):  # the first run sees, the second records, the third repeats
        assert everything(run_step(graph, asked)) == expected
    known = next(iter(k for k in call_records._records.values() if k.calls))
    assert sum(call is not None for call in known.calls.values()) > 0.9 * len(known.calls)


# -- graphs that no one would write ------------------------------------------------------------------------------

SHAPE = (2, 4, 6)
UNARY = ("aten::relu", "aten::relu_", "aten::gelu", "aten::exp", "aten::dropout", "aten::clone", "aten::contiguous")
BINARY = ("aten::add.Tensor", "aten::add_.Tensor", "aten::mul.Tensor", "aten::mul_.Tensor", "aten::sub.Tensor")
VIEWS = ("aten::transpose.int", "aten::view", "aten::slice.Tensor", "aten::unsqueeze", "aten::chunk", "aten::matmul")


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Values of one shape that ops change, view, join and overwrite in any order; a few parameters."""
    parameters = [Parameter(Value(f"w{k}", dtypes.float32, SHAPE), f"net.w{k}", draw(st.booleans())) for k in range(3)]
    known = ["x", *(p.value.name for p in parameters)]
    made: list[str] = []
    ops: list[Op] = []
    frames = [(Frame("", "Net"),), (Frame("", "Net"), Frame("a", "A")), (Frame("", "Net"), Frame("b", "B"))]

    def op(target: str, args: tuple[Any, ...], *outputs: str) -> str:
        ops.append(Op(f"op{len(ops)}", target, args, {}, outputs, draw(st.sampled_from(frames))))
        return outputs[0]

    for step in range(draw(st.integers(3, 20))):
        kind = draw(st.sampled_from(("unary", "binary", "view")))
        if kind == "view" or not made:
            source = Ref(draw(st.sampled_from(known)))
            target = draw(st.sampled_from(VIEWS))
            if target == "aten::transpose.int":
                turned = op(target, (source, 1, 2), f"t{step}")
                name = op(target, (Ref(turned), 1, 2), f"v{step}")
            elif target == "aten::view":
                flat = op(target, (source, (8, 6)), f"t{step}")
                name = op(target, (Ref(flat), SHAPE), f"v{step}")
            elif target == "aten::slice.Tensor":
                name = op(target, (source, 0, 0, draw(st.sampled_from((2, 99)))), f"v{step}")
            elif target == "aten::unsqueeze":
                name = op("aten::squeeze.dim", (Ref(op(target, (source, 0), f"t{step}")), 0), f"v{step}")
            elif target == "aten::chunk":
                op(target, (source, 2, 1), f"t{step}", f"u{step}")
                name = op("aten::cat", ((Ref(f"t{step}"), Ref(f"u{step}")), 1), f"v{step}")
            else:
                square = op(target, (source, Ref(op("aten::transpose.int", (source, 1, 2), f"t{step}"))), f"u{step}")
                name = op(target, (Ref(square), source), f"v{step}")
        elif kind == "unary":
            target = draw(st.sampled_from(UNARY))
            args = (Ref(draw(st.sampled_from(made))),) + ((0.5, True),) * (target == "aten::dropout")
            name = op(target, args if target != "aten::dropout" else (args[0], 0.5, True), f"v{step}")
        else:
            target = draw(st.sampled_from(BINARY))
            other = draw(st.one_of(st.sampled_from(known).map(Ref), st.sampled_from((1, 1.0, True))))
            name = op(target, (Ref(draw(st.sampled_from(made))), other), f"v{step}")
        made.append(name)
        known.append(name)
    return Graph(
        name="any", format="pt2", producer="test", inputs=(Value("x", dtypes.float32, SHAPE),),
        parameters=tuple(parameters), buffers=(), ops=tuple(ops), outputs=(made[-1],),
        values={made[-1]: Value(made[-1], dtypes.float32, SHAPE)},
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from(("adam", "infer", "amp", "accumulate")))
def test_any_graph(graph: Graph, scenario: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        try:
            expected = everything(by_rules(graph, SCENARIOS[scenario], patch))
        except DimensionError:  # a parameter is written to that requires a gradient: PyTorch refuses that
            reject()
    for _ in range(3):
        assert everything(run_step(graph, SCENARIOS[scenario])) == expected


def test_numbers_that_are_equal_are_told_apart() -> None:
    """1, 1.0 and True are equal as keys, and give results of other dtypes."""
    rule = lookup("aten::add.Tensor")
    assert rule is not None
    numbers = []
    for other in (1, 1.0, True, (1, 1), (1.0, 1), (True, 1), (1, (1,)), (1, (True,))):
        signature = signature_of(Op("a", "aten::add.Tensor", (Ref("x"), other), {}, ("y",)), rule)
        assert signature is not None
        numbers.append(signature.number)
    assert len(set(numbers)) == len(numbers)


def test_the_memory_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_records, "CALLS", 3)
    graph = graph_of("resnet18.pt2")
    expected = everything(by_rules(graph, SCENARIOS["adam"], monkeypatch))
    for _ in range(3):
        assert everything(run_step(graph, SCENARIOS["adam"])) == expected
    assert all(known.recorded <= 3 for known in call_records._records.values())


def test_what_ran_backward_in_one_micro_batch_does_not_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen parameter that is written to through a view keeps a history: PyTorch's second backward raises "Trying to
    backward through the graph a second time"."""
    ops = (
        Op("view", "aten::view", (Ref("frozen"), (-1,)), {}, ("flat",)),
        Op("add_", "aten::add_.Tensor", (Ref("flat"), Ref("trained")), {}, ("written",)),
        Op("relu", "aten::relu", (Ref("frozen"),), {}, ("y",)),
    )
    frozen = Parameter(Value("frozen", dtypes.float32, (2, 3)), "frozen", trainable=False)
    trained = Parameter(Value("trained", dtypes.float32, (6,)), "trained")
    graph = Graph("g", "pt2", "test", (), (frozen, trained), (), ops, ("y",), {"y": Value("y", dtypes.float32, (2, 3))})
    assert run_step(graph, Scenario(mode="train", optimizer="adam")).trained == 1
    with pytest.raises(DimensionError, match="a second time"):
        by_rules(graph, SCENARIOS["accumulate"], monkeypatch)
    for _ in range(3):
        with pytest.raises(DimensionError, match="a second time"):
            run_step(graph, SCENARIOS["accumulate"])
