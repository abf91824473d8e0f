"""Groups of nodes that are one layer: linear layers, norms, noise, the packed projection of attention, addcmul.

- linear: the TorchScript exporter writes a bias before the product (symbolic_opset9.py, `linear`), which code that adds
  a vector to a product does not: so a bias may be computed (that of BEiT and Swin v2 has no part for the key), and the
  input may be a tensor that the model owns (a table of positions).
- Noise of stochastic depth: `RandomUniformLike < p` is `empty(...).bernoulli_(p)` (torchvision/ops/stochastic_depth.py;
  the exporter writes bernoulli as a comparison, symbolic_opset15.py).
- The packed projection of `nn.MultiheadAttention`: its `.contiguous()` leaves no trace in an export
  (torch/nn/functional.py, `_in_projection_packed`:
  `proj.unflatten(-1, (3, E)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()`).
"""

from __future__ import annotations

from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.linear import named_weight
from staticmem.ops.reduction import onnx_axes
from staticmem.ops.views import onnx_squeeze, onnx_transpose, onnx_unsqueeze
from staticmem.passes.restoring.patterns.matcher import Matcher, close


def linear(m: Matcher, node: Node) -> bool:
    """MatMul with a transposed or a plain 2-D weight, with the Add of a 1-D bias where there is one."""
    if node.op == "Add":
        for position in (0, 1):
            product = m.inner(node.inputs[position], "MatMul")
            bias = node.inputs[1 - position]
            shape = m.net.shape(bias)
            if product is None or shape is None or len(shape) != 1:
                continue
            first = position == 1 and shape == (m.net.shape(node.outputs[0]) or ())[-1:]
            if (first or bias in m.net.weights) and _linear(m, node, product, bias, first):
                return True
        return False
    if node.op == "MatMul":
        follower = m.reader(node.outputs[0], "Add")
        if follower is not None and linear(m, follower):
            return True
        return _linear(m, node, node, "", False)
    return False


def _linear(m: Matcher, root: Node, product: Node, bias: str, written: bool) -> bool:
    x, weight = product.inputs[:2]
    others = [] if product is root else [product]
    turned, reverse = m.maker(weight, "Transpose"), False
    if turned is not None and turned.inputs[0] in m.net.weights and len(m.net.shape(turned.inputs[0]) or ()) == 2:
        weight = turned.inputs[0]
        if all(r is product for r in m.readers[turned.outputs[0]]):
            others.append(turned)
    elif (
        weight in m.net.weights
        and len(m.net.shape(weight) or ()) == 2
        and not named_weight(m.ctx, weight)
        and m.ctx.turnable(weight)
    ):
        reverse = True
    else:
        return False
    owned = x in m.net.weights and m.maker(x, "Constant") is None  # not what the code of a trace made
    if weight not in m.net.weights or (x in m.net.weights and turned is None) or (owned and not written):
        return False
    if reverse:
        m.ctx.transposed.add(weight)
    args = (m.ctx.ref(x), m.ctx.ref(weight), *((m.ctx.ref(bias),) if bias else ()))
    return m.take(root, [m.op(product, "aten::linear", *args, outputs=root.outputs[:1])], *others)


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
    if node.op != "Div" or m.is_own_arithmetic(since=17):  # symbolic_opset17.py, `layer_norm`
        return False
    centred = m.maker(node.inputs[0], "Sub")
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


def variance(m: Matcher, node: Node) -> bool:
    """mean((x - mean(x)) * (x - mean(x))), of which PyTorch's TorchScript exporter makes `var` and `std`; with a
    correction * n / (n - c) (symbolic_helper.py, `_var_mean_helper`). Code that squares has a power."""
    if node.op != "ReduceMean" or not m.is_own_arithmetic(since=1):
        return False
    square = m.inner(node.inputs[0], "Mul")
    if square is None or len(set(square.inputs)) != 1:
        return False
    centred = m.maker(square.inputs[0], "Sub")
    mean = m.maker(centred.inputs[1], "ReduceMean") if centred is not None else None
    if centred is None or mean is None or mean.inputs[0] != centred.inputs[0]:
        return False
    if len(m.readers.get(centred.outputs[0], ())) != 2 or len(m.readers.get(mean.outputs[0], ())) != 1:
        return False
    root, group = node, [square, centred, mean]
    axes, keepdim = onnx_axes(m.ctx, node)
    times = m.reader(node.outputs[0], "Mul")
    ratio = m.reader(times.outputs[0], "Div") if times is not None else None
    corrected = times is not None and ratio is not None and m.split(times) is not None
    if corrected and times is not None and ratio is not None and m.number(ratio.inputs[1]) is not None:
        root, group = ratio, [*group, node, times]
    call = m.op(root, "aten::var.dim", m.ctx.ref(centred.inputs[0]), axes, root is not node, keepdim)
    return m.take(root, [call], *group)


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
        source = m.maker(other, "Unsqueeze", "Reshape")
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


def stochastic_depth(m: Matcher, node: Node) -> bool:
    """Cast(Less(RandomUniformLike(t), p)), and the division by p after it."""
    if node.op not in ("RandomUniformLike", "RandomUniform"):
        return False
    less = m.reader(node.outputs[0], "Less")
    cast = m.reader(less.outputs[0], "Cast") if less is not None else None
    shape = m.net.shape(node.outputs[0])
    if less is None or cast is None or shape is None or less.inputs[0] != node.outputs[0]:
        return False
    p = m.number(less.inputs[1])
    if p is None:
        return False
    p = float(f"{p:.7g}")
    value = m.net.values.get(cast.outputs[0])
    empty, drawn = m.ctx.fresh(node), cast.outputs[0]
    m.ctx.define(empty, cast.outputs[0], shape)
    dtype = value.dtype if value is not None else dtypes.float32
    ops: list[Op] = [
        m.op(node, "aten::empty.memory_format", shape, outputs=(empty,), kwargs={"dtype": dtype}),
        m.op(node, "aten::bernoulli_.float", Ref(empty), p, outputs=(drawn,)),
    ]
    others = [node, less]
    root = cast
    scaled = m.reader(drawn, "Div")
    if scaled is not None and m.number(scaled.inputs[1]) is not None:
        ops.append(m.op(scaled, "aten::div_.Tensor", Ref(drawn), p, outputs=scaled.outputs[:1]))
        others.append(cast)
        root = scaled
    source = m.inner(node.inputs[0], "ConstantOfShape") if node.inputs else None
    if source is not None:
        others.append(source)
    return m.take(root, ops, *others)


def packed_projection(m: Matcher, node: Node) -> bool:
    """Squeeze(Transpose(Unsqueeze(x, 0)), -2) where the transpose swaps the first and the last but one axis."""
    if node.op != "Squeeze":
        return False
    turned = m.inner(node.inputs[0], "Transpose")
    added = m.inner(turned.inputs[0], "Unsqueeze") if turned is not None else None
    if turned is None or added is None or m.ctx.ints(added, 1, "axes") != (0,):
        return False
    perm = turned.attrs.get("perm")
    if not isinstance(perm, tuple) or len(perm) < 4 or perm[0] != len(perm) - 2 or perm[-2] != 0:
        return False
    m.ctx.frames = m.frames(node)
    ops: list[Op] = []
    for translate, part in ((onnx_unsqueeze, added), (onnx_transpose, turned), (onnx_squeeze, node)):
        ops.extend(translate(m.ctx, part) or [])
    if len(ops) != 3:
        return False
    strided = m.ctx.fresh(node)
    m.ctx.define(strided, node.outputs[0], m.net.shape(node.outputs[0]))
    last = ops[-1]
    ops[-1] = m.op(node, last.target, *last.args, outputs=(strided,))
    ops.append(m.op(node, "aten::contiguous", Ref(strided)))
    return m.take(node, ops, added, turned)


def addcmul(m: Matcher, node: Node) -> bool:
    """`a + (b * c) * 1.0`: the exporter multiplies by `value` even where it is 1 (symbolic_opset9.py, `addcmul`), which
    code that multiplies and adds does not. With another number it may be either, and is left."""
    if node.op != "Add":
        return False
    scaled = m.inner(node.inputs[1], "Mul")
    product = m.inner(scaled.inputs[0], "Mul") if scaled is not None else None
    if scaled is None or product is None or not close(m.number(scaled.inputs[1]), 1.0):
        return False
    if any(m.number(name) is not None for name in product.inputs):
        return False
    args = [m.ctx.ref(name) for name in (node.inputs[0], *product.inputs)]
    return m.take(node, [m.op(node, "aten::addcmul", *args)], scaled, product)
