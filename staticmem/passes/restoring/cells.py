"""Steps of recurrent layers (`nn.LSTMCell`, `nn.GRUCell`, `nn.RNNCell`) that the ONNX exporters took apart.

On CUDA the two products are followed by one fused kernel, whose memory is another than that of its parts. A cell that
is written by hand may have the same formula: the class of the module tells them apart, and where the file has no
classes (TorchScript) the names of its parameters.

A first state that the file has as constants (TorchScript) was made in the step: `torch.zeros(...)`, by the code or by
the cell itself; a learned or registered one is a tensor of the file. The exporter writes a Constant for each read, so
that the state of a GRU, which is read twice, is two of them.

Source: aten/src/ATen/native/RNN.cpp (`LSTMCell`, `GRUCell`, `SimpleCell`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from staticmem.ir.graph import Arg, Note, Op, Ref, Value
from staticmem.ir.onnx_graph import Net
from staticmem.passes.edit import Ops
from staticmem.passes.restoring.templates import Finder, Match, Named, Piece, Template, regrouped

Traced: TypeAlias = "Callable[[str], Value | None]"

_CLASS = "torch.nn.modules.rnn."
_NAMES = {"w_ih": "weight_ih", "w_hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh"}


def _linear(x: str, weight: str, bias: str) -> tuple[Template, ...]:
    """A product with a bias and without."""
    return ("linear", x, weight, bias), ("linear", x, weight)


def _lstm(of_state: Template, of_input: Template) -> Template:
    gates = Named("gates", ("add", of_state, of_input))

    def gate(index: int) -> Template:
        return Piece(index, 4, gates)

    cell = ("add", ("mul", ("sigmoid", gate(1)), "cx"), ("mul", ("sigmoid", gate(0)), ("tanh", gate(2))))
    return ("mul", ("sigmoid", gate(3)), ("tanh", Named("cy", cell)))


def _gru(of_state: Template, of_input: Template) -> Template:
    by_input, by_state = Named("igates", of_input), Named("hgates", of_state)

    def both(index: int) -> Template:
        return ("sigmoid", ("add", Piece(index, 3, by_state), Piece(index, 3, by_input)))

    new = Named("new", ("tanh", ("add", Piece(2, 3, by_input), ("mul", Piece(2, 3, by_state), both(0)))))
    return ("add", ("mul", ("sub", "again", new), both(1)), new)  # the state, read again


def _simple(activation: str, of_state: Template, of_input: Template) -> Template:
    return (activation, ("add", of_state, of_input))


_STATE, _INPUT = _linear("hx", "w_hh", "b_hh"), _linear("x", "w_ih", "b_ih")
_BOTH = tuple(zip(_STATE, _INPUT, strict=True))  # with biases, without


class _Cell(NamedTuple):
    """A class of cells: its call, and what that becomes; `top` is the base of the last op."""

    cls: str
    target: str
    top: str
    templates: tuple[Template, ...]


_CELLS = (
    _Cell("LSTMCell", "aten::lstm_cell", "aten::mul", tuple(_lstm(h, i) for h, i in _BOTH)),
    _Cell("GRUCell", "aten::gru_cell", "aten::add", tuple(_gru(h, i) for h, i in _BOTH)),
    _Cell("RNNCell", "aten::rnn_tanh_cell", "aten::tanh", tuple(_simple("tanh", h, i) for h, i in _BOTH)),
    _Cell("RNNCell", "aten::rnn_relu_cell", "aten::relu", tuple(_simple("relu", h, i) for h, i in _BOTH)),
)


def cells(ops: Ops, net: Net) -> Sequence[Note]:
    """Puts cells together again."""
    return _cells(ops, net, lambda name: None)


def traced_cells(ops: Ops, net: Net) -> Sequence[Note]:
    """The same in a file of the TorchScript exporter, with the states that Constant nodes of its trace make."""
    traced = {
        node.outputs[0]: net.values[node.outputs[0]]
        for node in (net.nodes if net.producer.startswith("pytorch") else ())
        if node.op == "Constant" and not node.domain and not node.fx and node.outputs and node.outputs[0] in net.values
    }
    return _cells(ops, net, traced.get)


def _cells(ops: Ops, net: Net, traced: Traced) -> Sequence[Note]:
    finder, count = Finder(ops, net.consts), 0
    possible = [cell._replace(templates=finder.possible(cell.templates)) for cell in _CELLS]
    by_top = {cell.top: cell for cell in possible if cell.templates}
    for op in ops.of(*by_top):
        cell = by_top[op.base]
        if op.modules and op.modules[-1].cls in (_CLASS + cell.cls, ""):
            count += _put_together(finder, op, cell, traced)
    return regrouped(count)


def _named(match: Match, op: Op) -> bool:
    """Whether the parameters have the names that the cells of torch.nn give them, in a module of this path."""
    path, cls = op.modules[-1].path, op.modules[-1].cls
    names = {key: value.name for key, value in match.values.items() if key in _NAMES and isinstance(value, Ref)}
    return bool(cls) or all(name == f"{path}.{_NAMES[key]}" for key, name in names.items())


def _put_together(finder: Finder, op: Op, cell: _Cell, traced: Traced) -> bool:
    match = finder.find(op, cell.templates, kept=("cy",))
    if match is None or not _named(match, op):
        return False
    values, outputs = match.values, op.outputs
    state, new = values["hx"], values.get("cy")
    again = values.get("again", state)
    if again != state and not _same_constant(again, state, traced):
        return False
    first = _add_state(finder.ops, op, match, state, traced)
    if first and again != state:
        _add_state(finder.ops, op, match, again, traced, state)
    if "cx" in values:
        _add_state(finder.ops, op, match, values["cx"], traced)
    if isinstance(new, Ref):  # an LSTM's, which returns its state as well
        state, outputs = (state, values["cx"]), (*outputs, new.name)
    args = (values["x"], state, values["w_ih"], values["w_hh"], values.get("b_ih"), values.get("b_hh"))
    finder.replaced(op, match, replace(op, target=cell.target, args=args, kwargs={}, outputs=outputs))
    return True


def _same_constant(one: Arg, other: Arg, traced: Traced) -> bool:
    """Whether two constants of a trace may be one tensor that is read twice."""
    a, b = (traced(arg.name) if isinstance(arg, Ref) else None for arg in (one, other))
    return a is not None and b is not None and (a.dtype, a.shape) == (b.dtype, b.shape)


def _add_state(ops: Ops, op: Op, match: Match, state: Arg, traced: Traced, same: Arg = None) -> bool:
    """Makes a constant state in front of the cell that this op ends, or gives its second name to the first one's
    tensor: what the step makes under a name is not the model's. False where others read it too."""
    value = traced(state.name) if isinstance(state, Ref) else None
    if value is None or value.shape is None or not match.ops.keys() >= set(ops.readers[value.name]):
        return False
    zeros = Op(value.name, "aten::zeros", (value.shape,), {"dtype": value.dtype}, (value.name,), op.modules)
    if same is not None:
        zeros = zeros.changed(target="aten::alias", args=(same,), kwargs={})
    ops.insert(ops.producer[op.outputs[0]], zeros)
    return True
