"""`scaled_dot_product_attention` as the TorchScript exporter decomposes it.

torch/onnx/_internal/torchscript_exporter/symbolic_opset14.py scales query and key by the root of the scale each;
attention that a model spells out itself scales once and stays as it is written.

The exporter leaves `contiguous()` out (symbolic_opset9.py). A mask that is permuted here had one: a bias by position is
looked up with the heads last and turned, and no fused kernel takes it as that leaves it (sdp_utils.cpp,
`check_last_dim_stride_equals_1_dense`). transformers copies it in front of each attention (`create_position_bias_mask`
of integrations/sdpa_attention.py), timm and torchvision where they turn it, once for each attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.passes.restoring.patterns.matcher import Matcher, close


@dataclass(slots=True)
class _Parts:
    query: str = ""
    key: str = ""
    mask: str = ""
    causal: bool = False
    dropout: float = 0.0
    scale: float = 0.0
    nodes: list[Node] = field(default_factory=list)
    turned: Node | None = None
    key_sizes: tuple[int, ...] = ()
    flipped: bool = False  # the key has its last two dimensions the other way round


def match(m: Matcher, node: Node) -> bool:
    """MatMul(Dropout?(Softmax(Add?(MatMul(q * s, k^T * s), mask))), v)."""
    if node.op != "MatMul":
        return False
    parts = _Parts()
    current = node.inputs[0]
    drop = m.inner(current, "Dropout")
    if drop is not None:
        parts.nodes.append(drop)
        parts.dropout = float(f"{_ratio(m, drop):.6g}")
        current = drop.inputs[0]
    guard = m.maker(current, "Where")  # newer exporters replace NaN of fully masked rows by 0
    if guard is not None and len(guard.inputs) == 3:
        test = m.maker(guard.inputs[0], "IsNaN")
        if test is not None:
            parts.nodes += [guard, test]
            current = guard.inputs[2]
    soft = m.maker(current, "Softmax")
    if soft is None or soft.attrs.get("axis", -1) not in (-1, len(m.net.shape(current) or ()) - 1):
        return False
    parts.nodes.append(soft)
    current = soft.inputs[0]
    total = m.inner(current, "Add")
    if total is not None:
        for position in (0, 1):
            if m.inner(total.inputs[position], "MatMul") is not None:
                parts.nodes.append(total)
                current = total.inputs[position]
                _mask(m, parts, total.inputs[1 - position])
                break
    product = m.inner(current, "MatMul")
    if product is None or not _scaled(m, parts, product):
        return False
    parts.nodes.append(product)
    return _emit(m, node, parts)


def _ratio(m: Matcher, drop: Node) -> float:
    if len(drop.inputs) > 1 and drop.inputs[1]:
        return m.number(drop.inputs[1]) or 0.0
    ratio = drop.attrs.get("ratio", 0.5)
    return float(ratio) if isinstance(ratio, (int, float)) else 0.0


def _scaled(m: Matcher, parts: _Parts, product: Node) -> bool:
    left, right = m.inner(product.inputs[0], "Mul"), m.inner(product.inputs[1], "Mul")
    if left is None or right is None:
        return False
    q, k = m.split(left), m.split(right)
    if q is None or k is None or not close(q[1], k[1]):
        return False
    turned = m.inner(k[0], "Transpose")
    if turned is None:
        return _reshaped_key(m, parts, q, k, left, right) or _flipped_key(m, parts, q, k, left, right)
    parts.query, parts.key, parts.scale = q[0], turned.inputs[0], q[1] * k[1]
    parts.turned = turned
    parts.nodes += [left, right, turned]
    return True


def _reshaped_key(
    m: Matcher, parts: _Parts, q: tuple[str, float], k: tuple[str, float], left: Node, right: Node
) -> bool:
    """An optimiser moves the transpose of the key before the reshape that divides its heads."""
    shaped = m.inner(k[0], "Reshape")
    turned = m.inner(shaped.inputs[0], "Transpose") if shaped is not None else None
    after = m.net.shape(k[0])
    if shaped is None or turned is None or after is None or turned.attrs.get("perm") != (0, 2, 1):
        return False
    if (m.net.shape(turned.outputs[0]) or ())[1:] != after[-2:]:
        return False
    parts.query, parts.key, parts.scale = q[0], turned.inputs[0], q[1] * k[1]
    parts.turned = turned
    parts.key_sizes = (*after[:-2], after[-1], after[-2])
    parts.nodes += [left, right, turned, shaped]
    joined = m.producer.get(turned.inputs[0])  # the optimised decomposition transposes a key of three axes
    if joined is not None and joined.op == "Reshape" and m.net.shape(joined.inputs[0]) == parts.key_sizes:
        parts.key, parts.key_sizes = joined.inputs[0], ()
        if m.inner(turned.inputs[0], "Reshape") is not None:
            parts.nodes.append(joined)
    return True


def _flipped_key(
    m: Matcher, parts: _Parts, q: tuple[str, float], k: tuple[str, float], left: Node, right: Node
) -> bool:
    """The model's own transpose of the key and the decomposition's cancelled: the key arrives as (..., E, S)."""
    shape = m.net.shape(k[0])
    if shape is None or len(shape) < 3:
        return False
    parts.query, parts.key, parts.scale = q[0], k[0], q[1] * k[1]
    parts.flipped = True
    parts.nodes += [left, right]
    return True


def _mask(m: Matcher, parts: _Parts, name: str) -> None:
    """A boolean mask was turned into 0 and -inf; a causal one was made of a triangle of ones."""
    parts.mask = name
    where = m.maker(name, "Where")
    if where is None:
        return
    yes, no = m.number(where.inputs[1]), m.number(where.inputs[2])
    if yes == 0.0 and no is not None and math.isinf(no):
        parts.mask = where.inputs[0]
        if len(m.readers[where.outputs[0]]) == 1:
            parts.nodes.append(where)
    elif no == 0.0 and yes is not None and math.isinf(yes):
        equal = m.maker(where.inputs[0], "Equal")
        if equal is not None and any(m.maker(i, "Trilu") for i in equal.inputs):
            parts.mask, parts.causal = "", True


def _emit(m: Matcher, node: Node, parts: _Parts) -> bool:
    turned = parts.turned
    rank = len(m.net.shape(parts.key) or ())
    if parts.flipped:
        perm: object = tuple(range(rank))
    elif turned is None:
        return False
    else:
        perm = turned.attrs.get("perm")
    if not isinstance(perm, tuple) or len(perm) < 2:
        return False
    ops: list[Op] = []
    key: Arg = m.ctx.ref(parts.key)
    before = (*perm[:-2], perm[-1], perm[-2])
    if parts.key_sizes:
        name = m.ctx.fresh(node)
        m.ctx.define(name, parts.key, parts.key_sizes)
        ops.append(m.op(node, "aten::reshape", key, parts.key_sizes, outputs=(name,)))
        key = Ref(name)
    elif before != tuple(range(len(perm))):  # a transpose before it was merged into the one of the decomposition
        name = m.ctx.fresh(node)
        shape = m.net.shape(parts.key)
        m.ctx.define(name, parts.key, tuple(shape[i] for i in before) if shape is not None else None)
        moved = [axis for axis, source in enumerate(before) if axis != source]
        target, args = ("aten::transpose.int", tuple(moved)) if len(moved) == 2 else ("aten::permute", (before,))
        ops.append(m.op(node, target, key, *args, outputs=(name,)))
        key = Ref(name)
    shape = m.net.shape(parts.query)
    kwargs: dict[str, Arg] = {}
    if shape is None or not close(parts.scale, shape[-1] ** -0.5):
        kwargs["scale"] = parts.scale
    mask = _rows(m, node, parts.mask, ops) if parts.mask else None
    query, value = m.ctx.ref(parts.query), m.ctx.ref(node.inputs[1])
    ops.append(
        m.op(
            node,
            "aten::scaled_dot_product_attention",
            query,
            key,
            value,
            mask,
            parts.dropout,
            parts.causal,
            kwargs=kwargs,
        )
    )
    return m.take(node, ops, *parts.nodes)


def _rows(m: Matcher, node: Node, name: str, ops: list[Op]) -> Arg:
    """A mask as an argument: a copy of it, which `ops` gets, where elements of a row are not next to each other."""
    source = name
    for _ in range(8):  # expanded again and again, or in the circle of a damaged file
        maker = m.producer.get(source)
        if maker is None or maker.op != "Expand" or not maker.inputs:
            break
        source = maker.inputs[0]  # copied before it is expanded; attention expands it again
    shape = m.net.shape(source)
    if shape is None or shape[-1:] in ((), (1,)) or _dense(m, source, 24) in (None, len(shape) - 1):
        return m.ctx.ref(name)
    copied = m.ctx.fresh(node)
    m.ctx.define(copied, source, shape)
    m.ctx.copied_masks += 1
    ops.append(m.op(node, "aten::contiguous", m.ctx.ref(source), outputs=(copied,)))
    return Ref(copied)


# results have the strides of their inputs
_STRIDES_STAY = (
    "Add", "Sub", "Mul", "Div", "Where", "Min", "Max", "Pow", "Cast", "Identity", "Neg", "Sigmoid", "Tanh", "Relu",
    "Exp", "Log", "Clip", "Softplus", "Slice", "Dropout",
)  # fmt: skip


def _dense(m: Matcher, name: str, steps: int) -> int | None:
    """The axis whose elements are next to each other, None where that is not known.

    Steps back over what keeps strides, `steps` at most. Of several operands the largest decides, as it brings most of
    the axes by which TensorIterator orders its result.
    """
    shape, maker = m.net.shape(name), m.producer.get(name)
    if shape is None or not steps:
        return None
    if maker is not None and maker.op in ("Transpose", "Unsqueeze", *_STRIDES_STAY):
        sizes = {i: m.net.shape(i) for i in (maker.inputs[:1] if maker.op == "Slice" else maker.inputs)}
        elements = {i: math.prod(size) for i, size in sizes.items() if size is not None}
        source = maker.inputs[0] if maker.op in ("Transpose", "Unsqueeze") else max(elements, key=lambda i: elements[i])
        before, inner = sizes.get(source), _dense(m, source, steps - 1)
        if before is None or inner is None:
            return None
        if maker.op == "Transpose":
            perm = maker.attrs.get("perm")
            return perm.index(inner) if isinstance(perm, tuple) else len(shape) - 1 - inner
        if maker.op == "Unsqueeze":
            added = {axis % len(shape) for axis in m.ctx.ints(maker, 1, "axes") or ()}
            return [axis for axis in range(len(shape)) if axis not in added][inner]
        return inner + len(shape) - len(before)
    return max((axis for axis, size in enumerate(shape) if size != 1), default=None)
