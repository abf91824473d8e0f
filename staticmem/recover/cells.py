"""Steps of recurrent layers (`nn.LSTMCell`, `nn.GRUCell`, `nn.RNNCell`) that the ONNX exporters took apart.

On CUDA the two products are followed by one fused kernel, whose memory is another than that of its parts. A cell that
is written by hand may have the same formula: the class of the module tells them apart, and where the file has no
classes (TorchScript) the names of its parameters.

Source: aten/src/ATen/native/RNN.cpp (`LSTMCell`, `GRUCell`, `SimpleCell`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from staticmem.graph.ir import Arg, Op, Ref
from staticmem.recover.edit import Ops
from staticmem.recover.templates import Finder, Match, Named, Piece, Template

if TYPE_CHECKING:
    import numpy as np

SIGNS = frozenset(("aten::tanh", "aten::relu"))  # one of these is in all of them
_CLASS = "torch.nn.modules.rnn."
_LAST = {"aten::mul": ("LSTMCell",), "aten::add": ("GRUCell",), "aten::tanh": ("RNNCell",), "aten::relu": ("RNNCell",)}
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
    return ("add", ("mul", ("sub", "hx", new), both(1)), new)


def _simple(activation: str, of_state: Template, of_input: Template) -> Template:
    return (activation, ("add", of_state, of_input))


_STATE, _INPUT = _linear("hx", "w_hh", "b_hh"), _linear("x", "w_ih", "b_ih")
_BOTH = tuple(zip(_STATE, _INPUT, strict=True))  # with biases, without
_LSTM = tuple(_lstm(h, i) for h, i in _BOTH)
_GRU = tuple(_gru(h, i) for h, i in _BOTH)
_TANH = tuple(_simple("tanh", h, i) for h, i in _BOTH)
_RELU = tuple(_simple("relu", h, i) for h, i in _BOTH)


def rewrite(ops: Ops, consts: Mapping[str, np.ndarray]) -> int:
    """Puts cells together again; how many."""
    finder, count = Finder(ops, consts), 0
    for op in list(ops.ops):
        if op is None or not op.modules or op.base not in _LAST:
            continue
        cls = op.modules[-1].cls
        if cls.startswith(_CLASS):
            count += _cell(finder, op, (cls.removeprefix(_CLASS),))
        elif not cls:
            count += _cell(finder, op, _LAST[op.base])
    return count


def _named(match: Match, op: Op) -> bool:
    """Whether the parameters have the names that the cells of torch.nn give them, in a module of this path."""
    path, cls = op.modules[-1].path, op.modules[-1].cls
    names = {key: value.name for key, value in match.values.items() if key in _NAMES and isinstance(value, Ref)}
    return bool(cls) or all(name == f"{path}.{_NAMES[key]}" for key, name in names.items())


def _cell(finder: Finder, op: Op, classes: tuple[str, ...]) -> bool:
    return any(_of_class(finder, op, cls) for cls in classes)


def _of_class(finder: Finder, op: Op, cls: str) -> bool:
    match: Match | None = None
    if cls == "LSTMCell" and op.base == "aten::mul":
        match = finder.find(op, _LSTM, kept=("cy",))
        match = match if match is not None and _named(match, op) else None
        if match is not None:
            hidden, cell = match.values["hx"], match.values["cx"]
            new = _call(op, "aten::lstm_cell", match, (hidden, cell))
            state = match.values["cy"]
            assert isinstance(state, Ref)
            finder.replaced(op, match, replace(new, outputs=(*op.outputs, state.name)))
    elif cls == "GRUCell" and op.base == "aten::add":
        match = finder.find(op, _GRU)
        match = match if match is not None and _named(match, op) else None
        if match is not None:
            finder.replaced(op, match, _call(op, "aten::gru_cell", match, match.values["hx"]))
    elif cls == "RNNCell" and op.base in ("aten::tanh", "aten::relu"):
        name = op.base.removeprefix("aten::")
        match = finder.find(op, _TANH if name == "tanh" else _RELU)
        match = match if match is not None and _named(match, op) else None
        if match is not None:
            finder.replaced(op, match, _call(op, f"aten::rnn_{name}_cell", match, match.values["hx"]))
    return match is not None


def _call(op: Op, target: str, match: Match, state: Arg) -> Op:
    values = match.values
    biases = (values.get("b_ih"), values.get("b_hh"))
    return replace(op, target=target, args=(values["x"], state, values["w_ih"], values["w_hh"], *biases), kwargs={})


__all__ = ["SIGNS", "rewrite"]
