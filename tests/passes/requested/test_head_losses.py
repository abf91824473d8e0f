"""Losses that end a graph: which graphs have room for them, and what the edited graph runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prepared import prepared

from staticmem.engine.step import StepResult, run_step
from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Op, Parameter, Recorded, Ref, Region, Value
from staticmem.liveness import Lifetimes
from staticmem.ops.head_losses import CHUNKS, chunk_size
from staticmem.scenario.losses import AFTER_THE_MODEL, HEAD_LOSSES
from staticmem.scenario.request import Request
from staticmem.scenario.step import Scenario

ROWS, TOKENS, WIDTH, CLASSES = 2, 64, 16, 256
LOGITS = ROWS * TOKENS * CLASSES * 4  # bytes in float32
WEIGHT = CLASSES * WIDTH * 4
MODEL = (Frame("", "my.Model"),)


def tensor(name: str, *shape: int) -> Value:
    return Value(name, dtypes.float32, shape)


def language_model(tail: tuple[Op, ...] = (), outputs: tuple[str, ...] = ("y",)) -> Graph:
    """A layer, and a head over `CLASSES` classes."""
    linear = (*MODEL, Frame("body", "torch.nn.modules.linear.Linear"))
    head = (*MODEL, Frame("head", "torch.nn.modules.linear.Linear"))
    ops = (
        Op("body", "aten::linear", (Ref("x"), Ref("w")), {}, ("h",), linear),
        Op("head", "aten::linear", (Ref("h"), Ref("v")), {}, ("y",), head),
        *tail,
    )
    weights = (
        Parameter(tensor("w", WIDTH, WIDTH), "body.weight"),
        Parameter(tensor("v", CLASSES, WIDTH), "head.weight"),
    )
    return Graph(
        name="m", format="pt2", producer="test", inputs=(tensor("x", ROWS, TOKENS, WIDTH),), parameters=weights,
        buffers=(), ops=ops, outputs=outputs,
        values={"y": tensor("y", ROWS, TOKENS, CLASSES), "h": tensor("h", ROWS, TOKENS, WIDTH)},
    )  # fmt: skip


def step(loss: str, graph: Graph | None = None, **options: object) -> StepResult:
    scenario = Scenario(mode="train", loss=loss, **options)  # type: ignore[arg-type]
    return run_step(prepared(language_model() if graph is None else graph, scenario), scenario)


@pytest.mark.parametrize("loss", HEAD_LOSSES)
def test_every_parameter_gets_a_gradient(loss: str) -> None:
    result = step(loss)
    assert result.loss == loss
    assert result.trained == 2
    assert not result.unknown
    found = {b.name for b in result.trace.buffers if b.category == "gradient"}
    assert found == {"body.weight.grad", "head.weight.grad"}
    assert result.trace.buffers[[b.name for b in result.trace.buffers].index("target")].shape == (ROWS, TOKENS)


def largest(result: StepResult) -> int:
    return max(b.nbytes for b in result.trace.buffers)


def test_logits_are_as_large_as_the_loss_needs_them() -> None:
    assert largest(step("causal-lm")) == LOGITS
    assert largest(step("chunked-cross-entropy")) == LOGITS // CHUNKS
    assert largest(step("linear-cross-entropy")) == LOGITS // CHUNKS
    # 256 / 16 = 16 parts of 128 tokens: 8 tokens at a time; the weight's gradient is larger than their logits
    assert chunk_size(ROWS * TOKENS, WIDTH, CLASSES) == 8
    assert largest(step("fused-linear-cross-entropy")) == WEIGHT


@pytest.mark.parametrize(
    ("tokens", "hidden", "classes", "chunk"),
    # Liger's comment: 4096*4 tokens, 4096 hidden, 32000 classes: 8 parts of 2048; others by hand
    [(16384, 4096, 32000, 2048), (4096, 4096, 128256, 128), (5, 8, 8, 5), (1, 768, 50257, 1), (100, 10, 30, 64)],
)
def test_tokens_of_a_chunk(tokens: int, hidden: int, classes: int, chunk: int) -> None:
    assert chunk_size(tokens, hidden, classes) == chunk


def test_chunks_of_a_class_that_asks_for_more_tokens_at_once() -> None:
    """8 x 16 hidden numbers for each of 128 tokens: 256 / 128 = 2 parts of 64 tokens."""
    graph = language_model()
    around = Frame("inner", "transformers.models.gpt_oss.modeling_gpt_oss.GptOssForCausalLM")
    ops = tuple(replace(op, modules=(op.modules[0], around, op.modules[-1])) for op in graph.ops)
    result = step("fused-linear-cross-entropy", replace(graph, ops=ops))
    assert largest(result) == 64 * CLASSES * 4
    assert chunk_size(ROWS * TOKENS, WIDTH, CLASSES, 8) == 64


def test_the_fused_loss_keeps_two_gradients_and_no_logits() -> None:
    result = step("fused-linear-cross-entropy")
    trace = result.trace
    end = trace.marks["forward_end"]
    alive = [b for b in trace.buffers if b.born < end and (b.died is None or b.died > end)]
    kept = ("activation", "gradient")  # `.grad` of the weight takes what the loss has saved
    made = sorted(b.nbytes for b in alive if b.category in kept and b.nbytes > 1024)
    assert made == sorted([ROWS * TOKENS * WIDTH * 4, WEIGHT])


def test_outputs_are_those_that_the_model_returns() -> None:
    assert step("causal-lm").output_shapes == ((), (ROWS, TOKENS, CLASSES))
    assert step("chunked-cross-entropy").output_shapes == ((), *((ROWS, TOKENS // CHUNKS, CLASSES),) * CHUNKS)
    assert step("linear-cross-entropy").output_shapes == ((), (ROWS, TOKENS, WIDTH))
    assert step("fused-linear-cross-entropy").output_shapes == ((),)


def test_dropping_outputs_pays_where_the_model_returns_logits() -> None:
    def saved(loss: str) -> int:
        held, dropped = (Lifetimes(step(loss, outputs=word).trace).peak_bytes for word in ("held", "dropped"))
        return held - dropped

    assert saved("chunked-cross-entropy") > 0
    assert saved("fused-linear-cross-entropy") == 0


@pytest.mark.parametrize("loss", HEAD_LOSSES)
def test_frozen_heads(loss: str) -> None:
    graph = language_model()
    result = step(loss, replace(graph, parameters=(graph.parameters[0], replace(graph.parameters[1], trainable=False))))
    assert [b.name for b in result.trace.buffers if b.category == "gradient"] == ["body.weight.grad"]


def refused(loss: str, graph: Graph) -> str:
    with pytest.raises(UsageError) as caught:
        step(loss, graph)
    assert caught.value.code == "SM281"
    return caught.value.why


def test_refusals_say_why() -> None:
    again = Op("s", "aten::sum", (Ref("y"),), {}, ("s",), MODEL)
    gelu = Op("g", "aten::gelu", (Ref("y"),), {}, ("g",), MODEL)
    activated = language_model((gelu,), ("g",))
    activated = replace(activated, values={**activated.values, "g": tensor("g", ROWS, TOKENS, CLASSES)})
    flat = language_model()
    flat = replace(flat, values={"y": tensor("y", ROWS * TOKENS, CLASSES)})
    tied = language_model()
    tied = replace(tied, parameters=tied.parameters[:1], buffers=(Parameter(tensor("v", CLASSES, WIDTH), "v"),))
    fused = "fused-linear-cross-entropy"
    assert "need what its last linear layer returns" in refused(fused, language_model((again,), ("y", "s")))
    assert "made by aten::gelu" in refused(fused, activated)
    assert "is no parameter" in refused(fused, tied)
    assert "[128, 256]" in refused("causal-lm", flat)
    assert "[128, 256]" in refused("linear-cross-entropy", flat)
    assert "no result of an op" in refused(fused, replace(language_model(), values={}))


def test_what_a_recording_says_moves_with_the_ops() -> None:
    after = Op("r", "aten::relu", (Ref("h"),), {}, ("r",), MODEL)
    last = {"h": 2, "r": 2}
    recorded = Recorded(last, (), (), (Region(0, 1, 0, "body"), Region(2, 3, 0, "tail")), {})
    graph = replace(language_model((after,), ("y", "r")), recorded=recorded)
    chunked = prepared(graph, Scenario(mode="train", loss="chunked-cross-entropy"))
    assert [op.name for op in chunked.ops[-2:]] == ["r", "loss"]
    assert chunked.recorded is not None
    index = {op.name: k for k, op in enumerate(chunked.ops)}
    assert chunked.recorded.last_held["h"] == index["r"]
    assert chunked.recorded.last_held["head.hidden.3"] == index["head.logits.3"]
    assert [(r.start, r.end) for r in chunked.recorded.regions] == [(0, 1), (index["r"], index["r"] + 1)]
    for loss in HEAD_LOSSES:
        assert step(loss, graph).trained == 2


def test_a_recorded_loss_stays() -> None:
    recorded = Recorded({}, (), (), (), {}, loss=True)
    summed = Op("s", "aten::sum", (Ref("y"),), {}, ("s",), MODEL)
    graph = language_model((summed,), ("s",))
    graph = replace(graph, recorded=recorded, values={**graph.values, "s": tensor("s")})
    result = step("causal-lm", graph)
    assert result.loss == "none"
    assert [note.code for note in result.notes if note.code == "SM329"] == ["SM329"]


def test_ops_behind_the_head_stay() -> None:
    after = Op("r", "aten::relu", (Ref("h"),), {}, ("r",), MODEL)
    graph = prepared(language_model((after,), ("y", "r")), Scenario(mode="train", loss="causal-lm"))
    assert [op.name for op in graph.ops] == ["body", "head", "r", "loss"]
    assert graph.ops[-1].modules == MODEL


def test_other_releases_are_said() -> None:
    """256 x 16 elements: a product in half precision (2 bytes) and its copy in float32 (4)."""
    (note,) = [n for n in step("fused-linear-cross-entropy").graph.notes if n.code == "SM128"]
    assert "took 24.0 KiB more" in " ".join(note.text.split())


@pytest.mark.parametrize("loss", HEAD_LOSSES)
def test_inference_has_no_loss(loss: str) -> None:
    scenario = Scenario(loss=loss, compile=("all",))
    assert prepared(language_model(), scenario).outputs == ("y",)
    with pytest.raises(UsageError, match="cannot be combined"):
        Request(mode="train", loss=loss, compile=("all",)).scenario()


def test_accumulated_micro_batches() -> None:
    for loss in (*AFTER_THE_MODEL, "fused-linear-cross-entropy"):
        assert step(loss, accumulate=2).trained == 2


@pytest.mark.torch
@pytest.mark.parametrize("loss", HEAD_LOSSES)
def test_a_recording_has_room_for_them_too(loss: str) -> None:
    """It has no sizes of results that rules know: those of the logits come from a forward."""
    torch = pytest.importorskip("torch")
    from staticmem.frontends.recorded import RecordedModel
    from staticmem.recording.record import record
    from staticmem.studies import Study

    with torch.device("meta"):
        body = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        module = torch.nn.Sequential(body, torch.nn.Linear(WIDTH, CLASSES, bias=False))
        model = RecordedModel("<m>", record(module, (torch.zeros(ROWS, TOKENS, WIDTH),)), "pt2")
    study = Study(model, Request(mode="train", batch=ROWS, loss=loss, outputs="dropped"))
    assert study.report.peak.live_bytes == Lifetimes(step(loss, outputs="dropped").trace).peak_bytes
    assert study.ask(Request(mode="train", batch=2 * ROWS, loss=loss)).report.scenario.loss == loss


def ctc(first: int, second: int, *tail: Op, **options: object) -> StepResult:
    """A model of `ROWS` samples whose first output has these sizes, and `CLASSES`."""
    last = tail[-1].name if tail else "y"
    graph = language_model(tail, (last,))
    graph = replace(graph, values={**graph.values, last: tensor(last, first, second, CLASSES)})
    return step("ctc", graph, **options)


def names(result: StepResult) -> list[str]:
    return [kernel.name for kernel in result.trace.kernels]


def test_ctc_needs_the_length_of_targets() -> None:
    result = ctc(ROWS, TOKENS, target_length=10)
    table = next(b for b in result.trace.buffers if b.shape == (ROWS, TOKENS, 21))
    assert (table.nbytes, table.category) == (ROWS * TOKENS * 21 * 4, "activation")
    assert not [note for note in result.graph.notes if note.code == "SM338"]
    longest = ctc(ROWS, TOKENS)
    assert any(b.shape == (ROWS, TOKENS, 2 * TOKENS + 1) for b in longest.trace.buffers)
    (note,) = [note for note in longest.graph.notes if note.code == "SM338"]
    assert f"targets of {TOKENS} labels" in note.text


def test_ctc_takes_log_probabilities_as_they_are() -> None:
    """The gradient of the log-probabilities is all that the loss's backward makes then."""
    softmax = Op("s", "aten::log_softmax.int", (Ref("y"), -1), {}, ("s",), MODEL)
    turned = Op("t", "aten::transpose.int", (Ref("s"), 0, 1), {}, ("t",), MODEL)
    plain = ctc(ROWS, TOKENS)
    for tail, first, second in (((softmax,), ROWS, TOKENS), ((softmax, turned), TOKENS, ROWS)):
        result = ctc(first, second, *tail)
        assert len([n for n in names(result) if "softmax.default" in n]) == 1
        assert any(b.shape == (ROWS, TOKENS, 2 * TOKENS + 1) for b in result.trace.buffers)
        assert result.trained == plain.trained == 2


def test_ctc_needs_a_batch() -> None:
    with pytest.raises(UsageError, match="does not fit") as caught:
        ctc(ROWS + 1, TOKENS)
    assert "no batch of 2" in caught.value.why


def test_studies_of_one_graph_have_targets_of_their_own_length() -> None:
    graph = language_model()
    sizes = [largest(step("ctc", graph, target_length=length)) for length in (100, 400)]
    assert sizes == [max(LOGITS, ROWS * TOKENS * (2 * length + 1) * 4) for length in (100, 400)]
