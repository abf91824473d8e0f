"""The fused inference path of `nn.MultiheadAttention` as compiled code has it.

Dynamo takes `_is_make_fx_tracing()` for true (torch/_dynamo/variables/torch.py), so that the module runs
`F.multi_head_attention_forward` (torch/nn/modules/activation.py, torch/nn/functional.py of 2.15).
`nn.TransformerEncoderLayer` does not ask, and keeps its fused call.
"""

from __future__ import annotations

import math

from staticmem.ops.traces.arithmetic import mul
from staticmem.ops.traces.attention import scaled_dot_product_attention
from staticmem.ops.traces.linear import bmm, linear
from staticmem.ops.traces.reduction import mean
from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.softmax import softmax
from staticmem.ops.traces.views import contiguous, permute, select, squeeze, transpose, unflatten, unsqueeze, view
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Tracer


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
    packed = linear(t, transpose(t, query, 1, 0), qkv_weight, qkv_bias)
    packed = transpose(t, unsqueeze(t, unflatten(t, packed, -1, (3, embed_dim)), 0), 0, -2)
    packed = contiguous(t, squeeze(t, packed, -2))
    q, k, v = (transpose(t, view(t, select(t, packed, 0, k), (length, batch * num_head, head)), 0, 1) for k in range(3))
    weights = None
    if need_weights:
        q = mul(t, q, math.sqrt(1.0 / head))
        scores = softmax(t, bmm(t, q, transpose(t, k, -2, -1)), -1)
        joined = view(t, transpose(t, bmm(t, scores, v), 0, 1), (length * batch, embed_dim))
        weights = view(t, scores, (batch, num_head, length, length))
        weights = mean(t, weights, (1,)) if average_attn_weights else weights
    else:
        q, k, v = (view(t, part, (batch, num_head, length, head)) for part in (q, k, v))
        attended = permute(t, scaled_dot_product_attention(t, q, k, v), (2, 0, 1, 3))
        joined = view(t, attended, (batch * length, embed_dim))
    out = view(t, linear(t, joined, proj_weight, proj_bias), (length, batch, embed_dim))
    return [contiguous(t, transpose(t, out, 1, 0)), weights]
