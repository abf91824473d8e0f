"""What code that no source line shows may do: checkpoints, custom functions, code of training alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prepared import restored
from small_graphs import Builder

from staticmem.ir.graph import Graph, Ref, SourceLine
from staticmem.passes.requested.regions import all_regions, has_open_regions, hidden_checkpoints
from staticmem.passes.requested.training_code import drop_training_code
from staticmem.passes.restoring.custom_functions import ends_of_functions
from staticmem.passes.variables.unseen_code import line_calling_function
from staticmem.scenario.step import Scenario

X = Ref("x")

TRAIN = Scenario(mode="train")


def line(text: str, number: int = 1, file: str = "net.py") -> SourceLine:
    return SourceLine(file, number, "forward", text)


def blocks(text: str, file: str = "net.py", count: int = 3, cls: str = "Block") -> Graph:
    """Numbered blocks of two ops, all run by one line of the model."""
    b, value = Builder(x=(4,)), X
    for index in range(count):
        b.within(f"blocks.{index}:{cls}{index if cls == 'Other' else ''}")
        b.stack = (line(text, 3, file), line("return torch.sin(torch.cos(x))", 9))
        value = b.call("sin", b.call("cos", value))
    return b.graph(value)


def test_a_method_may_run_blocks_in_checkpoints() -> None:
    graph = blocks("x = self.encode(x)")
    assert [(r.start, r.end, r.name) for r in hidden_checkpoints(graph)] == [
        (0, 2, "blocks.0"), (2, 4, "blocks.1"), (4, 6, "blocks.2"),
    ]  # fmt: skip
    scenario = Scenario(mode="train", optimizer="sgd")
    assert has_open_regions(graph, amp=False)
    assert len(all_regions(graph, scenario, "last-use")[0]) == 3
    assert all_regions(graph, scenario)[0] == ()


@pytest.mark.parametrize("graph", [
    blocks("x = self.blocks[0](x)"), blocks("x = block(x)"), blocks("x = self.encode(x)", count=1),
    blocks("x = self.encode(x)", cls="Other"), blocks("x = self.encode(x)", "/site-packages/timm/models/vit.py"),
])  # fmt: skip
def test_lines_that_show_the_call_hide_no_checkpoint(graph: Graph) -> None:
    assert hidden_checkpoints(graph) == ()
    assert not has_open_regions(graph, amp=False)


def test_a_copy_of_pytorchs_checkpoint_is_one() -> None:
    copied = blocks("input = module(input)", "/site-packages/torch/nn/modules/container.py")
    inner = line("outputs = run_function(*unpacked_args)", 5, "/site-packages/fairscale/nn/checkpoint.py")
    ops = tuple(replace(op, stack=(op.stack[0], inner, *op.stack[1:])) for op in copied.ops)
    copied = replace(copied, ops=ops)
    scenario = Scenario(mode="train", optimizer="sgd")
    assert [(r.start, r.end, r.reentrant) for r in all_regions(copied, scenario)[0]] == [
        (0, 2, True), (2, 4, True), (4, 6, True),
    ]  # fmt: skip
    assert has_open_regions(copied, amp=True)  # it may run again without autocast
    assert not has_open_regions(copied, amp=False)


def applied(*stack: SourceLine) -> Graph:
    b = Builder(x=(4,)).within("act:Act")
    b.stack = stack
    return b.graph(b.call("mul.Tensor", X, b.call("sigmoid", X)))


CALLS = line("y = entmax(x)"), line("return softmax_of(x)")


def test_a_function_that_hidden_code_applies_is_a_frame_more() -> None:
    graph = applied(*CALLS, line("y = x * torch.sigmoid(x)", 7))
    assert [line_calling_function(op) for op in graph.ops] == [1, 1]
    assert ends_of_functions(graph, TRAIN) is not None


@pytest.mark.parametrize("stack", [
    CALLS,
    (line("x = super().forward(x)"), *CALLS),
    (line("return self.inner.forward(x)"), *CALLS),
    (line("x = nn.Sequential(*layers)(x)"), line("input = module(input)", 3, "/torch/nn/container.py"), CALLS[1]),
])  # fmt: skip
def test_other_frames_are_no_functions(stack: tuple[SourceLine, ...]) -> None:
    graph = applied(*stack)
    assert [line_calling_function(op) for op in graph.ops] == [None, None]
    assert ends_of_functions(graph, TRAIN) is None


def test_a_head_of_training_alone_is_not_in_inference() -> None:
    b = Builder(x=(4,)).within()
    b.stack = (line("y = torch.sin(x)"),)
    y = b.call("sin", X, name="y")
    b.stack = (line("aux = self.head(y) if self.training else None", 2),)
    aux = b.call("cos", y, name="aux")
    graph, _ = drop_training_code(b.graph(y, aux))
    assert [op.name for op in graph.ops] == ["y"]
    assert graph.outputs == ("y",)
    b.stack = (line("z = y + aux", 3),)
    read = b.graph(b.call("add.Tensor", y, aux))
    assert drop_training_code(read)[0] is read


def test_rms_norm_is_one_call() -> None:
    b = Builder(x=(4, 8)).within("norm:torch.nn.modules.normalization.RMSNorm")
    b.stack = (line("return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)"),)
    weight = b.parameter("norm.weight", 8)
    mean = b.call("mean.dim", b.call("pow.Tensor_Scalar", X, 2), (1,), True)
    scale = b.call("rsqrt", b.call("add.Scalar", mean, 1e-6))
    b.call("type_as", b.call("mul.Tensor", b.call("mul.Tensor", X, scale), weight), X, name="out")
    values = {v.name: v for v in (*b.inputs, *(p.value for p in b.parameters))}
    (op,) = restored(b.ops, ("out",), ["rms norms"], values=values).ops
    assert (op.target, op.args, op.outputs) == ("aten::rms_norm", (X, (8,), weight), ("out",))
    b.stack = ()
    plain = restored(
        [replace(op, stack=(line("return self._norm(x)"),)) for op in b.ops], ("out",), ["rms norms"], values=values
    )
    assert len(plain.ops) == len(b.ops)
