"""The fused inference path of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`: one op in exports in evaluation
mode.

Each is a C++ function over ordinary kernels, whose tensors live until it lets go of them:
aten/src/ATen/native/transformers/cuda/attention.cu (`native_multi_head_attention_cuda`), transformer.cpp
(`transformer_encoder_layer_forward`), attention.cpp (`transform0213_gemm_nt_bias`, `masked_softmax`). Fake tensors show
only the results, so that no reference but the source has what is made inside.
"""

from __future__ import annotations

from staticmem.eager.context import Eager, scoped
from staticmem.eager.tensor import Tensor
from staticmem.ops.attention import choose_kernel, scaled_dot_product_attention
from staticmem.ops.linear import linear
from staticmem.ops.normalization import layer_norm
from staticmem.ops.registry import rule
from staticmem.ops.views import reshape, slice_, transpose

_linear, _norm, _attention = scoped(linear), scoped(layer_norm), scoped(scaled_dot_product_attention)


@rule("_native_multi_head_attention")
def native_multi_head_attention(
    e: Eager, query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor,
    qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """nn.MultiheadAttention in inference: the packed projection and a fused kernel, else a matrix of all scores."""
    batch, length, head = query.shape[0], query.shape[1], embed_dim // num_head
    if query is key and key is value and head % 8 == 0 and mask is None and not need_weights:
        split = _heads(e, query, num_head)
        if choose_kernel(split, split, split, None, 0.0).kernel != "math":
            packed = _linear(e, query, qkv_weight, qkv_bias)
            q, k, v = (_heads(e, slice_(e, packed, -1, i * embed_dim, (i + 1) * embed_dim), num_head) for i in range(3))
            attended = _attention(e, q, k, v)
            joined = reshape(e, transpose(e, attended, 1, 2), (batch, -1, embed_dim))
            return _linear(e, joined, proj_weight, proj_bias), e.empty((0,), query.dtype)
    packed = e.empty((batch, length, 3 * embed_dim), query.dtype, kernel="aten.mm.default")
    heads = e.empty((3, batch, num_head, length, head), query.dtype, kernel="aten._transform_bias_rescale_qkv.default")
    e.free(packed)
    scores = e.empty((batch, num_head, length, key.shape[1]), query.dtype, kernel="aten.bmm.default")
    if mask is not None:  # without one the softmax is in place
        unmasked, scores = scores, e.empty_like(scores, kernel="aten._masked_softmax.default")
        e.free(unmasked)
    if not need_weights:
        e.free(scores)  # the product with the values is written to where the queries were
    context = e.empty((batch, length, embed_dim), query.dtype, kernel="aten.contiguous.default")
    out = _linear(e, context, proj_weight, proj_bias)
    e.free(context)
    if need_weights and average_attn_weights:
        weights = e.empty((batch, length, key.shape[1]), query.dtype, kernel="aten.sum.dim_IntList")
    else:
        weights = scores if need_weights else e.empty((0,), query.dtype)
    e.free(heads)
    return out, weights


@rule("_transformer_encoder_layer_fwd")
def transformer_encoder_layer(
    e: Eager, src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
    norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
    ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """nn.TransformerEncoderLayer in inference: attention, norms and the feed-forward part, which adds in place."""

    def attention(e: Eager, x: Tensor) -> Tensor:
        return native_multi_head_attention(
            e, x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, need_weights=False
        )[0]

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return _norm(e, x, (embed_dim,), weight, bias, eps)

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    x = _replaced(e, x, src, scoped(attention)(e, x))
    e.kernel("aten.add_.Tensor")
    if not norm_first:
        x = _replaced(e, x, src, norm(x, norm_weight_1, norm_bias_1))
    residual = x
    if norm_first:
        x = norm(x, norm_weight_2, norm_bias_2)
    # the activation is part of the product: _addmm_activation
    x = _replaced(e, x, residual, _linear(e, x, ffn_weight_1, ffn_bias_1))
    x = _replaced(e, x, residual, _linear(e, x, ffn_weight_2, ffn_bias_2))
    e.kernel("aten.add_.Tensor")
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)


def _replaced(e: Eager, old: Tensor, kept: Tensor, new: Tensor) -> Tensor:
    """`x = f(x)`: the old tensor goes when the new one is there, unless it has another name."""
    if old.storage is not kept.storage:
        e.free(old)
    return new


def _heads(e: Eager, tensor: Tensor, count: int) -> Tensor:
    """(B, T, D) as (B, heads, T, D / heads): views."""
    batch, length, width = tensor.shape
    stride = tensor.strides
    shape = (batch, count, length, width // count)
    return e.alias(tensor, shape, (stride[0], width // count * stride[2], stride[1], stride[2]))
