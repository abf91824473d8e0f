"""Activation checkpointing: which ops run again, what is kept for it and how long, and what is asked of the user."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from blocks import ACTIVATION, chain
from hypothesis import given
from hypothesis import strategies as st
from prepared import run_step

from staticmem.eager.reasons import Reason
from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.ir.graph import Frame, Graph, Op, Ref, Region
from staticmem.liveness import Lifetimes
from staticmem.passes.requested.regions import regions_of
from staticmem.scenario.request import Request
from staticmem.scenario.step import Scenario


def train(**levers: Any) -> Scenario:
    return Scenario(mode="train", loss="cross-entropy", **levers)


def run(blocks: int, **levers: Any) -> StepResult:
    return run_step(chain(blocks), train(**levers))


def saved_bytes(result: StepResult) -> int:
    """Bytes of activations of the blocks' size that are alive at the end of the forward, without the input."""
    lifetimes = Lifetimes(result.trace)
    alive = lifetimes.alive(result.trace.marks["forward_end"] - 1)
    return sum(b.nbytes for b in alive if b.category == "activation" and b.nbytes == ACTIVATION)


def names(regions: tuple[Region, ...]) -> list[str]:
    return [r.name for r in regions]


# -- what is kept ------------------------------------------------------------------------------------------------


def test_a_checkpoint_keeps_its_input_only() -> None:
    """Four blocks save the relus' results, which are the next inputs: 4. Checkpointed, the last result is the head's
    input, the others are the inputs of checkpoints: also 4. In one checkpoint for two blocks each: 2."""
    assert saved_bytes(run(4)) == 4 * ACTIVATION
    assert saved_bytes(run(4, checkpoint=("Block",))) == 4 * ACTIVATION
    assert saved_bytes(run(4, checkpoint=("Block",), checkpoint_every=2)) == 2 * ACTIVATION
    assert saved_bytes(run(4, checkpoint=("Block",), checkpoint_every=4)) == ACTIVATION


def test_ops_of_a_checkpoint_run_once_more() -> None:
    result = run(3, checkpoint=("Block",))
    assert Counter(result.recomputed) == Counter(range(6))
    assert run(3).recomputed == ()


def test_the_recompute_runs_the_last_region_first() -> None:
    assert run(2, checkpoint=("Block",)).recomputed == (2, 3, 0, 1)


def test_recompute_stops_after_the_last_saved_tensor() -> None:
    """The linear saves its input before it runs: in a checkpoint of it alone nothing has to run again."""
    result = run(2, checkpoint=("Linear",))
    assert result.recomputed == ()
    kernels = [k.name for k in result.trace.kernels if k.phase == "backward"]
    assert kernels.count("aten.mm.default") == 2 + 2 + 1  # gradients: two of head and block 1, one of block 0's weight


def test_a_nested_checkpoint_runs_in_the_recompute_of_the_outer_one_too() -> None:
    result = run(2, checkpoint=("Sequential", "Block"))
    again = Counter(result.recomputed)
    assert again[0] == again[1] == 2
    assert set(again) <= {0, 1, 2, 3}
    assert saved_bytes(result) == ACTIVATION  # the head's input; the outer checkpoint keeps the model's input


def test_recomputed_tensors_are_activations_and_die_in_backward() -> None:
    result = run(3, checkpoint=("Sequential",))
    trace = result.trace
    kernels = trace.kernels
    again = [b for b in trace.buffers if kernels[b.kernel].phase == "backward" and b.category == "activation"]
    assert [b.nbytes for b in again] == [ACTIVATION] * 6
    assert all(b.died is not None for b in again)
    held = [h for h in trace.holds if h.kind is Reason.RECOMPUTED]
    assert {trace.buffers[h.buffer].nbytes for h in held} >= {ACTIVATION}
    assert all(h.end is not None for h in held)


def test_inference_ignores_checkpoints() -> None:
    plain = run_step(chain(2), Scenario()).trace
    lever = run_step(chain(2), Scenario(checkpoint=("Block",))).trace
    assert [(b.nbytes, b.born, b.died) for b in plain.buffers] == [(b.nbytes, b.born, b.died) for b in lever.buffers]


@given(st.integers(1, 7), st.sets(st.integers(0, 6)), st.booleans())
def test_any_choice_of_blocks_gives_the_same_gradients(blocks: int, chosen: set[int], nested: bool) -> None:
    paths = tuple(f"net.blocks.{k}" for k in sorted(chosen) if k < blocks)
    if nested:
        paths = (*paths, "net.blocks")
    plain, result = (run(blocks, optimizer="adam", outputs="dropped", checkpoint=chosen) for chosen in ((), paths))
    assert result.trained == plain.trained == blocks + 1
    assert saved_bytes(result) <= saved_bytes(plain)
    assert {(b.name, b.nbytes) for b in result.trace.buffers if b.category == "gradient"} == {
        (b.name, b.nbytes) for b in plain.trace.buffers if b.category == "gradient"
    }
    end = dict(result.trace.phases)["optimizer"]
    left = {b.nbytes for b in Lifetimes(result.trace).alive(end) if b.category in ("activation", "temporary")}
    assert left <= {4, plain.trace.buffers[-1].nbytes, 16 * 16 * 4, 8 * 16 * 4}  # the loss, and the step's roots
    for hold in result.trace.holds:
        buffer = result.trace.buffers[hold.buffer]
        assert hold.end is None or buffer.died is None or hold.end <= buffer.died


def test_an_input_that_is_changed_in_place_is_warned_of() -> None:
    """PyTorch saves the checkpoint's input at version 0, and finds another one in backward."""
    graph = chain(3)
    ops = list(graph.ops)
    relu = ops[3]
    ops[3] = Op(relu.name, "aten::relu_", relu.args, {}, relu.outputs, relu.modules)
    changed = Graph(**{**vars(graph), "ops": tuple(ops)})
    border = Scenario(mode="train", loss="cross-entropy", checkpoint=("net.blocks.1",))
    assert not [n for n in run_step(changed, border).notes if n.code == "SM311"]
    ops[3] = Op(relu.name, "aten::relu_", (Ref("a0"),), {}, relu.outputs, relu.modules)
    changed = Graph(**{**vars(graph), "ops": tuple(ops)})
    assert [n.count for n in run_step(changed, border).notes if n.code == "SM311"] == [1]


# -- which regions -----------------------------------------------------------------------------------------------


def test_modules_by_class_full_class_and_path() -> None:
    graph = chain(3)
    blocks = ["net.blocks.0", "net.blocks.1", "net.blocks.2"]
    assert names(regions_of(graph, train(checkpoint=("Block",)))) == blocks
    assert names(regions_of(graph, train(checkpoint=("my.Block",)))) == blocks
    assert names(regions_of(graph, train(checkpoint=("net.blocks.*",)))) == blocks
    assert names(regions_of(graph, train(checkpoint=("net.blocks.1",)))) == ["net.blocks.1"]
    assert names(regions_of(graph, train(checkpoint=("net.blocks.1", "Block")))) == blocks


def test_groups_of_blocks() -> None:
    found = regions_of(chain(5), train(checkpoint=("Block",), checkpoint_every=2))
    assert [(r.start, r.end) for r in found] == [(0, 4), (4, 8), (8, 10)]
    assert names(found)[0] == "net.blocks.0 to net.blocks.1"


@pytest.mark.parametrize(
    ("segments", "expected"),
    [(1, []), (2, [(0, 4)]), (3, [(0, 2), (2, 4)]), (5, [(0, 2), (2, 4), (4, 6), (6, 8)]), ("sqrt", [(0, 4)])],
)
def test_segments_are_those_of_checkpoint_sequential(segments: int | str, expected: list[tuple[int, int]]) -> None:
    """Five modules; the last segment, which takes the rest, is not a checkpoint."""
    found = regions_of(chain(5), train(checkpoint_segments=segments))
    assert [(r.start, r.end) for r in found] == expected


def test_modules_without_ops_count_for_the_segments() -> None:
    """A Sequential of 0, 1, 2 and 4 has five modules: an identity runs no op, but its number shows it."""
    graph = chain(5)
    ops = tuple(op for op in graph.ops if op.name not in ("l3", "r3"))
    ops = tuple(
        Op(op.name, op.target, tuple(Ref("a2") if a == Ref("a3") else a for a in op.args), {}, op.outputs, op.modules)
        for op in ops
    )
    found = regions_of(Graph(**{**vars(graph), "ops": ops}), train(checkpoint_segments=5))
    assert names(found) == ["net.blocks.0", "net.blocks.1", "net.blocks.2"]


def test_a_call_with_a_callers_op_in_its_middle_is_one_region() -> None:
    graph = chain(2)
    between = Op("mask", "aten::ones", ((4,),), {}, ("mask",), (Frame("", "Net"),))
    ops = (graph.ops[0], between, *graph.ops[1:])
    found = regions_of(Graph(**{**vars(graph), "ops": ops}), train(checkpoint=("Block",)))
    assert [(r.start, r.end) for r in found] == [(0, 3), (3, 5)]


def test_two_calls_of_one_module_are_two_regions() -> None:
    graph = chain(1)
    again = tuple(
        Op(f"{op.name}b", op.target, tuple(Ref("a0") if a == Ref("x") else Ref("h0b") if a == Ref("h0") else a
           for a in op.args), {}, tuple(f"{n}b" for n in op.outputs),
           tuple(Frame(f.path, f.cls, 1) if "blocks.0" in f.path else f for f in op.modules))
        for op in graph.ops[:2]
    )  # fmt: skip
    both = Graph(**{**vars(graph), "ops": (*graph.ops[:2], *again, graph.ops[2])})
    assert [(r.start, r.end) for r in regions_of(both, train(checkpoint=("Block",)))] == [(0, 2), (2, 4)]


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("levers", "code", "hint"),
    [
        ({"checkpoint": ("Blok",)}, "SM163", "Did you mean 'Block'?"),
        ({"checkpoint": ("layer1",)}, "SM163", "Known: Block, Linear, Net, Sequential"),
        ({"checkpoint_segments": 6}, "SM164", "Use at most 5, or sqrt."),
        ({"checkpoint_segments": 2, "checkpoint_sequential": "net.block"}, "SM164", "Did you mean 'net.blocks'?"),
    ],
)
def test_what_does_not_fit_the_model_is_told(levers: dict[str, Any], code: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(5, **levers)
    assert caught.value.code == code
    assert caught.value.hint == hint


def test_a_model_without_a_sequential_or_modules() -> None:
    graph = chain(1)
    flat = Graph(**{**vars(graph), "ops": tuple(
        Op(op.name, op.target, op.args, {}, op.outputs) for op in graph.ops)})  # fmt: skip
    with pytest.raises(UsageError, match="this model has no Sequential"):
        regions_of(flat, train(checkpoint_segments=2))
    with pytest.raises(UsageError, match="cannot be used with this file"):
        regions_of(flat, train(checkpoint=("Block",)))


def test_a_file_without_classes_says_so() -> None:
    graph = chain(1)
    ops = tuple(
        Op(op.name, op.target, op.args, {}, op.outputs, tuple(Frame(f.path) for f in op.modules)) for op in graph.ops
    )
    bare = Graph(**{**vars(graph), "ops": ops})
    with pytest.raises(UsageError) as caught:
        regions_of(bare, train(checkpoint=("Block",)))
    assert "does not have the classes" in caught.value.why
    assert names(regions_of(bare, train(checkpoint=("net.blocks.?",)))) == ["net.blocks.0"]


@pytest.mark.parametrize(
    ("levers", "code"),
    [
        ({"checkpoint_every": 0, "checkpoint": ("Block",)}, "SM160"),
        ({"checkpoint_every": 2}, "SM160"),
        ({"checkpoint_segments": -1}, "SM160"),
        ({"checkpoint_segments": "root"}, "SM160"),
        ({"checkpoint_sequential": "net.blocks"}, "SM160"),
        ({"accumulate": 0}, "SM160"),
        ({"nesterov": True, "optimizer": "sgd"}, "SM161"),
        ({"nesterov": True, "optimizer": "adam"}, "SM161"),
        ({"amsgrad": True, "optimizer": "sgd"}, "SM161"),
        ({"centered": True}, "SM161"),
        ({"weight_decay": -0.1, "optimizer": "sgd"}, "SM161"),
        ({"freeze": "("}, "SM162"),
        ({"freeze": "a" * 1001}, "SM162"),
        ({"optimizer": "radam", "optimizer_impl": "fused"}, "SM133"),
    ],
)
def test_levers_out_of_range(levers: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        Request(**{"mode": "train", **levers}).scenario()
    assert caught.value.code == code
    assert caught.value.hint
