"""Losses over several outputs: against graphs that compute the same sum themselves, and what their words mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prepared import run_step
from small_graphs import Builder

from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Graph, Ref
from staticmem.scenario.step import Scenario

CALLS = {"cross-entropy": "cross_entropy_loss", "mse": "mse_loss", "l1": "l1_loss", "smooth-l1": "smooth_l1_loss",
         "bce": "binary_cross_entropy_with_logits"}  # fmt: skip
CLASSES = dtypes.int64


def heads(*terms: tuple[int, str, float | None, str]) -> Graph:
    """Three linear heads over a hidden layer. With terms (head, loss, weight, target) their sum is the first output, as
    the model computes it, and targets are inputs."""
    b = Builder()
    x = b.input("x", 64, 128)
    hidden = b.call("relu", b.call("linear", x, b.parameter("w", 128, 128)), name="hidden")
    weights = (("a", 30), ("b", 30), ("c", 1000))
    outputs = [b.call("linear", hidden, b.parameter(w, n, 128), name=f"out_{w}") for w, n in weights]
    outputs.append(b.call("mean", b.call("pow.Tensor_Scalar", hidden, 2), name="penalty"))
    total: Ref | None = None
    for head, loss, weight, target in terms:
        term = outputs[head]
        if target:
            if target not in [value.name for value in b.inputs]:
                size = (64,) if loss == "cross-entropy" else (64, weights[head][1])
                b.input(target, *size, dtype=CLASSES if loss == "cross-entropy" else dtypes.float32)
            term = b.call(CALLS[loss], term, Ref(target))
        elif loss == "mean":
            term = b.call("mean", term)
        term = term if weight is None else b.call("mul.Tensor", term, weight)
        total = term if total is None else b.call("add.Tensor", total, term)
    return b.graph(*outputs) if total is None else b.graph(total, *outputs)


def named() -> Graph:
    return replace(heads(), output_names=("main", "aux", "vocabulary.0", "penalty"))


def run(graph: Graph, loss: str, **words: Any) -> StepResult:
    return run_step(graph, Scenario(**{"mode": "train", "optimizer": "adam", "loss": loss, **words}))


def backward_of(result: StepResult) -> list[tuple[str, int]]:
    """What the backward and the optimizer make, in order."""
    trace = result.trace
    start = dict(trace.phases)["backward"]
    return [(trace.kernels[b.kernel].name, b.nbytes) for b in trace.buffers if b.born >= start]


def sizes(result: StepResult, phase: str = "forward") -> list[int]:
    """Bytes alive when the forward has ended, by tensor."""
    at = result.trace.marks["forward_end"]
    return sorted(b.nbytes for b in result.trace.buffers if b.born < at and (b.died is None or b.died >= at))


SUMS: list[tuple[str, tuple[tuple[int, str, float | None, str], ...]]] = [
    ("0=cross-entropy,1=0.4*cross-entropy", ((0, "cross-entropy", None, "y"), (1, "cross-entropy", 0.4, "y"))),
    ("1=0.4*cross-entropy,0=cross-entropy", ((1, "cross-entropy", 0.4, "y"), (0, "cross-entropy", None, "y"))),
    ("0=cross-entropy@p,1=cross-entropy@q", ((0, "cross-entropy", None, "p"), (1, "cross-entropy", None, "q"))),
    ("0=mse,2=smooth-l1", ((0, "mse", None, "y"), (2, "smooth-l1", None, "z"))),
    ("2=l1,0=2*bce,1=bce", ((2, "l1", None, "y"), (0, "bce", 2.0, "z"), (1, "bce", None, "z"))),
    ("2=cross-entropy,3=0.1*none", ((2, "cross-entropy", None, "y"), (3, "none", 0.1, ""))),
    ("0=mean,1=mse", ((0, "mean", None, ""), (1, "mse", None, "y"))),
]  # fmt: skip


@pytest.mark.parametrize("amp", [None, dtypes.bfloat16])
@pytest.mark.parametrize(("loss", "terms"), SUMS, ids=[loss for loss, _ in SUMS])
def test_the_sum_is_what_a_model_would_compute(loss: str, terms: Any, amp: Any) -> None:
    """The same tensors live at the end of the forward, the same ones are made after it, parameters alike."""
    added, computed = run(heads(), loss, amp=amp), run(heads(*terms), "none", amp=amp)
    assert backward_of(added) == backward_of(computed)
    assert (added.trained, added.loss) == (computed.trained, loss)
    # where the model returns its loss it is an output, which the loop has from the step before as well; here it is not
    assert sizes(added) == sizes(computed)


def test_outputs_go_by_their_names() -> None:
    by_name = run(named(), "aux=0.5*mse,vocabulary.0=cross-entropy")
    assert backward_of(by_name) == backward_of(run(heads(), "1=0.5*mse,2=cross-entropy"))
    assert by_name.loss == "aux=0.5*mse,vocabulary.0=cross-entropy"
    assert by_name.trained == 3  # the first layer and two heads


def test_what_is_left_out_is_not_trained_and_said() -> None:
    result = run(named(), "aux=mse")
    assert result.trained == 2
    notes = {note.code: note.text for note in result.notes}
    assert notes["SM215"] == "the loss is mse of aux"
    assert notes["SM216"] == "outputs that the loss leaves out: main, vocabulary.0, penalty"
    assert "SM331" not in notes


def test_all_takes_the_outputs_that_are_not_named() -> None:
    assert run(named(), "penalty=none,all=mean").loss == "penalty=none,main=mean,aux=mean,vocabulary.0=mean"


def test_auto_is_decided_output_by_output() -> None:
    assert run(named(), "main=auto,penalty=auto").loss == "main=cross-entropy,penalty=mean"


def targets(result: StepResult) -> list[tuple[str, int]]:
    return [(b.name, b.nbytes) for b in result.trace.buffers if b.category == "input" and b.name != "x"]


def test_outputs_of_one_kind_and_shape_share_a_target() -> None:
    classes = 64 * 8
    shared = run(named(), "main=cross-entropy,aux=cross-entropy,vocabulary.0=cross-entropy")
    assert targets(shared) == [("target of main", classes), ("target of vocabulary.0", classes)]
    assert "main, aux have one target" in next(note.text for note in shared.notes if note.code == "SM215")
    own = run(named(), "main=cross-entropy@u,aux=cross-entropy@v")
    assert targets(own) == [("target 'u'", classes), ("target 'v'", classes)]


def test_an_input_may_be_the_target() -> None:
    b = Builder(x=(8, 16))
    graph = b.graph(b.call("linear", Ref("x"), b.parameter("w", 16, 16)))
    result = run(graph, "0=mse@x")
    assert targets(result) == []
    assert "the input 'x' is the target" in next(note.text for note in result.notes if note.code == "SM215")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("nope=mse", "no output 'nope'"), ("4=mse", "no output '4'"), ("main=mse,0=mse", "two terms of one output"),
        ("main=none", "the output is no loss"), ("penalty=cross-entropy", "does not fit the output"),
        ("main=mse@y,vocabulary.0=mse@y", "the target does not fit"), ("main=mse@x", "the target does not fit"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(loss: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run(named(), loss)
    assert caught.value.code == "SM139"


def test_an_output_of_integers_has_no_loss_and_all_leaves_it_out() -> None:
    b = Builder(x=(8, 16))
    scores = b.call("linear", Ref("x"), b.parameter("w", 16, 16))
    graph = b.graph(scores, b.call("argmax", scores, 1))
    assert run(graph, "all=mse").loss == "0=mse"
    with pytest.raises(UsageError, match="no gradient"):
        run(graph, "0=mse,1=mean")
