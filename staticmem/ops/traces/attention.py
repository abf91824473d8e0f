"""Scaled dot-product attention: the kernel that eager code takes, as one call, or the products of `math`.

Sources: aten/src/ATen/native/transformers/attention.cpp (`scaled_dot_product_attention`, masks,
`_scaled_dot_product_attention_math`), derivatives.yaml; forms of the results: torch/_meta_registrations.py. Which
kernel runs: `ops.attention`.

The fused inference path of `nn.MultiheadAttention` as compiled code has it.

Dynamo takes `_is_make_fx_tracing()` for true (torch/_dynamo/variables/torch.py), so that the module runs
`F.multi_head_attention_forward` (torch/nn/modules/activation.py, torch/nn/functional.py of 2.15).
`nn.TransformerEncoderLayer` does not ask, and keeps its fused call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.strides import Form
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.attention import decide_kernel, like_query
from staticmem.ops.traces import views
from staticmem.ops.traces.arithmetic import add, mul, mul_scalar
from staticmem.ops.traces.casts import to_copy
from staticmem.ops.traces.factories import dropout
from staticmem.ops.traces.linear import bmm, linear, matmul
from staticmem.ops.traces.rearranging import constant_pad, repeat_interleave
from staticmem.ops.traces.reduction import mean
from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.softmax import softmax, softmax_forward, softmax_gradient
from staticmem.tracing.nodes import GETITEM, Node
from staticmem.tracing.tracer import Gradients, Tracer, form, reduced

_SEEDS = form((), dtypes.int64)

_ALIGNMENT = 8  # elements; attention.cpp, `preprocess_mask` and `pad_last_dim`


@traced("scaled_dot_product_attention", calls="")
def scaled_dot_product_attention(
    t: Tracer, query: Node, key: Node, value: Node, attn_mask: Node | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Node:  # fmt: skip
    dropout_p = dropout_p if t.training else 0.0
    records = t.grad_enabled and t.needs_grad(query, key, value)
    asked = (query, key, value, attn_mask, dropout_p, is_causal, records, t.needs_grad(attn_mask))
    choice = decide_kernel(t.sdpa, asked)
    t.choices.append((f"scaled_dot_product_attention runs its {choice.kernel} kernel", choice.reason))
    mask = attn_mask
    if mask is not None and mask.dtype is dtypes.bool_:
        mask = _float_mask(t, mask, query.dtype)
    if choice.kernel == "math":
        return _math(t, query, key, value, mask, dropout_p, is_causal, scale)
    if choice.kernel == "flash":
        return _padded_flash(t, query, key, value, dropout_p, is_causal, scale)
    if choice.kernel == "cudnn":
        out: Node = cudnn(t, query, key, value, mask, records, dropout_p, is_causal, scale=scale)[0]
        return out
    if mask is not None:
        records = records or (t.grad_enabled and t.needs_grad(mask))
        mask = _prepared(t, mask, (*query.shape[:3], key.shape[2]))
    return efficient(t, query, key, value, mask, records, dropout_p, is_causal, scale=scale)[0]


def _float_mask(t: Tracer, mask: Node, dtype: DType) -> Node:
    """`convert_boolean_attn_mask`: 0 where it takes part, minus infinity (the last argument, made first) elsewhere."""
    least = t.full((), float("-inf"), dtype)
    zero = t.full((), 0.0, dtype)
    return t.pointwise("aten::where.self", mask, zero, least, dtype=dtype)


def _prepared(t: Tracer, mask: Node, shape: tuple[int, ...]) -> Node:
    """`preprocess_mask`: rows that begin at multiples of 8, in a copy with longer rows where they do not."""
    if any(stride % _ALIGNMENT for stride in mask.strides[:-1]) or mask.strides[-1] != 1:
        width = mask.shape[-1]
        mask = views.slice_(t, constant_pad(t, mask, (0, _ALIGNMENT - width % _ALIGNMENT)), -1, 0, width)
    return views.expand(t, mask, shape)


def _fused(
    t: Tracer, name: str, args: Sequence[Any], kept: int, scale: float | None, forms: Sequence[Form | None]
) -> dict[int, Node]:
    """The call without trailing defaults, of which there are none before `kept`; its tensors by their position."""
    defaults: tuple[Any, ...] = (0.0, False)
    given = list(args)
    while len(given) > kept and given[-1] == defaults[len(given) - 1 - kept]:
        given.pop()
    call = t.node(f"aten::_scaled_dot_product_{name}_attention", tuple(given), tuple(forms), _scaled(scale))
    return {k: t.node(GETITEM, (call, k), of) for k, of in enumerate(forms) if isinstance(of, Form)}


def _scaled(scale: float | None) -> Mapping[str, float]:
    return {} if scale is None else {"scale": scale}


def _backward(
    t: Tracer, name: str, args: tuple[Any, ...], scale: float | None, forms: Sequence[Form | None]
) -> list[Node | None]:
    call = t.node(f"aten::_scaled_dot_product_{name}_attention_backward", args, tuple(forms), _scaled(scale))
    return [None if of is None else t.node(GETITEM, (call, k), of) for k, of in enumerate(forms)]


def _heads_inside(shape: tuple[int, ...], dtype: DType) -> Form:
    """(batch, heads, length, size) in the memory order (batch, length, heads, size)."""
    batch, heads, length, size = shape
    s = layout.contiguous_strides((batch, length, heads, size))
    return form(shape, dtype, (s[0], s[2], s[1], s[3]))


@traced("_scaled_dot_product_efficient_attention")
def efficient(
    t: Tracer, query: Node, key: Node, value: Node, attn_bias: Node | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> list[Node]:  # fmt: skip
    """Memory-efficient attention; the sums have rows of a multiple of 32."""
    inputs = [query, key, value, attn_bias]
    (batch, heads, length, _), size = query.shape, value.shape[-1]
    sums = form((batch, heads, -(-length // 32) * 32 if compute_log_sumexp else 0), dtypes.float32)
    results = [_heads_inside((batch, heads, length, size), query.dtype), sums, _SEEDS, _SEEDS]
    args = (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal)
    out = _fused(t, "efficient", args, 5, scale, results)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        forms: list[Form | None] = [_heads_inside(of.shape, of.dtype) for of in (query, key, value)]
        forms.append(_mask_gradient(attn_bias) if attn_bias is not None and need[3] else None)
        given = (grads[0], query, key, value, attn_bias, *[out[k] for k in range(4)], dropout_p, tuple(need))
        return _backward(t, "efficient", (*given, True) if is_causal else given, scale, forms)

    t.record(out[0], inputs, gradient)
    return [out[k] for k in range(4)]


def _mask_gradient(mask: Node) -> Form:
    """Rows of a multiple of 16, cut to their length."""
    width = mask.shape[-1]
    strides = layout.contiguous_strides((*mask.shape[:-1], -(-width // 16) * 16))
    return form(mask.shape, mask.dtype, strides)


@traced("_scaled_dot_product_cudnn_attention")
def cudnn(
    t: Tracer, query: Node, key: Node, value: Node, attn_bias: Node | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> list[Any]:  # fmt: skip
    (batch, heads, length, _), keys = query.shape, key.shape[2]
    result = form((batch, heads, length, value.shape[-1]), query.dtype, like_query(query, value.shape[-1]))
    results = [result, form((batch, heads, length, 1), dtypes.float32), *[None] * 4, _SEEDS, _SEEDS, None]
    args = (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal)
    out = _fused(t, "cudnn", args, 5, scale, results)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        saved = (grads[0], query, key, value, out[0], out[1], out[6], out[7])
        given = (*saved, attn_bias, None, None, length, keys, dropout_p, is_causal)
        return _backward(t, "cudnn", given, scale, [_like(of) for of in (query, key, value)])

    t.record(out[0], [query, key, value], gradient)
    return [out.get(k) for k in range(9)]


def _like(node: Node) -> Form:
    return form(node.shape, node.dtype, layout.dense_like(node.shape, node.strides))


def _padded_flash(t: Tracer, query: Node, key: Node, value: Node, p: float, causal: bool, scale: float | None) -> Node:
    """Heads are padded to a multiple of 8 outside of the kernel (`pad_last_dim`); the scale is that of real ones."""
    size = query.shape[-1]
    missing = -size % _ALIGNMENT
    scale = scale if scale is not None else 1 / sqrt(size)
    if missing:
        query, key, value = (constant_pad(t, of, (0, missing)) for of in (query, key, value))
    out: Node = flash(t, query, key, value, p, causal, scale=scale)[0]
    return views.slice_(t, out, -1, 0, size) if missing else out


@traced("_scaled_dot_product_flash_attention")
def flash(
    t: Tracer, query: Node, key: Node, value: Node, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> list[Any]:  # fmt: skip
    """None where a result is no tensor, or is none that CUDA makes."""
    (batch, heads, length, _), keys = query.shape, key.shape[2]
    results = [
        form((batch, heads, length, value.shape[-1]), query.dtype, like_query(query, value.shape[-1])),
        form((batch, heads, length), dtypes.float32), *[None] * 4, form((2,), dtypes.uint64),
        form((), dtypes.uint64), form((0,), query.dtype),
    ]  # fmt: skip
    out = _fused(t, "flash", (query, key, value, dropout_p, is_causal), 3, scale, results)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        saved = (grads[0], query, key, value, out[0], out[1], None, None, length, keys, dropout_p, is_causal)
        forms = [_like(of) for of in (query, key, value)]
        return _backward(t, "flash", (*saved, out[6], out[7]), scale, forms)

    t.record(out[0], [query, key, value], gradient)
    return [out.get(k) for k in range(9)]


def _math(
    t: Tracer, query: Node, key: Node, value: Node, mask: Node | None, p: float, causal: bool, scale: float | None
) -> Node:
    """Products, in float32 for half precision; both factors have the root of the scale."""
    dtype = t.computes_in(query.dtype)
    q, k, v = (of if of.dtype is dtype else to_copy(t, of, dtype) for of in (query, key, value))
    factor = sqrt(abs(scale) if scale is not None else 1 / sqrt(query.shape[-1]))
    q = mul_scalar(t, q, -factor if scale is not None and scale < 0 else factor)
    if causal:
        square = t.full((q.shape[-2], k.shape[-2]), True, dtypes.bool_)
        mask = _float_mask(t, _lower_triangle(t, square), dtype)
    if q.ndim >= 3 and q.shape[-3] != k.shape[-3]:
        k = repeat_interleave(t, k, q.shape[-3] // k.shape[-3], -3)
        v = repeat_interleave(t, v, q.shape[-3] // v.shape[-3], -3)
    scores = matmul(t, q, mul_scalar(t, views.transpose(t, k, -2, -1), factor))
    if mask is not None:
        scores = add(t, scores, mask)
    weights = safe_softmax(t, scores, -1)
    if p > 0:
        weights = dropout(t, weights, p, True)
    out = matmul(t, weights, v)
    return out if out.dtype is query.dtype else to_copy(t, out, query.dtype)


def _lower_triangle(t: Tracer, square: Node) -> Node:
    from staticmem.ops.traces.indexing import tril

    return tril(t, square)


@traced("_safe_softmax")
def safe_softmax(t: Tracer, self: Node, dim: int, dtype: DType | None = None) -> Node:
    """Softmax with zeros for rows of which all is minus infinity (torch/_decomp/decompositions.py)."""
    if dtype is not None and dtype is not self.dtype:
        self = to_copy(t, self, dtype)
    out = softmax_forward(t, self, dim)
    is_masked = t.compare("eq", self, float("-inf"))
    some = t.pointwise("aten::logical_not", is_masked, dtype=dtypes.bool_)
    some = t.new("aten::any.dim", (some, dim, True), reduced(out.shape, [out.dim(dim)], True), dtypes.bool_)
    empty = t.pointwise("aten::logical_not", some, dtype=dtypes.bool_)
    out = t.where(empty, t.full(out.shape, 0, out.dtype), out)
    return t.derive(out, self, lambda grad: softmax_gradient(t, grad, out, dim, self.dtype))


@traced("_native_multi_head_attention")
def native_multi_head_attention(
    t: Tracer, query: Node, key: Node, value: Node, embed_dim: int, num_head: int, qkv_weight: Node, qkv_bias: Node,
    proj_weight: Node, proj_bias: Node, mask: Node | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> list[Node | None]:  # fmt: skip
    """Self-attention without a mask; `query` is [batch, length, embed_dim], as the fused path asks for."""
    if query is not key or key is not value or mask is not None:
        raise ValueError("masks, keys and values of other tensors are not traced")
    batch, length, _ = query.shape
    head = embed_dim // num_head
    packed = linear(t, views.transpose(t, query, 1, 0), qkv_weight, qkv_bias)
    packed = views.transpose(t, views.unsqueeze(t, views.unflatten(t, packed, -1, (3, embed_dim)), 0), 0, -2)
    packed = views.contiguous(t, views.squeeze(t, packed, -2))
    q, k, v = (
        views.transpose(t, views.view(t, views.select(t, packed, 0, k), (length, batch * num_head, head)), 0, 1)
        for k in range(3)
    )
    weights = None
    if need_weights:
        q = mul(t, q, math.sqrt(1.0 / head))
        scores = softmax(t, bmm(t, q, views.transpose(t, k, -2, -1)), -1)
        joined = views.view(t, views.transpose(t, bmm(t, scores, v), 0, 1), (length * batch, embed_dim))
        weights = views.view(t, scores, (batch, num_head, length, length))
        weights = mean(t, weights, (1,)) if average_attn_weights else weights
    else:
        q, k, v = (views.view(t, part, (batch, num_head, length, head)) for part in (q, k, v))
        attended = views.permute(t, scaled_dot_product_attention(t, q, k, v), (2, 0, 1, 3))
        joined = views.view(t, attended, (batch * length, embed_dim))
    out = views.view(t, linear(t, joined, proj_weight, proj_bias), (length, batch, embed_dim))
    return [views.contiguous(t, views.transpose(t, out, 1, 0)), weights]
