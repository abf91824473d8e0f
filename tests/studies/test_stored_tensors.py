"""Tensors that an exporter stored in the place of the module's own."""

from __future__ import annotations

from dataclasses import replace

from small_graphs import Builder

from staticmem.engine.step import run_step
from staticmem.ir.graph import Graph
from staticmem.scenario.step import Scenario
from staticmem.studies.stored_tensors import moved_by_stored_tensors

TRAINING = Scenario(mode="train", optimizer="adam", loss="mean")
INFERENCE = Scenario(mode="infer")


def moved(graph: Graph, scenario: Scenario, written_as: str = "onnx") -> tuple[int, int]:
    graph = replace(graph, format=written_as)
    return moved_by_stored_tensors(graph, run_step(graph, scenario).trace)


def two_norms(first: str, second: str) -> Graph:
    b = Builder(x=(4, 256))
    x = b.input("y", 4, 256)
    weight = b.parameter(first, 256)
    x = b.within("norm1:my.Norm").call("mul.Tensor", x, weight)
    return b.graph(b.within("norm2:my.Norm").call("mul.Tensor", x, weight if not second else b.parameter(second, 256)))


def test_a_vector_that_another_module_reads_may_stand_for_two() -> None:
    assert moved(two_norms("norm1.weight", ""), INFERENCE) == (0, 1024)
    assert moved(two_norms("norm1.weight", ""), TRAINING) == (0, 4 * 1024)  # with a gradient and two of Adam
    assert moved(two_norms("norm1.weight", "norm2.weight"), INFERENCE) == (0, 0)
    assert moved(two_norms("norm1.weight", ""), INFERENCE, "pt2") == (0, 0)


def test_a_result_that_is_stored_may_be_made_in_each_step() -> None:
    b = Builder(x=(4, 256)).within("net:my.Net")
    table = b.parameter("index_1", 4, 256)
    graph = b.graph(b.call("add.Tensor", b.input("y", 4, 256), table))
    assert moved(graph, INFERENCE) == (4096, 0)
    assert moved(graph, TRAINING) == (4 * 4096, 0)


def test_published_code_is_left_out() -> None:
    b = Builder(x=(4, 256)).within("net:timm.models.vit.Vit")
    graph = b.graph(b.call("add.Tensor", b.input("y", 4, 256), b.parameter("index_1", 4, 256)))
    assert moved(graph, INFERENCE) == (0, 0)


def test_what_several_calls_of_a_class_read_may_be_merged() -> None:
    b = Builder(x=(4, 256)).within("blocks.0:my.Block")
    mask = b.call("sin", b.input("y", 4, 256), name="mask")
    for number in range(3):
        b.within(f"blocks.{number}:my.Block")
        out = b.call("mul.Tensor", b.input(f"z{number}", 4, 256), mask)
    assert moved(b.graph(out), INFERENCE) == (4096, 2 * 4096)


def test_what_one_other_call_reads_is_a_second_result() -> None:
    b = Builder(x=(4, 256)).within("blocks.0:my.Block")
    mask = b.call("sin", b.input("y", 4, 256), name="mask")
    x = b.call("cos", mask)
    b.within("blocks.1:my.Block")
    assert moved(b.graph(b.call("mul.Tensor", x, mask)), INFERENCE) == (0, 0)


def test_a_result_that_modules_of_a_list_read_may_be_made_for_each() -> None:
    """`for conv in self.convs: y = conv(F.leaky_relu(x)) + x`: exporters compute the activation once."""
    b = Builder(x=(4, 256)).within()
    shared = b.call("leaky_relu", b.input("y", 4, 256), 0.1)
    read = [b.within(f"convs.{n}:my.Conv").call("sin", shared) for n in range(3)]
    b.within()
    total = b.call("add.Tensor", b.call("add.Tensor", read[0], read[1]), read[2])
    assert moved(b.graph(total), INFERENCE) == (4096, 2 * 4096)


def test_what_a_stored_table_was_made_of_may_exist_beside_it() -> None:
    """`F.linear(y, self.basis.T.contiguous())`: the exporter stores the copy alone."""
    b = Builder(x=(4, 256)).within("net:my.Net")
    graph = b.graph(b.call("matmul", b.input("y", 4, 256), b.parameter("/Constant_output_0", 256, 4)))
    graph = replace(graph, parameters=(), buffers=graph.parameters)
    assert moved(graph, INFERENCE) == (4096, 4096)
