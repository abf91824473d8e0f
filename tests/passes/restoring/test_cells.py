"""Steps of recurrent layers, taken apart as the dynamo exporter does it, become the call that PyTorch ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prepared import restored as after
from small_graphs import Builder

from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Op, Ref, Value
from staticmem.passes.pipeline import NODES

RNN = "torch.nn.modules.rnn."
PARAMETERS = {name: Ref(name) for name in ("w_ih", "w_hh", "b_ih", "b_hh")}


def linears(b: Builder, bias: bool) -> tuple[Ref, Ref]:
    """The products of the state and of the input, in ATen's order."""
    p = PARAMETERS
    hidden = b.call("linear", Ref("hx"), p["w_hh"], *([p["b_hh"]] if bias else []))
    return hidden, b.call("linear", Ref("x"), p["w_ih"], *([p["b_ih"]] if bias else []))


def lstm(bias: bool = True, cls: str = "LSTMCell", split: str = "unsafe_split.Tensor") -> Builder:
    b = Builder(x=(2, 4), hx=(2, 8), cx=(2, 8)).within(f"cell:{RNN}{cls}")
    gates = b.call("add.Tensor", *linears(b, bias))
    b.call(split, gates, 8, 1, outputs=("i", "f", "g", "o"))
    i, f, o = (b.call("sigmoid", Ref(name)) for name in "ifo")
    g = b.call("tanh", Ref("g"))
    cy = b.call("add.Tensor", b.call("mul.Tensor", f, Ref("cx")), b.call("mul.Tensor", i, g), name="cy")
    b.call("mul.Tensor", o, b.call("tanh", cy), name="hy")
    return b


def gru(bias: bool = True) -> Builder:
    b = Builder(x=(2, 4), hx=(2, 8)).within(f"cell:{RNN}GRUCell")
    hidden, given = linears(b, bias)
    b.call("unsafe_split.Tensor", given, 8, 1, outputs=("i0", "i1", "i2"))
    b.call("unsafe_split.Tensor", hidden, 8, 1, outputs=("h0", "h1", "h2"))
    reset, update = (b.call("sigmoid", b.call("add.Tensor", Ref(f"h{k}"), Ref(f"i{k}"))) for k in range(2))
    new = b.call("tanh", b.call("add.Tensor", Ref("i2"), b.call("mul.Tensor", Ref("h2"), reset)))
    kept = b.call("mul.Tensor", b.call("sub.Tensor", Ref("hx"), new), update)
    b.call("add.Tensor", kept, new, name="hy")
    return b


def simple(activation: str, cls: str = "RNNCell") -> Builder:
    b = Builder(x=(2, 4), hx=(2, 8)).within(f"cell:{RNN}{cls}")
    b.call(activation, b.call("add.Tensor", *linears(b, True)), name="hy")
    return b


def restored(b: Builder, *outputs: str) -> list[Op]:
    return list(after(b.ops, outputs).ops)


def arguments(state: Any, bias: bool = True) -> tuple[Any, ...]:
    p = PARAMETERS
    return (Ref("x"), state, p["w_ih"], p["w_hh"], *((p["b_ih"], p["b_hh"]) if bias else (None, None)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("split", ["unsafe_split.Tensor", "split.Tensor"])  # an optimiser writes the second
def test_lstm_cell(bias: bool, split: str) -> None:
    (op,) = restored(lstm(bias, split=split), "hy", "cy")
    assert (op.target, op.outputs) == ("aten::lstm_cell", ("hy", "cy"))
    assert op.args == arguments((Ref("hx"), Ref("cx")), bias)


@pytest.mark.parametrize("bias", [True, False])
def test_gru_cell(bias: bool) -> None:
    (op,) = restored(gru(bias), "hy")
    assert (op.target, op.outputs, op.args) == ("aten::gru_cell", ("hy",), arguments(Ref("hx"), bias))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_simple_cell(activation: str) -> None:
    (op,) = restored(simple(activation), "hy")
    assert (op.target, op.args) == (f"aten::rnn_{activation}_cell", arguments(Ref("hx")))


@pytest.mark.parametrize("b", [lstm(cls="OwnCell"), simple("tanh", "OwnCell"), simple("tanh", "GRUCell")])
def test_a_cell_by_hand_is_left_as_it_is(b: Builder) -> None:
    assert restored(b, "hy", "cy") == b.ops


def test_a_cell_whose_inner_value_is_read_is_left_as_it_is() -> None:
    b = lstm()
    b.call("relu", Ref("i"), name="seen")
    assert restored(b, "hy", "seen") == b.ops


def test_the_order_of_gates_matters() -> None:
    b = lstm()
    split = next(op for op in b.ops if len(op.outputs) == 4)
    b.ops[b.ops.index(split)] = Op("s", split.target, split.args, {}, ("f", "i", "g", "o"), split.modules)
    assert restored(b, "hy", "cy") == b.ops


def renamed(b: Builder, cls: str, prefix: str) -> Builder:
    """The cell in a file without classes, under the names of its parameters."""
    full = {"w_ih": "weight_ih", "w_hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh"}
    for index, op in enumerate(b.ops):
        args = tuple(Ref(prefix + full[a.name]) if isinstance(a, Ref) and a.name in full else a for a in op.args)
        frames = (*op.modules[:-1], Frame("cell", cls))
        b.ops[index] = replace(op, args=args, modules=frames)
    return b


@pytest.mark.parametrize(("prefix", "known"), [("cell.", True), ("cell.own_", False), ("other.", False)])
def test_without_classes_the_names_of_parameters_tell(prefix: str, known: bool) -> None:
    """A file of the TorchScript exporter."""
    for b, target in ((lstm(), "lstm"), (gru(), "gru"), (simple("tanh"), "rnn_tanh")):
        found = restored(renamed(b, "", prefix), "hy", "cy")
        if known:
            assert [op.target for op in found] == [f"aten::{target}_cell"]
        else:
            assert found == b.ops


CONSTANTS = {name: Value(name, dtypes.float32, (2, 8)) for name in ("hx", "cx", "again")}


def read_again(b: Builder) -> Builder:
    """The exporter writes a Constant for each read of a tensor of the trace."""
    for index, op in enumerate(b.ops):
        if op.target == "aten::sub.Tensor":
            b.ops[index] = replace(op, args=(Ref("again"), *op.args[1:]))
    return b


def traced(b: Builder, *outputs: str, constants: dict[str, Value] = CONSTANTS) -> list[Op]:
    return list(after(b.ops, outputs, passes=NODES, constants=constants).ops)


@pytest.mark.parametrize(
    ("b", "made"),
    [
        (simple("tanh"), [("zeros", "hx")]),
        (lstm(), [("zeros", "hx"), ("zeros", "cx")]),
        (gru(), [("zeros", "hx")]),  # an optimiser may have merged the constants
        (read_again(gru()), [("zeros", "hx"), ("alias", "again")]),
    ],
)
def test_a_first_state_that_the_trace_made_is_made_in_each_step(b: Builder, made: list[tuple[str, str]]) -> None:
    *before, cell = traced(b, "hy", "cy")
    assert cell.target.endswith("_cell")
    assert [(op.target.removeprefix("aten::"), *op.outputs) for op in before] == made
    assert all(op.args == ((2, 8),) for op in before if op.target == "aten::zeros")
    assert all(op.modules == cell.modules for op in before)


def test_a_state_that_is_no_constant_is_not_made() -> None:
    (cell,) = traced(gru(), "hy", constants={})
    assert cell.target == "aten::gru_cell"


def test_a_constant_that_others_read_is_the_models() -> None:
    b = simple("tanh")
    b.call("relu", Ref("hx"), name="seen")
    assert [op.target for op in traced(b, "hy", "seen")] == ["aten::rnn_tanh_cell", "aten::relu"]


@pytest.mark.parametrize("other", [None, (2, 1)])
def test_two_states_are_no_gru_cell(other: tuple[int, ...] | None) -> None:
    """The state that is kept is another tensor than the one that the gates read."""
    constants = {name: value for name, value in CONSTANTS.items() if name != "again"}
    if other is not None:
        constants["again"] = Value("again", dtypes.float32, other)
    b = read_again(gru())
    assert traced(b, "hy", constants=constants) == b.ops


def test_the_report_is_told() -> None:
    notes = after(gru().ops, ("hy",)).notes
    assert [(n.kind, n.code, n.count) for n in notes] == [("regrouped", "SM252", 1)]
