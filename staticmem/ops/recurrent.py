"""Recurrent layers as cuDNN runs them.

`_cudnn_rnn` (aten/src/ATen/native/cudnn/RNN.cpp) is one node over the whole sequence. It saves input, weights, hidden
states, output and cuDNN's reserve, whose size only cuDNN knows: we state the gates of every layer, direction and step
(4 for LSTM, 3 for GRU, 1 for RNN) plus a cell state for LSTM, which is what the gradient needs at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ops.registry import rule

_GATES = {"lstm": 5, "gru": 4, "rnn_tanh": 1, "rnn_relu": 1}


def _recurrent(
    e: Eager, kind: str, input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], layers: int, train: bool,
    bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`_cudnn_rnn` works on (T, B, features): with `batch_first` its result is a transposed view, and what comes in is
    copied where it is not contiguous that way."""
    directions = 2 if bidirectional else 1
    hidden = hx[0].shape[-1]
    batch = input.shape[0 if batch_first else 1] if input.ndim == 3 else 1
    if input.ndim == 3 and hx[0].ndim == 3 and hx[0].shape[1] != batch:
        raise ValueError(f"a batch of {batch} does not fit states of {hx[0].shape[1]}")
    out_features = hx[0].shape[-1] * directions
    e.kernel("aten._cudnn_rnn.default")
    copy = _time_first(e, input, batch_first)
    out = _laid_out(e, (*input.shape[:-1], out_features), input, batch_first)
    states = [e.empty(h.shape, h.dtype) for h in hx]
    if copy is not None:
        e.free(copy)
    steps = input.numel // input.shape[-1]
    reserve = e.empty((_GATES[kind] * layers * directions * steps * hidden if train else 0,), input.dtype)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("aten._cudnn_rnn_backward.default")
        given = [grad if grad is not None else e.empty_like(t) for grad, t in zip(grads, (out, *states), strict=True)]
        copies = [_time_first(e, input, batch_first), _time_first(e, given[0], batch_first)]
        made = [_laid_out(e, input.shape, input, batch_first) if need[0] else None]
        made += [e.empty(t.shape, t.dtype) if wanted else None for t, wanted in zip(inputs[1:], need[1:], strict=True)]
        for temporary in copies:
            if temporary is not None:
                e.free(temporary)
        return made

    inputs = [input, *hx, *params]
    formula = Formula(tuple(range(len(inputs))), gradients)
    e.record("CudnnRnnBackward0", [out, *states], inputs, [formula], [*inputs, out, reserve])
    return out, *states


def _time_first(e: Eager, tensor: Tensor, batch_first: bool) -> Tensor | None:
    """A copy as (T, B, features), where the tensor is not contiguous that way."""
    order = (1, 0, 2) if batch_first and tensor.ndim == 3 else tuple(range(tensor.ndim))
    shape, strides = (tuple(values[d] for d in order) for values in (tensor.shape, tensor.strides))
    if Tensor(tensor.storage, shape, strides, tensor.dtype).is_contiguous:
        return None
    return e.empty(shape, tensor.dtype)


def _laid_out(e: Eager, shape: Sequence[int], like: Tensor, batch_first: bool) -> Tensor:
    """A result in memory as (T, B, features)."""
    if not batch_first or len(shape) != 3:
        return e.empty(shape, like.dtype)
    batch, _, features = shape
    return e.empty(shape, like.dtype, (features, batch * features, 1))


@rule("aten::lstm.input", kinds=("recurrent",), autocast="half")
def lstm(
    e: Eager, input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """cuDNN: one node; saves input, weights, states, output and a reserve (assumed: gates and cells of every step)."""
    return _recurrent(e, "lstm", input, hx, params, num_layers, train and e.training, bidirectional, batch_first)


def _single(kind: str) -> Any:
    def run(
        e: Eager, input: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return _recurrent(e, kind, input, [hx], params, num_layers, train and e.training, bidirectional, batch_first)

    run.__doc__ = (
        "cuDNN: one node; saves input, weights, state, output and a reserve (assumed: the gates of every step)."
    )
    return run


for _kind in ("gru", "rnn_tanh", "rnn_relu"):
    rule(f"aten::{_kind}.input", kinds=("recurrent",), autocast="half")(_single(_kind))
