"""Accumulation, frozen parameters, kept gradients, loss scaling, clipping and offload, by what they must be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from blocks import ACTIVATION, WIDTH, chain, value
from prepared import run_step

from staticmem.allocators.from_trace import process_of_trace
from staticmem.eager.reasons import Reason
from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Op, Parameter, Ref
from staticmem.liveness import Lifetimes
from staticmem.scenario.request import Request
from staticmem.scenario.step import Scenario

WEIGHT = WIDTH * WIDTH * 4  # bytes of a block's weight
HEAD = 8 * WIDTH * 4
SCALAR = 512  # bytes that a scalar occupies


def run(blocks: int = 3, graph: Graph | None = None, **levers: Any) -> StepResult:
    return run_step(graph or chain(blocks), Scenario(mode="train", loss="cross-entropy", **levers))


def named(result: StepResult, category: str) -> set[str]:
    return {b.name for b in result.trace.buffers if b.category == category}


def peak(result: StepResult) -> int:
    return Lifetimes(result.trace).peak_bytes


def forward_end(result: StepResult) -> int:
    return Lifetimes(result.trace).level_before(result.trace.marks["forward_end"])


def codes(result: StepResult) -> set[str]:
    return {n.code for n in result.notes}


# -- accumulation ------------------------------------------------------------------------------------------------


def test_gradients_exist_during_the_forward_of_a_later_micro_batch() -> None:
    one, two = run(), run(accumulate=2)
    assert [name for name, _ in two.trace.phases] == [
        "setup",
        "forward",
        "backward",
        "forward",
        "backward",
        "optimizer",
    ]
    assert forward_end(two) - forward_end(one) == 3 * WEIGHT + HEAD
    assert "SM313" in codes(two)


def test_gradients_are_added_in_place() -> None:
    trace = run(accumulate=2).trace
    assert sum(b.category == "gradient" for b in trace.buffers) == 4
    assert sum(k.name == "aten.add_.Tensor" and k.phase == "backward" for k in trace.kernels) == 4


def test_micro_batches_after_the_second_change_nothing() -> None:
    assert peak(run(accumulate=2)) == peak(run(accumulate=16))


def test_ops_are_counted_once() -> None:
    assert run(accumulate=4).covered == run().covered
    assert run(checkpoint=("Block",)).covered == run().covered


def test_micro_batches_make_room_only_for_gradients() -> None:
    """Half the batch twice: less than the whole batch once, more than half of it once."""
    assert peak(run(accumulate=2)) <= peak(run()) + 3 * WEIGHT + HEAD


# -- frozen parameters -------------------------------------------------------------------------------------------


def test_layers_before_the_first_that_trains_save_nothing() -> None:
    result = run(freeze=r"blocks\.[01]\.", optimizer="adam")
    assert named(result, "gradient") == {"net.blocks.2.linear.weight.grad", "net.head.weight.grad"}
    assert named(result, "optimizer_state") == {
        f"net.{n}.weight.{s}" for n in ("blocks.2.linear", "head") for s in ("exp_avg", "exp_avg_sq")
    }
    assert {h.op for h in result.trace.holds if h.kind is Reason.SAVED and 0 <= h.op < 4} == set()
    assert result.trained == 2
    assert [p.trainable for p in result.graph.parameters] == [False, False, True, True]


def test_a_frozen_layer_in_between_passes_gradients_on() -> None:
    """It saves its weight only: 2 results (relu of 0, and of 2), and that of block 1, which the next weight needs."""
    middle = run(freeze=r"blocks\.1\.")
    assert named(middle, "gradient") == {f"net.{n}.weight.grad" for n in ("blocks.0.linear", "blocks.2.linear", "head")}
    saved = {(h.op, middle.trace.buffers[h.buffer].nbytes) for h in middle.trace.holds if h.kind is Reason.SAVED}
    assert (2, WEIGHT) in saved
    assert (2, ACTIVATION) not in saved
    assert (4, ACTIVATION) in saved


def test_everything_frozen_trains_nothing() -> None:
    result = run(freeze="", optimizer="sgd")
    assert result.trained == 0
    assert not [h for h in result.trace.holds if h.kind in ("saved", "grad")]


def test_a_pattern_without_a_match_is_said() -> None:
    result = run(freeze="encoder")
    assert [note.code for note in result.graph.notes] == ["SM310"]
    assert result.trained == 4


def tied(fqns: tuple[str, str], shared: bool) -> Graph:
    """An embedding and a head over one weight: with both names, or as ONNX has it, with the second one only."""
    embed = (Frame("", "Net"), Frame("wte", "torch.nn.modules.sparse.Embedding"))
    head = (Frame("", "Net"), Frame("lm_head", "torch.nn.modules.linear.Linear"))
    first, second = (Parameter(value(n, 10, 4), fqn) for n, fqn in zip(("w", "v"), fqns, strict=True))
    name = "v" if shared else "w"
    ops = (
        Op("e", "aten::embedding", (Ref(name), Ref("x")), {}, ("h",), embed),
        Op("l", "aten::linear", (Ref("h"), Ref("v")), {}, ("y",), head),
    )
    parameters = (second,) if shared else (second, replace(first, alias_of="v"))
    return Graph(
        name="net", format="onnx" if shared else "pt2", producer="test",
        inputs=(replace(value("x", 2, 3), dtype=dtypes.int64),), parameters=parameters, buffers=(), ops=ops,
        outputs=("y",), values={"y": value("y", 2, 3, 10)},
    )  # fmt: skip


@pytest.mark.parametrize(("pattern", "trained"), [("wte", 0), ("lm_head", 1)])
def test_a_tied_weight_has_the_name_of_its_first_reader_in_onnx(pattern: str, trained: int) -> None:
    """`named_parameters()` lists a tied weight once, under its first name."""
    graph = tied(("wte.weight", "lm_head.weight"), shared=True)
    assert run(graph=graph, freeze=pattern).trained == trained


def test_all_names_of_a_tied_weight_are_frozen_together() -> None:
    graph = tied(("wte.weight", "lm_head.weight"), shared=False)
    assert run(graph=graph, freeze="lm_head").trained == 0  # listed first in this file
    assert run(graph=graph, freeze="wte").trained == 1


# -- zero_grad, GradScaler, clipping, offload --------------------------------------------------------------------


def test_zeroed_gradients_are_alive_in_the_forward() -> None:
    kept, plain = run(optimizer="sgd", set_to_none=False), run(optimizer="sgd")
    assert forward_end(kept) - forward_end(plain) == 3 * WEIGHT + HEAD
    assert sum(b.category == "gradient" for b in kept.trace.buffers) == 4


def test_gradients_that_end_after_the_forward() -> None:
    """Lightning's closure: training_step, zero_grad, backward."""
    late, plain = (run(optimizer="adam", zero_grad=word) for word in ("after-forward", "first"))
    assert forward_end(late) - forward_end(plain) == 3 * WEIGHT + HEAD
    first, again = (Lifetimes(result.trace) for result in (late, plain))
    ends = dict(late.trace.phases), dict(plain.trace.phases)
    assert first.level_before(ends[0]["optimizer"]) == again.level_before(ends[1]["optimizer"])
    assert forward_end(run(accumulate=2, zero_grad="after-forward")) == forward_end(run(accumulate=2))
    kept: dict[str, Any] = {"optimizer": "sgd", "set_to_none": False}
    assert peak(run(zero_grad="after-forward", **kept)) == peak(run(**kept))


def test_the_allocator_keeps_those_gradients_through_the_next_forward() -> None:
    """From the second step on the calls of a process have what the trace has alive, rounded or not."""
    result = run(optimizer="sgd", zero_grad="after-forward")
    process = process_of_trace(result.trace, steps=3)
    live = most = 0
    for call in process.calls:
        live += process.sizes[call] if call >= 0 else -process.sizes[~call]
        most = max(most, live)
    buffers = [b for b in result.trace.buffers if b.nbytes]
    moments = sorted({b.born for b in buffers})
    alive = max(sum(b.nbytes for b in buffers if b.born <= t and (b.died is None or b.died > t)) for t in moments)
    assert most == alive


def test_parameters_that_get_no_gradient_have_none_to_zero() -> None:
    graph = chain(1)
    spare = Parameter(value("spare", 9), "net.spare")
    result = run(graph=replace(graph, parameters=(*graph.parameters, spare)), set_to_none=False, optimizer="adam")
    assert named(result, "gradient") == {"net.blocks.0.linear.weight.grad", "net.head.weight.grad"}


def test_a_grad_scaler_adds_scalars_only() -> None:
    scaled = run(optimizer="sgd", grad_scaler=True, amp=dtypes.float16)
    plain = run(optimizer="sgd", amp=dtypes.float16)
    assert {"GradScaler.scale", "GradScaler.growth_tracker"} <= named(scaled, "optimizer_state")
    assert 0 < peak(scaled) - peak(plain) <= 4 * SCALAR
    assert "SM312" in codes(plain)
    assert "SM312" not in codes(scaled)
    assert [h for h in scaled.trace.holds if h.who == "GradScaler" and h.end is not None]  # found_inf, until update()


@pytest.mark.parametrize("impl", ["foreach", "fused"])
def test_a_grad_scaler_scales_before_backward_and_checks_after(impl: str) -> None:
    trace = run(optimizer="adam", optimizer_impl=impl, grad_scaler=True).trace
    kernels = [(k.phase, k.name) for k in trace.kernels]
    check = kernels.index(("optimizer", "aten._amp_foreach_non_finite_check_and_unscale_.default"))
    assert kernels.index(("backward", "aten.mul.Tensor")) < check
    assert check < kernels.index(("optimizer", "aten._amp_update_scale_.default"))


def test_clipping_makes_a_norm_for_every_gradient() -> None:
    trace = run(optimizer="sgd", clip_grad_norm=True).trace
    norms = [b for b in trace.buffers if trace.kernels[b.kernel].name == "aten._foreach_norm.Scalar"]
    assert [b.nbytes for b in norms] == [4] * 4
    assert all(b.died is not None for b in norms)


def test_an_offloaded_optimizer_leaves_parameters_and_gradients() -> None:
    offloaded = run(optimizer="adam", offload_optimizer=True)
    assert named(offloaded, "optimizer_state") == set()
    assert len(named(offloaded, "gradient")) == 4
    assert peak(offloaded) == peak(run())
    assert "SM314" in codes(offloaded)


def test_levers_go_together() -> None:
    result = run(
        4, optimizer="adam-8bit", checkpoint=("Block",), checkpoint_every=2, accumulate=3, freeze=r"blocks\.0\.",
        grad_scaler=True, clip_grad_norm=True, set_to_none=False, amp=dtypes.float16,
    )  # fmt: skip
    assert result.trained == 4
    assert set(result.recomputed) == set(range(2, 8)) | set(result.recomputed) & {0, 1}
    end = result.trace.ticks - 1
    kinds = {b.category for b in Lifetimes(result.trace).alive(end)}
    assert kinds == {"parameter", "input", "gradient", "optimizer_state", "activation"}  # activation: the loss


# -- what a backward starts from and leaves ---------------------------------------------------------------------------


def test_a_retained_graph_lives_to_the_end_of_the_backward() -> None:
    """`backward(retain_graph=True)`: nothing that the forward saved goes before the last gradient is there."""
    trace = run(retain_graph=True).trace
    last = max(b.born for b in trace.buffers if b.category == "gradient")
    assert all(h.end is not None and h.end > last for h in trace.holds if h.kind is Reason.SAVED)
    assert peak(run(retain_graph=True)) > peak(run())
    optimizer = dict(trace.phases)["optimizer"]
    assert all(h.end is not None and h.end <= optimizer for h in trace.holds if h.kind is Reason.SAVED)


def test_the_graph_of_a_forward_without_backward_ends_with_it() -> None:
    result = run(backward=False)
    assert [name for name, _ in result.trace.phases] == ["setup", "forward", "optimizer"]
    assert forward_end(result) == forward_end(run())
    assert all(h.end is not None for h in result.trace.holds if h.kind is Reason.SAVED)
    assert not named(result, "gradient")


def test_an_optimizer_needs_a_backward() -> None:
    with pytest.raises(UsageError, match="no gradients for sgd"):
        Request(mode="train", optimizer="sgd", backward=False).scenario()


def test_inputs_have_gradients_where_they_are_asked_for() -> None:
    name = chain(3).inputs[0].name
    for given in ((name,), ("all",)):
        result = run(input_grad=given)
        assert named(result, "gradient") - named(run(), "gradient") == {f"{name}.grad"}
    kept = run(input_grad=("all",), set_to_none=False)
    assert forward_end(kept) - forward_end(run(set_to_none=False)) == ACTIVATION
    with pytest.raises(UsageError, match="no input 'y'") as caught:
        run(input_grad=("y",))
    assert caught.value.code == "SM165"


def test_backward_from_all_outputs_has_a_gradient_for_each() -> None:
    graph = chain(2)
    inner = graph.ops[-2].outputs[0]
    both = replace(graph, outputs=(*graph.outputs, inner))
    result = run_step(both, Scenario(mode="train", loss="outputs"))
    roots = [k for k in result.trace.kernels if k.name == "aten.ones_like.default"]
    assert len(roots) == 2
    assert result.trained == run(2).trained
    assert "SM331" not in codes(result)


def test_a_sum_as_the_loss() -> None:
    result = run_step(chain(2), Scenario(mode="train", loss="sum"))
    assert result.loss == "sum"
    assert any(k.name.startswith("aten.sum") for k in result.trace.kernels if k.phase == "forward")
