"""Attention operators: the calls of PyTorch that they stand for.

`Attention` (opset 23) and com.microsoft's `Attention`, `MultiHeadAttention`, `GroupQueryAttention` are projections,
views as heads and one scaled-dot-product attention. `RotaryEmbedding` is what models write: x * cos + rotated(x) * sin.
Definitions: onnx/docs/Operators.md, onnxruntime/docs/ContribOperators.md.
"""

from __future__ import annotations

from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx.context import Context, Rule, integer, real

SDPA = "aten::scaled_dot_product_attention"


class _Calls:
    """Ops of one node, with the sizes of the values between them."""

    def __init__(self, ctx: Context, node: Node) -> None:
        self.ctx, self.node = ctx, node
        self.ops: list[Op] = []

    def call(self, target: str, *args: Arg, shape: tuple[int, ...] | None, out: str = "") -> Ref:
        name = out or self.ctx.fresh(self.node)
        self.ctx.define(name, self.node.inputs[0], shape)
        self.ops.append(self.ctx.op(self.node, f"aten::{target}", *args, outputs=(name,)))
        return Ref(name)

    def heads(self, x: Ref, shape: tuple[int, ...], count: int) -> tuple[Ref, tuple[int, ...]]:
        """[B, S, H * D] as [B, H, S, D]."""
        batch, length, width = shape
        split = (batch, length, count, width // count)
        viewed = self.call("view", x, split, shape=split)
        turned = (batch, count, length, width // count)
        return self.call("transpose.int", viewed, 1, 2, shape=turned), turned

    def join(self, past: str, x: Ref, shape: tuple[int, ...], out: str) -> tuple[Ref, tuple[int, ...]]:
        """Keys or values after those of earlier tokens."""
        before = self.ctx.net.shape(past) if past else None
        if before is None:
            if out:
                self.ctx.alias(out, x.name)
            return x, shape
        joined = (*shape[:2], shape[2] + before[2], shape[3])
        return self.call("cat", (self.ctx.ref(past), x), 2, shape=joined, out=out), joined

    def attend(self, q: Ref, k: Ref, v: Ref, mask: Arg, causal: bool, shape: tuple[int, ...], grouped: bool) -> Ref:
        name = self.ctx.fresh(self.node)
        self.ctx.define(name, self.node.inputs[0], shape)
        kwargs: dict[str, Arg] = {"enable_gqa": True} if grouped else {}
        self.ops.append(self.ctx.op(self.node, SDPA, q, k, v, mask, 0.0, causal, outputs=(name,), kwargs=kwargs))
        return Ref(name)

    def merge(self, x: Ref, shape: tuple[int, ...], out: str) -> list[Op]:
        """[B, H, S, D] as [B, S, H * D], under the node's name."""
        batch, count, length, size = shape
        turned = self.call("transpose.int", x, 1, 2, shape=(batch, length, count, size))
        merged = (batch, length, count * size)
        self.call("reshape", turned, merged, shape=merged, out=out)
        return self.ops


def _input(node: Node, position: int) -> str:
    return node.inputs[position] if position < len(node.inputs) else ""


def _output(node: Node, position: int) -> str:
    return node.outputs[position] if position < len(node.outputs) else ""


def attention(ctx: Context, node: Node) -> list[Op] | None:
    return packed_attention(ctx, node) if node.domain else onnx_attention(ctx, node)


def onnx_attention(ctx: Context, node: Node) -> list[Op] | None:
    """Opset 23: Q, K, V of 3 or 4 dimensions, mask, earlier keys and values."""
    made = _Calls(ctx, node)
    shapes = [ctx.net.shape(name) for name in node.inputs[:3]]
    if any(shape is None for shape in shapes) or _output(node, 3):
        return None  # the product of queries and keys as a result: no fused kernel gives it
    flat = len(shapes[0] or ()) == 3
    counts = (integer(node, "q_num_heads", 0), *(integer(node, "kv_num_heads", 0),) * 2)
    parts: list[tuple[Ref, tuple[int, ...]]] = []
    for name, shape, count in zip(node.inputs[:3], shapes, counts, strict=True):
        assert shape is not None
        parts.append(made.heads(ctx.ref(name), shape, count) if flat else (ctx.ref(name), shape))
    (q, q_shape), (k, k_shape), (v, v_shape) = parts
    k, k_shape = made.join(_input(node, 4), k, k_shape, _output(node, 1))
    v, v_shape = made.join(_input(node, 5), v, v_shape, _output(node, 2))
    shape = (*q_shape[:3], v_shape[3])
    causal = bool(integer(node, "is_causal", 0))
    mask = ctx.optional(node, 3)
    grouped = q_shape[1] != k_shape[1]
    if not flat:
        kwargs: dict[str, Arg] = {"enable_gqa": True} if grouped else {}
        return [*made.ops, ctx.op(node, SDPA, q, k, v, mask, 0.0, causal, kwargs=kwargs)]
    return made.merge(made.attend(q, k, v, mask, causal, shape, grouped), shape, node.outputs[0])


def packed_attention(ctx: Context, node: Node) -> list[Op] | None:
    """com.microsoft Attention: one projection for queries, keys and values."""
    shape, weight = ctx.net.shape(node.inputs[0]), ctx.net.shape(node.inputs[1])
    heads = integer(node, "num_heads", 0)
    if shape is None or weight is None or not heads or len(shape) != 3 or _input(node, 4):
        return None
    made = _Calls(ctx, node)
    projected = (*shape[:2], weight[1])
    if node.inputs[1] in ctx.net.weights:
        ctx.transposed.add(node.inputs[1])
        x = made.call(
            "linear", ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1]), ctx.optional(node, 2), shape=projected
        )
    else:
        x = made.call("matmul", ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1]), shape=projected)
        if ctx.optional(node, 2) is not None:
            x = made.call("add.Tensor", x, ctx.optional(node, 2), shape=projected)
    sizes = node.attrs.get("qkv_hidden_sizes")
    widths = tuple(int(s) for s in sizes) if isinstance(sizes, tuple) and sizes else (weight[1] // 3,) * 3
    names = [ctx.fresh(node) for _ in range(3)]
    for name, width in zip(names, widths, strict=True):
        ctx.define(name, node.inputs[0], (*shape[:2], width))
    made.ops.append(ctx.op(node, "aten::split_with_sizes", x, widths, 2, outputs=names))
    parts = [made.heads(Ref(n), (*shape[:2], w), heads) for n, w in zip(names, widths, strict=True)]
    result = (*parts[0][1][:3], parts[2][1][3])
    mask = ctx.optional(node, 5)  # a mask of token counts (input 3) has no counterpart: no padding is assumed
    q, k, v = (ref for ref, _ in parts)
    out = made.attend(q, k, v, mask, bool(integer(node, "unidirectional", 0)), result, False)
    return made.merge(out, result, node.outputs[0])


def multi_head_attention(ctx: Context, node: Node) -> list[Op] | None:
    """com.microsoft MultiHeadAttention: queries, keys and values apart, an optional bias for all three."""
    shapes = [ctx.net.shape(_input(node, k)) for k in range(3)]
    heads = integer(node, "num_heads", 0)
    if any(s is None or len(s) != 3 for s in shapes) or not heads:
        return None  # packed forms
    made = _Calls(ctx, node)
    parts: list[tuple[Ref, tuple[int, ...]]] = []
    bias, start = _input(node, 3), 0
    for name, shape in zip(node.inputs[:3], shapes, strict=True):
        assert shape is not None
        x = ctx.ref(name)
        if bias:
            piece = made.call("slice.Tensor", ctx.ref(bias), 0, start, start + shape[2], shape=(shape[2],))
            x = made.call("add.Tensor", x, piece, shape=shape)
            start += shape[2]
        parts.append(made.heads(x, shape, heads))
    (q, q_shape), (k, k_shape), (v, v_shape) = parts
    k, k_shape = made.join(_input(node, 6), k, k_shape, _output(node, 1))
    v, v_shape = made.join(_input(node, 7), v, v_shape, _output(node, 2))
    shape = (*q_shape[:3], v_shape[3])
    causal = bool(integer(node, "unidirectional", 0))
    return made.merge(made.attend(q, k, v, ctx.optional(node, 5), causal, shape, False), shape, node.outputs[0])


def group_query_attention(ctx: Context, node: Node) -> list[Op] | None:
    """com.microsoft GroupQueryAttention: causal, fewer heads for keys and values, with a cache."""
    heads, groups = integer(node, "num_heads", 0), integer(node, "kv_num_heads", 0)
    shape = ctx.net.shape(node.inputs[0])
    if shape is None or len(shape) != 3 or not heads or not groups:
        return None
    made = _Calls(ctx, node)
    names = list(node.inputs[:3])
    shapes = [ctx.net.shape(name) for name in names]
    if not _input(node, 1):  # packed
        size = shape[2] // (heads + 2 * groups)
        widths = (heads * size, groups * size, groups * size)
        names = [ctx.fresh(node) for _ in range(3)]
        shapes = [(*shape[:2], w) for w in widths]
        for name, each in zip(names, shapes, strict=True):
            ctx.define(name, node.inputs[0], each)
        made.ops.append(ctx.op(node, "aten::split_with_sizes", ctx.ref(node.inputs[0]), widths, 2, outputs=names))
    if any(s is None for s in shapes):
        return None
    parts = [made.heads(ctx.ref(n), s or (), c) for n, s, c in zip(names, shapes, (heads, groups, groups), strict=True)]
    if integer(node, "do_rotary", 0) and _input(node, 8):
        for index in (0, 1):
            ref, sizes = parts[index]
            parts[index] = (_rotated(made, ref, sizes, Ref(_input(node, 7)), Ref(_input(node, 8)), None), sizes)
    (q, q_shape), (k, k_shape), (v, v_shape) = parts
    k, k_shape = made.join(_input(node, 3), k, k_shape, _output(node, 1))
    v, v_shape = made.join(_input(node, 4), v, v_shape, _output(node, 2))
    result = (*q_shape[:3], v_shape[3])
    return made.merge(made.attend(q, k, v, None, True, result, heads != groups), result, node.outputs[0])


def _rotated(made: _Calls, x: Ref, shape: tuple[int, ...], cos: Ref, sin: Ref, positions: Arg, out: str = "") -> Ref:
    """x * cos + cat(-x2, x1) * sin, with rows of the tables for [.., S, D]."""
    length, half = shape[-2], shape[-1] // 2
    tables = []
    for table in (cos, sin):
        if isinstance(positions, Ref):
            batch = made.ctx.net.shape(positions.name) or (1, length)
            rows = (*batch, half)
            part = made.call("embedding", table, positions, shape=rows)
            lifted = (*batch[:1], 1, *rows[1:]) if len(rows) == 3 else rows
            part = made.call("unsqueeze", part, 1, shape=lifted) if len(rows) == 3 else part
        elif len(given := made.ctx.net.shape(table.name) or ()) == 3:  # rows are picked already: [B, S, D / 2]
            lifted = (given[0], 1, *given[1:])
            part = made.call("unsqueeze", table, 1, shape=lifted)
        else:
            rows = lifted = (length, half)
            part = made.call("slice.Tensor", table, 0, 0, length, shape=rows)
        whole = (*lifted[:-1], 2 * half)
        tables.append(made.call("cat", (part, part), -1, shape=whole))
    part_shape = (*shape[:-1], half)
    scaled = made.call("mul.Tensor", x, tables[0], shape=shape)
    first = made.call("slice.Tensor", x, len(shape) - 1, 0, half, shape=part_shape)
    second = made.call("slice.Tensor", x, len(shape) - 1, half, 2 * half, shape=part_shape)
    negative = made.call("neg", second, shape=part_shape)
    turned = made.call("cat", (negative, first), -1, shape=shape)
    product = made.call("mul.Tensor", turned, tables[1], shape=shape)
    return made.call("add.Tensor", scaled, product, shape=shape, out=out)


def rotary_embedding(ctx: Context, node: Node) -> list[Op] | None:
    """Opset 23 (x, cos, sin, positions) and com.microsoft (x, positions, cos, sin)."""
    shape = ctx.net.shape(node.inputs[0])
    order = (2, 3, 1) if node.domain else (1, 2, 3)
    partial = integer(node, "rotary_embedding_dim", 0)
    if shape is None or len(shape) not in (3, 4) or (partial and partial != shape[-1]):
        return None
    cos, sin = (ctx.ref(node.inputs[k]) for k in order[:2])
    position_name = _input(node, order[2])
    known = ctx.net.shape(position_name) if position_name else None
    positions: Arg = ctx.ref(position_name) if known is not None and len(known) == 2 else None
    made = _Calls(ctx, node)
    x, sizes = ctx.ref(node.inputs[0]), shape
    if len(shape) == 3:
        heads = integer(node, "num_heads", 0)
        table = ctx.net.shape(node.inputs[order[0]])
        heads = heads or (shape[2] // (2 * table[-1]) if table else 0)
        if not heads:
            return None
        x, sizes = made.heads(x, shape, heads)
        return made.merge(_rotated(made, x, sizes, cos, sin, positions), sizes, node.outputs[0])
    _rotated(made, x, sizes, cos, sin, positions, node.outputs[0])
    return made.ops


def embed_layer_norm(ctx: Context, node: Node) -> list[Op] | None:
    """com.microsoft EmbedLayerNormalization: tables of words, positions and segments, their sum, a layer norm."""
    ids = ctx.net.shape(node.inputs[0])
    words = ctx.net.shape(_input(node, 2))
    if ids is None or words is None or len(ids) != 2:
        return None
    made = _Calls(ctx, node)
    shape = (*ids, words[1])

    def rows(target: str, *args: Arg, size: tuple[int, ...], out: str = "") -> Ref:
        ref = made.call(target, *args, shape=size, out=out)
        ctx.define(ref.name, node.inputs[2], size)
        return ref

    total = rows("embedding", ctx.ref(node.inputs[2]), ctx.ref(node.inputs[0]), size=shape)
    if _input(node, 8):
        position = rows("embedding", ctx.ref(node.inputs[3]), ctx.ref(node.inputs[8]), size=shape)
    else:
        position = rows("slice.Tensor", ctx.ref(node.inputs[3]), 0, 0, ids[1], size=shape[1:])
    last = not _input(node, 4)
    total = rows("add.Tensor", total, position, size=shape, out=_output(node, 2) if last else "")
    if not last:
        segment = rows("embedding", ctx.ref(node.inputs[4]), ctx.ref(node.inputs[1]), size=shape)
        total = rows("add.Tensor", total, segment, size=shape, out=_output(node, 2))
    eps = float(f"{real(node, 'epsilon', 1e-12):.6g}")
    norm = ctx.op(node, "aten::layer_norm", total, shape[-1:], ctx.ref(node.inputs[5]), ctx.ref(node.inputs[6]), eps)
    return [*made.ops, norm]


RULES: dict[str, Rule] = {
    "Attention": attention,
    "MultiHeadAttention": multi_head_attention,
    "GroupQueryAttention": group_query_attention,
    "RotaryEmbedding": rotary_embedding,
    "EmbedLayerNormalization": embed_layer_norm,
}
