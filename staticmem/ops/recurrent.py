"""Recurrent layers as cuDNN runs them, and single steps (`nn.LSTMCell`, `nn.GRUCell`, `nn.RNNCell`) as CUDA does.

`_cudnn_rnn` (aten/src/ATen/native/cudnn/RNN.cpp) is one node over the whole sequence. It saves input, weights, hidden
states, output and cuDNN's reserve, whose size only cuDNN knows: we state the gates of every layer, direction and step
(4 for LSTM, 3 for GRU, 1 for RNN) plus a cell state for LSTM, which is what the gradient needs at least.

Sources of cells: aten/src/ATen/native/RNN.cpp (`LSTMCell`, `GRUCell`, `SimpleCell`: two products, then a fused kernel
on CUDA), aten/src/ATen/native/cuda/RNN.cu (results, workspaces and gradients of the fused kernels), derivatives.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.arithmetic import add_
from staticmem.ops.linear import linear, matmul
from staticmem.ops.onnx import Context, integer, text, translation
from staticmem.ops.registry import KernelCall, Shapes, Temporary, from_ampere, function_of, rule, size_of, workspace
from staticmem.ops.views import t
from staticmem.units import Band

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
        results = [_laid_out(e, input.shape, input, batch_first) if need[0] else None]
        results += [
            e.empty(t.shape, t.dtype) if wanted else None for t, wanted in zip(inputs[1:], need[1:], strict=True)
        ]
        for temporary in copies:
            if temporary is not None:
                e.free(temporary)
        return results

    inputs = [input, *hx, *params]
    formula = Formula(tuple(range(len(inputs))), gradients)
    e.record("CudnnRnnBackward0", [out, *states], inputs, [formula], [*inputs, out, reserve])
    return out, *states


_MOST_GATES = 4  # of an LSTM, the most of all cells


# aten/src/ATen/native/RNN.cpp, `use_cudnn_rnn`: `supportsBFloat16RNNWithCuDNN` of cuda/detail/CUDAHooks.cpp
from_ampere("aten._cudnn_rnn.default", "recurrent layers of cuDNN")


@workspace("aten._cudnn_rnn.default aten._cudnn_rnn_backward.default", results=0)
def recurrent_workspace(call: KernelCall) -> list[Temporary]:
    """Only cuDNN knows it (cudnnGetRNNTempSpaceSizes; ATen's cudnn/RNN.cpp): for the backward we state the forward's.

    The products with the inputs of all steps are one (Appleyard, Kocisky and Blunsom 2016, "Optimizing Performance of
    Recurrent Neural Networks on GPUs"), so the gates of all steps of one layer are expected; at least nothing, at most
    those of all layers, which the reserve is made of.
    """
    if not call.forward:
        return []
    gates = _MOST_GATES * call.forward[0].nbytes  # of the result; the reserve is the last
    return [Temporary(Band(0, gates, max(gates, call.forward[-1].nbytes)), "cuDNN recurrent layer")]


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


def _recurrent_flops(op: Op, args: Sequence[Arg], shapes: Shapes) -> int:
    """Every weight matrix once for each step of the sequence: the last list of tensors has the weights."""
    steps = prod(size_of(args[0], shapes)[:-1])
    sizes = [size_of(w, shapes) for w in [arg for arg in args if isinstance(arg, tuple)][-1]]
    # an ONNX file has the matrices of both directions in one tensor of three dimensions, and their biases in two rows
    matrices = [shape for shape in sizes if len(shape) == 3 or (len(shape) == 2 and shape[0] > 2)]
    return sum(2 * steps * prod(shape) for shape in matrices)


@rule("lstm.input", kinds=("recurrent",), autocast="half", flops=_recurrent_flops)
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
    rule(f"{_kind}.input", kinds=("recurrent",), autocast="half", flops=_recurrent_flops)(_single(_kind))


GRU_WORKSPACE = 5  # multiples of the hidden size that the fused kernel keeps for its backward


def _gates(e: Eager, input: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor) -> tuple[Tensor, Tensor]:
    """Products of input and state with their weights; the biases are added by the fused kernel."""
    if input.shape[0] != hidden.shape[0]:
        raise ValueError(f"a batch of {input.shape[0]} does not fit states of {hidden.shape[0]}")
    return matmul(e, input, t(e, w_ih)), matmul(e, hidden, t(e, w_hh))


def _summed(e: Eager, gates: Tensor, bias: Tensor | None) -> Tensor | None:
    """The gradient of a bias: a sum over the batch, made whether it is wanted or not."""
    if bias is None:
        return None
    return e.empty(bias.shape, gates.dtype, kernel="aten.sum.dim_IntList")


@rule("lstm_cell", autocast="half")
def lstm_cell(
    e: Eager, input: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Two products and a fused kernel, which saves both products, the cell states, the biases and its workspace."""
    hidden, cell = hx
    igates, hgates = _gates(e, input, hidden, w_ih, w_hh)
    hy = e.empty(cell.shape, cell.dtype, kernel="aten._thnn_fused_lstm_cell.default")
    cy = e.empty(cell.shape, cell.dtype)
    workspace = e.empty(igates.shape, igates.dtype)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        gates = e.empty(igates.shape, igates.dtype, kernel="aten._thnn_fused_lstm_cell_backward_impl.default")
        by_cell = e.empty(cell.shape, cell.dtype)
        by_bias = _summed(e, gates, b_ih)
        return [gates, gates, by_cell, by_bias, by_bias]

    inputs = [igates, hgates, cell, b_ih, b_hh]
    saves = [cell, b_hh, hgates, b_ih, igates, cy, workspace]
    e.record("ThnnFusedLstmCellBackward0", [hy, cy], inputs, [Formula((0, 1, 2, 3, 4), gradients)], saves)
    return hy, cy


@rule("gru_cell", autocast="half")
def gru_cell(
    e: Eager, input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Two products and a fused kernel, which saves both, the state, the biases and a workspace of 5 times the state."""
    igates, hgates = _gates(e, input, hx, w_ih, w_hh)
    hy = e.empty(hx.shape, hx.dtype, kernel="aten._thnn_fused_gru_cell.default")
    workspace = e.empty((hx.shape[0], hx.shape[1] * GRU_WORKSPACE), hx.dtype)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        by_input = e.empty(igates.shape, igates.dtype, kernel="aten._thnn_fused_gru_cell_backward.default")
        by_hidden = e.empty(hgates.shape, hgates.dtype)
        by_state = e.empty(hx.shape, hx.dtype)
        biases = [_summed(e, gates, bias) for gates, bias in ((by_input, b_ih), (by_hidden, b_hh))]
        return [by_input, by_hidden, by_state, *biases]

    inputs = [igates, hgates, hx, b_ih, b_hh]
    saves = [*inputs, workspace]  # the products and biases for a second derivative only, but kept in any case
    return e.record("ThnnFusedGruCellBackward0", hy, inputs, [Formula((0, 1, 2, 3, 4), gradients)], saves)


def _simple(activation: str) -> Any:
    def run(
        e: Eager, input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Two linear layers, added in place, and the activation: no fused kernel."""
        hidden = linear(e, hx, w_hh, b_hh)
        result: Tensor = function_of(activation)(e, add_(e, hidden, linear(e, input, w_ih, b_ih)))
        return result

    return run


rule("rnn_tanh_cell", autocast="half")(_simple("aten::tanh"))

rule("rnn_relu_cell", autocast="half")(_simple("aten::relu"))


_TARGETS = {"LSTM": "aten::lstm.input", "GRU": "aten::gru.input", "RNN": "aten::rnn_tanh.input"}


@translation(*_TARGETS)
def onnx_recurrent(ctx: Context, node: Node) -> list[Op] | None:
    """`Y` of ONNX is [time, direction, batch, hidden], PyTorch's output [time, batch, direction * hidden]."""
    shape = ctx.net.shape(node.inputs[0])
    hidden = integer(node, "hidden_size", 0)
    if shape is None or len(shape) != 3 or not hidden or integer(node, "layout", 0):
        return None
    both = text(node, "direction", "forward") == "bidirectional"
    directions = 2 if both else 1
    target = _TARGETS[node.op]
    if node.op == "RNN" and "Relu" in str(node.attrs.get("activations", "")):
        target = "aten::rnn_relu.input"
    params = _params(ctx, node, directions)
    states: list[Arg] = []
    ops: list[Op] = []
    for position in (5, 6) if node.op == "LSTM" else (5,):
        given = ctx.optional(node, position)
        if given is None:
            name = ctx.fresh(node)
            sizes = (directions, shape[1], hidden)
            ctx.define(name, node.inputs[0], sizes)
            value = ctx.net.values.get(node.inputs[0])
            ops.append(
                ctx.op(node, "aten::zeros", sizes, outputs=(name,), kwargs={"dtype": value.dtype if value else None})
            )
            given = Ref(name)
        states.append(given)
    out = ctx.fresh(node)
    ctx.define(out, node.inputs[0], (shape[0], shape[1], directions * hidden))
    finals = tuple(n or ctx.fresh(node) for n in (*node.outputs, "", "")[1:3])
    names = (out, *finals) if node.op == "LSTM" else (out, finals[0])
    state: Arg = tuple(states) if node.op == "LSTM" else states[0]
    biases = len(node.inputs) > 3 and bool(node.inputs[3])
    ops.append(
        ctx.op(node, target, ctx.ref(node.inputs[0]), state, params, biases, 1, 0.0, True, both, False, outputs=names)
    )
    if node.outputs and node.outputs[0]:
        ops.extend(_onnx_layout(ctx, node, out, (shape[0], shape[1], directions, hidden)))
    return ops


def _params(ctx: Context, node: Node, directions: int) -> tuple[Arg, ...]:
    """Weights in PyTorch's order: input, hidden and the two biases of each direction.

    An export without constant folding reorders the gates with slices, so the weights themselves are found behind them.
    The optimizer of the dynamo exporter folds small ones alone: what is folded already is one tensor of the file, with
    all directions and both biases.
    """
    sources = [ctx.sources(name) if name else () for name in node.inputs[1:4]]
    if not all(sources[:2]) or len(sources) < 2:
        return tuple(ctx.ref(n) for n in node.inputs[1:4] if n)
    order: list[Arg] = []
    for d in range(directions):
        for weights, each in zip(sources, (1, 1, 2), strict=False):
            if len(weights) == each * directions:
                order += [ctx.ref(name) for name in weights[each * d : each * (d + 1)]]
            elif d == 0:  # folded: once for all directions
                order += [ctx.ref(name) for name in weights]
    return tuple(order)


def _onnx_layout(ctx: Context, node: Node, out: str, sizes: tuple[int, int, int, int]) -> list[Op]:
    if sizes[2] == 1:
        return [ctx.op(node, "aten::unsqueeze", Ref(out), 1)]
    name = ctx.fresh(node)
    ctx.define(name, node.inputs[0], sizes)
    return [
        ctx.op(node, "aten::view", Ref(out), sizes, outputs=(name,)),
        ctx.op(node, "aten::transpose.int", Ref(name), 1, 2),
    ]
