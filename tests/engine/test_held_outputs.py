"""Outputs that the training loop holds: from one forward's return to the next one's, with what their history keeps."""

from __future__ import annotations

from typing import Any

import pytest
from blocks import chain
from prepared import run_step
from small_graphs import Builder

from staticmem.allocators.from_trace import process_of_trace
from staticmem.eager.reasons import Reason
from staticmem.engine.held_outputs import BEFORE, HISTORY, PREVIOUS
from staticmem.engine.step import StepResult
from staticmem.ir.graph import Graph
from staticmem.liveness import Lifetimes
from staticmem.liveness.intervals import added_by_held_outputs
from staticmem.scenario.step import Scenario

SIZE = 64 * 64 * 4  # bytes of every tensor of the graphs below but losses


def with_auxiliary() -> Graph:
    """Two outputs; the second is in no loss, and its history saves one tensor of its own: the sigmoid's result."""
    b = Builder()
    x = b.input("x", 64, 64)
    main = b.call("mm", x, b.parameter("w", 64, 64), name="main")
    gate = b.call("sigmoid", b.call("mm", x, b.parameter("v", 64, 64)), name="gate")
    return b.graph(main, b.call("mm", gate, b.parameter("u", 64, 64), name="auxiliary"))


def with_input_and_view() -> Graph:
    """The input and a view of the first output are returned beside it."""
    b = Builder()
    x = b.input("x", 64, 64)
    main = b.call("mm", x, b.parameter("w", 64, 64), name="main")
    return b.graph(main, x, b.call("t", main, name="turned"))


GRAPHS = {"chain": chain(3), "auxiliary": with_auxiliary(), "input and view": with_input_and_view()}
GO_OF_BATCH, GO_OF_LOSS = {"let_go": ("batch@loop",)}, {"let_go": ("loss@loop",)}
STEPS: list[dict[str, Any]] = [{}, {"accumulate": 2}, {"set_to_none": False}]
STEPS_OF_LOOP = [*STEPS, *({**words, **go} for words in STEPS for go in (GO_OF_BATCH, GO_OF_LOSS))]
CASES = [*((name, words) for name in GRAPHS for words in STEPS), ("chain", {"checkpoint": ("Block",)})]
CASES_OF_LOOP = [*((name, words) for name in GRAPHS for words in STEPS_OF_LOOP), *CASES[-1:]]


def run(graph: Graph, **words: Any) -> StepResult:
    return run_step(graph, Scenario(**{"mode": "train", "optimizer": "adam", "loss": "cross-entropy", **words}))


def previous(result: StepResult) -> list[int]:
    return sorted(b.nbytes for b in result.trace.buffers if b.name in (PREVIOUS, HISTORY) and b.nbytes)


def test_the_outputs_of_the_step_before_go_when_the_forward_has_returned() -> None:
    result = run(chain(2))
    trace, logits = result.trace, 64 * 8 * 4
    assert previous(result) == [logits]
    old = next(b for b in trace.buffers if b.name == PREVIOUS and b.nbytes)
    new = next(b for b in trace.buffers if b.name == "y")
    log_softmax = next(b for b in trace.buffers if "log_softmax" in trace.kernels[b.kernel].name)
    assert old.died is not None
    assert new.born < old.died < log_softmax.born
    assert new.died is None
    assert trace.replaced_by[old.id] == (new.id,)


def test_an_output_that_is_in_no_loss_keeps_what_it_saved() -> None:
    result = run(with_auxiliary())
    assert previous(result) == [SIZE, SIZE, SIZE]  # two outputs, and the gate
    lifetimes = Lifetimes(result.trace)
    assert {b.name for b in lifetimes.alive(lifetimes.ticks - 1) if b.category == "activation"} == {
        "main", "auxiliary", "gate", "",  # the loss has no name
    }  # fmt: skip


def test_a_history_of_several_tensors_is_no_tensor_of_one_of_their_shapes() -> None:
    b = Builder()
    x = b.input("x", 64, 64)
    main = b.call("mm", x, b.parameter("w", 64, 64), name="main")
    gate = b.call("sigmoid", b.call("sigmoid", b.call("mm", x, b.parameter("v", 64, 64))))
    result = run(b.graph(main, b.call("mm", gate, b.parameter("u", 64, 64), name="auxiliary")))
    (history,) = [buffer for buffer in result.trace.buffers if buffer.name == HISTORY]
    assert (history.nbytes, history.shape, history.dtype.name) == (2 * SIZE, (2 * SIZE,), "uint8")
    shapes = [buffer.shape for buffer in result.trace.buffers if buffer.name == PREVIOUS]
    assert shapes == [(64, 64), (64, 64)]


def test_an_input_and_a_view_take_nothing_more() -> None:
    assert previous(run(with_input_and_view())) == [SIZE]


def test_a_loss_that_the_model_returns_is_one_of_the_outputs() -> None:
    b = Builder()
    product = b.call("mm", b.input("y", 64, 64), b.parameter("w", 64, 64), name="logits")
    result = run(b.graph(b.call("mean", product, name="loss"), product), loss="none")
    assert previous(result) == [4, SIZE]
    assert not [b for b in result.trace.buffers if b.name == "loss of the previous step"]


def test_micro_batches_hold_the_outputs_of_the_one_before() -> None:
    trace = run(chain(2), accumulate=4).trace
    first, second = [b for b in trace.buffers if b.name == "y"]
    start = [tick for name, tick in trace.phases if name == "forward"][1]
    assert first.died is not None
    assert start < first.died < trace.marks["forward_end"]
    assert second.died is None


@pytest.mark.parametrize(("name", "words"), CASES_OF_LOOP)
def test_a_step_leaves_what_it_found(name: str, words: dict[str, Any]) -> None:
    """It is one of equal steps; gradients apart, which a first forward may not have."""
    lifetimes = Lifetimes(run(GRAPHS[name], **words).trace)
    begin = dict(reversed(lifetimes.trace.phases))["forward"] - 1
    found, left = lifetimes.by_category(begin), lifetimes.by_category(lifetimes.ticks - 1)
    # an input that the history of an output has saved is part of that history in the next step
    assert [sum(found.get(part, 0) for part in ("activation", "input"))] == [
        sum(left.get(part, 0) for part in ("activation", "input"))
    ]


@pytest.mark.parametrize(("name", "words"), CASES_OF_LOOP)
def test_the_process_keeps_nothing_from_step_to_step(name: str, words: dict[str, Any]) -> None:
    trace = run(GRAPHS[name], **words).trace
    after = []
    for steps in (2, 3):
        process = process_of_trace(trace, steps=steps)
        alive = {call for call in process.calls if call >= 0} - {~call for call in process.calls if call < 0}
        after.append(sorted(process.sizes[id] for id in alive))
    assert after[0] == after[1]


@pytest.mark.parametrize(("name", "words"), CASES)
def test_what_they_add_to_the_peak(name: str, words: dict[str, Any]) -> None:
    """Worked out from one step, and by a step that drops them."""
    held, dropped = (Lifetimes(run(GRAPHS[name], outputs=word, **words).trace) for word in ("held", "dropped"))
    assert added_by_held_outputs(held) == held.peak_bytes - dropped.peak_bytes
    assert added_by_held_outputs(dropped) == 0
    assert Reason.OUTPUTS not in dropped.trace.holds.kinds


def test_a_batch_that_the_loop_deletes_lives_until_the_backward_has_read_it() -> None:
    trace = run(chain(2), **GO_OF_BATCH).trace
    first, after = [buffer for buffer in trace.buffers if buffer.name == "x"]
    target, *_ = [buffer for buffer in trace.buffers if buffer.name == "target"]
    phases = dict(trace.phases)
    assert phases["backward"] < (target.died or 0) < (first.died or 0) < phases["optimizer"] < after.born
    assert after.born > max(b.born for b in trace.buffers if b.category == "temporary")  # behind the optimizer's step
    assert trace.replaced_by[first.id] == (after.id,)


def test_a_loss_that_the_loop_deletes_has_gone_before_the_optimizer() -> None:
    trace = run(with_auxiliary(), **GO_OF_LOSS).trace
    activations = [b for b in trace.buffers if b.category == "activation" and b.nbytes]
    assert max(b.died or trace.ticks for b in activations) < dict(trace.phases)["optimizer"]
    assert not [b for b in activations if b.name in (PREVIOUS, HISTORY, "loss of the previous step")]


def test_inference_in_a_loop_holds_the_result_of_the_call_before() -> None:
    """`out = model(x)`: the result of before lives until the next forward has returned, and is none in the first."""
    result = run(with_auxiliary(), mode="infer", optimizer=None)
    trace, lifetimes = result.trace, Lifetimes(result.trace)
    old = [b for b in trace.buffers if b.name == BEFORE and b.nbytes]
    assert [b.nbytes for b in old] == [SIZE, SIZE]
    assert {trace.replaced_by[b.id] for b in old} == {(b.id,) for b in trace.buffers if b.name in ("main", "auxiliary")}
    dropped = Lifetimes(run(with_auxiliary(), mode="infer", optimizer=None, outputs="dropped").trace)
    assert lifetimes.peak_bytes == dropped.peak_bytes + 2 * SIZE
    assert added_by_held_outputs(lifetimes) == 2 * SIZE
    found, left = (lifetimes.by_category(tick)["activation"] for tick in (old[-1].born, lifetimes.ticks - 1))
    assert found == left == 2 * SIZE


def test_the_first_call_of_a_process_holds_nothing() -> None:
    """Its allocations are those of a single forward; from the second on there is a result of before."""
    held, dropped = (run(chain(2), mode="infer", optimizer=None, outputs=word).trace for word in ("held", "dropped"))
    most = []
    for trace in (held, dropped):
        process, now, peaks = process_of_trace(trace, steps=3), 0, []
        starts = [mark.event for mark in process.marks if mark.phase == "forward"]
        for number, call in enumerate(process.calls):
            if number in starts:
                peaks.append(0)
            now += process.sizes[call] if call >= 0 else -process.sizes[~call]
            if peaks:
                peaks[-1] = max(peaks[-1], now)
        most.append(peaks)
    of_loop, alone = most
    assert of_loop[0] == alone[0] == alone[1] == alone[2]
    assert of_loop[1] == of_loop[2] == alone[0] + 64 * 8 * 4


def test_an_input_that_inference_returns_takes_nothing_more() -> None:
    assert added_by_held_outputs(Lifetimes(run(with_input_and_view(), mode="infer", optimizer=None).trace)) == SIZE
