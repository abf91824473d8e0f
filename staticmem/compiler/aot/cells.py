"""Cells of recurrent layers, which ATen composes (aten/src/ATen/native/RNN.cpp); layers of them break the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.compiler.aot.activations import sigmoid
from staticmem.compiler.aot.arithmetic import add, mul
from staticmem.compiler.aot.joining import chunk
from staticmem.compiler.aot.linear import linear
from staticmem.compiler.aot.registry import lookup, traced
from staticmem.compiler.aot.tracer import Tracer
from staticmem.compiler.nodes import Node


def _apply(t: Tracer, name: str, x: Node) -> Node:
    function = lookup(f"aten::{name}")
    assert function is not None
    activated: Node = function(t, x)
    return activated


@traced("lstm_cell")
def lstm_cell(
    t: Tracer, input: Node, hx: Sequence[Node], w_ih: Node, w_hh: Node, b_ih: Any = None, b_hh: Any = None
) -> list[Node]:
    hidden, cell = hx
    gates = add(t, linear(t, hidden, w_hh, b_hh), linear(t, input, w_ih, b_ih))
    entered, forgotten, new, out = chunk(t, gates, 4, 1)
    entered, forgotten = sigmoid(t, entered), sigmoid(t, forgotten)
    new, out = _apply(t, "tanh", new), sigmoid(t, out)
    cell = add(t, mul(t, forgotten, cell), mul(t, entered, new))
    return [mul(t, out, _apply(t, "tanh", cell)), cell]


def _simple(name: str, activation: str) -> None:
    def cell(t: Tracer, input: Node, hx: Node, w_ih: Node, w_hh: Node, b_ih: Any = None, b_hh: Any = None) -> Node:
        return _apply(t, activation, add(t, linear(t, hx, w_hh, b_hh), linear(t, input, w_ih, b_ih)))

    traced(name)(cell)


_simple("rnn_tanh_cell", "tanh")
_simple("rnn_relu_cell", "relu")
