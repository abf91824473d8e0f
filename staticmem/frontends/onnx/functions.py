"""Local functions of an ONNX file, put in place of the nodes that call them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from staticmem.errors import ModelFileError

MAX_NODES = 4_000_000  # after inlining; a model of a million nodes takes some GiB
MAX_DEPTH = 100  # of calls; torch.onnx.export writes one per level of modules

Key = tuple[str, str, str]


def inlined(proto: Any) -> Any:
    """The model without functions.

    Raises:
        ModelFileError: functions call themselves, or would become more nodes than any model has.
    """
    if not proto.functions:
        return proto
    _check(proto)
    import onnx.checker
    import onnx.inliner

    try:
        return onnx.inliner.inline_local_functions(proto)
    except (onnx.checker.ValidationError, RuntimeError, ValueError, TypeError) as error:
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
            if sizes[key] > MAX_NODES:
                raise _refused(f"{key[1]} would become {sizes[key]:,} nodes, of at most {MAX_NODES:,}.")
        return sizes[key]

    total = size(proto.graph.node)
    if total > MAX_NODES:
        raise _refused(f"The graph would become {total:,} nodes, of at most {MAX_NODES:,}.")


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
    found = [node for nodes in (proto.graph, *proto.functions) for node in nodes.node if node.op_type in bodies]
    for node in _all(found):
        if node.op_type == "Scan" and not any(a.name == "num_scan_inputs" for a in node.attribute):
            raise ModelFileError(
                "a Scan of the graph lacks num_scan_inputs",
                "Without it nobody knows which of its inputs it scans.",
                "Check the file with onnx.checker.check_model.",
                code="SM157",
            )
