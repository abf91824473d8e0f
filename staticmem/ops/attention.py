"""Scaled dot-product attention: which kernel CUDA runs, what it saves, and in which layout it answers.

Sources: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (`select_sdp_backend` and its priority order on sm_90),
attention.cpp (`scaled_dot_product_attention`, mask preparation), derivatives.yaml (what each kernel saves),
cuda/attention.cu (layout of the results). Sizes of log-sum-exp: float32; efficient rounds L up to 32.

ONNX: `Attention` (opset 23) and com.microsoft's `Attention`, `MultiHeadAttention`, `GroupQueryAttention` are
projections, views as heads and one scaled-dot-product attention. `RotaryEmbedding` is what models write:
x * cos + rotated(x) * sin. Definitions: onnx/docs/Operators.md, onnxruntime/docs/ContribOperators.md.

Rotary positions of queries and keys, as the calls that published models write.

The fused inference path of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`: one op in exports in evaluation
mode.

Each is a C++ function over ordinary kernels, whose tensors live until it lets go of them:
aten/src/ATen/native/transformers/cuda/attention.cu (`native_multi_head_attention_cuda`), transformer.cpp
(`transformer_encoder_layer_forward`), attention.cpp (`transform0213_gemm_nt_bias`, `masked_softmax`). Fake tensors show
only the results, so that no reference but the source has what is made inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol, TypeAlias

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.tensor import Tensor
from staticmem.eager.trace import round_up
from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ir.record import record
from staticmem.ops import registry
from staticmem.ops.arithmetic import add, add_, mul
from staticmem.ops.casts import to_copy
from staticmem.ops.factories import dropout
from staticmem.ops.linear import linear, matmul
from staticmem.ops.normalization import layer_norm
from staticmem.ops.onnx import Calls, Context, Results, Shape, integer, like_first, translation
from staticmem.ops.pointwise import grad_of
from staticmem.ops.rearranging import pad, repeat_interleave
from staticmem.ops.softmax import softmax
from staticmem.ops.views import expand, reshape, slice_, transpose
from staticmem.units import Band, exactly
from staticmem.version import DEFAULTS_CHANGED


def rotated(calls: Calls, x: Ref, shape: tuple[int, ...], cos: Ref, sin: Ref, positions: Arg, out: str = "") -> Ref:
    """x * cos + cat(-x2, x1) * sin, with rows of the tables for [.., S, D]."""
    length, half = shape[-2], shape[-1] // 2
    tables = []
    for table in (cos, sin):
        if isinstance(positions, Ref):
            batch = calls.ctx.net.shape(positions.name) or (1, length)
            rows = (*batch, half)
            part = calls.call("embedding", table, positions, shape=rows)
            lifted = (*batch[:1], 1, *rows[1:]) if len(rows) == 3 else rows
            part = calls.call("unsqueeze", part, 1, shape=lifted) if len(rows) == 3 else part
        elif len(given := calls.ctx.net.shape(table.name) or ()) == 3:  # rows are picked already: [B, S, D / 2]
            lifted = (given[0], 1, *given[1:])
            part = calls.call("unsqueeze", table, 1, shape=lifted)
        else:
            rows = lifted = (length, half)
            part = calls.call("slice.Tensor", table, 0, 0, length, shape=rows)
        whole = (*lifted[:-1], 2 * half)
        tables.append(calls.call("cat", (part, part), -1, shape=whole))
    part_shape = (*shape[:-1], half)
    scaled = calls.call("mul.Tensor", x, tables[0], shape=shape)
    first = calls.call("slice.Tensor", x, len(shape) - 1, 0, half, shape=part_shape)
    second = calls.call("slice.Tensor", x, len(shape) - 1, half, 2 * half, shape=part_shape)
    negative = calls.call("neg", second, shape=part_shape)
    turned = calls.call("cat", (negative, first), -1, shape=shape)
    product = calls.call("mul.Tensor", turned, tables[1], shape=shape)
    return calls.call("add.Tensor", scaled, product, shape=shape, out=out)


@record(frozen=True)
class Choice:
    """The kernel and why it was chosen."""

    kernel: str
    reason: str


class Operand(Protocol):
    """What the choice of a kernel looks at: eager tensors and nodes of traced graphs have it."""

    @property
    def shape(self) -> layout.Shape: ...
    @property
    def strides(self) -> layout.Strides: ...
    @property
    def dtype(self) -> dtypes.DType: ...
    @property
    def ndim(self) -> int: ...


def choose_kernel(
    q: Operand, k: Operand, v: Operand, mask: Operand | None, dropout_p: float, causal: bool = False,
    grad: bool = False, mask_grad: bool = False,
) -> Choice:  # fmt: skip
    """The kernel that `torch.nn.functional.scaled_dot_product_attention` picks on an sm_90 device.

    `mask` is the caller's, before a boolean one is converted; `grad` says whether autograd records the call, and
    `mask_grad` whether the mask needs a gradient.
    """
    half = q.dtype in dtypes.HALVES
    kernel = why_not = ""
    for kernel in ("cudnn", "flash", "efficient") if half else ("efficient",):
        why_not = _refusal(kernel, (q, k, v, mask, dropout_p, causal, grad, mask_grad)) or ""
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


def _refusal(kernel: str, given: Call) -> str | None:
    """The constraints of each fused kernel, as PyTorch 2.15 has them in sdp_utils.cpp.

    Inputs of other ranks than 4 had none of these kernels before 2.15, and are taken so.
    """
    q, k, v, mask = given[:4]
    head, value, half = q.shape[-1], v.shape[-1], q.dtype in dtypes.HALVES
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        return "takes 4-D inputs only"
    if not half and (kernel != "efficient" or q.dtype is not dtypes.float32):
        return "has no float64" if q.dtype is dtypes.float64 else f"takes half precision only, not {q.dtype.name}"
    reason = _refusal_of(kernel, given)
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


_UNALIGNED = ("efficient takes heads of a multiple", "efficient was asked for, but takes heads of a multiple")
Call: TypeAlias = tuple[Operand, Operand, Operand, Operand | None, float, bool, bool, bool]  # see `choose_kernel`


def decide_kernel(sdpa: str, given: Call, asked: str = "asked for") -> Choice:
    """The kernel that runs under `--sdpa`; the reason says where cards before compute capability 8.0 run another."""
    choice, other = choose_kernel(*given), ""
    if sdpa != "auto":
        why_not = None if sdpa == "math" else _refusal(sdpa, given)
        refused = f"{sdpa} was asked for, but {why_not}: PyTorch fails if it may take no other"
        choice = Choice(sdpa, asked) if why_not is None else Choice(choice.kernel, refused)
    if choice.kernel == "flash" and given[0].shape[-1] % 8:
        other = registry.PADDED_HEADS
    elif choice.kernel == "math" and given[0].dtype is dtypes.float32 and choice.reason.startswith(_UNALIGNED):
        other = registry.ANY_HEADS
    elif choice.kernel in ("flash", "cudnn") and given[0].dtype is dtypes.float16 and _differs_in_efficient(given):
        other = registry.EFFICIENT
    return Choice(choice.kernel, choice.reason + other)


def _differs_in_efficient(given: Call) -> bool:
    """Whether the memory-efficient kernel takes other memory: layouts, copies of masks, blocks of its backward."""
    (q, _, _, mask), head, shape = given[:4], given[2].shape[-1], (*given[0].shape[:3], given[2].shape[-1])
    strides = zip(shape, like_query(q, head), _by_length(shape), strict=True)
    is_copied = mask is not None and any(stride % 8 for stride in mask.strides[:-1])
    in_blocks = given[6] and q.shape[2] % _GRADIENT_ROWS[head > 64] + head % 64 > 0
    return is_copied or in_blocks or any(size > 1 and a != b for size, a, b in strides)


def _refusal_of(kernel: str, given: Call) -> str | None:
    """What flash and cuDNN ask for beside what all fused kernels do."""
    q, k, v, mask, dropout_p, causal, grad, mask_grad = given
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
        if mask is not None and mask_grad:
            return "takes no mask that needs a gradient"
        if dropout_p * 16 % 1:  # check_cudnn_dropout
            return "takes dropout of a multiple of 1/16 only"
        if k.shape[2] == 1 or (q.shape[2] == 1 and dropout_p):
            return "takes no sequence of one element"
    return None


def _attention_flops(op: Op, args: Sequence[Arg], shapes: registry.Shapes) -> int:
    """q k^T and p v: batch x heads x queries x keys x (head + value head)."""
    q, k, v = (registry.size_of(arg, shapes) for arg in args[:3])
    return 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


# what it calls in graphs of torch.compile
for _kernel in ("efficient_attention", "flash_attention", "flash_attention_for_cpu", "cudnn_attention"):
    registry.declare(f"_scaled_dot_product_{_kernel}", flops=_attention_flops)


@registry.rule("scaled_dot_product_attention", kinds=("product",), autocast="half", flops=_attention_flops)
def scaled_dot_product_attention(
    e: Eager, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Fused: saves q, k, v, result, log-sum-exp and two seeds (8 bytes), never the L x S matrix; math saves it."""
    if not e.training:
        dropout_p = 0.0
    records, mask_grad = e.needs_grad(query, key, value), attn_mask is not None and attn_mask.requires_grad
    given = (query, key, value, attn_mask, dropout_p, is_causal, records, mask_grad)
    asked = "asked for" if e.torch >= DEFAULTS_CHANGED else "asked for, or before PyTorch 2.0"
    choice = decide_kernel(e.sdpa, given, asked)
    e.choices[f"scaled_dot_product_attention runs its {choice.kernel} kernel", choice.reason] += 1
    if attn_mask is not None and attn_mask.dtype is dtypes.bool_:
        attn_mask = _float_mask(e, attn_mask, query)
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


def like_query(query: Operand, head: int) -> layout.Strides:
    """The result's layout follows the query's order of dimensions (`alloc_with_matching_layout`)."""
    shape = (*query.shape[:-1], head)
    order = sorted(range(4), key=lambda i: (-query.strides[i], i))
    strides = [0] * 4
    step = 1
    for i in reversed(order):
        strides[i] = step
        step *= max(shape[i], 1)
    return tuple(strides)


def kernel_results(
    e: Eager, kernel: str, q: Tensor, k: Tensor, v: Tensor, logsumexp: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """What a fused kernel makes: the result, and log-sum-exp (where asked for) with two seeds."""
    b, h, length, _ = q.shape
    name, shape = f"aten._scaled_dot_product_{kernel}_attention.default", (b, h, length, v.shape[-1])
    efficient, sums = kernel == "efficient", list[layout.Shape]()
    out = e.empty(shape, q.dtype, _by_length(shape) if efficient else like_query(q, v.shape[-1]), name)
    if efficient:
        sums = [(b, h, -(-length // 32) * 32 if logsumexp else 0)]
    elif logsumexp:
        sums = [(b, h, length, 1) if kernel == "cudnn" else (b, h, length)]
    return out, [*(e.empty(size, dtypes.float32) for size in sums), *(e.empty((), dtypes.int64) for _ in range(2))]


def kernel_gradients(e: Eager, kernel: str, q: Tensor, k: Tensor, v: Tensor, dtype: dtypes.DType) -> list[Tensor]:
    """What the backward of a fused kernel makes; `dtype` is that of the incoming gradient."""
    e.kernel(f"aten._scaled_dot_product_{kernel}_attention_backward.default")
    efficient = kernel == "efficient"
    return [e.empty(t.shape, dtype, _by_length(t.shape)) if efficient else e.empty_like(t) for t in (q, k, v)]


def _by_length(shape: layout.Shape) -> layout.Strides:
    """Strides of [B, H, L, D] in the memory order [B, L, H, D]."""
    s = layout.contiguous_strides((shape[0], shape[2], shape[1], shape[3]))
    return s[0], s[2], s[1], s[3]


def _fused(e: Eager, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: str) -> Tensor:
    shape = (*q.shape[:3], k.shape[2])
    if mask is not None and mask.shape != shape:
        mask = expand(e, mask, shape)
    out, extras = kernel_results(e, kernel, q, k, v, kernel == "flash" or e.training)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        return kernel_gradients(e, kernel, q, k, v, q.dtype)

    node, saves = f"ScaledDotProduct{kernel.title()}AttentionBackward0", [q, k, v, out, *extras, mask]
    return e.record(node, out, [q, k, v], [Formula((0, 1, 2), gradients)], saves)


def _efficient(e: Eager, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        mask = _prepare_bias(e, q, k, mask)
    out, extras = kernel_results(e, "efficient", q, k, v, e.needs_grad(q, k, v, mask))

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)
        results: list[Tensor | None] = [*kernel_gradients(e, "efficient", q, k, v, grad.dtype)]
        by_mask = None
        if mask is not None and need[3]:
            last = mask.shape[-1]
            padded = -(-last // 16) * 16 if last % 16 else last
            full = e.empty((*q.shape[:3], padded), grad.dtype)
            by_mask = e.alias(full, (*q.shape[:3], last), full.strides)
        return [*results, by_mask]

    node, saves = "ScaledDotProductEfficientAttentionBackward0", [q, k, v, mask, out, *extras]
    return e.record(node, out, [q, k, v, mask], [Formula((0, 1, 2, 3), gradients)], saves)


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
    if e.torch < DEFAULTS_CHANGED:
        return _written_out(e, q, k, v, mask, dropout_p)
    half = q.dtype if q.dtype in dtypes.HALVES else None
    if half is not None:
        q, k, v = (to_copy(e, t, dtypes.float32) for t in (q, k, v))
    if is_causal:
        square = e.empty((q.shape[-2], k.shape[-2]), dtypes.bool_, kernel="aten.ones.default")
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
    if half is None:
        return matmul(e, weights, v)
    to_copy(e, weights, half)  # the second result, made first: g++ evaluates arguments from the right
    return to_copy(e, matmul(e, weights, v), half)


@scoped
def _written_out(e: Eager, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    """Products and a softmax as code before 2.0 has them, in the dtype of its inputs; a causal mask is a buffer of
    the model and not counted. Autocast computes a softmax in float32 (autocast_mode.h)."""
    dtype = q.dtype
    if q.ndim >= 3 and q.shape[-3] != k.shape[-3]:
        k = repeat_interleave(e, k, q.shape[-3] // k.shape[-3], -3)
        v = repeat_interleave(e, v, q.shape[-3] // v.shape[-3], -3)
    product = matmul(e, q, transpose(e, k, -2, -1))
    scores = mul(e, product, 1.0)
    e.free(product)
    if mask is not None:
        scores = add(e, scores, mask)
        e.collect(keep=(scores,))
    if e.autocast is not None and scores.dtype is not dtypes.float32:
        scores = to_copy(e, scores, dtypes.float32)
    weights = softmax(e, scores, -1)
    e.collect(keep=(weights,))
    weights = dropout(e, weights, dropout_p, True)
    weights = weights if weights.dtype is dtype else to_copy(e, weights, dtype)  # `to()` makes none of the same type
    e.collect(keep=(weights,))
    return matmul(e, weights, v)


@scoped
def _scores(e: Eager, q: Tensor, k: Tensor) -> Tensor:
    return matmul(e, q, mul(e, transpose(e, k, -2, -1), 1.0))


# -- memory that the backward kernels take for themselves --------------------------------------------------------------

_FLOAT = 4  # bytes; accumulators are float32
_GRADIENT_ROWS = (64, 128)  # queries of a block; kernel_backward.h, kBlockSizeI: for heads up to 64, for larger ones
_BLOCK_HEADER = 16  # bytes; kernel_backward.h, GradQTempStorage: a lock, a counter and padding


def _held(*bands: Band) -> list[registry.Temporary]:
    return [registry.Temporary(band, "attention backward") for band in bands]


# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: flash and cuDNN begin with sm_80, and before it the
# memory-efficient kernel takes float16 and float32 alone (`less_than_sm80_mem_efficient_dtypes`)
registry.from_ampere(
    " ".join(f"aten._scaled_dot_product_{kernel}_attention.default" for kernel in ("flash", "cudnn", "efficient")),
    "fused attention",
)


@registry.workspace("aten._scaled_dot_product_flash_attention_backward.default", results=2)
def flash_backward(call: registry.KernelCall) -> list[registry.Temporary]:
    """FlashAttention-2: the sum over d_out x out, the query gradient in float32, expanded key gradients.

    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: softmax_d and dq_accum, rounded to 128
    queries and to 32 (above 128: 64) of the head; dk and dv of all query heads where there are fewer key heads.
    """
    (batch, heads, queries, head), (_, key_heads, keys, _) = [form.shape for form in call.results[:2]]
    rows, width = round_up(queries, 128), round_up(head, 32 if head <= 128 else 64)
    sizes = [batch * heads * rows * _FLOAT, batch * heads * rows * width * _FLOAT]
    if key_heads != heads:
        sizes += [batch * keys * heads * round_up(head, 8) * call.results[0].dtype.itemsize] * 2
    return _held(*map(exactly, sizes))


@registry.workspace("aten._scaled_dot_product_cudnn_attention_backward.default", results=2)
def cudnn_backward(call: registry.KernelCall) -> list[registry.Temporary]:
    """The query gradient and its row sums in float32 (workspace of the graph, MHA.cpp); newer engines need less."""
    batch, heads, queries, head = call.results[0].shape
    rows = batch * heads * queries * _FLOAT
    total = rows * head + rows
    return _held(Band(rows, total, total + batch * heads * round_up(queries, 128) * _FLOAT))


@registry.workspace("aten._scaled_dot_product_efficient_attention_backward.default", results=2)
def efficient_backward(call: registry.KernelCall) -> list[registry.Temporary]:
    """Memory-efficient: delta, and the query gradient in blocks of float32.

    aten/src/ATen/native/transformers/cuda/attention_backward.cu: in float32 delta is (grad_out x out).sum(-1), made
    contiguous: a product of the size of the result, which the sum outlives, and delta twice. In half precision the
    kernel computes it. mem_eff_attention/kernel_backward.h, workspace_elements_gq: blocks of queries by 64 columns of
    the head, each with a header; key and value gradients stay in registers up to a head of 128.
    """
    batch, heads, queries, head = call.results[0].shape
    delta = exactly(batch * heads * queries * _FLOAT)
    tiles = batch * heads * -(-head // 64)
    sizes = [tiles * -(-queries // rows) * (rows * 64 * _FLOAT + _BLOCK_HEADER) for rows in _GRADIENT_ROWS]
    accumulated = Band(min(sizes), sizes[head > 64], max(sizes))
    if call.results[0].dtype.itemsize < _FLOAT:
        return _held(delta, accumulated)
    product = registry.Temporary(exactly(delta.expected * head), "attention backward: product", held=False)
    return [product, *_held(delta, delta, accumulated)]


class _Calls(Calls):
    """Ops of one attention node."""

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
        kwargs: dict[str, Arg] = {"enable_gqa": True} if grouped else {}
        return self.call("scaled_dot_product_attention", q, k, v, mask, 0.0, causal, shape=shape, kwargs=kwargs)

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


def _attention_sizes(node: Node, x: Shape, weight: Shape | None, *_: Shape | None) -> Results:
    if weight is None:
        return []
    widths = node.attrs.get("qkv_hidden_sizes")
    width = int(widths[2]) if isinstance(widths, tuple) and len(widths) == 3 else weight[-1] // 3
    return [((*x[:2], width), 0)]


@translation("Attention", sizes=_attention_sizes)
def onnx_attention(ctx: Context, node: Node) -> list[Op] | None:
    return onnx_packed_attention(ctx, node) if node.domain else onnx_onnx_attention(ctx, node)


def onnx_onnx_attention(ctx: Context, node: Node) -> list[Op] | None:
    """Opset 23: Q, K, V of 3 or 4 dimensions, mask, earlier keys and values."""
    calls = _Calls(ctx, node)
    shapes = [ctx.net.shape(name) for name in node.inputs[:3]]
    if any(shape is None for shape in shapes) or _output(node, 3):
        return None  # the product of queries and keys as a result: no fused kernel gives it
    flat = len(shapes[0] or ()) == 3
    counts = (integer(node, "q_num_heads", 0), *(integer(node, "kv_num_heads", 0),) * 2)
    parts: list[tuple[Ref, tuple[int, ...]]] = []
    for name, shape, count in zip(node.inputs[:3], shapes, counts, strict=True):
        assert shape is not None
        parts.append(calls.heads(ctx.ref(name), shape, count) if flat else (ctx.ref(name), shape))
    (q, q_shape), (k, k_shape), (v, v_shape) = parts
    k, k_shape = calls.join(_input(node, 4), k, k_shape, _output(node, 1))
    v, v_shape = calls.join(_input(node, 5), v, v_shape, _output(node, 2))
    shape = (*q_shape[:3], v_shape[3])
    causal = bool(integer(node, "is_causal", 0))
    mask = ctx.optional(node, 3)
    covered = ctx.net.shape(_input(node, 3)) if mask is not None else None
    if covered and 1 < covered[-1] < k_shape[2]:  # "can also be shorter" (onnx/docs/Operators.md)
        padded = ctx.fresh(node)
        ctx.define(padded, node.inputs[3], (*covered[:-1], k_shape[2]))
        missing = (0, k_shape[2] - covered[-1])
        calls.ops.append(ctx.op(node, "aten::constant_pad_nd", mask, missing, float("-inf"), outputs=(padded,)))
        mask = Ref(padded)
    grouped = q_shape[1] != k_shape[1]
    if not flat:
        kwargs: dict[str, Arg] = {"enable_gqa": True} if grouped else {}
        target = "aten::scaled_dot_product_attention"
        return [*calls.ops, ctx.op(node, target, q, k, v, mask, 0.0, causal, kwargs=kwargs)]
    return calls.merge(calls.attend(q, k, v, mask, causal, shape, grouped), shape, node.outputs[0])


def onnx_packed_attention(ctx: Context, node: Node) -> list[Op] | None:
    """com.microsoft Attention: one projection for queries, keys and values."""
    shape, weight = ctx.net.shape(node.inputs[0]), ctx.net.shape(node.inputs[1])
    heads = integer(node, "num_heads", 0)
    if shape is None or weight is None or not heads or len(shape) != 3 or _input(node, 4):
        return None
    calls = _Calls(ctx, node)
    projected = (*shape[:2], weight[1])
    if node.inputs[1] in ctx.net.weights and ctx.turnable(node.inputs[1]):
        ctx.transposed.add(node.inputs[1])
        x = calls.call(
            "linear", ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1]), ctx.optional(node, 2), shape=projected
        )
    else:
        x = calls.call("matmul", ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1]), shape=projected)
        if ctx.optional(node, 2) is not None:
            x = calls.call("add.Tensor", x, ctx.optional(node, 2), shape=projected)
    sizes = node.attrs.get("qkv_hidden_sizes")
    widths = tuple(int(s) for s in sizes) if isinstance(sizes, tuple) and sizes else (weight[1] // 3,) * 3
    names = [ctx.fresh(node) for _ in range(3)]
    for name, width in zip(names, widths, strict=True):
        ctx.define(name, node.inputs[0], (*shape[:2], width))
    calls.ops.append(ctx.op(node, "aten::split_with_sizes", x, widths, 2, outputs=names))
    parts = [calls.heads(Ref(n), (*shape[:2], w), heads) for n, w in zip(names, widths, strict=True)]
    result = (*parts[0][1][:3], parts[2][1][3])
    mask = ctx.optional(node, 5)  # a mask of token counts (input 3) has no counterpart: no padding is assumed
    q, k, v = (ref for ref, _ in parts)
    out = calls.attend(q, k, v, mask, bool(integer(node, "unidirectional", 0)), result, False)
    return calls.merge(out, result, node.outputs[0])


def _multi_head_sizes(
    node: Node, q: Shape, k: Shape | None = None, v: Shape | None = None, *_: Shape | None
) -> Results:
    if len(q) == 5:  # packed: [B, S, heads, 3, size]
        return [((*q[:2], q[2] * q[4]), 0)]
    if v is None or len(v) == 5:
        return [(q, 0)]
    width, length = (v[-1], v[1]) if len(v) == 3 else (v[1] * v[3], v[2])
    heads = integer(node, "num_heads", 1)
    return [((*q[:2], width), 0), *[((q[0], heads, length, width // max(heads, 1)), 0)] * 2]


@translation("MultiHeadAttention", sizes=_multi_head_sizes)
def onnx_multi_head_attention(ctx: Context, node: Node) -> list[Op] | None:
    """com.microsoft MultiHeadAttention: queries, keys and values apart, an optional bias for all three."""
    shapes = [ctx.net.shape(_input(node, k)) for k in range(3)]
    heads = integer(node, "num_heads", 0)
    if any(s is None or len(s) != 3 for s in shapes) or not heads:
        return None  # packed forms
    calls = _Calls(ctx, node)
    parts: list[tuple[Ref, tuple[int, ...]]] = []
    bias, start = _input(node, 3), 0
    for name, shape in zip(node.inputs[:3], shapes, strict=True):
        assert shape is not None
        x = ctx.ref(name)
        if bias:
            piece = calls.call("slice.Tensor", ctx.ref(bias), 0, start, start + shape[2], shape=(shape[2],))
            x = calls.call("add.Tensor", x, piece, shape=shape)
            start += shape[2]
        parts.append(calls.heads(x, shape, heads))
    (q, q_shape), (k, k_shape), (v, v_shape) = parts
    k, k_shape = calls.join(_input(node, 6), k, k_shape, _output(node, 1))
    v, v_shape = calls.join(_input(node, 7), v, v_shape, _output(node, 2))
    shape = (*q_shape[:3], v_shape[3])
    causal = bool(integer(node, "unidirectional", 0))
    return calls.merge(calls.attend(q, k, v, ctx.optional(node, 5), causal, shape, False), shape, node.outputs[0])


def _grouped_sizes(
    node: Node, q: Shape, k: Shape | None = None, v: Shape | None = None, past: Shape | None = None, *_: Shape | None
) -> Results:
    heads, groups = integer(node, "num_heads", 1), integer(node, "kv_num_heads", 1)
    packed = not _input(node, 1)
    size = q[2] // (heads + 2 * groups) if packed else q[2] // heads
    length = q[1] + (past[2] if past is not None and len(past) == 4 else 0)
    cache = ((q[0], groups, length, size), 0)
    return [((*q[:2], heads * size), 0), cache, cache]


@translation("GroupQueryAttention", sizes=_grouped_sizes)
def onnx_group_query_attention(ctx: Context, node: Node) -> list[Op] | None:
    """com.microsoft GroupQueryAttention: causal, fewer heads for keys and values, with a cache."""
    heads, groups = integer(node, "num_heads", 0), integer(node, "kv_num_heads", 0)
    shape = ctx.net.shape(node.inputs[0])
    if shape is None or len(shape) != 3 or not heads or not groups:
        return None
    calls = _Calls(ctx, node)
    names = list(node.inputs[:3])
    shapes = [ctx.net.shape(name) for name in names]
    if not _input(node, 1):  # packed
        size = shape[2] // (heads + 2 * groups)
        widths = (heads * size, groups * size, groups * size)
        names = [ctx.fresh(node) for _ in range(3)]
        shapes = [(*shape[:2], w) for w in widths]
        for name, each in zip(names, shapes, strict=True):
            ctx.define(name, node.inputs[0], each)
        calls.ops.append(ctx.op(node, "aten::split_with_sizes", ctx.ref(node.inputs[0]), widths, 2, outputs=names))
    if any(s is None for s in shapes):
        return None
    parts = [
        calls.heads(ctx.ref(n), s or (), c) for n, s, c in zip(names, shapes, (heads, groups, groups), strict=True)
    ]
    if integer(node, "do_rotary", 0) and _input(node, 8):
        for index in (0, 1):
            ref, sizes = parts[index]
            parts[index] = (rotated(calls, ref, sizes, Ref(_input(node, 7)), Ref(_input(node, 8)), None), sizes)
    (q, q_shape), (k, k_shape), (v, v_shape) = parts
    k, k_shape = calls.join(_input(node, 3), k, k_shape, _output(node, 1))
    v, v_shape = calls.join(_input(node, 4), v, v_shape, _output(node, 2))
    result = (*q_shape[:3], v_shape[3])
    return calls.merge(calls.attend(q, k, v, None, True, result, heads != groups), result, node.outputs[0])


@translation("RotaryEmbedding", sizes=like_first)
def onnx_rotary_embedding(ctx: Context, node: Node) -> list[Op] | None:
    """Opset 23 (x, cos, sin, positions) and com.microsoft (x, positions, cos, sin)."""
    shape = ctx.net.shape(node.inputs[0])
    order = (2, 3, 1) if node.domain else (1, 2, 3)
    partial = integer(node, "rotary_embedding_dim", 0)
    if shape is None or len(shape) not in (3, 4) or (partial and partial != shape[-1]):
        return None
    cos, sin = (ctx.ref(node.inputs[k]) for k in order[:2])
    position_name = _input(node, order[2])
    position_shape = ctx.net.shape(position_name) if position_name else None
    positions: Arg = ctx.ref(position_name) if position_shape is not None and len(position_shape) == 2 else None
    calls = _Calls(ctx, node)
    x, sizes = ctx.ref(node.inputs[0]), shape
    if len(shape) == 3:
        table = ctx.net.shape(node.inputs[order[0]])
        heads = integer(node, "num_heads", 0) or (shape[2] // (2 * table[-1]) if table else 0)
        if not heads:
            return None
        x, sizes = calls.heads(x, shape, heads)
        return calls.merge(rotated(calls, x, sizes, cos, sin, positions), sizes, node.outputs[0])
    rotated(calls, x, sizes, cos, sin, positions, node.outputs[0])
    return calls.ops


_linear, _norm, _attention = scoped(linear), scoped(layer_norm), scoped(scaled_dot_product_attention)


@registry.rule("_native_multi_head_attention")
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


@registry.rule("_transformer_encoder_layer_fwd")
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
