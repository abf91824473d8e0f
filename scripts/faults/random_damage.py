"""ONNX models damaged on purpose: attributes, inputs, types, sizes, names, operators, versions, bodies, functions.

What is made here is never inferred or checked in this process: onnx may end it.
"""

from __future__ import annotations

import random
from typing import Any

import onnx
from onnx import AttributeProto, TensorProto, helper
from random_demands import NoSuchInputError
from random_graphs import OPSETS, STARTS, Graph, elements, model_of, schemas, valid
from random_nodes import drawn, node_of

EXTREMES = (-1, 0, -2, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 3, 7)
TEXTS = (b"", b"\xff\xfe", b"NOTSET", b"linear", b"...->a", b"a" * 3000, b"ab,bc->ac", b"1,2")


def damaged(rng: random.Random) -> Any:
    """A model with one to four things wrong, or nodes of any schema with anything as their inputs."""
    model = _loose(rng) if rng.random() < 0.35 else valid(rng).proto
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(DAMAGE)(model, rng)
    return model


def _loose(rng: random.Random) -> Any:
    """Nodes as their schemas describe them, which nothing has inferred."""
    graph = Graph(rng, rng.choice((*OPSETS, onnx.defs.onnx_opset_version())))
    for _ in range(2):
        graph.add_input(rng.choice(("float", "float", "int64", "string", "bool")), (2, *rng.choice(STARTS)))
    keys = list(schemas(graph.opset))
    for _ in range(rng.choice((1, 3, 6))):
        try:
            proposal = drawn(schemas(graph.opset)[rng.choice(keys)], rng, graph.pool, graph.fresh())
            names = [graph.fresh() for _ in range(proposal.outputs)]
            graph.nodes.append(node_of(proposal, names, names[0]))
        except (NoSuchInputError, IndexError, ValueError, TypeError, OverflowError):
            continue
        graph.constants.update(proposal.constants)
        for name in names:
            shape = rng.choice(graph.pool).shape or ()
            graph.know(name, helper.make_tensor_type_proto(rng.choice((1, 1, 7, 9)), shape))
    if not graph.nodes:
        graph.nodes.append(helper.make_node("Relu", [graph.inputs[0].name], ["y"]))
        graph.know("y", graph.inputs[0].type)
    return model_of(graph)


def _nodes(model: Any) -> list[Any]:
    found, todo = [], [model.graph]
    while todo:
        for node in todo.pop().node:
            found.append(node)
            todo += [a.g for a in node.attribute if a.HasField("g")]
    return [*found, *(n for f in model.functions for n in f.node)]


def _attribute(model: Any, rng: random.Random) -> None:
    """A value at an extreme, of another length, another type, or gone."""
    having = [n for n in _nodes(model) if n.attribute]
    if not having:
        return _missing_input(model, rng)
    node = rng.choice(having)
    attribute = rng.choice(node.attribute)
    kind = rng.randrange(6)
    if kind == 0:
        node.attribute.remove(attribute)
    elif kind == 1:
        attribute.type = rng.randrange(1, 15)
    elif attribute.type == AttributeProto.INT:
        attribute.i = rng.choice(EXTREMES)
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = rng.choice((float("nan"), float("inf"), -1.0, 1e38, 0.0))
    elif attribute.type == AttributeProto.STRING:
        attribute.s = rng.choice(TEXTS)
    elif attribute.type == AttributeProto.INTS:
        if kind == 2 and attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(EXTREMES)
        elif kind == 3:
            attribute.ints.append(rng.choice(EXTREMES))
        elif kind == 4 and attribute.ints:
            attribute.ints.pop()
        else:
            attribute.ints[:] = [rng.choice(EXTREMES)] * rng.choice((0, 1, 100))
    elif attribute.type == AttributeProto.TENSOR:
        _tensor(attribute.t, rng)
    elif attribute.type == AttributeProto.GRAPH:
        _body(attribute.g, rng)
    return None


def _body(graph: Any, rng: random.Random) -> None:
    items = rng.choice((graph.input, graph.output, graph.node))
    if not items:
        return
    kind = rng.randrange(3)
    if kind == 0:
        items.pop(rng.randrange(len(items)))
    elif kind == 1:
        items.add().CopyFrom(rng.choice(items))
    elif graph.output:
        graph.output[0].name = rng.choice(("", "gone", *(v.name for v in graph.input)))


def _schema_attribute(model: Any, rng: random.Random) -> None:
    """An attribute that the operator may have, with a value that it may not."""
    node = rng.choice(_nodes(model))
    schema = schemas(onnx.defs.onnx_opset_version()).get((node.domain, node.op_type))
    names = list(schema.attributes) if schema is not None else ["axis"]
    if not names:
        return
    name = rng.choice(names)
    for old in [a for a in node.attribute if a.name == name]:
        node.attribute.remove(old)
    value: Any = rng.choice(
        (rng.choice(EXTREMES), [rng.choice(EXTREMES)], [1, 2, 3, 4, 5, 6, 7], 0.5, "x", [0.5], ["a"])
    )
    node.attribute.append(helper.make_attribute(name, value))


def _missing_input(model: Any, rng: random.Random) -> None:
    node = rng.choice(_nodes(model))
    if node.input:
        place = rng.randrange(len(node.input))
        if rng.random() < 0.5:
            node.input[place] = ""
        else:
            node.input.pop(place)


def _other_input(model: Any, rng: random.Random) -> None:
    """Another value in place of one, or one more."""
    nodes = _nodes(model)
    node = rng.choice(nodes)
    names = [*(v.name for v in model.graph.input), *(t.name for t in model.graph.initializer), "", "gone"]
    names += [o for n in nodes for o in n.output]
    if node.input and rng.random() < 0.7:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)
    else:
        node.input.append(rng.choice(names))


def _tensor(tensor: Any, rng: random.Random) -> None:
    kind = rng.randrange(5)
    if kind == 0 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(EXTREMES)
    elif kind == 1:
        tensor.dims.append(rng.choice(EXTREMES))
    elif kind == 2:
        tensor.data_type = rng.choice((0, 1, 6, 7, 8, 9, 14, 16, 17, 21, 23, 99))
    elif kind == 3:
        tensor.raw_data = rng.randbytes(rng.choice((0, 1, 7, 64)))
    else:
        tensor.ClearField(rng.choice(("float_data", "int64_data", "int32_data", "raw_data", "dims")))


def _initializer(model: Any, rng: random.Random) -> None:
    if model.graph.initializer:
        _tensor(rng.choice(model.graph.initializer), rng)


def _small_integers(model: Any, rng: random.Random) -> None:
    """Other contents of a vector that sizes follow from."""
    found = [t for t in model.graph.initializer if t.data_type == TensorProto.INT64 and t.int64_data]
    if found:
        tensor = rng.choice(found)
        tensor.int64_data[rng.randrange(len(tensor.int64_data))] = rng.choice(EXTREMES)


def _end(model: Any, rng: random.Random) -> None:
    """Another shape or type of an input or an output."""
    infos = [*model.graph.input, *model.graph.output]
    if not infos:
        return
    info = rng.choice(infos)
    tensor, kind = info.type.tensor_type, rng.randrange(6)
    if kind <= 1 and tensor.shape.dim:
        tensor.shape.dim[rng.randrange(len(tensor.shape.dim))].dim_value = rng.choice(EXTREMES)
    elif kind == 2:
        tensor.elem_type = rng.choice((0, 1, 7, 8, 9, 14, 16, 22, 99))
    elif kind == 3:
        tensor.ClearField("shape")
    elif kind == 4:
        tensor.shape.dim.add().dim_param = rng.choice(("N", "", "2*N", "a b", "-1"))
    else:
        inner = onnx.TypeProto()
        inner.CopyFrom(info.type)
        info.type.sequence_type.elem_type.CopyFrom(inner)


def _names(model: Any, rng: random.Random) -> None:
    """Two of one name, or a name that is gone."""
    infos = [*model.graph.input, *model.graph.output, *model.graph.initializer]
    info = rng.choice(infos)
    if rng.random() < 0.3:
        model.graph.input.add().CopyFrom(rng.choice(model.graph.input)) if model.graph.input else None
    else:
        info.name = rng.choice([i.name for i in infos] + ["", "gone"])


def _output(model: Any, rng: random.Random) -> None:
    node = rng.choice(_nodes(model))
    if node.output:
        node.output[rng.randrange(len(node.output))] = rng.choice(("", "gone", *node.input, *node.output))
    if rng.random() < 0.3:
        node.output.append("more")


def _operator(model: Any, rng: random.Random) -> None:
    node = rng.choice(_nodes(model))
    domain, name = rng.choice(list(schemas(onnx.defs.onnx_opset_version())))
    node.op_type = rng.choice((name, name, "If", "Loop", "Scan", "NoSuchOp", ""))
    node.domain = rng.choice((domain, domain, "com.microsoft", "gone"))


def _order(model: Any, rng: random.Random) -> None:
    nodes = list(model.graph.node)
    kind = rng.randrange(3)
    if kind == 0:
        rng.shuffle(nodes)
    elif kind == 1:
        nodes.pop(rng.randrange(len(nodes)))
    else:
        nodes.append(rng.choice(nodes))
    kept = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    if not kept:
        model.graph.node.append(helper.make_node("Relu", ["gone"], ["y"]))


def _version(model: Any, rng: random.Random) -> None:
    if model.opset_import and rng.random() < 0.8:
        rng.choice(model.opset_import).version = rng.choice((-1, 0, 1, 6, 9, 13, 24, 99, 2**40))
    else:
        model.ir_version = rng.choice((0, 3, 99, -1))


def _strings(model: Any, rng: random.Random) -> None:
    """A tensor of strings where numbers are expected."""
    for info in rng.sample(list(model.graph.input), len(model.graph.input))[:1]:
        info.type.tensor_type.elem_type = TensorProto.STRING
    if model.graph.initializer:
        old = rng.choice(model.graph.initializer)
        size = min(max(elements(tuple(old.dims)), 0), 64) if len(old.dims) < 5 else 1
        old.CopyFrom(helper.make_tensor(old.name, TensorProto.STRING, [size], [b"x"] * size))


def _function(model: Any, rng: random.Random) -> None:
    if not model.functions:
        return _attribute(model, rng)
    function = rng.choice(model.functions)
    kind = rng.randrange(4)
    if kind == 0 and function.input:
        function.input.pop()
    elif kind == 1:
        function.output.append("gone")
    elif kind == 2:
        function.node.add().CopyFrom(helper.make_node(function.name, list(function.input), ["y"], domain="local"))
    else:
        function.attribute.append("needed")
    return None


DAMAGE = (
    _attribute, _attribute, _schema_attribute, _schema_attribute, _missing_input, _other_input, _initializer, _end,
    _end, _small_integers, _small_integers, _names, _output, _operator, _order, _version, _strings, _function,
)  # fmt: skip
