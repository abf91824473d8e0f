"""Losses of language models as libraries run them over logits, or over what the last linear layer reads.

Each is one op, `staticmem::NAME`, that `passes.requested.head_losses` adds to a graph. Functions of Python have local
variables: what a rule makes here lives to the end of the function that has the variable, as in the sources:

- transformers 5.23, loss/loss_utils.py, `ForCausalLMLoss`
- torchtune 0.6.1, modules/loss/ce_chunked_output_loss.py, `CEWithChunkedOutputLoss`
- torchtune at bd2a0fc, modules/loss/cross_entropy_loss.py, `LinearCrossEntropyLoss`
- Liger-Kernel 0.8.5, ops/fused_linear_cross_entropy.py, `LigerFusedLinearCrossEntropyFunction`, called as
  transformers/model/loss_utils.py does, `LigerForCausalLMLoss`

Kernels of Liger write in place into what PyTorch has allocated for them. No label is taken to be ignored: an ignored
one makes some of these tensors smaller, none larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.arithmetic import add, add_, div
from staticmem.ops.casts import to
from staticmem.ops.dispatch import call
from staticmem.ops.registry import rule, rule_of
from staticmem.ops.views import contiguous, reshape, t

CHUNKS = 8  # `num_output_chunks` of both losses of torchtune


def _shifted(e: Eager, labels: Tensor) -> Tensor:
    """`pad(labels, (0, 1))[..., 1:].contiguous().view(-1)`: each token is scored by the next one."""
    rows, length = labels.shape
    padded = e.empty((rows, length + 1), labels.dtype, kernel="aten.constant_pad_nd.default")
    return reshape(e, contiguous(e, e.alias(padded, (rows, length), padded.strides)), (-1,))


def _joined(e: Eager, labels: Tensor) -> Tensor:
    """`torch.hstack((labels[..., 1:], ignored))` of torchtune's recipes: the labels of the next tokens."""
    ignored = e.empty((labels.shape[0], 1), labels.dtype, kernel="aten.full.default")
    result = e.empty(labels.shape, labels.dtype, kernel="aten.cat.default")
    e.free(ignored)
    return result


@scoped
def _called(e: Eager, name: str, *args: Any) -> Tensor:
    """A call through the dispatcher: what autocast casts ends with it, but for weights in its cache."""
    result: Tensor = call(e, rule_of(f"aten::{name}"), args, {})
    return result


def _cross_entropy(e: Eager, logits: Tensor, labels: Tensor, reduction: int = 1) -> Tensor:
    return _called(e, "cross_entropy_loss", logits, labels, None, reduction)


@rule("staticmem::causal_lm_loss")
@scoped
def causal_lm_loss(e: Eager, logits: Tensor, labels: Tensor) -> Tensor:
    """`ForCausalLMLoss`: logits in float32, labels shifted by one token, cross entropy over all tokens."""
    full = to(e, logits, dtypes.float32)
    shifted = _shifted(e, labels)
    return _cross_entropy(e, reshape(e, full, (-1, full.shape[-1])), shifted)


@scoped
def _of_chunk(e: Eager, logits: Tensor, labels: Tensor) -> Tensor:
    """`compute_cross_entropy`: the float32 logits of one chunk end with the call."""
    return _cross_entropy(e, to(e, logits, dtypes.float32), labels, 2)


@rule("staticmem::chunked_cross_entropy")
@scoped
def chunked_cross_entropy(e: Eager, chunks: Sequence[Tensor], labels: Tensor) -> Tensor:
    """`CEWithChunkedOutputLoss` over logits of `CHUNKS` parts of the sequence: one part is in float32 at a time, but
    autograd keeps the log-probabilities of all."""
    labels = _joined(e, labels)
    kept = e.empty(labels.shape, dtypes.bool_, kernel="aten.ne.Scalar")
    count = e.empty((), dtypes.int64, kernel="aten.sum.default")
    e.free(kept)
    parts = [reshape(e, e.alias(labels, chunk.shape[:2], labels.strides), (-1,)) for chunk in chunks]
    total: Tensor | None = None
    for chunk, part in zip(chunks, parts, strict=True):
        loss = _of_chunk(e, reshape(e, chunk, (-1, chunk.shape[-1])), part)
        total = add(e, loss, 0.0) if total is None else add_(e, total, loss)
        e.free(loss)
    assert total is not None
    return div(e, total, count)


@scoped
def _of_hidden(e: Eager, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    return _of_chunk(e, _called(e, "linear", hidden, weight, bias), labels)


@rule("staticmem::linear_cross_entropy", kinds=("head_loss",))
@scoped
def linear_cross_entropy(e: Eager, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """`LinearCrossEntropyLoss`: the last linear layer and cross entropy on `CHUNKS` parts of the tokens that have a
    label. Logits end with their part; autograd keeps log-probabilities and the chosen hidden states."""
    labels = _joined(e, labels)
    _where(e, labels)
    e.collect([labels])
    labels = reshape(e, labels, (-1,))
    hidden = reshape(e, hidden, (-1, hidden.shape[-1]))
    indices = _where(e, labels)
    hidden, labels = (_called(e, "index_select", each, 0, indices) for each in (hidden, labels))
    total = e.empty((), dtypes.float32, kernel="aten._to_copy.default")
    pieces = [call(e, rule_of("aten::tensor_split"), (x, CHUNKS, 0), {}) for x in (hidden, labels)]
    before = None
    for some, of_some in zip(*pieces, strict=True):
        loss = _of_hidden(e, some, weight, bias, of_some)
        if before is not None:  # the variable is assigned anew
            e.free(before)
        total = add_(e, total, loss)
        before = loss
    return div(e, total, hidden.shape[0])


def _where(e: Eager, labels: Tensor) -> Tensor:
    """`torch.where(labels != ignored)[0]`: a column of `nonzero`, which has one for each dimension."""
    mask = e.empty(labels.shape, dtypes.bool_, kernel="aten.ne.Scalar")
    indices = e.empty((labels.numel, labels.ndim), dtypes.int64, kernel="aten.nonzero.default")
    e.free(mask)
    return e.alias(indices, (labels.numel,), (labels.ndim,))


# -- Liger -------------------------------------------------------------------------------------------------------


def chunk_size(tokens: int, hidden: int, classes: int, budget: int = 1) -> int:
    """Tokens of which Liger makes logits at once: about `budget` (`chunk_mem_const`) times as many elements as
    the hidden states of all tokens have."""
    parts = -(-classes // max(budget * hidden, 1))
    per_part = -(-tokens // max(parts, 1))
    return max(min(1 << max(per_part - 1, 0).bit_length(), tokens), 1)


@rule("staticmem::fused_linear_cross_entropy", kinds=("head_loss",))
@scoped
def fused_linear_cross_entropy(
    e: Eager, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, budget: int = 1
) -> Tensor:
    """`LigerForCausalLMLoss`: gradients of the hidden states and of the weight are made in the forward, chunk by chunk,
    and saved in place of what they are made of. A float32 weight adds a product of its own size to its gradient, unless
    the products are those of half precision, which write into it."""
    labels = _shifted(e, labels) if labels.ndim == 2 else labels
    flat = reshape(e, hidden, (-1, hidden.shape[-1]))
    grad_enabled, e.grad_enabled = e.grad_enabled, False
    loss, gradients = _fused_forward(e, flat, weight, bias, labels, grad_enabled, budget)
    e.grad_enabled = grad_enabled

    def backward(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        """They are scaled in place, by a kernel, unless `torch.equal` finds that the incoming gradient is 1."""
        e.empty((), dtypes.float32, kernel="aten._to_copy.default")
        e.empty((), dtypes.bool_, kernel="aten.eq.Tensor")
        e.empty((), dtypes.bool_, kernel="aten.all.default")
        return [
            None if kept is None or not wanted else Tensor(kept.storage, kept.shape, kept.strides, kept.dtype)
            for kept, wanted in zip(gradients, need, strict=True)
        ]

    inputs = [flat, weight, bias]
    e.record("LigerFusedLinearCrossEntropyFunctionBackward", loss, inputs, [Formula((0, 1, 2), backward)], gradients)
    return loss


def _fused_forward(
    e: Eager, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, of_inputs: bool, budget: int
) -> tuple[Tensor, list[Tensor | None]]:
    """`fused_linear_cross_entropy_forward`: the loss, and the gradients of hidden states, weight and bias.

    `of_inputs`: autograd is on, so gradients are made; where the hidden states need none, Liger makes none at all.
    """
    e.open_scope()
    tokens, classes = hidden.shape[0], weight.shape[0]
    size = chunk_size(tokens, hidden.shape[1], classes, budget)
    wanted = of_inputs and hidden.requires_grad
    of_hidden = e.empty_like(hidden, kernel="aten.zeros_like.default")
    of_weight = e.empty_like(weight, kernel="aten.zeros_like.default") if wanted and weight.requires_grad else None
    of_bias = e.empty_like(bias, kernel="aten.zeros_like.default") if wanted and bias is not None else None
    losses = e.empty((tokens,), dtypes.float32, kernel="aten.zeros.default")
    e.empty(labels.shape, dtypes.bool_, kernel="aten.ne.Scalar")  # a variable: it lives as long as the call
    e.free(e.empty((), dtypes.int64, kernel="aten.sum.default"))
    alike = hidden.dtype is weight.dtype and e.autocast in (None, hidden.dtype)  # `_can_use_mm_out`
    shared = alike and (bias is None or bias.dtype is hidden.dtype)
    buffer = e.empty((size, classes), hidden.dtype, kernel="aten.empty.memory_format") if shared else None
    for start in range(0, tokens, size):
        rows = min(size, tokens - start)
        _fused_chunk(e, hidden, rows, weight, bias, buffer, alike, (of_hidden if wanted else None, of_weight, of_bias))
    if buffer is not None:
        e.free(buffer)
    loss = e.empty((), losses.dtype, kernel="aten.sum.default")
    gradients = [of_hidden, of_weight, of_bias]
    e.close_scope(keep=[loss, *(g for g in gradients if g is not None)])
    return loss, gradients


def _fused_chunk(
    e: Eager,
    hidden: Tensor,
    rows: int,
    weight: Tensor,
    bias: Tensor | None,
    buffer: Tensor | None,
    alike: bool,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """One pass of the loop. `buffer` has the logits of each chunk where products can write into it."""
    e.open_scope()
    of_hidden, of_weight, of_bias = gradients
    part = e.alias(hidden, (rows, hidden.shape[1]), hidden.strides)
    if buffer is not None:
        logits = e.alias(buffer, (rows, buffer.shape[1]), buffer.strides)
        e.kernel("aten.mm.out")
    else:
        logits = _called(e, "mm", part, t(e, weight))
        if bias is not None:
            without, logits = logits, add(e, logits, bias)
            e.free(without)
    if of_hidden is not None:
        if alike and logits.dtype is of_hidden.dtype:
            e.kernel("aten.mm.out")
        else:
            e.free(_called(e, "mm", logits, weight))
    if of_weight is not None:
        _add_to_weight(e, part, logits, of_weight)
    if of_bias is not None:
        e.free(e.empty(of_bias.shape, logits.dtype, kernel="aten.sum.dim_IntList"))
    e.close_scope()


def _add_to_weight(e: Eager, part: Tensor, logits: Tensor, of_weight: Tensor) -> None:
    """The product of logits and hidden states is added to the gradient: in place for half precision on a GPU from
    compute capability 8.0 and PyTorch 2.8 on, else as a float32 tensor of its own."""
    of_half = logits.dtype in dtypes.HALVES
    if of_half and of_weight.dtype in (dtypes.float32, logits.dtype):
        if part.dtype is not logits.dtype:
            e.free(e.empty(part.shape, logits.dtype, kernel="aten._to_copy.default"))
        e.kernel("aten.addmm.out")
        return
    product = _called(e, "mm", t(e, logits), part)
    if product.dtype is not dtypes.float32:
        full = e.empty(product.shape, dtypes.float32, kernel="aten._to_copy.default")
        e.free(product)
        product = full
    e.free(product)
