"""Plans of small graphs made by hand; each expectation follows from the rule of PyTorch's source that it names."""

from __future__ import annotations

from collections.abc import Sequence

from planned import plan

from staticmem.compiler.graphs import NodeGraph
from staticmem.compiler.inductor.buffers import Operation
from staticmem.compiler.inductor.kernels import fallback
from staticmem.compiler.inductor.lowering import Lowering
from staticmem.compiler.plan import Plan
from staticmem.eager.strides import Form, Shape, channels_last_strides, contiguous_strides, form_of
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.tracing.nodes import PLACEHOLDER, Argument, Node

BIG = (64, 1024)


def form(shape: Shape, dtype: DType = dtypes.float32) -> Form:
    return form_of(shape, contiguous_strides(shape), dtype)


def given(shape: Shape, name: str = "x") -> Node:
    return Node(PLACEHOLDER, (), form(shape), name=name)


def call(target: str, args: Sequence[Argument], shape: Shape, dtype: DType = dtypes.float32) -> Node:
    return Node(target, tuple(args), form(shape, dtype))


def graph(*outputs: Node | None) -> NodeGraph:
    """Nodes in the order in which they were made: an input before what reads it."""
    nodes: dict[Node, None] = {}

    def visit(node: Node) -> None:
        for read in node.inputs:
            visit(read)
        nodes[node] = None

    for output in outputs:
        if output is not None:
            visit(output)
    ordered = sorted(nodes, key=lambda node: node.target != PLACEHOLDER)
    return NodeGraph(tuple(ordered), tuple(outputs))


def operations(made: NodeGraph) -> list[Operation]:
    """What is realized, before kernels are fused."""
    return Lowering(made, inference=True, backward=False, fallback=fallback).run().operations


def shapes(made: Plan) -> list[Shape]:
    return [buffer.form.shape for buffer in made.buffers]


def kernels(made: Plan) -> list[str]:
    return [step.kernel for step in made.steps]


def test_pointwise_chain_is_one_buffer() -> None:
    """`Pointwise` values are computed where they are read (`StorageBox`)."""
    x = given(BIG)
    y = call("aten::relu", [call("aten::mul.Tensor", [call("aten::exp", [x], BIG), 2.0], BIG)], BIG)
    made = plan(graph(y), inference=True)
    assert shapes(made) == [BIG]
    assert made.steps[0].allocates == (1,)
    assert made.outputs[0] is not None
    assert made.outputs[0].storage == 1


def test_product_takes_what_is_realized() -> None:
    """An extern kernel needs its inputs in memory (`ExternKernel.realize_input`); its result is written by `out=`."""
    x, w = given(BIG), given((1024, 512), "w")
    y = call("aten::mm", [call("aten::relu", [x], BIG), w], (64, 512))
    made = plan(graph(y), inference=True)
    assert shapes(made) == [BIG, (64, 512)]
    assert kernels(made)[-1] == "aten.mm.default"


def test_pointwise_behind_a_product_is_in_place() -> None:
    """`decide_inplace_update`: the last reader of a buffer that reads where it writes takes it."""
    x, w = given(BIG), given((1024, 512), "w")
    y = call("aten::relu", [call("aten::mm", [x, w], (64, 512))], (64, 512))
    made = plan(graph(y), inference=True)
    assert shapes(made) == [(64, 512)]
    assert made.outputs[0] is not None
    assert made.outputs[0].storage == 2


def test_no_in_place_through_a_permutation() -> None:
    """`SchedulerNode.can_inplace`: the index of the read has to be that of the write."""
    x, w = given((512, 512)), given((512, 512), "w")
    product = call("aten::mm", [x, w], (512, 512))
    turned = call("aten::permute", [product, (1, 0)], (512, 512))
    y = call("aten::add.Tensor", [call("aten::exp", [turned], (512, 512)), product], (512, 512))
    assert shapes(plan(graph(y), inference=True)) == [(512, 512), (512, 512)]


def test_reused_value_with_many_reads_is_realized() -> None:
    """`should_realize_on_reuse`: more than config.realize_reads_threshold = 4 reads and more than one user."""
    for count, buffers in ((4, 2), (5, 3)):
        values = [given(BIG, f"x{i}") for i in range(count)]
        total = values[0]
        for value in values[1:]:
            total = call("aten::add.Tensor", [total, value], BIG)
        half = call("prims::convert_element_type", [total, dtypes.float16], BIG, dtypes.float16)
        one, other = call("aten::gt.Scalar", [total, 0.0], BIG, dtypes.bool_), half
        assert len(operations(graph(one, other))) == buffers


def test_value_with_more_than_eight_reads_is_realized() -> None:
    """`has_exceeded_max_reads`: config._realize_acc_reads_threshold_default = 8."""
    for count, buffers in ((8, 1), (9, 2)):
        values = [given(BIG, f"x{i}") for i in range(count)]
        total = values[0]
        for value in values[1:]:
            total = call("aten::add.Tensor", [total, value], BIG)
        out = call("aten::exp", [call("aten::permute", [total, (1, 0)], BIG[::-1])], BIG[::-1])
        assert len(operations(graph(out))) == buffers


def test_convolution_in_channels_last() -> None:
    """`decide_layout_opt` is true of a plain 3x3 convolution; inference copies input and weight just before it."""
    x, w = given((8, 64, 32, 32)), given((128, 64, 3, 3), "w")
    args = [x, w, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1]
    y = call("aten::relu", [call("aten::convolution", args, (8, 128, 32, 32))], (8, 128, 32, 32))
    made = plan(graph(y), inference=True)
    assert shapes(made)[:3] == [(8, 64, 32, 32), (128, 64, 3, 3), (8, 128, 32, 32)]
    assert made.buffers[2].form.strides == channels_last_strides((8, 128, 32, 32))
    convolution = next(step for step in made.steps if step.kernel == "aten.convolution.default")
    assert {2, 3} <= set(convolution.frees)


def test_saved_weight_is_the_copy() -> None:
    """`run_node` gives a placeholder that is an output and leads to a convolution channels-last strides."""
    x, w = given((8, 64, 32, 32)), given((128, 64, 3, 3), "w")
    args = [x, w, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1]
    y = call("aten::convolution", args, (8, 128, 32, 32))
    made = plan(graph(y, x, w), visible=1)
    saved = made.outputs[2]
    assert saved is not None
    assert saved.storage >= made.inputs
    assert saved.form.strides == channels_last_strides((128, 64, 3, 3))
    # the output that the user sees has the strides of eager
    assert made.outputs[0] is not None
    assert made.outputs[0].form.strides == contiguous_strides((8, 128, 32, 32))


def test_concatenation_is_written_part_by_part() -> None:
    """`ConcatKernel`: the first part that is written allocates the whole."""
    x, w = given(BIG), given((1024, 1024), "w")
    parts = [call("aten::mm", [x, w], BIG) for _ in range(2)]
    y = call("aten::cat", [tuple(parts), 0], (128, 1024))
    made = plan(graph(y), inference=True)
    assert sorted(shapes(made)) == [BIG, BIG, (128, 1024)]
    whole = shapes(made).index((128, 1024)) + made.inputs
    assert next(step.allocates for step in made.steps if step.kernel.startswith("triton")) == (whole,)


def test_scatter_writes_into_the_base() -> None:
    """`scatter_reduce_`: the base is a buffer, and the values are written into it (`MutationLayout`)."""
    full = Node("aten::full", ((1000, 64), 0.0), form((1000, 64)))
    index, source = Node(PLACEHOLDER, (), form((8, 64), dtypes.int64), name="i"), given((8, 64))
    y = call("aten::scatter_add", [full, 0, index, source], (1000, 64))
    made = plan(graph(y), inference=True)
    assert shapes(made) == [(1000, 64)]
    assert len(made.steps) == 2


def test_free_buffer_is_reused() -> None:
    """`AllocateLine.plan`: a buffer of the same size that the kernel before let go of."""
    x, w = given((512, 512)), given((512, 512), "w")
    value = x
    for _ in range(4):
        value = call("aten::mm", [value, w], (512, 512))
    assert shapes(plan(graph(value), inference=True)) == [(512, 512)] * 2


def test_copy_into_an_input_has_no_storage() -> None:
    """`mutate_to`: the new value is realized where it reads more than one tensor, and copied into the input."""
    running, batch = given((64,), "running"), given((64,), "batch")
    value = call("aten::add.Tensor", [call("aten::mul.Tensor", [running, 0.9], (64,)), batch], (64,))
    write = call("aten::copy_", [running, value], (64,))
    nodes = (running, batch, value.args[0], value, write)
    made = plan(NodeGraph(nodes, (batch,)), inference=True)
    assert all(buffer.form.shape == (64,) for buffer in made.buffers)
    assert made.outputs[0] is not None
    assert made.outputs[0].storage == 1


def test_donated_input_is_taken_over() -> None:
    """A saved value that nobody else has may be written over (`get_donated_buffers`)."""
    saved = given(BIG, "")
    y = call("aten::mul.Tensor", [call("aten::exp", [saved], BIG), 2.0], BIG)
    made = plan(graph(y), backward=True, freeable=[saved], donated=[saved])
    assert made.buffers == ()
    assert made.outputs[0] is not None
    assert made.outputs[0].storage == 0


def test_padding_of_strides() -> None:
    """`Layout._pad_strides`: strides above 1024 elements become multiples of 128 bytes, unless the user sees them."""
    x = given((16, 1027, 1027))
    made = plan(graph(call("aten::exp", [x], (16, 1027, 1027))), inference=True)
    assert made.buffers[0].form.strides == contiguous_strides((16, 1027, 1027))
    w = given((1027, 64), "w")
    values = [call("aten::exp", [x], (16, 1027, 1027)), w]
    wide = call("aten::expand", [w, (16, 1027, 64)], (16, 1027, 64))
    made = plan(graph(call("aten::bmm", [values[0], wide], (16, 1027, 64))), inference=True)
    assert made.buffers[0].form.strides == (1027 * 1056, 1056, 1)


def test_a_gated_half_is_no_kernel_of_its_own() -> None:
    """`glu` of lowering.py: two slices, a sigmoid and a product, which what follows computes with it."""
    x = given((64, 2048))
    gated = call("aten::glu", (x, -1), BIG)
    made = plan(graph(call("aten::add.Tensor", (gated, given(BIG, "y")), BIG)))
    assert shapes(made) == [BIG]
    assert len(kernels(made)) == 1
