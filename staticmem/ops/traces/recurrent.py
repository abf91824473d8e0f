"""Cells of recurrent layers, which ATen composes (aten/src/ATen/native/RNN.cpp); layers of them break the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.ops.recurrent import GRU_WORKSPACE
from staticmem.ops.traces.activations import sigmoid
from staticmem.ops.traces.arithmetic import add, mul
from staticmem.ops.traces.joining import chunk
from staticmem.ops.traces.linear import linear
from staticmem.ops.traces.registry import trace_of, traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form


def _apply(t: Tracer, name: str, x: Node) -> Node:
    activated: Node = trace_of(f"aten::{name}")(t, x)
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


@traced("gru_cell")
def gru_cell(
    t: Tracer, input: Node, hx: Node, w_ih: Node, w_hh: Node, b_ih: Node | None = None, b_hh: Node | None = None
) -> Node:
    """On CUDA two products and a fused kernel, which has no decomposition; its backward reads the workspace alone
    (`_thnn_fused_gru_cell` of tools/autograd/derivatives.yaml)."""
    by_input, by_hidden = linear(t, input, w_ih), linear(t, hx, w_hh)
    state, gates = form(hx.shape, hx.dtype), form(by_input.shape, by_input.dtype)
    workspace = form((hx.shape[0], hx.shape[1] * GRU_WORKSPACE), hx.dtype)
    call = t.node("aten::_thnn_fused_gru_cell", (by_input, by_hidden, hx, b_ih, b_hh), (state, workspace))
    out, kept = (t.node("operator::getitem", (call, k), part) for k, part in enumerate((state, workspace)))

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        biases = [None if bias is None else form(bias.shape, by_input.dtype) for bias in (b_ih, b_hh)]
        parts = (gates, gates, state, *biases)
        call = t.node("aten::_thnn_fused_gru_cell_backward", (grads[0], kept, b_ih is not None), parts)
        return [
            t.node("operator::getitem", (call, k), part) if part is not None and needed else None
            for k, (part, needed) in enumerate(zip(parts, need, strict=True))
        ]

    return t.record(out, [by_input, by_hidden, hx, b_ih, b_hh], gradient)


def _simple(name: str, activation: str) -> None:
    def cell(t: Tracer, input: Node, hx: Node, w_ih: Node, w_hh: Node, b_ih: Any = None, b_hh: Any = None) -> Node:
        return _apply(t, activation, add(t, linear(t, hx, w_hh, b_hh), linear(t, input, w_ih, b_ih)))

    traced(name)(cell)


_simple("rnn_tanh_cell", "tanh")

_simple("rnn_relu_cell", "relu")
