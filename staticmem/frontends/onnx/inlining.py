"""Local functions and If nodes of an ONNX file, put in place of the nodes that call them.

A branch takes the place of its If before sizes are inferred again. A condition that is known at the bound sizes
decides. Otherwise the branch whose results have more bytes is taken: memory is then that of the more expensive one.
Where their sizes cannot be inferred, it is the branch with more nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from staticmem.errors import ModelFileError
from staticmem.frontends.onnx import isolation
from staticmem.frontends.onnx.metadata import inherit
from staticmem.ir import dtypes
from staticmem.ir.graph import Value

MAX_INLINED = 4_000_000  # after inlining; a model of a million nodes takes some GiB
MAX_DEPTH = 100  # of calls; torch.onnx.export writes one per level of modules

Key = tuple[str, str, str]


def without_functions(proto: Any) -> Any:
    """The model without functions.

    Raises:
        ModelFileError: functions call themselves, or would become more nodes than any model has.
    """
    if not proto.functions:
        return proto
    _check(proto)
    import onnx

    try:
        return onnx.ModelProto.FromString(isolation.inline_functions(proto.SerializeToString()))
    except isolation.RefusedError as error:
        raise _refused(f"{str(error).splitlines()[0] if str(error) else type(error).__name__}.") from error


def _check(proto: Any) -> None:
    """Counts the nodes that there will be before any is made: forty functions of two calls each are 2**40."""
    functions = {(f.domain, f.name, getattr(f, "overload", "")): f for f in proto.functions}
    if len(functions) < len(proto.functions):
        raise _refused("Two of them have the same name.")
    sizes: dict[Key, int] = {}
    open_calls: list[Key] = []

    def size(nodes: Iterable[Any]) -> int:
        total = 0
        for node in _all(nodes):
            key = (node.domain, node.op_type, getattr(node, "overload", ""))
            total += size_of(key) if key in functions else 1
        return total

    def size_of(key: Key) -> int:
        if key not in sizes:
            if key in open_calls:
                raise _refused(f"{key[1]} calls itself.")
            if len(open_calls) >= MAX_DEPTH:
                raise _refused(f"They call each other more than {MAX_DEPTH} deep.")
            open_calls.append(key)
            sizes[key] = size(functions[key].node)
            open_calls.pop()
            if sizes[key] > MAX_INLINED:
                raise _refused(f"{key[1]} would become {sizes[key]:,} nodes, of at most {MAX_INLINED:,}.")
        return sizes[key]

    total = size(proto.graph.node)
    if total > MAX_INLINED:
        raise _refused(f"The graph would become {total:,} nodes, of at most {MAX_INLINED:,}.")


def _all(nodes: Iterable[Any]) -> Iterator[Any]:
    """Nodes, and those of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all(attribute.g.node)
            for graph in attribute.graphs:
                yield from _all(graph.node)


def _refused(why: str) -> ModelFileError:
    return ModelFileError(
        "the functions of the ONNX file cannot be inlined", why, "Check the file with onnx.checker.check_model.",
        code="SM155",
    )  # fmt: skip


def check_scans(proto: Any) -> None:
    """Inference of onnx 1.17 ends the process at a Scan that does not say how many inputs it scans.

    Raises:
        ModelFileError: there is one.
    """
    bodies = ("If", "Loop", "Scan", "SequenceMap")
    with_bodies = [node for nodes in (proto.graph, *proto.functions) for node in nodes.node if node.op_type in bodies]
    for node in _all(with_bodies):
        if node.op_type == "Scan" and not any(a.name == "num_scan_inputs" for a in node.attribute):
            raise ModelFileError(
                "a Scan of the graph lacks num_scan_inputs",
                "Without it nobody knows which of its inputs it scans.",
                "Check the file with onnx.checker.check_model.",
                code="SM157",
            )


MAX_ROUNDS = 8
MAX_NODES = 1_000_000
LEAST_WEIGHT = 64  # elements: less of a branch that is not taken is a number of its code, or nothing


def inline(
    graph: Any, contents: Mapping[str, Any], values: Mapping[str, Value], opset: int, owned: set[str] | None = None
) -> tuple[int, int]:
    """Replaces the If nodes of a GraphProto by a branch; gives how many were decided and how many were guessed.

    `values` has the sizes of the outer graph, for the sizes in branches. `owned` gets the names of the tensors that
    branches bring, those of weights of the other branch too; without it the latter are left out.
    """
    nodes = list(graph.node)
    del graph.node[:]
    decided = guessed = 0
    for node in nodes:
        branch = None
        if node.op_type == "If" and node.domain in ("", "ai.onnx"):
            condition = contents.get(node.input[0])
            branch, by_constant = _choose(node, condition, values, opset)
            decided += branch is not None and by_constant
            guessed += branch is not None and not by_constant
        if branch is None:
            graph.node.append(node)
            continue
        start, before = len(graph.node), len(graph.initializer)
        _insert(graph, node, branch)
        if owned is not None:
            for attribute in node.attribute:
                if attribute.type == 5 and attribute.g is not branch:
                    _keep_weights(graph, node, attribute.g)
            owned.update(tensor.name for tensor in graph.initializer[before:])
        inherit(graph, start, node)
    return decided, guessed


def _keep_weights(graph: Any, node: Any, branch: Any) -> None:
    """Adds the weights of a branch that is not taken: the module has the parameters of both."""
    owned = [t for body in _bodies(branch) for t in body.initializer]
    for body in _bodies(branch):
        constants = [inner for inner in body.node if inner.op_type == "Constant"]
        for inner in constants:
            for attribute in inner.attribute:
                if attribute.name == "value":
                    tensor = type(attribute.t)()
                    tensor.CopyFrom(attribute.t)
                    tensor.name = inner.output[0]
                    owned.append(tensor)
    taken = {t.name for t in graph.initializer}
    for tensor in owned:
        dtype = dtypes.ONNX_CODES.get(tensor.data_type)
        if dtype is None or not dtype.is_floating_point or prod(tensor.dims) < LEAST_WEIGHT:
            continue  # numbers and sizes of the branch
        kept = graph.initializer.add()
        kept.CopyFrom(tensor)
        kept.name = f"{tensor.name}::{branch.name} of {node.output[0]}"  # its beginning tells weights from numbers
        while kept.name in taken:
            kept.name += "'"
        taken.add(kept.name)


def _bodies(branch: Any) -> Iterator[Any]:
    """A branch and the graphs within it."""
    yield branch
    for inner in _all(branch.node):
        for attribute in inner.attribute:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


def _choose(node: Any, condition: Any, values: Mapping[str, Value], opset: int) -> tuple[Any, bool]:
    branches = {a.name: a.g for a in node.attribute if a.type == 5}
    yes, no = branches.get("then_branch"), branches.get("else_branch")
    if yes is None or no is None:
        return None, False
    if condition is not None and condition.size == 1:
        return (yes if bool(condition.reshape(-1)[0]) else no), True
    first, second = _bytes(yes, values, opset), _bytes(no, values, opset)
    if first is None or second is None:
        first, second = len(yes.node), len(no.node)
    return (yes if first >= second else no), False


def _bytes(branch: Any, values: Mapping[str, Value], opset: int) -> int | None:
    """Bytes of all results of a branch; None where a size is not known."""
    import onnx
    from onnx import helper

    codes = {dtype: code for code, dtype in dtypes.ONNX_CODES.items()}
    computed = {name for inner in branch.node for name in inner.output if name}
    body = onnx.GraphProto()
    body.CopyFrom(branch)
    own = {t.name for t in body.initializer}
    for name in {name for inner in branch.node for name in inner.input} - computed - own:
        value = values.get(name)
        if value is not None and value.shape is not None and value.dtype in codes:
            body.input.append(helper.make_tensor_value_info(name, codes[value.dtype], value.shape))
    del body.value_info[:]
    try:
        model = helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)])
        inferred = onnx.ModelProto.FromString(isolation.infer_shapes(model.SerializeToString()))
    except ValueError:  # `RefusedError` is one
        return None
    total = 0
    for info in (*inferred.graph.value_info, *inferred.graph.output):
        tensor = info.type.tensor_type
        dims = tensor.shape.dim
        if info.name not in computed:
            continue
        dtype = dtypes.ONNX_CODES.get(tensor.elem_type)
        if dtype is None or not tensor.HasField("shape") or not all(d.HasField("dim_value") for d in dims):
            return None
        computed.discard(info.name)
        total += prod(d.dim_value for d in dims) * dtype.itemsize
    return None if computed else total


def _insert(graph: Any, node: Any, branch: Any) -> None:
    """The branch's nodes, with its results under the names of the If node's."""
    names = {inner.name: outer for inner, outer in zip(branch.output, node.output, strict=False) if outer}
    computed = {name for inner in branch.node for name in inner.output}
    taken = {name for other in graph.node for name in other.output} | {t.name for t in graph.initializer}
    clash = {name: f"{node.name or node.output[0]}::{name}" for name in computed & taken}
    renamed = {**clash, **{inner: outer for inner, outer in names.items() if inner in computed}}
    for tensor in branch.initializer:
        if tensor.name not in taken:
            graph.initializer.add().CopyFrom(tensor)
    for inner in branch.node:
        copy = graph.node.add()
        copy.CopyFrom(inner)
        for field in (copy.input, copy.output):
            for index, name in enumerate(field):
                if name in renamed:
                    field[index] = renamed[name]
    for inner_name, outer in names.items():
        if inner_name not in computed:  # the branch hands on a value of the outer graph
            copy = graph.node.add()
            copy.op_type, copy.name = "Identity", f"{node.name}/Identity"
            copy.input.append(inner_name)
            copy.output.append(outer)
