"""Scaled dot-product attention: which kernel CUDA runs, what it saves, and in which layout it answers.

Sources: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (`select_sdp_backend` and its priority order on sm_90),
attention.cpp (`scaled_dot_product_attention`, mask preparation), derivatives.yaml (what each kernel saves),
cuda/attention.cu (layout of the results). Sizes of log-sum-exp: float32; efficient rounds L up to 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from staticmem import dtypes
from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.tensor import Tensor
from staticmem.rules.casts import to_copy
from staticmem.rules.factory import dropout
from staticmem.rules.joining import repeat_interleave
from staticmem.rules.linear import matmul
from staticmem.rules.padding import pad
from staticmem.rules.pointwise import add_, grad_of, mul
from staticmem.rules.reduction import softmax
from staticmem.rules.registry import rule
from staticmem.rules.views import expand, slice_, transpose


@dataclass(frozen=True)
class Choice:
    """The kernel and why it was chosen."""

    kernel: str
    reason: str


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> Choice:
    """The kernel that `torch.nn.functional.scaled_dot_product_attention` picks on an sm_90 device."""
    half = q.dtype in (dtypes.float16, dtypes.bfloat16)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        return Choice("math", "inputs are not 4-D")
    head = q.shape[-1]
    if half and head <= 256 and head == v.shape[-1]:
        if head % 8 == 0 and dropout_p == 0 and (mask is None or not mask.requires_grad):
            return Choice("cudnn", "half precision, no dropout")
        if mask is None:
            return Choice("flash", "half precision, no mask")
    if q.dtype is dtypes.float64 or q.dtype not in (dtypes.float16, dtypes.bfloat16, dtypes.float32):
        return Choice("math", f"{q.dtype.name} has no fused kernel")
    if head % (8 if half else 4) or v.shape[-1] % (8 if half else 4):  # minimum_gemm_alignment
        return Choice("math", f"head size {head} is not a multiple of {8 if half else 4}")
    # Grouped queries (fewer key heads) stay with this kernel and are not repeated: PyTorch 2.15 dispatches so for sm_90
    # (recorded for Qwen2 in float32). Versions before 2.15 are not looked at.
    return Choice("efficient", "half precision with a mask and dropout" if half else "float32")


def refusal(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> str | None:
    """Why PyTorch has no such kernel for these inputs (sdp_utils.cpp, the constraints of each), or None.

    It raises "No available kernel" where nothing else is allowed, and takes another one where it is.
    """
    half = q.dtype in (dtypes.float16, dtypes.bfloat16)
    head = q.shape[-1]
    reason = None
    if kernel == "math":
        return None
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        reason = "takes 4-D inputs only"
    elif kernel in ("flash", "cudnn") and not half:
        reason = f"takes half precision only, not {q.dtype.name}"
    elif kernel == "flash" and mask is not None:
        reason = "takes no mask"
    elif kernel in ("flash", "cudnn") and head > 256:
        reason = f"takes heads of up to 256, not {head}"
    elif kernel == "cudnn" and (head % 8 or v.shape[-1] % 8):
        reason = f"takes heads of a multiple of 8, not {head}"
    elif kernel == "cudnn" and mask is not None and mask.requires_grad:
        reason = "takes no mask that needs a gradient"
    elif kernel == "efficient" and (head % (8 if half else 4) or v.shape[-1] % (8 if half else 4)):
        reason = f"takes heads of a multiple of {8 if half else 4}, not {head}"
    elif kernel == "efficient" and q.dtype is dtypes.float64:
        reason = "has no float64"
    return None if reason is None else f"{kernel} was asked for, but {reason}: PyTorch fails if it may take no other"


@rule("aten::scaled_dot_product_attention", autocast="half")
def scaled_dot_product_attention(
    e: Eager, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Fused: saves q, k, v, result, log-sum-exp and two seeds (8 bytes), never the L x S matrix; math saves it."""
    if not e.training:
        dropout_p = 0.0
    if attn_mask is not None and attn_mask.dtype is dtypes.bool_:
        attn_mask = _float_mask(e, attn_mask, query)
    choice = choose_kernel(query, key, value, attn_mask, dropout_p)
    if e.sdpa != "auto":
        why_not = refusal(e.sdpa, query, key, value, attn_mask, dropout_p)
        choice = Choice(e.sdpa, "asked for") if why_not is None else Choice(choice.kernel, why_not)
    e.choices[f"scaled_dot_product_attention runs its {choice.kernel} kernel", choice.reason] += 1
    if choice.kernel == "math":
        return _math(e, query, key, value, attn_mask, dropout_p, is_causal)
    if choice.kernel == "efficient":
        return _efficient(e, query, key, value, attn_mask)
    head = query.shape[-1]
    if head % 8:  # flash pads the head dimension outside of the kernel (attention.cpp, `pad_last_dim`)
        query, key, value = (pad(e, t, (0, 8 - head % 8)) for t in (query, key, value))
        return slice_(e, _fused(e, query, key, value, attn_mask, choice.kernel), -1, 0, head)
    return _fused(e, query, key, value, attn_mask, choice.kernel)


def _float_mask(e: Eager, mask: Tensor, query: Tensor) -> Tensor:
    """`convert_boolean_attn_mask`: where(mask, 0, -inf) in the query's dtype."""
    for _ in range(2):
        e.empty((), query.dtype, kernel="aten.scalar_tensor.default")
    return e.pointwise("aten.where.self", mask, dtype=query.dtype)


def _seeds(e: Eager) -> list[Tensor]:
    return [e.empty((), dtypes.int64) for _ in range(2)]


def _like_query(query: Tensor, head: int) -> layout.Strides:
    """The result's layout follows the query's order of dimensions (`alloc_with_matching_layout`)."""
    shape = (*query.shape[:-1], head)
    order = sorted(range(4), key=lambda i: (-query.strides[i], i))
    strides = [0] * 4
    step = 1
    for i in reversed(order):
        strides[i] = step
        step *= max(shape[i], 1)
    return tuple(strides)


def _fused(e: Eager, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: str) -> Tensor:
    b, h, length, _ = q.shape
    name = f"aten._scaled_dot_product_{kernel}_attention"
    if mask is not None and mask.shape != (b, h, length, k.shape[2]):
        mask = expand(e, mask, (b, h, length, k.shape[2]))
    out = e.empty((b, h, length, v.shape[-1]), q.dtype, _like_query(q, v.shape[-1]), f"{name}.default")
    extras: list[Tensor] = []
    if kernel == "flash" or e.training:
        shape = (b, h, length, 1) if kernel == "cudnn" else (b, h, length)
        extras.append(e.empty(shape, dtypes.float32))
    extras += _seeds(e)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel(f"{name}_backward.default")
        return [e.empty_like(t) for t in (q, k, v)]

    saves = [q, k, v, out, *extras, mask]
    e.record(
        f"ScaledDotProduct{kernel.title()}AttentionBackward0", out, [q, k, v], [Formula((0, 1, 2), gradients)], saves
    )
    return out


def _efficient(e: Eager, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    b, h, length, _ = q.shape
    if mask is not None:
        mask = _prepare_bias(e, q, k, mask)
    out_shape = (b, h, length, v.shape[-1])
    bhld = layout.contiguous_strides((b, length, h, v.shape[-1]))
    strides = (bhld[0], bhld[2], bhld[1], bhld[3])  # memory order is [B, L, H, D]
    out = e.empty(out_shape, q.dtype, strides, "aten._scaled_dot_product_efficient_attention.default")
    training = e.needs_grad(q, k, v, mask)
    logsumexp = e.empty((b, h, -(-length // 32) * 32 if training else 0), dtypes.float32)
    seeds = _seeds(e)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)
        e.kernel("aten._scaled_dot_product_efficient_attention_backward.default")
        results: list[Tensor | None] = [_transposed_like(e, t, grad.dtype) for t in (q, k, v)]
        by_mask = None
        if mask is not None and need[3]:
            last = mask.shape[-1]
            padded = -(-last // 16) * 16 if last % 16 else last
            full = e.empty((b, h, length, padded), grad.dtype)
            by_mask = e.alias(full, (b, h, length, last), full.strides)
        return [*results, by_mask]

    saves = [q, k, v, mask, out, logsumexp, *seeds]
    e.record(
        "ScaledDotProductEfficientAttentionBackward0", out, [q, k, v, mask], [Formula((0, 1, 2, 3), gradients)], saves
    )
    return out


def _transposed_like(e: Eager, tensor: Tensor, dtype: dtypes.DType) -> Tensor:
    b, h, length, d = tensor.shape
    s = layout.contiguous_strides((b, length, h, d))
    return e.empty(tensor.shape, dtype, (s[0], s[2], s[1], s[3]))


def _prepare_bias(e: Eager, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """`preprocess_mask` of attention.cpp: a mask whose rows do not begin at multiples of 8 (`aligned_tensor`) is copied
    into longer rows (`pad_bias`, by 8 where their length is such a multiple); then it is expanded to (B, H, L, S)."""
    shape = (*q.shape[:3], k.shape[2])
    if mask.strides[-1] != 1 or any(stride % 8 for stride in mask.strides[:-1]):
        width = mask.shape[-1]
        mask = slice_(e, pad(e, mask, (0, 8 - width % 8)), -1, 0, width)
    return expand(e, mask, shape) if mask.shape != shape else mask


def _math(e: Eager, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool) -> Tensor:
    """`_scaled_dot_product_attention_math` of attention.cpp: matmul, mask, softmax, dropout, matmul, all recorded."""
    if q.dtype in (dtypes.float16, dtypes.bfloat16):
        q, k, v = (to_copy(e, t, dtypes.float32) for t in (q, k, v))
    if is_causal:
        length, source = q.shape[-2], k.shape[-2]
        square = e.empty((length, source), dtypes.bool_, kernel="aten.ones.default")
        mask = e.empty_like(square, kernel="aten.tril.default")
    if mask is not None and mask.dtype is dtypes.bool_:
        mask = _float_mask(e, mask, q)
    if q.ndim >= 3 and q.shape[-3] != k.shape[-3]:
        k = repeat_interleave(e, k, q.shape[-3] // k.shape[-3], -3)
        v = repeat_interleave(e, v, q.shape[-3] // v.shape[-3], -3)
    q = mul(e, q, 1.0)  # a C++ local: it lives until the end
    scores = _scores(e, q, k)
    if mask is not None:
        scores = add_(e, scores, mask)
    weights = softmax(e, scores, -1, kernel="aten._safe_softmax")
    if dropout_p > 0:
        weights = dropout(e, weights, dropout_p, True)
    e.collect(keep=(weights, v, q))
    return matmul(e, weights, v)


@scoped
def _scores(e: Eager, q: Tensor, k: Tensor) -> Tensor:
    return matmul(e, q, mul(e, transpose(e, k, -2, -1), 1.0))
