"""An ONNX file as a `ModelFile`: its inputs and symbols, its nodes, and the tensors that it owns.

Which axes of an image are its height and width.

ONNX computes with channels first. Exports of TensorFlow and Keras keep inputs with channels last and transpose them,
unless an optimizer merged that into something else: with one channel the transpose is a Reshape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from staticmem.errors import ModelFileError
from staticmem.frontends.onnx import metadata, weights
from staticmem.frontends.onnx.convert import Converter, with_metadata
from staticmem.frontends.onnx.inlining import check_scans, without_functions
from staticmem.frontends.onnx.ordering import NOTE, put_in_order
from staticmem.frontends.onnx.shapes import Body
from staticmem.frontends.recent import Graphs
from staticmem.ir import dtypes
from staticmem.ir.graph import Note
from staticmem.ir.model_file import CHANNELS_FIRST, CHANNELS_LAST, InputSpec, ModelFile, SymbolRange, TracedSizes
from staticmem.ir.onnx_graph import Attr, Node, Subgraph

TO_CHANNELS_FIRST = (0, 3, 1, 2)  # a permutation of axes
CHANNELS = (1, 3, 4)  # of an image: gray, RGB, RGB with alpha or depth


def with_sides(inputs: Sequence[InputSpec], nodes: Sequence[Node]) -> tuple[InputSpec, ...]:
    """The inputs with what the graph does with them: a convolution reads channels first, and a transpose to channels
    first reads channels last. Where nothing tells, an image whose last axis alone has the size of channels may be
    either."""
    images = {spec.name for spec in inputs if spec.is_image}
    told: dict[str, tuple[int, int]] = {}
    for node in nodes:
        name = node.inputs[0] if node.inputs else ""
        if name not in images:
            continue
        if node.op == "Conv":
            told.setdefault(name, CHANNELS_FIRST)
        elif node.op == "Transpose" and node.attrs.get("perm") == TO_CHANNELS_FIRST:
            told.setdefault(name, CHANNELS_LAST)
    return tuple([replace(spec, sides=told.get(spec.name, _find_axes_by_sizes(spec))) for spec in inputs])


def _find_axes_by_sizes(spec: InputSpec) -> tuple[int, int] | None:
    if not spec.is_image or spec.shape is None:
        return CHANNELS_FIRST
    looks_last = spec.shape[3] in CHANNELS and spec.shape[1] not in CHANNELS
    return None if looks_last else CHANNELS_FIRST


LARGE = 20_000  # nodes: from here on it pays to read the file again rather than to keep them
_FIXED = re.compile(r"[1-9][0-9]{0,11}$")  # what PyTorch writes where Dim.AUTO ended in a constant
_NAME = re.compile(r"[A-Za-z_][\w.]*$")


class OnnxModel(ModelFile):
    """A model of an ONNX file. `body` is its proto without metadata and old shapes: it is what inference gets.

    With `again`, which reads the file once more, a large model lets its nodes go when it is bound: the ATen graph takes
    their place in memory.
    """

    format = "onnx"

    def __init__(
        self, path: str, proto: Any, again: Callable[[], Any] | None = None, unread: Mapping[str, str] | None = None
    ) -> None:
        """`unread`: small tensors in other files that could not be read, and why.

        Raises:
            ModelFileError: the graph reads what nothing makes, or its sizes follow from a tensor that was not read.
        """
        self.path = path
        self.notes: tuple[Note, ...] = ()
        self.again = again
        self.graphs: Graphs | None = None  # where the model is kept, so are its graphs
        self.producer = " ".join(t for t in (proto.producer_name, proto.producer_version) if t) or "unknown"
        if proto.functions:
            check_scans(proto)
        proto = without_functions(proto)
        graph = proto.graph
        self.name: str = graph.name
        self.opset: int = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=0)
        self.signature = metadata.read(graph)
        self.sizes: TracedSizes = metadata.sizes(proto, path)
        converter = Converter()
        self.nodes: tuple[Node, ...] = tuple([converter.node(n, strip=True) for n in graph.node])
        given = {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
        missing = _undefined(self.nodes, given | {i.name for i in graph.input}, converter.bodies)
        if missing:
            missing = self._sorted(proto, converter, given)
        if converter.bodies or any(node.op == "Scan" for node in self.nodes):
            check_scans(proto)
        self.weights = weights.collect(graph, self.nodes, self.signature)
        count = len(graph.initializer)
        owned = weights.of_inputs(graph, self.nodes, self.signature, self.weights)
        _check_names(path, graph)
        given_inputs, symbols = _inputs([i for i in graph.input if i.name not in owned])
        self.inputs = with_sides(given_inputs, self.nodes)
        ranges = self.signature.ranges
        self.symbols: Mapping[str, SymbolRange] = {
            name: _positive(ranges.get(name), self.sizes.least.get(name)) for name in symbols
        }
        self.outputs = tuple(o.name for o in graph.output)
        if missing:
            raise _undefined_names(path, missing)
        if unread:
            from staticmem.frontends.onnx.external import check_sizes

            check_sizes(path, self.nodes, given, unread)
        self._pair_renamed_inputs()
        if any(node.op == "SplitToSequence" for node in self.nodes):
            from staticmem.frontends.onnx.sequences import slice_splits

            slice_splits(graph, self.nodes, self.weights.contents)
        del graph.value_info[:]
        del graph.metadata_props[:]
        del graph.quantization_annotation[:]
        initializers, self.weights.initializers = self.weights.initializers, {}
        self.body: Body | None = Body(proto, initializers, count, self.nodes)

    def read_again(self) -> None:
        """Reads the nodes again that `let_go` has let go.

        Raises:
            ModelFileError: the file is another one now.
        """
        if self.nodes or self.again is None:
            return
        fresh = OnnxModel(self.path, self.again())
        if (fresh.inputs, fresh.outputs) != (self.inputs, self.outputs):
            raise ModelFileError(
                f"{self.path} changed while it was analysed",
                "Its inputs or outputs are not those of before.",
                "Run it again.",
                code="SM158",
            )
        self.nodes, self.body = fresh.nodes, fresh.body

    def let_go(self) -> None:
        """Lets the nodes of a large model go: those that it was decoded to take their place in memory."""
        if len(self.nodes) > LARGE and self.again is not None:
            self.nodes, self.body = (), None

    def _sorted(self, proto: Any, converter: Converter, given: set[str]) -> list[str]:
        """Sorts the nodes where something is read before it is made; gives the names that nothing makes."""
        graph = proto.graph
        with_metadata(graph, self.nodes)
        if put_in_order(graph):
            self.notes = (NOTE,)
        self.nodes = tuple([converter.node(n, strip=True) for n in graph.node])
        return _undefined(self.nodes, given | {i.name for i in graph.input}, converter.bodies)

    def _pair_renamed_inputs(self) -> None:
        """`input_names=` of torch.onnx.export renames inputs, but the metadata keeps the old names."""
        declared = {spec.name for spec in self.inputs}
        users = self.signature.user_inputs
        if len(users) == len(self.inputs):
            for old, spec in zip(users, self.inputs, strict=True):
                if old not in declared:
                    self.signature.aliases.setdefault(old, spec.name)


def _check_names(path: str, graph: Any) -> None:
    """Raises:
    ModelFileError: two inputs have one name, which onnx.checker refuses too: nothing tells which of them is read.
    """
    names: set[str] = set()
    for given in graph.input:
        if given.name in names:
            raise ModelFileError(
                f"two inputs of {path} are called '{given.name}'",
                "ONNX gives every name one value (single static assignment).",
                "Check the file with onnx.checker.check_model.",
                code="SM157",
            )
        names.add(given.name)


def _undefined_names(path: str, missing: Sequence[str]) -> ModelFileError:
    """An export without initializers that does not keep them as inputs has lost the weights' shapes."""
    listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    return ModelFileError(
        f"{len(missing)} tensors of {path} have neither a value nor a shape: {listed}",
        "The graph reads them, but no node, input or initializer defines them.",
        "Export with keep_initializers_as_inputs=True, or keep initializers as external data.",
        code="SM154",
    )


def _inputs(protos: Sequence[Any]) -> tuple[tuple[InputSpec, ...], list[str]]:
    specs: list[InputSpec] = []
    symbols: dict[str, None] = {}
    for proto in protos:
        kind = proto.type
        while kind.WhichOneof("value") in ("optional_type", "sequence_type"):
            kind = getattr(kind, kind.WhichOneof("value")).elem_type
        tensor = kind.sparse_tensor_type if kind.HasField("sparse_tensor_type") else kind.tensor_type
        dtype = dtypes.ONNX_CODES.get(tensor.elem_type, dtypes.float32)
        if not tensor.HasField("shape"):
            specs.append(InputSpec(proto.name, dtype, None))
            continue
        shape: list[int | str] = []
        for axis, dim in enumerate(tensor.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value >= 0:  # 0 is a size, as the ONNX Runtime has it
                shape.append(int(dim.dim_value))
                continue
            if _FIXED.match(dim.dim_param):
                shape.append(int(dim.dim_param))
                continue
            symbol = dim.dim_param if _NAME.match(dim.dim_param) else f"{proto.name}[{axis}]"
            symbols[symbol] = None
            shape.append(symbol)
        specs.append(InputSpec(proto.name, dtype, tuple(shape)))
    return tuple(specs), list(symbols)


def _positive(bounds: SymbolRange | None, least: int | None) -> SymbolRange:
    """torch.export writes ranges from 0, but a tensor without elements is no step. `least`: from `staticmem export`."""
    if bounds is None:
        return SymbolRange(least)
    return SymbolRange(max(least if least is not None else bounds.low or 1, 1), bounds.high)


def _undefined(nodes: Sequence[Node], outer: set[str], bodies: bool) -> list[str]:
    """Names that nodes read before anything defines them. `bodies`: nodes may have subgraphs."""
    defined = {"", *outer}
    missing: dict[str, None] = {}
    for node in nodes:
        for name in node.inputs:
            if name not in defined:
                missing[name] = None
        if bodies:
            for attr in node.attrs.values():
                for body in _bodies(attr):
                    for name in _undefined(body.nodes, defined | {*body.inputs, *body.initializers}, True):
                        missing[name] = None
        defined.update(node.outputs)
    return list(missing)


def _bodies(attr: Attr) -> list[Subgraph]:
    if isinstance(attr, Subgraph):
        return [attr]
    if isinstance(attr, tuple):
        return [a for a in attr if isinstance(a, Subgraph)]
    return []
