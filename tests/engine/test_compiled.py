"""Compiled regions: hand-made plans, and the trace that they must give, buffer by buffer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
from blocks import BATCH, F32, WIDTH, chain
from prepared import clean

from staticmem.compiler.aot.joint import NotTracedError
from staticmem.compiler.plan import CompiledCall, Output, Plan, PlannedBuffer, Step
from staticmem.eager.reasons import Reason
from staticmem.eager.strides import Form, contiguous_strides, form_of
from staticmem.engine.compiled_step import CompiledRegion
from staticmem.engine.step import StepResult, StepRun
from staticmem.ir.graph import Graph, Op, Ref
from staticmem.liveness import Lifetimes
from staticmem.liveness.why import reasons
from staticmem.scenario.step import Scenario


def form(*shape: int) -> Form:
    return form_of(shape, contiguous_strides(shape), F32)


X, W, WH, Y = form(BATCH, WIDTH), form(WIDTH, WIDTH), form(8, WIDTH), form(BATCH, 8)  # 4096, 1024, 512, 2048 bytes
TRAIN: dict[str, Any] = {"mode": "train", "loss": "none", "outputs": "dropped"}

# relu(x @ w0) @ wh: the relu takes the memory of the product
FORWARD = Plan(
    inputs=3,
    buffers=(PlannedBuffer(X, 0, "aten::mm"), PlannedBuffer(Y, 2, "aten::mm")),
    steps=(
        Step("aten.mm.default", 0, (3,), (1,)),
        Step("triton: relu", 1, (), ()),
        Step("aten.mm.default", 2, (4,), ()),
    ),
    outputs=(Output(4, Y), Output(0, X), Output(3, X), Output(2, WH)),
)
BACKWARD = Plan(
    inputs=4,  # x, relu, wh, and the gradient of y
    buffers=(PlannedBuffer(WH, 2, "aten::mm"), PlannedBuffer(X, 2, "aten::mm"), PlannedBuffer(W, 0, "aten::mm")),
    steps=(
        Step("aten.mm.default", 2, (4,), ()),
        Step("aten.mm.default", 2, (5,), (2, 3)),
        Step("triton: le where", 1, (), (1,)),
        Step("aten.mm.default", 0, (6,), (0, 5)),
    ),
    outputs=(None, Output(6, W), Output(4, WH)),
)
CALL = CompiledCall(0, 3, ("x", "w0", "wh"), ("y",), FORWARD, BACKWARD, ("x", "relu", "wh"), (0,))
INFERENCE = Plan(
    inputs=3,
    buffers=FORWARD.buffers,
    steps=(*FORWARD.steps[:2], Step("aten.mm.default", 2, (4,), (0, 2, 3))),
    outputs=(Output(4, Y),),
)


def run(call: CompiledCall, graph: Graph | None = None, **options: Any) -> StepResult:
    """The step of `chain(1)` with one region."""
    scenario = Scenario(**{**TRAIN, **options})
    graph = clean(chain(1) if graph is None else graph, scenario.training)
    step = StepRun(graph, scenario, "expected")
    region = CompiledRegion(call.start, call.end, "", lambda *_: call, scenario.cuda_graphs)
    step.interpreter.compiled = (region,)
    return step.train()[0] if scenario.training else step.infer()


def events(result: StepResult, phase: str) -> list[tuple[str, int]]:
    """Each birth (+) and death (-) in a phase, in bytes, under the kernel that was running."""
    trace = result.trace
    start = dict(trace.phases)[phase]
    end = min([tick for _, tick in trace.phases if tick > start], default=trace.ticks)
    found = {}
    for buffer in trace.buffers:
        found[buffer.born] = (trace.kernels[buffer.kernel].name, buffer.nbytes)
        if buffer.died is not None:
            found[buffer.died] = ("", -buffer.nbytes)
    return [found[tick] for tick in range(start, end) if tick in found]


def test_a_step_runs_both_plans() -> None:
    """The backward gives up what it saved: the relu dies after its last reader, the gradient of y before that."""
    result = run(CALL)
    assert events(result, "forward")[:2] == [("aten.mm.default", 4096), ("aten.mm.default", 2048)]
    assert events(result, "backward") == [
        ("aten.ones_like.default", 2048),  # Python holds it until backward() returns
        ("aten.mm.default", 512),
        ("aten.mm.default", 4096),
        ("", -4096),  # the relu
        ("aten.mm.default", 1024),
        ("", -4096),  # its gradient
        ("", -2048),
    ]
    gradients = [b.name for b in result.trace.buffers if b.category == "gradient"]
    assert sorted(gradients) == ["net.blocks.0.linear.weight.grad", "net.head.weight.grad"]
    assert result.trained == 2


def test_inference_frees_what_nobody_returns() -> None:
    call = CompiledCall(0, 3, ("x", "w0", "wh"), ("y",), INFERENCE, None)
    result = run(call, mode="infer", outputs="dropped")
    assert events(result, "forward") == [("aten.mm.default", 4096), ("aten.mm.default", 2048), ("", -4096), ("", -2048)]


def test_reasons_say_what_compiled_code_keeps() -> None:
    result = run(CALL)
    trace = result.trace
    relu = next(b for b in trace.buffers if b.nbytes == 4096 and b.category == "activation")
    holds = [h for h in trace.holds if h.buffer == relu.id and h.kind is Reason.SAVED]
    why = reasons(result.graph, trace.kernels[relu.kernel], relu, holds)
    assert why == ("saved for the backward of linear in net.blocks.0.linear",)


def test_what_the_backward_computes_again_is_an_activation() -> None:
    """The same backward, which computes the relu once more in place of reading it."""
    again = (*BACKWARD.buffers, PlannedBuffer(X, 1, "aten::relu", recomputed=True))
    steps = (Step("triton: relu", 1, (7,), ()), *BACKWARD.steps[:2], Step("triton: where", 1, (), (7,)))
    backward = Plan(4, again, (*steps, BACKWARD.steps[3]), BACKWARD.outputs)
    result = run(CompiledCall(0, 3, CALL.inputs, ("y",), FORWARD, backward, CALL.saved, (0,)))
    trace = result.trace
    made = next(b for b in trace.buffers if trace.kernels[b.kernel].name == "triton: relu")
    assert made.category == "activation"
    holds = [h for h in trace.holds if h.buffer == made.id]
    assert reasons(result.graph, trace.kernels[made.kernel], made, holds) == (
        "recomputed in backward: relu in net.blocks.0",
    )
    assert events(result, "backward")[1:3] == [("", -4096), ("triton: relu", 4096)]  # not read: let go of at the start


def test_retain_graph_keeps_what_was_saved() -> None:
    result = run(CALL, retain_graph=True)
    assert ("", -4096) in events(result, "backward")
    relu = next(b for b in result.trace.buffers if b.nbytes == 4096 and b.category == "activation")
    last = max(b.born for b in result.trace.buffers if b.category in ("temporary", "gradient"))
    assert relu.died is not None
    assert relu.died > last


def test_accumulation_adds_to_the_gradients_of_before() -> None:
    result = run(CALL, accumulate=2)
    gradients = [b for b in result.trace.buffers if b.category == "gradient"]
    assert len(gradients) == 2
    assert all(b.died is None for b in gradients)


def test_a_gradient_in_other_strides_is_copied() -> None:
    """AccumulateGrad clones a gradient whose strides are not its parameter's (channels last)."""
    transposed = form_of((WIDTH, WIDTH), (1, WIDTH), F32)
    buffers = (*BACKWARD.buffers[:2], PlannedBuffer(transposed, 0, "aten::mm"))
    backward = Plan(4, buffers, BACKWARD.steps, (None, Output(6, transposed), BACKWARD.outputs[2]))
    result = run(CompiledCall(0, 3, CALL.inputs, ("y",), FORWARD, backward, CALL.saved, (0,)))
    tail = events(result, "backward")[-4:]
    assert tail == [("", -4096), ("aten.new_empty_strided.default", 1024), ("", -1024), ("", -2048)]


def test_an_incoming_gradient_in_other_strides_is_copied() -> None:
    """`coerce_to_expected_memory_format`: the backward was compiled for the strides of the output."""
    other = form_of((BATCH, 8), (1, BATCH), F32)
    node_forms = CompiledCall(
        0, 3, CALL.inputs, ("y",), Plan(3, FORWARD.buffers, FORWARD.steps, (Output(4, other), *FORWARD.outputs[1:])),
        BACKWARD, CALL.saved, (0,),
    )  # fmt: skip
    result = run(node_forms, loss="sum")
    assert any(name == "aten.copy_.default" for name, _ in events(result, "backward"))


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_an_op_that_is_refused_runs_by_itself(refused: int) -> None:
    """No stretch can be compiled here, so that the step is the eager one."""
    graph = clean(chain(1))

    def compile_stretch(
        _: Graph, start: int, end: int, forms: Mapping[str, Form], needs: Collection[str]
    ) -> CompiledCall:
        assert set(needs) <= set(forms)
        raise NotTracedError(refused if start <= refused < end else start, "no rule")

    scenario = Scenario(**TRAIN)
    step = StepRun(graph, scenario, "expected")
    region = CompiledRegion(0, 3, "", compile_stretch)
    step.interpreter.compiled = (region,)
    compiled = step.train()[0]
    assert refused in region.refused or compiled.graph.ops[refused].target in {
        compiled.graph.ops[k].target for k in region.refused
    }
    eager = StepRun(graph, scenario, "expected").train()[0]
    assert list(compiled.trace.buffers) == list(eager.trace.buffers)


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("no"), AssertionError("never"), TypeError("what")])
def test_a_region_whose_plans_fail_is_eager(error: Exception) -> None:
    def compile_stretch(*_: object) -> CompiledCall:
        raise error

    graph, scenario = clean(chain(1)), Scenario(**TRAIN)
    step = StepRun(graph, scenario, "expected")
    region = CompiledRegion(0, 3, "", compile_stretch)
    step.interpreter.compiled = (region,)
    compiled = step.train()[0]
    assert list(region.refused) == [0]
    assert list(compiled.trace.buffers) == list(_eager().trace.buffers)


def test_sizes_that_a_region_computes_are_known_behind_it() -> None:
    """An export computes the batch where the first block reads it; a reshape of the last op reads it too."""
    graph = chain(1)
    size = Op("size", "aten::sym_size.int", (Ref("x"), 0), {}, ("s",), graph.ops[0].modules)
    view = Op("view", "aten::view", (Ref("y"), (Ref("s"), 8)), {}, ("z",), graph.ops[2].modules)
    graph = replace(graph, ops=(size, *graph.ops, view), outputs=("z",))

    def compile_stretch(graph: Graph, *_: object) -> CompiledCall:
        assert graph.ops[0].outputs == ()  # no result of the compiled code
        return CompiledCall(0, 4, CALL.inputs, ("y",), FORWARD, BACKWARD, CALL.saved, (0,))

    region = CompiledRegion(0, 4, "", compile_stretch)
    for _ in range(2):  # the second step has what the first one compiled
        step = StepRun(clean(graph), Scenario(**TRAIN), "expected")
        step.interpreter.compiled = (region,)
        assert step.train()[0].output_shapes == ((BATCH, 8),)
    assert region.sizes == {"s": BATCH}


def test_a_region_among_eager_ops() -> None:
    """The last product alone is compiled: it holds the relu, which the eager ops saved."""
    forward = Plan(
        2, (PlannedBuffer(Y, 2, "aten::mm"),), (Step("aten.mm.default", 2, (2,), ()),),
        (Output(2, Y), Output(0, X), Output(1, WH)),
    )  # fmt: skip
    backward = Plan(
        3, (PlannedBuffer(WH, 2, "aten::mm"), PlannedBuffer(X, 2, "aten::mm")),
        (Step("aten.mm.default", 2, (3,), (0,)), Step("aten.mm.default", 2, (4,), (1, 2))),
        (Output(4, X), Output(3, WH)),
    )  # fmt: skip
    call = CompiledCall(2, 3, ("a0", "wh"), ("y",), forward, backward, ("a0", "wh"), (0,))
    result = run(call)
    assert Lifetimes(result.trace).peak_bytes == Lifetimes(_eager().trace).peak_bytes
    assert result.trained == 2


def _eager() -> StepResult:
    return StepRun(clean(chain(1)), Scenario(**TRAIN), "expected").train()[0]


def test_a_checkpoint_around_a_region_computes_its_saved_tensors_again() -> None:
    """torch.utils.checkpoint around compiled code: the node saves nothing, its recomputation runs the forward again."""
    result = run(CALL, graph=chain(1), checkpoint=("Net",))
    kernels = [k.name for k in result.trace.kernels if k.phase == "backward"]
    assert kernels.count("triton: relu") == 1
    start = dict(result.trace.phases)["backward"]
    alive = [b for b in result.trace.buffers if b.born < start and (b.died is None or b.died > start)]
    assert not [b for b in alive if b.nbytes == 4096 and b.category == "activation"]


def test_a_cuda_graph_reads_copies() -> None:
    """`static_input_idxs`: the batch is copied, and the copy is what is saved; so is the gradient of the output, which
    goes when it is copied. What the forward has saved and the weights are read where they are."""
    result = run(CALL, compile_mode="reduce-overhead")
    copy = "aten.empty_strided.default"
    assert events(result, "forward")[:3] == [(copy, 4096), ("aten.mm.default", 4096), ("aten.mm.default", 2048)]
    assert events(result, "backward") == [
        ("aten.ones_like.default", 2048),  # Python holds it until backward() returns
        (copy, 2048),
        ("aten.mm.default", 512),
        ("aten.mm.default", 4096),
        ("", -2048),  # the copy
        ("", -4096),  # the relu
        ("aten.mm.default", 1024),
        ("", -4096),  # the batch, copied, and the gradient of the relu
        ("", -4096),
        ("", -2048),
    ]
    trace = result.trace
    forward, backward = trace.cuda_graphs
    assert (forward.body - forward.start, backward.body - backward.start) == (1, 1)
    names = {trace.buffers[copy].name for graph in trace.cuda_graphs for copy in graph.copied}
    assert names == {"x, copied for the CUDA graph", "gradient, copied for the CUDA graph"}
    inside = [trace.kernels[k].name for k in range(len(trace.kernels)) if trace.in_cuda_graph(k)]
    assert inside == [copy, *(step.kernel for step in FORWARD.steps), copy, *(step.kernel for step in BACKWARD.steps)]


def test_code_that_writes_to_its_inputs_is_no_cuda_graph() -> None:
    """`check_for_mutation`."""
    result = run(replace(CALL, written_inputs=("x",)), compile_mode="reduce-overhead")
    assert result.trace.cuda_graphs == []
    assert events(result, "backward") == events(run(CALL), "backward")
