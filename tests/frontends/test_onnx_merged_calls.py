"""Calls that the TorchScript exporter merged: each module of a list runs its own."""

from __future__ import annotations

from pathlib import Path

from onnx_models import bound, model, node, value, weight

from staticmem.ir.graph import Graph, Op


def blocks(*paths: str, reads_input: bool = True, returns_first: bool = False) -> list[object]:
    """`x = conv(leaky_relu(x)) + x` in each module, of which the exporter computes `leaky_relu(x)` once."""
    first = paths[0]
    nodes = [node("LeakyRelu", ["h"], ["r"], name=f"/{first}/LeakyRelu")]
    for path in paths:
        source = "r" if path == first or not returns_first else f"{first}.y"
        nodes.append(node("Conv", [source, f"{path}.w"], [f"{path}.c"], name=f"/{path}/Conv", kernel_shape=[1]))
        other = "h" if reads_input else f"{path}.c"
        nodes.append(node("Add", [f"{path}.c", other], [f"{path}.y"], name=f"/{path}/Add"))
    return nodes


def made(folder: Path, nodes: list[object], *paths: str) -> Graph:
    start = node("Conv", ["x", "s.w"], ["h"], name="/start/Conv", kernel_shape=[1])
    end = node("Concat", [f"{path}.y" for path in paths], ["y"], name="/Concat", axis=1)
    weights = [weight("s.w", 8, 8, 1), *[weight(f"{path}.w", 8, 8, 1) for path in paths]]
    return bound(model([start, *nodes, end], [value("x", [2, 8, 16])], ["y"], weights), folder)


def activations(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.base == "aten::leaky_relu"]


def test_each_module_of_a_list_runs_its_own(tmp_path: Path) -> None:
    paths = ("blocks.0", "blocks.1", "blocks.2")
    graph = made(tmp_path, blocks(*paths), *paths)
    ops = activations(graph)
    assert [op.modules[-1].path for op in ops] == list(paths)
    assert len({name for op in ops for name in op.outputs}) == 3
    assert [note.code for note in graph.notes if note.code == "SM271"] == ["SM271"]
    convolutions = [op for op in graph.ops if op.base == "aten::conv1d"][1:]
    assert [op.refs()[0] for op in convolutions] == [op.outputs[0] for op in ops]


def test_modules_of_other_names_pass_values_on(tmp_path: Path) -> None:
    assert len(activations(made(tmp_path, blocks("stem", "head"), "stem", "head"))) == 1


def test_a_module_without_the_input_cannot_have_run_it(tmp_path: Path) -> None:
    nodes = blocks("blocks.0", "blocks.1", reads_input=False)
    assert len(activations(made(tmp_path, nodes, "blocks.0", "blocks.1"))) == 1


def test_results_are_passed_on(tmp_path: Path) -> None:
    nodes = blocks("blocks.0", "blocks.1", returns_first=True)
    assert len(activations(made(tmp_path, nodes, "blocks.0", "blocks.1"))) == 1
