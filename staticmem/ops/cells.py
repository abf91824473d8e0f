"""One step of a recurrent layer (`nn.LSTMCell`, `nn.GRUCell`, `nn.RNNCell`) as CUDA runs it.

Sources: aten/src/ATen/native/RNN.cpp (`LSTMCell`, `GRUCell`, `SimpleCell`: two products, then a fused kernel on CUDA),
aten/src/ATen/native/cuda/RNN.cu (results, workspaces and gradients of the fused kernels) and derivatives.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ops.linear import linear, matmul
from staticmem.ops.pointwise import add_
from staticmem.ops.registry import RULES, rule
from staticmem.ops.views import t

_LSTM_GATES = 4
_GRU_WORKSPACE = 5  # multiples of the hidden size that the fused kernel keeps for its backward


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


@rule("aten::lstm_cell", autocast="half")
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
    saves = [igates, hgates, cell, b_ih, b_hh, cy, workspace]
    e.record("ThnnFusedLstmCellBackward0", [hy, cy], inputs, [Formula((0, 1, 2, 3, 4), gradients)], saves)
    return hy, cy


@rule("aten::gru_cell", autocast="half")
def gru_cell(
    e: Eager, input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Two products and a fused kernel, which saves both, the state, the biases and a workspace of 5 times the state."""
    igates, hgates = _gates(e, input, hx, w_ih, w_hh)
    hy = e.empty(hx.shape, hx.dtype, kernel="aten._thnn_fused_gru_cell.default")
    workspace = e.empty((hx.shape[0], hx.shape[1] * _GRU_WORKSPACE), hx.dtype)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        by_input = e.empty(igates.shape, igates.dtype, kernel="aten._thnn_fused_gru_cell_backward.default")
        by_hidden = e.empty(hgates.shape, hgates.dtype)
        by_state = e.empty(hx.shape, hx.dtype)
        biases = [_summed(e, gates, bias) for gates, bias in ((by_input, b_ih), (by_hidden, b_hh))]
        return [by_input, by_hidden, by_state, *biases]

    inputs = [igates, hgates, hx, b_ih, b_hh]
    saves = [*inputs, workspace]  # the products and biases for a second derivative only, but kept in any case
    e.record("ThnnFusedGruCellBackward0", hy, inputs, [Formula((0, 1, 2, 3, 4), gradients)], saves)
    return hy


def _simple(activation: str) -> Any:
    def run(
        e: Eager, input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Two linear layers, added in place, and the activation: no fused kernel."""
        hidden = linear(e, hx, w_hh, b_hh)
        result: Tensor = RULES[activation].function(e, add_(e, hidden, linear(e, input, w_ih, b_ih)))
        return result

    return run


rule("aten::rnn_tanh_cell", autocast="half")(_simple("aten::tanh"))
rule("aten::rnn_relu_cell", autocast="half")(_simple("aten::relu"))
