"""Linear layers and embeddings of a graph: calls of modules whose own ops are one product, or one lookup.

What a library does to "all linear layers" it does to modules; a graph has their calls. `aten::linear` is that of
nn.Linear, `aten::addmm` between two views that of transformers' Conv1D, whose weight is transposed (GPT-2). Falcon's
FalconLinear is an nn.Linear that writes its product out: `input @ self.weight.T`, and a sum with the bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from staticmem.errors import UsageError
from staticmem.ir.graph import REQUIRES_GRAD, SET_DATA, Graph, Op, Parameter, Ref
from staticmem.ir.module_spans import calls_of
from staticmem.ir.record import record
from staticmem.ops.registry import RESHAPES

LINEAR, CONV1D, EMBEDDING = "linear", "Conv1D", "embedding"
QUANTIZED_4, QUANTIZED_8 = "bitsandbytes::linear_4bit", "bitsandbytes::linear_8bit"
PACKED = "packed::linear"  # recorded with the packed weights of a checkpoint
_PRODUCTS = {  # op -> weight, bias
    "aten::linear": (1, 2),
    "aten::addmm": (2, 0),
    "aten::embedding": (0, None),
    QUANTIZED_4: (1, 2),
    QUANTIZED_8: (1, 2),
    PACKED: (1, 2),
}
WRITTEN_OUT = ("aten::matmul", "aten::mm")  # products with what `_TRANSPOSED` makes of a weight
_TRANSPOSED = ("aten::numpy_T", "aten::t")
_VIEWS = RESHAPES | {"aten::sym_size", "aten::_assert_tensor_metadata"}
_OF_DATA = {"aten::detach", SET_DATA}  # compressed-tensors puts a weight's data in its place, which is that weight


@record(frozen=True, slots=True)
class Layer:
    """One call of a layer: its ops [start, end) of the graph.

    Attributes:
        kind: `LINEAR`, `CONV1D`, `EMBEDDING`, `QUANTIZED_4`, `QUANTIZED_8` or `PACKED`.
        product: the index of its product or lookup.
        input: the value that it reads; `output` is its result.
        features: sizes of the input's and of the output's last dimension; of an embedding, rows and their length.
    """

    path: str
    cls: str
    kind: str
    start: int
    end: int
    product: int
    input: str
    output: str
    weight: Parameter
    bias: Parameter | None
    features: tuple[int, int]


def layers_of(graph: Graph) -> list[Layer]:
    """The calls of linear layers and embeddings, in order."""
    parameters = {p.value.name: p for p in graph.parameters}
    return [layer for layer in _layers(graph, parameters) if layer is not None]


def _layers(graph: Graph, parameters: Mapping[str, Parameter]) -> Iterator[Layer | None]:
    ops = graph.ops
    for call in calls_of(graph):
        if call.end - call.start > 8 or not call.path:
            continue
        own = range(call.start, call.end)
        written_out = _written_out(ops[call.start : call.end], parameters)
        if written_out is not None:
            yield replace(written_out, start=call.start, end=call.end, product=call.start + written_out.product)
            continue
        products = [index for index in own if ops[index].base in _PRODUCTS]
        if len(products) != 1:
            continue
        rest = [ops[index] for index in own if index != products[0]]
        if all(op.base in _VIEWS | _OF_DATA and (not op.modules or op.modules[-1].path == call.path) for op in rest):
            yield _layer(ops, call.start, call.end, products[0], parameters)


def _written_out(ops: Sequence[Op], parameters: Mapping[str, Parameter]) -> Layer | None:
    """The layer that is `input @ weight.T`, or the sum of that and a bias; its product is counted from the first op."""
    calls = [op for op in ops if op.target != REQUIRES_GRAD]  # recordings of inference say it of the view
    if not 2 <= len(calls) <= 3 or calls[0].base not in _TRANSPOSED or calls[1].base not in WRITTEN_OUT:
        return None
    turned, product, *rest = calls
    frame = product.modules[-1:]
    if not frame or not frame[0].cls.endswith("Linear"):  # libraries look for nn.Linear and what derives from it
        return None
    weight = _parameter(turned, 0, parameters)
    read = [arg.name if isinstance(arg, Ref) else "" for arg in product.args]
    if weight is None or len(weight.value.shape or ()) != 2 or read[1:] != list(turned.outputs):
        return None
    bias = None
    for addition in rest:
        bias = _parameter(addition, 1, parameters)
        if addition.base != "aten::add" or bias is None or addition.args[0] != Ref(product.outputs[0]):
            return None
    (rows, columns), at = weight.value.shape or (0, 0), ops.index(product)
    result, path, cls = calls[-1].outputs[0], frame[0].path, frame[0].cls
    return Layer(path, cls, LINEAR, 0, len(ops), at, read[0], result, weight, bias, (columns, rows))


def _layer(ops: Sequence[Op], start: int, end: int, index: int, parameters: Mapping[str, Parameter]) -> Layer | None:
    product = ops[index]
    frame = product.modules[-1]
    at_weight, at_bias = _PRODUCTS[product.base]
    weight = _parameter(product, at_weight, parameters)
    bias = None if at_bias is None else _parameter(product, at_bias, parameters)
    if weight is None or len(weight.value.shape or ()) != 2:
        return None
    computed = {name for op in ops[start:end] for name in op.outputs}
    owned = {p.value.name for p in (weight, bias) if p is not None}
    is_packed = product.base in (QUANTIZED_4, QUANTIZED_8, PACKED)
    first_op = product if is_packed or ops[start].base in _OF_DATA else ops[start]
    read = [name for name in first_op.refs() if name not in computed and name not in owned]
    results = [op.outputs[0] for op in ops[index:end] if op.outputs and op.base != "aten::sym_size"]
    if not read or not results:
        return None
    first, second = weight.value.shape or (0, 0)
    kind, features = LINEAR, (second, first)
    if is_packed:
        kind, features = product.base, product.args[4]  # type: ignore[assignment]
    elif product.base != "aten::linear":
        kind, features = (CONV1D if product.base == "aten::addmm" else EMBEDDING), (first, second)
    return Layer(frame.path, frame.cls, kind, start, end, index, read[0], results[-1], weight, bias, features)


def _parameter(op: Op, index: int, parameters: Mapping[str, Parameter]) -> Parameter | None:
    arg = op.args[index] if len(op.args) > index else None
    return parameters.get(arg.name) if isinstance(arg, Ref) else None


def output_head(graph: Graph, layers: Sequence[Layer]) -> str | None:
    """The path of the layer whose result are scores of a vocabulary: what `get_output_embeddings()` gives.

    It makes the first output, or leads to it through ops that are in no layer, and has a row for each of an embedding.
    """
    parameters = {p.value.name: p for p in graph.parameters}  # of any lookup: Gemma's module scales what it looks up
    tables = [_parameter(op, 0, parameters) for op in graph.ops if op.base == "aten::embedding"]
    rows = {table.value.shape[0] for table in tables if table is not None and table.value.shape}
    linear = [layer for layer in layers if layer.kind == LINEAR]
    if not linear or linear[-1].features[1] not in rows:
        return None
    reached = {linear[-1].output}
    for op in graph.ops[linear[-1].end :]:
        if not reached.isdisjoint(op.refs()):
            reached.update(op.outputs)
    return linear[-1].path if reached.intersection(graph.outputs[:1]) else None


def without_modules(flag: str) -> UsageError:
    """The error of a file that does not say which modules its ops belong to."""
    return UsageError(
        f"{flag} cannot be used with this file",
        "It does not say which modules its ops belong to, so that layers have no names.",
        "Export with torch.export, or torch.onnx.export(dynamo=True).",
        code="SM187",
    )
