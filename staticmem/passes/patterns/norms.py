"""Normalisations that exporters write as arithmetic."""

from __future__ import annotations

from staticmem.ir.graph import Arg
from staticmem.ir.onnx_graph import Node
from staticmem.passes.patterns.matcher import Matcher


def rsqrt(m: Matcher, node: Node) -> bool:
    """1 / sqrt(x) or reciprocal(sqrt(x))."""
    if node.op == "Div":
        if m.number(node.inputs[0]) != 1.0:
            return False
        root = m.inner(node.inputs[1], "Sqrt")
    elif node.op == "Reciprocal":
        root = m.inner(node.inputs[0], "Sqrt")
    else:
        return False
    return root is not None and m.take(node, [m.op(node, "aten::rsqrt", m.ctx.ref(root.inputs[0]))], root)


def layer_norm(m: Matcher, node: Node) -> bool:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias (torch.onnx before opset 17)."""
    if node.op != "Div":
        return False
    centred = m.made(node.inputs[0], "Sub")
    root = m.inner(node.inputs[1], "Sqrt")
    plus = m.inner(root.inputs[0], "Add") if root is not None else None
    parts = m.split(plus) if plus is not None else None
    if centred is None or root is None or plus is None or parts is None:
        return False
    variance = m.inner(parts[0], "ReduceMean")
    square = m.inner(variance.inputs[0], "Pow", "Mul") if variance is not None else None
    mean = m.inner(centred.inputs[1], "ReduceMean")
    if variance is None or square is None or mean is None or mean.inputs[0] != centred.inputs[0]:
        return False
    if square.inputs[0] != centred.outputs[0] or len(m.readers[centred.outputs[0]]) > 3:
        return False
    x = centred.inputs[0]
    shape = m.net.shape(x)
    axes = m.ctx.ints(mean, 1, "axes")
    if shape is None or axes is None:
        return False
    dims = sorted(a % len(shape) for a in axes)
    if dims != list(range(len(shape) - len(dims), len(shape))):
        return False
    nodes, last = [centred, root, plus, variance, square, mean, node], node
    weight = bias = ""
    scale = m.reader(node.outputs[0], "Mul")
    if scale is not None:
        weight = scale.inputs[1] if scale.inputs[0] == node.outputs[0] else scale.inputs[0]
        if weight in m.net.weights and m.net.shape(weight) == shape[dims[0] :]:
            last = scale
            shift = m.reader(scale.outputs[0], "Add")
            if shift is not None:
                bias = shift.inputs[1] if shift.inputs[0] == scale.outputs[0] else shift.inputs[0]
                if bias in m.net.weights:
                    last = shift
                    nodes.append(scale)
                else:
                    bias = ""
        else:
            weight = ""
    args: tuple[Arg, ...] = (m.ctx.ref(x), shape[dims[0] :])
    tail: tuple[Arg, ...] = (m.ctx.ref(weight) if weight else None, m.ctx.ref(bias) if bias else None, parts[1])
    group = [n for n in nodes if n is not last]
    return m.take(last, [m.op(last, "aten::layer_norm", *args, *tail)], *group)


def group_norm(m: Matcher, node: Node) -> bool:
    """reshape to groups, InstanceNormalization with ones and zeros, reshape back, * weight, + bias."""
    if node.op != "InstanceNormalization":
        return False
    grouped = m.inner(node.inputs[0], "Reshape")
    back = m.reader(node.outputs[0], "Reshape")
    if grouped is None or back is None or node.inputs[1] in m.net.weights:
        return False
    inner, outer = m.net.shape(grouped.outputs[0]), m.net.shape(grouped.inputs[0])
    if inner is None or outer is None or m.net.shape(back.outputs[0]) != outer or len(inner) != 3:
        return False
    eps = node.attrs.get("epsilon", 1e-5)
    last, nodes = back, [grouped, node]
    names: list[str] = []
    for op in ("Mul", "Add"):
        reader = m.reader(last.outputs[0], op)
        if reader is None:
            break
        other = reader.inputs[1] if reader.inputs[0] == last.outputs[0] else reader.inputs[0]
        source = m.made(other, "Unsqueeze", "Reshape")
        weight = source.inputs[0] if source is not None else other
        if weight not in m.net.weights:
            break
        names.append(weight)
        nodes += [last, *([source] if source is not None else [])]
        last = reader
    weights: list[Arg] = [m.ctx.ref(n) for n in names]
    weights += [None] * (2 - len(weights))
    args: tuple[Arg, ...] = (m.ctx.ref(grouped.inputs[0]), inner[1], *weights)
    number = float(f"{eps:.6g}") if isinstance(eps, float) else 1e-5
    return m.take(last, [m.op(last, "aten::group_norm", *args, number)], *nodes)
