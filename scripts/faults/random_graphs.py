"""Valid ONNX models of any operators, the same for the same random state and release of onnx.

A valid graph grows node by node: `random_nodes.py` proposes one for the schema of an operator, and it stays where
onnx.shape_inference accepts it and knows what comes out. Then some values go into an If, a Loop, a Scan or a function,
some batch sizes become symbols, and onnx.checker checks the whole. `random_damage.py` breaks them.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import TensorProto, checker, helper, shape_inference
from random_demands import CODES, NAMES, Drawer, NoSuchInputError, Shape, Value
from random_nodes import Proposal, drawn, node_of

OPSETS = (11, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)
LARGEST = 1 << 18  # elements of a value
UNARY = ("Relu", "Sigmoid", "Tanh", "Exp", "Neg", "Identity", "Abs", "Softplus", "Erf", "Elu", "LeakyRelu")
BINARY = ("Add", "Mul", "Sub", "Div", "Max", "Min")
FREQUENT = (
    "Conv", "Conv", "Gemm", "MatMul", "Add", "Mul", "Relu", "Concat", "Reshape", "Transpose", "BatchNormalization",
    "LayerNormalization", "Softmax", "Gather", "Slice", "MaxPool", "GlobalAveragePool", "Resize", "LSTM", "Cast",
    "ReduceMean", "Unsqueeze", "Squeeze", "Split", "Pad", "Shape", "Where", "Expand", "QuantizeLinear", "PRelu",
    "DequantizeLinear", "ConvTranspose", "Clip", "Constant", "ConstantOfShape", "Flatten", "Dropout", "GRU",
    "Attention",
)  # fmt: skip
CONTROL = ("If", "Loop", "Scan", "Function", "Sequence")
STARTS: tuple[Shape, ...] = ((3, 16, 16), (8,), (5, 8), (4, 8, 8), (2, 6, 5), (4, 4, 4, 4), (16,), (1,))


@functools.cache
def schemas(opset: int, ml: int = 3) -> dict[tuple[str, str], Any]:
    """The operators of an opset, without those whose attributes are graphs."""
    found: dict[tuple[str, str], Any] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        most = {"": opset, "ai.onnx.ml": ml}.get(schema.domain, 0)
        key = (schema.domain, schema.name)
        if schema.since_version <= most and (key not in found or found[key].since_version < schema.since_version):
            found[key] = schema
    bodies = ("Loop", "If", "Scan", "SequenceMap")
    return {k: s for k, s in sorted(found.items()) if not s.deprecated and s.name not in bodies}


@dataclass
class Graph:
    """What has been drawn. `pool` has what later nodes can read."""

    rng: random.Random
    opset: int
    prefix: str = "v"
    pool: list[Value] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    nodes: list[Any] = field(default_factory=list)
    functions: list[Any] = field(default_factory=list)
    types: dict[str, Any] = field(default_factory=dict)  # TypeProto by name
    count: int = 0

    @property
    def opsets(self) -> list[Any]:
        made = [helper.make_opsetid("", self.opset), helper.make_opsetid("ai.onnx.ml", 3)]
        return [*made, helper.make_opsetid("local", 1)] if self.functions else made

    def fresh(self) -> str:
        self.count += 1
        return f"{self.prefix}{self.count}"

    def know(self, name: str, kind: Any) -> Value:
        """A value with this type: nodes can read it if its sizes are known."""
        self.types[name] = kind
        tensor = kind.tensor_type
        if kind.WhichOneof("value") == "sequence_type":
            inner = kind.sequence_type.elem_type.tensor_type.elem_type
            value = Value(name, f"seq(tensor({NAMES.get(inner, 'float')}))", None)
        else:
            dims = tuple(d.dim_value for d in tensor.shape.dim) if tensor.HasField("shape") else None
            value = Value(name, NAMES.get(tensor.elem_type, "float"), dims)
        shape = value.shape
        if value.type.startswith("seq") or (
            shape is not None and min(shape, default=1) > 0 and elements(shape) <= LARGEST
        ):
            self.pool.append(value)
        return value

    def add_input(self, type_: str, shape: Shape) -> None:
        name = self.fresh()
        self.inputs.append(helper.make_tensor_value_info(name, CODES[type_], shape))
        self.know(name, self.inputs[-1].type)

    def add(self, proposal: Proposal) -> bool:
        """Keeps the node if inference accepts it."""
        names = [self.fresh() for _ in range(proposal.outputs)]
        return self.keep(node_of(proposal, names, names[0]), proposal.constants, proposal.fresh)

    def keep(
        self,
        node: Any,
        constants: dict[str, Any],
        fresh: dict[str, Value] | None = None,
        types: dict[str, Any] | None = None,
    ) -> bool:
        """Keeps the node if inference accepts it. `types` are better known than it can."""
        found = self.inferred(node, constants)
        if found is None:
            return False
        found |= types or {}
        for name, tensor in constants.items():
            if fresh and name in fresh and self.prefix == "v" and self.rng.random() < 0.08:
                value = fresh[name]
                self.inputs.append(helper.make_tensor_value_info(name, CODES[value.type], value.shape))
                self.know(name, self.inputs[-1].type)
            else:
                self.constants[name] = tensor
                kind = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
                if self.rng.random() < 0.3:
                    self.know(name, kind)
                else:
                    self.types[name] = kind
        self.nodes.append(node)
        for name in node.output:
            if name:
                self.know(name, found[name])
        return True

    def inferred(self, node: Any, constants: dict[str, Any]) -> dict[str, Any] | None:
        """The types of the node's outputs; None: it is not valid, or they are not known."""
        read = dict.fromkeys(n for n in reads(node) if n and n not in constants)
        if any(n not in self.types for n in read):
            return None
        ends = [helper.make_value_info(n, self.types[n]) for n in read if n not in self.constants]
        known = [self.constants[n] for n in read if n in self.constants]
        outputs = [onnx.ValueInfoProto(name=n) for n in node.output if n]
        graph = helper.make_graph([node], "one", ends, outputs, [*known, *constants.values()])
        model = helper.make_model(graph, opset_imports=self.opsets, functions=self.functions)
        try:
            shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
            made = shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True).graph
        except (shape_inference.InferenceError, checker.ValidationError, RuntimeError, ValueError, TypeError):
            return None
        found = {info.name: info.type for info in (*made.output, *made.value_info)}
        for name in node.output:
            kind = found.get(name)
            if name and (kind is None or kind.WhichOneof("value") not in ("tensor_type", "sequence_type")):
                return None
            dims = kind.tensor_type.shape.dim if name and kind is not None else ()
            if any(d.HasField("dim_value") and d.dim_value <= 0 for d in dims):
                return None
        return found


def elements(shape: Shape) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def reads(node: Any) -> list[str]:
    """Names that a node reads, its bodies' of the graph around them included."""
    found = list(node.input)
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            own = {v.name for v in body.input} | {t.name for t in body.initializer}
            for inner in body.node:
                found += [n for n in reads(inner) if n not in own]
                own |= set(inner.output)
            found += [o.name for o in body.output if o.name not in own]
    return found


# -- bodies ------------------------------------------------------------------------------------------------------------


def grow(graph: Graph, wanted: int, tries: int = 30) -> None:
    """Adds up to `wanted` nodes."""
    rng, table = graph.rng, schemas(graph.opset)
    keys = list(table)
    frequent = [("", name) for name in FREQUENT if ("", name) in table]
    while wanted and tries:
        key = rng.choice(frequent) if rng.random() < 0.5 else rng.choice(keys)
        added = False
        for _ in range(3):
            try:
                added = graph.add(drawn(table[key], rng, graph.pool, graph.fresh()))
            except (NoSuchInputError, IndexError, ValueError, TypeError, OverflowError):
                continue  # a schema that the drawing does not serve
            if added:
                break
        wanted, tries = (wanted - 1, tries) if added else (wanted, tries - 1)


def _chain(graph: Graph, start: str, prefix: str, length: int) -> tuple[list[Any], str]:
    """Nodes that keep the shape of a float."""
    nodes, last = [], start
    for number in range(length):
        name = f"{prefix}c{number}"
        two = graph.rng.random() < 0.4
        op = graph.rng.choice(BINARY if two else UNARY)
        nodes.append(helper.make_node(op, [last, start] if two else [last], [name]))
        last = name
    return nodes, last


def _float(graph: Graph, least: int = 0) -> Value:
    found = [v for v in graph.pool if v.type == "float" and v.shape is not None and len(v.shape) >= least]
    if not found:
        raise NoSuchInputError
    return graph.rng.choice(found[-5:])


def _info(name: str, shape: Shape | None, code: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, code, shape)


def add_if(graph: Graph) -> bool:
    rng, name, x = graph.rng, graph.fresh(), _float(graph)
    assert x.shape is not None
    branches = []
    for which in "te":
        nodes, last = _chain(graph, x.name, f"{name}{which}", rng.choice((1, 2, 4)))
        shape = x.shape
        if which == "e" and rng.random() < 0.2 and shape:
            made = f"{name}{which}l"
            nodes.append(helper.make_node("Concat", [last, last], [made], axis=0))
            last, shape = made, (2 * shape[0], *shape[1:])
        branches.append(helper.make_graph(nodes, which, [], [_info(last, shape)]))
    d = Drawer(rng, graph.pool, name)
    flags = [v.name for v in graph.pool if v.type == "bool" and v.shape == ()]
    flag = rng.choice(flags) if flags and rng.random() < 0.5 else d.tensor((), "bool")
    node = helper.make_node("If", [flag], [graph.fresh()], then_branch=branches[0], else_branch=branches[1])
    return graph.keep(node, d.constants, d.fresh)


def add_loop(graph: Graph) -> bool:
    rng, name, x = graph.rng, graph.fresh(), _float(graph)
    assert x.shape is not None
    d = Drawer(rng, graph.pool, name)
    inner, state = f"{name}s", x.shape
    nodes, last = _chain(graph, inner, name, rng.choice((1, 2, 3)))
    weights = []
    if rng.random() < 0.3 and state:
        weights = [helper.make_tensor(f"{name}w", 1, [state[-1]], [0.5] * state[-1])]
        nodes.append(helper.make_node("Mul", [last, f"{name}w"], [f"{name}m"]))
        last = f"{name}m"
    nodes.append(helper.make_node("Identity", [f"{name}k"], [f"{name}q"]))
    outputs = [_info(f"{name}q", (), TensorProto.BOOL), _info(last, state)]
    if scan := rng.random() < 0.5:
        nodes.append(helper.make_node("Relu", [last], [f"{name}o"]))
        outputs.append(_info(f"{name}o", state))
    ends = [_info(f"{name}i", (), TensorProto.INT64), _info(f"{name}k", (), TensorProto.BOOL), _info(inner, state)]
    body = helper.make_graph(nodes, "turn", ends, outputs, weights)
    turns = d.constant(rng.choice((1, 3, 10))) if rng.random() < 0.8 else ""
    flag = d.constant(True, "bool") if rng.random() < 0.5 or not turns else ""
    results = [graph.fresh() for _ in range(1 + scan)]
    sizes = [state, (None, *state)]  # inference does not say that the state keeps its sizes
    types = {name: helper.make_tensor_type_proto(1, size) for name, size in zip(results, sizes, strict=False)}
    return graph.keep(helper.make_node("Loop", [turns, flag, x.name], results, body=body), d.constants, None, types)


def add_scan(graph: Graph) -> bool:
    rng, name, x = graph.rng, graph.fresh(), _float(graph, 1)
    assert x.shape is not None
    axis = rng.randrange(len(x.shape))
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    d = Drawer(rng, graph.pool, name)
    start = d.tensor(shape)
    nodes = [helper.make_node("Add", [f"{name}s", f"{name}e"], [f"{name}a"])]
    more, last = _chain(graph, f"{name}a", name, rng.choice((1, 2)))
    ends = [_info(f"{name}s", shape), _info(f"{name}e", shape)]
    body = helper.make_graph([*nodes, *more], "step", ends, [_info(f"{name}a", shape), _info(last, shape)])
    attributes: dict[str, Any] = {"num_scan_inputs": 1, "scan_input_axes": [axis]}
    if rng.random() < 0.5:
        attributes["scan_output_axes"] = [rng.randrange(len(shape) + 1)]
    if rng.random() < 0.3:
        attributes["scan_input_directions"] = [1]
    results = [graph.fresh(), graph.fresh()]
    node = helper.make_node("Scan", [start, x.name], results, body=body, **attributes)
    return graph.keep(node, d.constants, d.fresh)


def add_function(graph: Graph) -> bool:
    rng, x = graph.rng, _float(graph)
    name = f"F{len(graph.functions)}"
    nodes, last = _chain(graph, "p", "f", rng.choice((1, 3, 5)))
    if graph.functions and rng.random() < 0.5:
        nodes.append(helper.make_node(graph.functions[-1].name, [last], ["g"], domain="local"))
        last = "g"
    opsets = [helper.make_opsetid("", graph.opset), helper.make_opsetid("local", 1)]
    graph.functions.append(helper.make_function("local", name, ["p"], [last], nodes, opsets))
    added = graph.keep(helper.make_node(name, [x.name], [graph.fresh()], domain="local"), {})
    if not added:
        graph.functions.pop()
    return added


def add_sequence(graph: Graph) -> bool:
    x, names = _float(graph, 1), [graph.fresh() for _ in range(3)]
    if not graph.keep(helper.make_node("SequenceConstruct", [x.name, x.name], [names[0]]), {}):
        return False
    d = Drawer(graph.rng, graph.pool, names[1])
    place = d.constant(graph.rng.choice((0, 1, -1)))
    if graph.rng.random() < 0.5:
        return graph.keep(helper.make_node("SequenceAt", [names[0], place], [names[2]]), d.constants)
    return graph.keep(helper.make_node("ConcatFromSequence", names[:1], [names[2]], axis=0), {})


ADD = {"If": add_if, "Loop": add_loop, "Scan": add_scan, "Function": add_function, "Sequence": add_sequence}


# -- whole models ------------------------------------------------------------------------------------------------------


def proposed(rng: random.Random) -> Graph:
    """Inputs and nodes; not checked as a whole."""
    graph = Graph(rng, rng.choice((*OPSETS, onnx.defs.onnx_opset_version())))
    batch = rng.choice((1, 2, 2, 4))
    for _ in range(rng.choice((1, 1, 2, 3))):
        shape = (batch, *rng.choice(STARTS))
        graph.add_input(
            rng.choice(("float",) * 12 + ("float16", "double", "int64", "bfloat16", "bool", "string")), shape
        )
    for _ in range(rng.choice((1, 1, 2, 3))):
        grow(graph, rng.choice((1, 2, 4, 8)))
        if rng.random() < 0.3:
            try:
                ADD[rng.choice(CONTROL)](graph)
            except NoSuchInputError:
                continue
    return graph


def model_of(graph: Graph) -> Any:
    """What nothing reads is an output, and sometimes a value more."""
    rng = graph.rng
    used = {name for node in graph.nodes for name in reads(node)}
    made = [name for node in graph.nodes for name in node.output if name]
    results = [name for name in made if name not in used] or made[-1:]
    if len(made) > 2 and rng.random() < 0.3:
        results = list(dict.fromkeys([*results, rng.choice(made)]))
    if rng.random() < 0.2 and len(results) > 1:
        results = results[:1]
    outputs = []
    for name in results:
        info = onnx.ValueInfoProto(name=name)
        info.type.CopyFrom(graph.types[name])
        outputs.append(info)
    read = used | set(results)
    constants = [t for name, t in graph.constants.items() if name in read]
    body = helper.make_graph(graph.nodes, "drawn", graph.inputs, outputs, constants)
    used_domains = {node.domain for node in graph.nodes} | {""}
    opsets = [o for o in graph.opsets if o.domain in used_domains]
    functions = graph.functions if "local" in used_domains else []
    ir = helper.find_min_ir_version_for(opsets, ignore_unknown=True)
    return helper.make_model(
        body, opset_imports=opsets, functions=functions, ir_version=max(ir, 8), producer_name="random_graphs"
    )


@dataclass
class Model:
    """`batch`: axis 0 of its inputs is a symbol, and the graph is well formed for 1, 2 and 4 of it."""

    proto: Any
    batch: bool = False


def valid(rng: random.Random) -> Model:
    """A model that onnx.checker accepts with full_check."""
    while True:
        graph = proposed(rng)
        if not graph.nodes:
            continue
        model = model_of(graph)
        if not accepted(model):
            continue
        made = symbolic(model, rng) if rng.random() < 0.5 else None
        return Model(made, True) if made is not None else Model(model)


def accepted(model: Any) -> bool:
    try:
        checker.check_model(model, full_check=True)
    except (checker.ValidationError, shape_inference.InferenceError, RuntimeError, ValueError, TypeError):
        return False
    return True


def symbolic(model: Any, rng: random.Random) -> Any | None:
    """The model with axis 0 of its inputs open, if it can be of any size; outputs' sizes are open too."""
    name = rng.choice(("N", "batch", "s0"))
    for size in (1, 2, 4, name):
        made = onnx.ModelProto()
        made.CopyFrom(model)
        for info in made.graph.input:
            dims = info.type.tensor_type.shape.dim
            if not dims:
                return None
            if isinstance(size, str):
                dims[0].dim_param = size
            else:
                dims[0].dim_value = size
        for info in made.graph.output:
            info.type.tensor_type.ClearField("shape") if info.type.HasField("tensor_type") else None
        try:
            found = shape_inference.infer_shapes(made, check_type=True, strict_mode=True, data_prop=True)
        except (shape_inference.InferenceError, RuntimeError, ValueError):
            return None
        if isinstance(size, int) and not sound(found.graph):
            return None
    for info, old in zip(made.graph.output, model.graph.output, strict=True):
        if info.type.HasField("tensor_type") and old.type.tensor_type.HasField("shape"):
            for number, _ in enumerate(old.type.tensor_type.shape.dim):
                info.type.tensor_type.shape.dim.add().dim_param = f"{info.name}_{number}"
            if not old.type.tensor_type.shape.dim:
                info.type.tensor_type.shape.SetInParent()
    return made if accepted(made) else None


def sound(graph: Any) -> bool:
    """What inference does not look at: elements that a Reshape keeps, channels of a convolution, empty values."""
    shapes = {
        info.name: tuple(d.dim_value for d in info.type.tensor_type.shape.dim)
        for info in (*graph.input, *graph.value_info, *graph.output) if info.type.tensor_type.HasField("shape")
    }  # fmt: skip
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        read = [shapes.get(name) for name in node.input]
        made = [shapes.get(name) for name in node.output]
        if any(shape is not None and min(shape, default=1) <= 0 for shape in made):
            return False
        if node.op_type == "Reshape" and read[0] and made[0] and elements(read[0]) != elements(made[0]):
            return False
        if node.op_type == "PRelu" and read[0] and read[1] and not _fits(read[1], read[0]):
            return False
        if node.op_type == "ConvTranspose" and read[0] and read[1] and read[0][1] != read[1][0]:
            return False
    return True


def _fits(slope: Shape, x: Shape) -> bool:
    """Whether the first broadcasts to the second, which keeps its sizes."""
    pairs = zip(reversed(slope), reversed(x), strict=False)
    return len(slope) <= len(x) and all(one in (1, other) for one, other in pairs)


# -- equal models ------------------------------------------------------------------------------------------------------


def renamed(model: Any) -> Any:
    """The same model with other names for its values."""
    made = onnx.ModelProto()
    made.CopyFrom(model)

    def new(name: str) -> str:
        return f"t_{name}" if name else ""

    def rename(graph: Any) -> None:
        for items in (graph.input, graph.output, graph.initializer, graph.value_info):
            for item in items:
                item.name = new(item.name)
        for node in graph.node:
            node.name = new(node.name)
            for names in (node.input, node.output):
                names[:] = [new(name) for name in names]
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    rename(attribute.g)

    rename(made.graph)
    return made
