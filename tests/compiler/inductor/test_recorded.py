"""Plans of graphs that real Inductor compiled: what its wrapper code allocates, and the peak.

`tests/data/inductor/graphs.json.gz` says which PyTorch, card and settings.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from planned import plan

from staticmem.compiler.graphs import NodeGraph
from staticmem.compiler.plan import Plan
from staticmem.eager.strides import Form, form_of
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.tracing.nodes import Argument, Node

DATA = Path(__file__).parents[2] / "data" / "inductor" / "graphs.json.gz"
ROUNDED = 512
VGG = "vgg16, float32, 16 images, training: "
INFERENCE = ("resnet18, float32, 32 images, inference", "googlenet, float32, 8 images, inference")


@cache
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(DATA.read_bytes()))["graphs"]
    return found


def dtype_of(name: str) -> DType:
    found: DType = getattr(dtypes, {"bool": "bool_"}.get(name, name))
    return found


def form_from(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, dict):
        return tuple(form_from(part) for part in value["parts"])
    shape, strides, dtype = value
    return form_of(tuple(shape), tuple(strides), dtype_of(dtype))


def graph_of(row: dict[str, Any]) -> NodeGraph:
    nodes: list[Node] = []

    def argument(value: Any) -> Argument:
        if isinstance(value, dict):
            return nodes[value["n"]] if "n" in value else dtype_of(value["d"])
        return tuple(argument(part) for part in value) if isinstance(value, list) else value

    for target, args, form, kwargs, name in row["nodes"]:
        given = {key: argument(value) for key, value in kwargs.items()}
        nodes.append(Node(target, argument(args), form_from(form), given, name=name))
    return NodeGraph(tuple(nodes), tuple(None if at is None else nodes[at] for at in row["outputs"]))


def rounded(form: Form) -> int:
    return -(-form.nbytes // ROUNDED) * ROUNDED


def peak(made: Plan, owned: dict[int, int]) -> int:
    """The most that is alive over what is there before, where this graph lets go of the inputs `owned` (bytes)."""
    live = most = 0
    for step in made.steps:
        live += sum(rounded(made.buffers[number - made.inputs].form) for number in step.allocates)
        most = max(most, live)
        for number in step.frees:
            live -= owned.get(number, 0) if number < made.inputs else rounded(made.buffers[number - made.inputs].form)
    return most


def allocations(made: Plan) -> list[int]:
    return sorted(rounded(buffer.form) for buffer in made.buffers)


@pytest.mark.parametrize("name", INFERENCE)
def test_inference(name: str) -> None:
    row = recorded()[name]
    made = plan(graph_of(row["graph"]), inference=True)
    assert peak(made, {}) == row["peak"]
    assert allocations(made) == sorted(row["allocations"])


def test_training() -> None:
    """The backward is compiled for what the forward saves: copies of weights and of the images in channels last."""
    row = recorded()[VGG + "forward"]
    graph = graph_of(row["graph"])
    forward = plan(graph, visible=row["visible"])
    assert peak(forward, {}) == row["peak"]
    assert allocations(forward) == sorted(row["allocations"])
    names = [node.name for node in graph.placeholders]
    kept = [output for output in forward.outputs[row["visible"] :] if output is not None]
    row = recorded()[VGG + "backward"]
    graph = graph_of(row["graph"])
    inputs = graph.placeholders
    forms = {placeholder: output.form for placeholder, output in zip(inputs, kept, strict=False)}
    made = [at for at, output in enumerate(kept) if output.storage >= forward.inputs]
    tangents = {at: rounded(inputs[at].tensor) for at in range(len(kept), len(inputs))}
    backward = plan(
        graph,
        backward=True,
        forms=forms,
        freeable=[inputs[at] for at in range(len(kept)) if inputs[at].name not in names],
        donated=[inputs[at] for at in made if inputs[at].name not in names],
    )
    assert peak(backward, {at: rounded(kept[at].form) for at in made} | tangents) == row["peak"]
    assert allocations(backward) == sorted(row["allocations"])
