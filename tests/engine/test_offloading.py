"""Saved tensors on the CPU: what is left on the GPU, what comes back and until when, and what is refused. Steps of real
networks are in test_levers_measured.py, every rule is in tests/ops/test_offloaded_rules.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from blocks import ACTIVATION, WIDTH, chain
from prepared import run_step

from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.ir.graph import Frame, Graph, Op, Ref
from staticmem.liveness import Lifetimes
from staticmem.scenario.request import Request
from staticmem.scenario.step import OFFLOADS, ON_GPU, PAGEABLE, PINNED, STREAMS, TORCHTUNE, Scenario

WEIGHT = WIDTH * WIDTH * 4  # bytes of a block's weight
HEAD = 8 * WIDTH * 4  # of the head's, which is smaller than what torchtune copies


def run(kind: str, blocks: int = 4, graph: Graph | None = None, **levers: Any) -> StepResult:
    scenario = Scenario(mode="train", loss="cross-entropy", outputs="dropped", offload_activations=kind, **levers)
    return run_step(graph or chain(blocks), scenario)


def activations_left(result: StepResult) -> int:
    """How many activations of the blocks are alive when the loss is known."""
    lifetimes = Lifetimes(result.trace)
    alive = lifetimes.alive(result.trace.marks["forward_end"] - 1)
    return sum(b.nbytes == ACTIVATION and b.category == "activation" for b in alive)


def came_back(result: StepResult) -> list[int]:
    """Bytes of the tensors that came back, in order."""
    kernels = result.trace.kernels
    return [b.nbytes for b in result.trace.buffers if kernels[b.kernel].name == "aten._to_copy.default"]


def test_all_that_is_saved_leaves_the_gpu() -> None:
    """Each linear saves its input and `weight.t()`, the first no weight because the input needs no gradient; each relu
    its result. The head is first in the backward."""
    assert activations_left(run(ON_GPU)) == 4
    result = run(PAGEABLE)
    assert activations_left(result) == 0
    block = [ACTIVATION, WEIGHT, ACTIVATION]  # the relu's result, then for the linear `mat2` and `self`
    assert came_back(result) == [HEAD, ACTIVATION, *block * 3, ACTIVATION, ACTIVATION]
    copied = HEAD + ACTIVATION + 3 * sum(block) + 2 * ACTIVATION
    (text,) = [n.text for n in result.notes if n.code == "SM339"]
    assert text.startswith(f"save_on_cpu() is around the model's forward: {copied / 1024:.1f} KiB of saved tensors")


def test_torchtune_leaves_small_tensors() -> None:
    """The head's weight has 512 bytes; those of the blocks are saved as views, which are no parameters."""
    assert HEAD not in came_back(run(TORCHTUNE))
    assert came_back(run(TORCHTUNE)).count(WEIGHT) == 3
    assert came_back(run(PINNED)).count(HEAD) == 1


def test_torchtune_leaves_parameters() -> None:
    """The second product saves the parameter itself; the first one only its input, which needs no gradient."""
    frames = (Frame("", "Net"),)
    ops = (
        Op("first", "aten::mm", (Ref("x"), Ref("w0")), {}, ("h",), frames),
        Op("second", "aten::mm", (Ref("h"), Ref("w0")), {}, ("i",), frames),
        Op("head", "aten::linear", (Ref("i"), Ref("wh")), {}, ("y",), frames),
    )
    graph = replace(chain(1), ops=ops)
    assert came_back(run(PAGEABLE, graph=graph)).count(WEIGHT) == 1
    assert came_back(run(TORCHTUNE, graph=graph)).count(WEIGHT) == 0


def test_the_last_copies_hold_what_they_read() -> None:
    """The last five that were saved: of the last linear w3 and a2, of its relu a3, of the head wh (not copied) and
    a3."""
    assert activations_left(run(STREAMS)) == 2
    assert activations_left(run(TORCHTUNE)) == 0


def test_streams_keep_what_came_back_until_the_next_node() -> None:
    """At most two nodes have theirs: the peak is larger by what a linear had when the relu before it runs."""
    peaks = {kind: Lifetimes(run(kind).trace).peak_bytes for kind in (TORCHTUNE, STREAMS)}
    assert peaks[STREAMS] > peaks[TORCHTUNE]
    assert all(b.died is not None for b in run(STREAMS).trace.buffers if b.category == "temporary")


def test_the_layer_output_of_torchtune_is_left_out() -> None:
    graph = chain(2)
    head = graph.ops[-1]
    frames = (Frame("", "Net"), Frame("output", "torch.nn.modules.linear.Linear"))
    graph = replace(graph, ops=(*graph.ops[:-1], replace(head, modules=frames)))
    assert activations_left(run(TORCHTUNE, graph=graph)) == 1
    assert activations_left(run(PAGEABLE, graph=graph)) == 0


def test_the_input_of_a_checkpoint_is_on_the_cpu() -> None:
    """What a checkpoint computes again is saved on the GPU, for its backward follows."""
    result = run(PAGEABLE, checkpoint=("Block",))
    assert activations_left(run(ON_GPU, checkpoint=("Block",))) == 4
    assert activations_left(result) == 0
    # the head's two, and one for each checkpoint but the first, whose input is the model's
    assert came_back(result) == [HEAD, *[ACTIVATION] * 4]


@pytest.mark.parametrize("levers", [{}, {"checkpoint": ("Block",)}, {"offload_activations": PAGEABLE}])
def test_a_backward_may_look_at_what_came_back(levers: dict[str, Any]) -> None:
    """The backward of a norm over a dimension reads its result through a view."""
    graph = chain(2)
    first, relu, *rest = graph.ops
    norm = Op("n", "aten::linalg_vector_norm", (Ref("a0"), 2, (1,)), {}, ("n",), relu.modules)
    column = Op("u", "aten::unsqueeze", (Ref("n"), 1), {}, ("u",), relu.modules)
    scaled = Op("m", "aten::mul.Tensor", (Ref("a0"), Ref("u")), {}, ("m",), relu.modules)
    rest[0] = replace(rest[0], args=(Ref("m"), Ref("w1")))
    graph = replace(graph, ops=(first, relu, norm, column, scaled, *rest))
    result = run_step(graph, Scenario(mode="train", loss="cross-entropy", **levers))
    assert result.trained == 3


@pytest.mark.parametrize("kind", OFFLOADS)
def test_micro_batches_are_alike(kind: str) -> None:
    """Nothing of the first is left when the second begins."""
    one, two = run(kind), run(kind, accumulate=2)
    assert came_back(two) == came_back(one) * 2
    more = Lifetimes(two.trace).peak_bytes - Lifetimes(one.trace).peak_bytes
    assert 0 <= more <= 4 * WEIGHT + HEAD  # gradients of the first


@pytest.mark.parametrize("other", [{"compile": ("all",)}, {"parallel": "fsdp", "devices": 2}, {"parallel": "tp"}])
def test_what_is_not_covered_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        Request(mode="train", offload_activations=PINNED, **other).scenario()
    assert refused.value.code == "SM179"


def test_an_inference_saves_nothing() -> None:
    request = Request(mode="infer", offload_activations=PINNED, parallel="tp", devices=2)
    assert request.scenario()[0].offload_activations == ON_GPU
