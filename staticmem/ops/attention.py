"""Scaled dot-product attention: which kernel CUDA runs, what it saves, and in which layout it answers.

Sources: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (`select_sdp_backend` and its priority order on sm_90),
attention.cpp (`scaled_dot_product_attention`, mask preparation), derivatives.yaml (what each kernel saves),
cuda/attention.cu (layout of the results). Sizes of log-sum-exp: float32; efficient rounds L up to 32.
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.record import record
from staticmem.ops.casts import to_copy
from staticmem.ops.factory import dropout
from staticmem.ops.joining import repeat_interleave
from staticmem.ops.linear import matmul
from staticmem.ops.padding import pad
from staticmem.ops.pointwise import add_, grad_of, mul
from staticmem.ops.reduction import softmax
from staticmem.ops.registry import rule
from staticmem.ops.views import expand, slice_, transpose


@record(frozen=True)
class Choice:
    """The kernel and why it was chosen."""

    kernel: str
    reason: str


def choose_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool = False, grad: bool = False
) -> Choice:
    """The kernel that `torch.nn.functional.scaled_dot_product_attention` picks on an sm_90 device.

    `mask` is the caller's, before a boolean one is converted; `grad` says whether autograd records the call.
    """
    half = q.dtype in (dtypes.float16, dtypes.bfloat16)
    kernel = why_not = ""
    for kernel in ("cudnn", "flash", "efficient") if half else ("efficient",):
        why_not = _refusal(kernel, q, k, v, mask, dropout_p, causal, grad) or ""
        if not why_not:
            # Grouped queries (fewer key heads) stay with a fused kernel and are not repeated: PyTorch 2.15 dispatches
            # so for sm_90 (recorded for Qwen2 in float32). Versions before 2.15 are not looked at.
            return Choice(kernel, _reason(kernel, half, dropout_p))
    return Choice("math", f"{kernel} {why_not}")


def _reason(kernel: str, half: bool, dropout_p: float) -> str:
    if kernel == "cudnn":
        return "half precision, dropout of a multiple of 1/16" if dropout_p else "half precision, no dropout"
    if kernel == "flash":
        return "half precision, no mask"
    return "half precision with a mask and dropout" if half else "float32"


def refusal(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool = False,
    grad: bool = False,
) -> str | None:  # fmt: skip
    """Why PyTorch has no such kernel for these inputs, or None; arguments as those of `choose_kernel`.

    It raises "No available kernel" where nothing else is allowed, and takes another one where it is.
    """
    reason = None if kernel == "math" else _refusal(kernel, q, k, v, mask, dropout_p, causal, grad)
    return None if reason is None else f"{kernel} was asked for, but {reason}: PyTorch fails if it may take no other"


def _refusal(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, grad: bool
) -> str | None:
    """The constraints of each fused kernel, as PyTorch 2.15 has them in sdp_utils.cpp.

    Inputs of other ranks than 4 had none of these kernels before 2.15, and are taken so.
    """
    half = q.dtype in (dtypes.float16, dtypes.bfloat16)
    head, value = q.shape[-1], v.shape[-1]
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        return "takes 4-D inputs only"
    if not half and (kernel != "efficient" or q.dtype is not dtypes.float32):
        return "has no float64" if q.dtype is dtypes.float64 else f"takes half precision only, not {q.dtype.name}"
    reason = _refusal_of(kernel, q, k, v, mask, dropout_p, causal, grad)
    if reason is not None:
        return reason
    # check_last_dim_stride_equals_1_dense; flash and cuDNN let heads of one element pass
    if any(t.strides[-1] != 1 for t in (q, k, v)) and (kernel == "efficient" or head != 1):
        return "takes no query, key or value whose last dimension has another stride than 1"
    if mask is not None and mask.strides[-1] != 1:
        return "takes no mask whose last dimension has another stride than 1"
    multiple = 8 if half else 4  # minimum_gemm_alignment
    if kernel == "efficient" and (head % multiple or value % multiple):
        return f"takes heads of a multiple of {multiple}, not {head if head % multiple else value}"
    return None


def _refusal_of(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, grad: bool
) -> str | None:
    """What flash and cuDNN ask for beside what all fused kernels do."""
    head, value = q.shape[-1], v.shape[-1]
    if kernel == "flash":
        if mask is not None:
            return "takes no mask"
        if head > 256 or head != value:
            return f"takes heads of up to 256, not {head}" if head > 256 else "takes heads of one size"
        if causal and q.shape[-2] != k.shape[-2]:  # check_flash_causal_non_square_seqlens
            return "takes no causal mask that is not square"
    if kernel == "cudnn":
        if max(head, value) > 256:
            return f"takes heads of up to 256, not {max(head, value)}"
        if head % 8 or value % 8:
            return f"takes heads of a multiple of 8, not {head if head % 8 else value}"
        if grad and max(head, value) > 128 and (head, value) not in ((192, 128), (256, 256)):
            return f"has no backward for heads of {head}"  # check_cudnn_d256_bprop_head_dim
        if mask is not None and mask.requires_grad:
            return "takes no mask that needs a gradient"
        if dropout_p * 16 % 1:  # check_cudnn_dropout
            return "takes dropout of a multiple of 1/16 only"
        if k.shape[2] == 1 or (q.shape[2] == 1 and dropout_p):
            return "takes no sequence of one element"
    return None


@rule("aten::scaled_dot_product_attention", kinds=("product",), autocast="half")
def scaled_dot_product_attention(
    e: Eager, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Fused: saves q, k, v, result, log-sum-exp and two seeds (8 bytes), never the L x S matrix; math saves it."""
    if not e.training:
        dropout_p = 0.0
    given = (query, key, value, attn_mask, dropout_p, is_causal, e.needs_grad(query, key, value))
    choice = choose_kernel(*given)
    if attn_mask is not None and attn_mask.dtype is dtypes.bool_:
        attn_mask = _float_mask(e, attn_mask, query)
    if e.sdpa != "auto":
        why_not = refusal(e.sdpa, *given)
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
    into longer rows (`pad_bias`, by 8 where their length is such a multiple); then it is expanded to (B, H, L, S).
    Elements of a row are next to each other: the kernel takes no others."""
    shape = (*q.shape[:3], k.shape[2])
    if any(stride % 8 for stride in mask.strides[:-1]):
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
    q = mul(e, q, 1.0)
    local = [t for t in (q, k, v, mask) if t is not None]  # C++ variables: they live until the end
    scores = _scores(e, q, k)
    if mask is not None:
        scores = add_(e, scores, mask)
    weights = softmax(e, scores, -1, kernel="aten._safe_softmax")
    e.collect(keep=(weights, *local))  # the scores go where the variable gets the weights
    if dropout_p > 0:
        weights = dropout(e, weights, dropout_p, True)
        e.collect(keep=(weights, *local))
    return matmul(e, weights, v)


@scoped
def _scores(e: Eager, q: Tensor, k: Tensor) -> Tensor:
    return matmul(e, q, mul(e, transpose(e, k, -2, -1), 1.0))
