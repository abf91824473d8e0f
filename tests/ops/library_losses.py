"""Losses of libraries in PyTorch, for `ops.head_losses`: the tensors that these functions make and the variables that
hold them, restated from transformers 5.23 (`ForCausalLMLoss`), torchtune (`CEWithChunkedOutputLoss` 0.6.1,
`LinearCrossEntropyLoss` at bd2a0fc) and Liger-Kernel 0.8.5 (`LigerFusedLinearCrossEntropyFunction`).

Kernels of Liger, which write in place, are left out, and so are values of data: no label is ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_impls import register_op_impl
from torch.nn import functional

IGNORED = -100


# PyTorch has no fake kernels of these: the sizes are those of native/cuda/LossCTC.cu
@register_op_impl(torch.ops.aten._use_cudnn_ctc_loss.default)  # type: ignore[untyped-decorator]
@register_op_impl(torch.ops.aten._use_miopen_ctc_loss.default)  # type: ignore[untyped-decorator]
def _not_of_libraries(*_: Any) -> bool:
    """Which is so for targets in int64."""
    return False


@register_op_impl(torch.ops.aten._ctc_loss.default)  # type: ignore[untyped-decorator]
def _ctc(mode: Any, func: Any, log_probs: Any, targets: Any, frames: Any, lengths: Any, *_: Any) -> Any:
    length, batch = log_probs.shape[:2]
    log_alpha = log_probs.new_empty((batch, length, 2 * max(lengths) + 1))
    return log_probs.new_empty((batch,)), log_alpha


@register_op_impl(torch.ops.aten._ctc_loss_backward.default)  # type: ignore[untyped-decorator]
def _ctc_backward(mode: Any, func: Any, grad: Any, log_probs: Any, *_: Any, **__: Any) -> Any:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def ctc_loss(outputs: Any, targets: Any, batch_first: bool, normalized: bool) -> Any:
    """What a training loop writes: `functional.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), ...)`. Its mean is
    restated from native/LossCTC.cpp: numbers of fake tensors are not made there."""
    log_probs = outputs if normalized else outputs.log_softmax(-1, dtype=torch.float32)
    if batch_first:
        log_probs = log_probs.transpose(0, 1)
    frames, batch = log_probs.shape[:2]
    of_targets = (targets.shape[1],) * batch
    losses = functional.ctc_loss(log_probs, targets, (frames,) * batch, of_targets, reduction="none")
    lengths = losses.new_full((batch,), targets.shape[1]).clamp_min(1)
    return (losses / lengths).mean()


def causal_lm_loss(logits: Any, labels: Any) -> Any:
    logits = logits.float()
    labels = functional.pad(labels, (0, 1), value=IGNORED)
    shifted = labels[..., 1:].contiguous()
    logits = logits.view(-1, logits.shape[-1])
    return functional.cross_entropy(logits, shifted.view(-1), ignore_index=IGNORED)


def _joined(labels: Any) -> Any:
    return torch.hstack((labels[..., 1:], torch.full((labels.shape[0], 1), IGNORED, device=labels.device)))


def _of_chunk(logits: Any, labels: Any) -> Any:
    return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def chunked_cross_entropy(chunks: Any, labels: Any) -> Any:
    labels = _joined(labels)
    count = (labels != IGNORED).sum()
    parts = [part.reshape(-1) for part in labels.chunk(len(chunks), dim=1)]
    chunks = [chunk.reshape(-1, chunk.size(-1)) for chunk in chunks]
    total: Any = 0.0
    for chunk, part in zip(chunks, parts, strict=True):
        total += _of_chunk(chunk, part)
    return total / count


def _where(mask: Any) -> Any:
    """`torch.where(mask)[0]`, where all are true: fake tensors do not know how many."""
    return torch.zeros((mask.numel(), mask.ndim), dtype=torch.int64, device=mask.device).unbind(1)[0]


def _of_hidden(hidden: Any, weight: Any, bias: Any, labels: Any) -> Any:
    logits = functional.linear(hidden, weight, bias)
    return functional.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORED)


def linear_cross_entropy(outputs: Any, weight: Any, bias: Any, labels: Any) -> Any:
    labels = _joined(labels)  # a variable of the recipe
    return _linear_cross_entropy(outputs, weight, bias, labels)


def _linear_cross_entropy(outputs: Any, weight: Any, bias: Any, targets: Any) -> Any:
    valid = _where(targets != IGNORED).numel()
    targets = targets.reshape(-1)
    outputs = outputs.reshape(-1, outputs.shape[-1])
    indices = _where(targets != IGNORED)
    outputs, targets = outputs.index_select(0, indices), targets.index_select(0, indices)
    total = torch.full((), 0.0, device=targets.device)
    for hidden, of_hidden in zip(outputs.tensor_split(8), targets.tensor_split(8), strict=True):
        loss = _of_hidden(hidden, weight, bias, of_hidden)
        total += loss
    return total / valid


class Fused(torch.autograd.Function):  # type: ignore[misc]
    """On a GPU of compute capability 8.0 or more, with reduction="mean"."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, target: Any, bias: Any) -> Any:
        gradients = _gradients(hidden, weight, target, bias)
        loss, *saved = gradients
        ctx.save_for_backward(*(None if tensor is None else tensor.detach() for tensor in saved))
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        one = torch.full((), 1.0, device=gradient.device)
        torch.eq(gradient, one).all()  # torch.equal
        return of_hidden, of_weight, None, of_bias


def _next_power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _gradients(hidden: Any, weight: Any, target: Any, bias: Any) -> Any:
    (tokens, width), classes = hidden.shape, weight.shape[0]
    parts = -(-classes // width)
    size = min(_next_power(-(-tokens // parts)), tokens)
    of_hidden = torch.zeros_like(hidden)
    of_weight = torch.zeros_like(weight) if hidden.requires_grad and weight.requires_grad else None
    of_bias = torch.zeros_like(bias) if hidden.requires_grad and bias is not None else None
    losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
    mask = target != IGNORED
    mask.sum()
    alike = hidden.dtype == weight.dtype
    if torch.is_autocast_enabled("cuda"):
        alike = alike and hidden.dtype == torch.get_autocast_dtype("cuda")
    shared = None
    if alike and (bias is None or bias.dtype == hidden.dtype):
        shared = torch.empty((size, classes), dtype=hidden.dtype, device=hidden.device)
    for start in range(0, tokens, size):
        rows = hidden[start : start + size]
        if shared is not None:
            logits = shared[: len(rows)]
            torch.mm(rows, weight.t(), out=logits)
            if bias is not None:
                logits.add_(bias)
        else:
            logits = rows @ weight.t()
            if bias is not None:
                logits = logits + bias
        if hidden.requires_grad:
            if alike and logits.dtype == of_hidden.dtype:
                torch.mm(logits, weight, out=of_hidden[start : start + size])
            else:
                of_hidden[start : start + size] = logits @ weight
        if of_weight is not None:
            half = logits.dtype in (torch.float16, torch.bfloat16)
            if half and of_weight.dtype in (torch.float32, logits.dtype):
                product = rows if rows.dtype == logits.dtype else rows.to(logits.dtype)
                wide = {"out_dtype": torch.float32} if of_weight.dtype == torch.float32 else {}
                torch.addmm(of_weight, logits.t(), product, out=of_weight, **wide)
                del product
            else:
                of_weight += torch.mm(logits.t(), rows).float()
        if of_bias is not None:
            torch.add(of_bias, logits.sum(dim=0), out=of_bias)
        del logits, rows
    del shared
    return torch.sum(losses), of_hidden, of_weight, of_bias


def fused_linear_cross_entropy(hidden: Any, weight: Any, bias: Any, labels: Any) -> Any:
    if labels.ndim == 2:
        labels = functional.pad(labels, (0, 1), value=IGNORED)
        shifted = labels[..., 1:].contiguous()
        return Fused.apply(hidden.view(-1, hidden.shape[-1]), weight, shifted.view(-1), bias)
    return Fused.apply(hidden, weight, labels, bias)
