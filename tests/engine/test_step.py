"""A whole step over a small graph: phases, what exists when, and what the second step has from the first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prepared import run_step
from small_graphs import Builder

from staticmem.eager.reasons import Reason
from staticmem.engine.step import StepResult
from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Op, Parameter, Ref, Value
from staticmem.liveness import Lifetimes
from staticmem.scenario.step import Scenario

F32 = dtypes.float32


def value(name: str, *shape: int) -> Value:
    return Value(name, F32, shape)


def graph() -> Graph:
    """Two linear layers with a relu; `spare` is a parameter that nothing reads."""
    first, second = (Frame("", "Net"), Frame("first", "Linear")), (Frame("", "Net"), Frame("second", "Linear"))
    parameters = [("w1", (10, 6)), ("b1", (10,)), ("w2", (7, 10)), ("spare", (9,))]
    ops = (
        Op("l1", "aten::linear", (Ref("x"), Ref("w1"), Ref("b1")), {}, ("h",), first),
        Op("r", "aten::relu", (Ref("h"),), {}, ("a",), (Frame("", "Net"),)),
        Op("l2", "aten::linear", (Ref("a"), Ref("w2")), {}, ("y",), second),
    )
    return Graph(
        name="net", format="pt2", producer="test", inputs=(value("x", 8, 6),),
        parameters=tuple(Parameter(value(n, *s), f"net.{n}") for n, s in parameters), buffers=(), ops=ops,
        outputs=("y",), values={"y": value("y", 8, 7)},
    )  # fmt: skip


def run(**kwargs: object) -> StepResult:
    return run_step(graph(), Scenario(**{"mode": "train", "loss": "cross-entropy", **kwargs}))  # type: ignore[arg-type]


def names(result: StepResult, category: str) -> set[str]:
    return {b.name for b in result.trace.buffers if b.category == category}


def start_of(result: StepResult, phase: str) -> int:
    return dict(result.trace.phases)[phase]


def test_phases_come_in_order() -> None:
    assert [name for name, _ in run(optimizer="adam").trace.phases] == ["setup", "forward", "backward", "optimizer"]
    assert [name for name, _ in run(mode="infer").trace.phases] == ["setup", "forward"]


def test_only_parameters_with_a_gradient_have_state_and_grad() -> None:
    result = run(optimizer="adam")
    assert names(result, "gradient") == {f"net.{n}.grad" for n in ("w1", "b1", "w2")}
    assert names(result, "optimizer_state") == {
        f"net.{n}.{s}" for n in ("w1", "b1", "w2") for s in ("exp_avg", "exp_avg_sq")
    }
    assert names(result, "parameter") == {f"net.{n}" for n in ("w1", "b1", "w2", "spare")}
    assert result.trained == 3


@pytest.mark.parametrize("words", [{"optimizer": "adam"}, {"optimizer": "adam", "set_to_none": False}])
def test_a_parameter_that_the_loss_does_not_need_has_no_state_either(words: dict[str, object]) -> None:
    """An op reads it, so that only the backward tells; torch.optim makes state for what has a `.grad`."""
    plain = graph()
    beside = Op("m", "aten::mul.Tensor", (Ref("h"), Ref("scale")), {}, ("unread",), plain.ops[0].modules)
    scale = Parameter(value("scale", 10), "net.scale")
    made = replace(plain, ops=(*plain.ops, beside), parameters=(*plain.parameters, scale))
    result = run_step(made, Scenario(mode="train", loss="cross-entropy", **words))  # type: ignore[arg-type]
    assert "net.scale" in names(result, "parameter")
    assert names(result, "optimizer_state") == names(run(**words), "optimizer_state")
    assert names(result, "gradient") == names(run(**words), "gradient")


def test_state_exists_from_the_start_and_gradients_appear_in_backward() -> None:
    result = run(optimizer="adam")
    backward, forward = start_of(result, "backward"), start_of(result, "forward")
    for b in result.trace.buffers:
        if b.category == "optimizer_state":
            assert b.born < forward
            assert b.died is None
        if b.category == "gradient":
            assert b.born >= backward
            assert b.died is None


def test_the_loss_of_the_step_before_lives_until_it_is_assigned_again() -> None:
    result = run(optimizer="sgd")
    old = next(b for b in result.trace.buffers if b.name == "loss of the previous step")
    assert old.died is not None
    assert start_of(result, "forward") < old.died <= start_of(result, "backward")


def test_activations_are_gone_after_backward() -> None:
    result = run(optimizer="sgd", outputs="dropped")
    end = start_of(result, "optimizer")
    left = [b for b in result.trace.buffers if b.category in ("activation", "temporary") and (b.died or 10**9) > end]
    assert [b.nbytes for b in left if b.nbytes > 4] == []


def test_inference_saves_nothing() -> None:
    result = run(mode="infer")
    assert not [h for h in result.trace.holds if h.kind is Reason.SAVED]
    assert result.output_shapes == ((8, 7),)


def test_every_hold_and_buffer_is_well_formed() -> None:
    trace = run(optimizer="adam").trace
    for hold in trace.holds:
        buffer = trace.buffers[hold.buffer]
        assert hold.start >= buffer.born
        assert hold.end is None or buffer.died is None or hold.end <= buffer.died
    assert all(b.died is None or b.died > b.born for b in trace.buffers)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "rmsprop", "adagrad"])
def test_autocast_halves_activations_but_not_parameters(optimizer: str) -> None:
    result = run(optimizer=optimizer, amp=dtypes.bfloat16)
    by_name = {b.name: b for b in result.trace.buffers}
    assert by_name["h"].dtype is dtypes.bfloat16
    assert by_name["net.w1"].dtype is F32
    assert by_name["net.w1.grad"].dtype is F32


def test_a_whole_model_in_half_precision() -> None:
    result = run(optimizer="adam", dtype=dtypes.bfloat16)
    by_name = {b.name: b for b in result.trace.buffers}
    assert {by_name[n].dtype for n in ("h", "net.w1", "net.w1.grad", "x")} == {dtypes.bfloat16}
    assert by_name["net.w1.exp_avg"].dtype is dtypes.bfloat16


def test_the_caller_may_drop_what_the_loss_does_not_read() -> None:
    b = Builder(x=(64, 64))
    main = b.call("mm", Ref("x"), b.parameter("w", 64, 64), name="main")
    auxiliary = b.call("mm", Ref("x"), b.parameter("v", 64, 64), name="auxiliary")
    graph = b.graph(main, auxiliary)
    scenario = Scenario(mode="train", loss="cross-entropy", outputs="dropped")
    expected, early = (Lifetimes(run_step(graph, scenario, policy).trace) for policy in ("expected", "last-use"))
    assert early.phases["forward"].nbytes < expected.phases["forward"].nbytes
