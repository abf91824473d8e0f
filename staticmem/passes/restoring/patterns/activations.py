"""Activations that exporters write as arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace

from staticmem.ir.graph import Arg
from staticmem.ir.onnx_graph import Node
from staticmem.ops.activations import MISH, SWISH
from staticmem.passes.restoring.patterns.matcher import Matcher, close


def gelu_erf(m: Matcher, node: Node) -> bool:
    """x * 0.5 * (1 + erf(x / sqrt(2))), the products in any order."""
    if node.op != "Erf" or m.is_own_arithmetic(since=20):  # symbolic_opset20.py, `gelu`
        return False
    scaled = m.inner(node.inputs[0], "Div", "Mul")
    if scaled is None:
        return False
    if scaled.op == "Div":
        if not close(m.number(scaled.inputs[1]), math.sqrt(2)):
            return False
        x = scaled.inputs[0]
    else:
        parts = m.split(scaled)
        if parts is None or not close(parts[1], math.sqrt(0.5)):
            return False
        x = parts[0]
    plus = m.reader(node.outputs[0], "Add")
    if plus is None or not close((m.split(plus) or ("", 0.0))[1], 1.0):
        return False
    return _half_products(m, x, plus, [scaled, node], None)


def gelu_tanh(m: Matcher, node: Node) -> bool:
    """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))).

    PyTorch's exporter writes the cube as products. A power is a model that spells GELU out (transformers'
    NewGELUActivation) and runs its parts.
    """
    if node.op != "Tanh" or m.is_own_arithmetic(since=20):
        return False
    outer = m.inner(node.inputs[0], "Mul")
    parts = m.split(outer) if outer is not None else None
    if outer is None or parts is None or not close(parts[1], math.sqrt(2 / math.pi)):
        return False
    total = m.inner(parts[0], "Add")
    if total is None:
        return False
    for x, cube in (total.inputs, total.inputs[::-1]):
        scaled = m.inner(cube, "Mul")
        pieces = m.split(scaled) if scaled is not None else None
        if scaled is None or pieces is None or not close(pieces[1], 0.044715):
            continue
        power = m.inner(pieces[0], "Pow", "Mul")
        if power is None or x not in power.inputs:
            continue
        nodes = [outer, total, scaled, power, node]
        if power.op == "Pow" and m.net.producer.startswith("pytorch"):
            continue
        if power.op == "Mul":
            square = m.inner(power.inputs[1] if power.inputs[0] == x else power.inputs[0], "Mul")
            if square is None or tuple(square.inputs) != (x, x):
                continue
            nodes.append(square)
        plus = m.reader(node.outputs[0], "Add")
        if plus is not None:
            return _half_products(m, x, plus, nodes, "tanh")
    return False


def _half_products(m: Matcher, x: str, plus: Node, nodes: list[Node], approximate: str | None) -> bool:
    """The two products after `1 + ...`: one with x (or x / 2), one with 0.5."""
    first = m.reader(plus.outputs[0], "Mul")
    if first is None:
        return False
    other = first.inputs[1] if first.inputs[0] == plus.outputs[0] else first.inputs[0]
    kwargs: dict[str, Arg] = {"approximate": approximate} if approximate else {}
    if other == x:
        second = m.reader(first.outputs[0], "Mul")
        if second is not None and close((m.split(second) or ("", 0.0))[1], 0.5):
            op = m.op(second, "aten::gelu", m.ctx.ref(x), kwargs=kwargs)
            return m.take(second, [op], *nodes, plus, first)
        return False
    half = m.inner(other, "Mul")
    if half is not None:
        parts = m.split(half)
        if parts is not None and parts[0] == x and close(parts[1], 0.5):
            return m.take(first, [m.op(first, "aten::gelu", m.ctx.ref(x), kwargs=kwargs)], *nodes, plus, half)
    if close(m.number(other), 0.5):
        second = m.reader(first.outputs[0], "Mul")
        if second is not None and x in second.inputs:
            return m.take(second, [m.op(second, "aten::gelu", m.ctx.ref(x), kwargs=kwargs)], *nodes, plus, first)
    return False


def silu(m: Matcher, node: Node) -> bool:
    """x * sigmoid(x): `silu`, or the product as it stands, which the nodes do not tell (`inplace.take_apart`).

    PyTorch's exporter writes `silu` with its input first (torchscript_exporter/symbolic_opset9.py).
    """
    if node.op != "Mul" or len(node.inputs) != 2:
        return False
    orders = (node.inputs,) if m.net.producer.startswith("pytorch") else (node.inputs, node.inputs[::-1])
    for a, b in orders:
        gate = m.inner(b, "Sigmoid")
        if gate is not None and gate.inputs[0] == a:
            return m.take(node, [replace(m.op(node, "aten::silu", m.ctx.ref(a)), source=SWISH)], gate)
    return False


def hard_sigmoid(m: Matcher, node: Node) -> bool:
    """clip(x + 3, 0, 6) / 6."""
    if node.op not in ("Div", "Mul"):
        return False
    parts = m.split(node)
    if parts is None or not close(parts[1], 6.0 if node.op == "Div" else 1 / 6):
        return False
    gate = _relu6_plus3(m, parts[0])
    if gate is None:
        return False
    return m.take(node, [m.op(node, "aten::hardsigmoid", m.ctx.ref(gate[0]))], *gate[1])


def hard_swish(m: Matcher, node: Node) -> bool:
    """x * hardsigmoid(x), or x * clip(x + 3, 0, 6) / 6."""
    if node.op == "Mul" and len(node.inputs) == 2:
        for a, b in (node.inputs, node.inputs[::-1]):
            gate = m.inner(b, "HardSigmoid")
            if gate is not None and gate.inputs[0] == a:
                return m.take(node, [m.op(node, "aten::hardswish", m.ctx.ref(a))], gate)
            scaled = m.inner(b, "Div", "Mul")
            parts = m.split(scaled) if scaled is not None else None
            if scaled is not None and parts is not None and close(parts[1], 6.0 if scaled.op == "Div" else 1 / 6):
                clipped = _relu6_plus3(m, parts[0])
                if clipped is not None and clipped[0] == a:
                    return m.take(node, [m.op(node, "aten::hardswish", m.ctx.ref(a))], scaled, *clipped[1])
    if node.op == "Div" and close(m.number(node.inputs[1]), 6.0):
        product = m.inner(node.inputs[0], "Mul")
        if product is not None:
            for a, b in (product.inputs, product.inputs[::-1]):
                clipped = _relu6_plus3(m, b)
                if clipped is not None and clipped[0] == a:
                    return m.take(node, [m.op(node, "aten::hardswish", m.ctx.ref(a))], product, *clipped[1])
    return False


def _relu6_plus3(m: Matcher, name: str) -> tuple[str, list[Node]] | None:
    """The operand and the nodes of clip(x + 3, 0, 6), where they stand for one op of PyTorch.

    PyTorch's TorchScript exporter writes HardSigmoid and HardSwish since 1.10 (symbolic_opset9.py, `hardsigmoid`;
    symbolic_opset14.py, `hardswish`): in its files this is arithmetic of the model's own code.
    """
    if m.is_own_arithmetic(since=1):
        return None
    clip = m.inner(name, "Clip")
    if clip is None or len(clip.inputs) < 3 or m.number(clip.inputs[1]) != 0 or m.number(clip.inputs[2]) != 6:
        return None
    plus = m.inner(clip.inputs[0], "Add")
    parts = m.split(plus) if plus is not None else None
    if plus is None or parts is None or not close(parts[1], 3.0):
        return None
    return parts[0], [clip, plus]


def mish(m: Matcher, node: Node) -> bool:
    """x * tanh(softplus(x))."""
    if node.op != "Mul" or len(node.inputs) != 2:
        return False
    for a, b in (node.inputs, node.inputs[::-1]):
        tanh = m.inner(b, "Tanh")
        soft = m.inner(tanh.inputs[0], "Softplus") if tanh is not None else None
        if tanh is not None and soft is not None and soft.inputs[0] == a:
            return m.take(node, [replace(m.op(node, "aten::mish", m.ctx.ref(a)), source=MISH)], tanh, soft)
    return False
