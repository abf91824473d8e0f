"""Memory of LSTM, GRU and RNN: packed weights, and the buffers of a run.

Source: onnxruntime/core/providers/cpu/rnn (deep_cpu_lstm.cc, lstm_base.cc, uni_directional_lstm.cc, deep_cpu_gru.cc,
rnn.cc) and contrib_ops/cpu/quantization/dynamic_quantize_lstm.cc; sizes and the largest workspace of each were compared
with onnxruntime 1.32.
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.ir import dtypes
from staticmem.ort.memory.kernel import Kernel, Packing, PackRule, WorkRule, float_pack, integer_pack, matrix


def _directions(kernel: Kernel) -> int:
    return 2 if kernel.text("direction", "forward") == "bidirectional" else 1


def _packed_lstm(kernel: Kernel) -> Packing:
    hidden, kept = kernel.node.number("hidden_size"), 0
    for index in (1, 2):
        kind = kernel.constant(index)
        sizes = matrix(kind, 3)
        if kind is not None and sizes is not None and kind.dtype is dtypes.float32 and sizes[1] == 4 * hidden:
            kept += sizes[0] * float_pack(sizes[1], sizes[2])
    return Packing(kept)


def _packed_gru(kernel: Kernel) -> Packing:
    """The recurrent weights are packed in two parts: of both gates, and of the state."""
    hidden, kept = kernel.node.number("hidden_size"), 0
    weights, recurrent = kernel.constant(1), kernel.constant(2)
    sizes = matrix(weights, 3)
    if weights is not None and sizes is not None and weights.dtype is dtypes.float32 and sizes[1] == 3 * hidden:
        kept += sizes[0] * float_pack(3 * hidden, sizes[2])
    sizes, expected = matrix(recurrent, 3), (_directions(kernel), 3 * hidden, hidden)
    if recurrent is not None and sizes == expected and recurrent.dtype is dtypes.float32:
        kept += expected[0] * (float_pack(2 * hidden, hidden) + float_pack(hidden, hidden))
    return Packing(kept)


def _packed_integer_lstm(kernel: Kernel) -> Packing | None:
    """Weights are stored transposed: rows are those of the input."""
    kept = 0
    for index in (1, 2):
        sizes, signed = matrix(kernel.constant(index), 3), kernel.signed(index)
        if sizes is None or signed is None:
            continue
        kept += sizes[0] * integer_pack(sizes[2], sizes[1], kernel.processor.rows(False, signed))
    return Packing(kept)


def _sizes(kernel: Kernel) -> tuple[int, int, int, int] | None:
    """Length, batch, features, hidden size. A layout other than the default is refused by the kernels."""
    data = kernel.value(0)
    hidden = kernel.node.number("hidden_size")
    if data is None or data.shape is None or len(data.shape) != 3 or hidden < 1 or kernel.node.number("layout"):
        return None
    return (*data.shape, hidden)


def _lstm(kernel: Kernel, quantised: bool = False) -> Sequence[int] | None:
    sizes = _sizes(kernel)
    # DynamicQuantizeLSTM has the same eight inputs first
    lengths = bool(kernel.name(4))
    if sizes is None or (quantised and lengths):
        return None
    length, batch, features, hidden = sizes
    state, count = batch * hidden, _directions(kernel)
    requests = [4 * state * count for number in (1, 2) if not kernel.given(number)]
    later: list[int] = []
    for number in range(count):
        floats = [hidden, hidden, state, state, state, 4 * state * length]
        if kernel.name(3):
            floats += [hidden] * 4
        if kernel.text("direction", "forward") == "reverse" or number:
            floats += [length * batch * features, length * state]
        requests += [4 * size for size in floats]
        if not lengths:
            later.append(4 * batch)
        if quantised:  # of the largest left side in bytes, and of a step's products
            later += [max(length * batch * features, state), 16 * state]
    return requests + later


def _quantised_lstm(kernel: Kernel) -> Sequence[int] | None:
    return _lstm(kernel, True)


def _gru(kernel: Kernel) -> Sequence[int] | None:
    sizes = _sizes(kernel)
    if sizes is None:
        return None
    length, batch, features, hidden = sizes
    state, count = batch * hidden, _directions(kernel)
    requests = [] if kernel.given(1) else [4 * state * count]
    linear = kernel.node.number("linear_before_reset")
    for number in range(count):
        floats = [state, state]
        if kernel.name(3):
            floats += [state] * (4 if linear else 3)
        if linear:
            floats.append(state)
        floats.append(3 * state * length)
        if kernel.text("direction", "forward") == "reverse" or number:
            floats += [length * batch * features, length * state]
        requests += [4 * size for size in floats]
        if not kernel.name(4):
            requests.append(4 * batch)
    return requests


def _rnn(kernel: Kernel) -> Sequence[int] | None:
    sizes = _sizes(kernel)
    if sizes is None:
        return None
    length, batch, _, hidden = sizes
    products = 4 * length * batch * hidden
    return [products] if kernel.given(0) else [products, products * _directions(kernel)]


PACKED: dict[tuple[str, str], PackRule] = {
    ("", "LSTM"): _packed_lstm,
    ("", "GRU"): _packed_gru,
    ("com.microsoft", "DynamicQuantizeLSTM"): _packed_integer_lstm,
}
WORKSPACES: dict[tuple[str, str], WorkRule] = {
    ("", "LSTM"): _lstm,
    ("", "GRU"): _gru,
    ("", "RNN"): _rnn,
    ("com.microsoft", "DynamicQuantizeLSTM"): _quantised_lstm,
}
