"""LSTM, GRU and RNN: one ATen call a node, and the change of layout that ONNX's outputs need."""

from __future__ import annotations

from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx.context import Context, Rule, integer, text

_TARGETS = {"LSTM": "aten::lstm.input", "GRU": "aten::gru.input", "RNN": "aten::rnn_tanh.input"}


def recurrent(ctx: Context, node: Node) -> list[Op] | None:
    """`Y` of ONNX is [time, direction, batch, hidden], PyTorch's output [time, batch, direction * hidden]."""
    shape = ctx.net.shape(node.inputs[0])
    hidden = integer(node, "hidden_size", 0)
    if shape is None or len(shape) != 3 or not hidden or integer(node, "layout", 0):
        return None
    both = text(node, "direction", "forward") == "bidirectional"
    directions = 2 if both else 1
    target = _TARGETS[node.op]
    if node.op == "RNN" and "Relu" in str(node.attrs.get("activations", "")):
        target = "aten::rnn_relu.input"
    params = _params(ctx, node, directions)
    states: list[Arg] = []
    ops: list[Op] = []
    for position in (5, 6) if node.op == "LSTM" else (5,):
        given = ctx.optional(node, position)
        if given is None:
            name = ctx.fresh(node)
            sizes = (directions, shape[1], hidden)
            ctx.define(name, node.inputs[0], sizes)
            value = ctx.net.values.get(node.inputs[0])
            ops.append(
                ctx.op(node, "aten::zeros", sizes, outputs=(name,), kwargs={"dtype": value.dtype if value else None})
            )
            given = Ref(name)
        states.append(given)
    out = ctx.fresh(node)
    ctx.define(out, node.inputs[0], (shape[0], shape[1], directions * hidden))
    finals = tuple(n or ctx.fresh(node) for n in (*node.outputs, "", "")[1:3])
    names = (out, *finals) if node.op == "LSTM" else (out, finals[0])
    state: Arg = tuple(states) if node.op == "LSTM" else states[0]
    biases = len(node.inputs) > 3 and bool(node.inputs[3])
    ops.append(
        ctx.op(node, target, ctx.ref(node.inputs[0]), state, params, biases, 1, 0.0, True, both, False, outputs=names)
    )
    if node.outputs and node.outputs[0]:
        ops.extend(_layout(ctx, node, out, (shape[0], shape[1], directions, hidden)))
    return ops


def _params(ctx: Context, node: Node, directions: int) -> tuple[Arg, ...]:
    """Weights in PyTorch's order: input, hidden and the two biases of each direction.

    An export without constant folding reorders the gates with slices, so the weights themselves are found behind them.
    """
    found = [ctx.sources(name) if name else () for name in node.inputs[1:4]]
    sizes = [directions, directions, 2 * directions]
    if any(len(f) != size for f, size in zip(found, sizes, strict=False) if f) or not found or not all(found[:2]):
        return tuple(ctx.ref(n) for n in node.inputs[1:4] if n)
    order: list[Arg] = []
    for d in range(directions):
        order += [ctx.ref(found[0][d]), ctx.ref(found[1][d])]
        if len(found) > 2 and found[2]:
            order += [ctx.ref(n) for n in found[2][2 * d : 2 * d + 2]]
    return tuple(order)


def _layout(ctx: Context, node: Node, out: str, sizes: tuple[int, int, int, int]) -> list[Op]:
    if sizes[2] == 1:
        return [ctx.op(node, "aten::unsqueeze", Ref(out), 1)]
    name = ctx.fresh(node)
    ctx.define(name, node.inputs[0], sizes)
    return [
        ctx.op(node, "aten::view", Ref(out), sizes, outputs=(name,)),
        ctx.op(node, "aten::transpose.int", Ref(name), 1, 2),
    ]


RULES: dict[str, Rule] = dict.fromkeys(_TARGETS, recurrent)
