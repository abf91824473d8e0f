"""The events of a process, on traces small enough to count by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.from_trace import model_to_order, process_of_trace
from staticmem.allocators.peaks import joined, serve
from staticmem.allocators.process import FIRST, RELEASE, Process, Workspace
from staticmem.eager.trace import Buffer, Buffers, CudaGraph, Kernel, Kernels, Trace
from staticmem.ir import dtypes
from staticmem.studies import Study, request_of

BLOCKS = Path(__file__).parents[1] / "data" / "graphs" / "mlp_blocks.pt2"
MIB = 2**20


def buffer(id: int, name: str, category: str, born: int, died: int | None, kernel: int, nbytes: int = MIB) -> Buffer:
    return Buffer(id, nbytes, (nbytes // 4,), dtypes.float32, category, name, kernel, born, died)


def step() -> Trace:
    """A parameter, an input, two states, the old loss; an activation, the new loss, a gradient, a temporary of the
    optimizer."""
    rows = [
        ("fc.weight", "parameter", 0, None, 0, 2 * MIB),
        ("x", "input", 1, None, 0, MIB),
        ("fc.weight.exp_avg", "optimizer_state", 2, None, 1, 2 * MIB),
        ("fc.weight.step", "optimizer_state", 3, None, 1, 4),
        ("loss of the previous step", "activation", 4, 7, 2, 4),
        ("h", "activation", 5, 9, 3, 3 * MIB),
        ("loss", "activation", 6, None, 4, 4),
        ("fc.weight.grad", "gradient", 8, None, 5, 2 * MIB),
        ("", "temporary", 10, 11, 6, 2 * MIB),
    ]
    names = ["model", "aten.zeros_like", "loss", "aten.addmm", "aten.mean", "aten.mm", "aten._foreach_sqrt"]
    return Trace(
        kernels=Kernels([Kernel(name, "forward", -1) for name in names]),
        buffers=Buffers([buffer(i, n, c, b, d, k, size) for i, (n, c, b, d, k, size) in enumerate(rows)]),
        phases=[("setup", 0), ("forward", 5), ("backward", 8), ("optimizer", 10)],
        ticks=12,
    )


def story(found: Process) -> list[str]:
    """Each event as +name.step or -name.step, with the marks of phases."""
    trace = step()
    marks = {mark.event: f"[{mark.step} {mark.phase}]" for mark in found.marks}
    lines = []
    for time, (id, nbytes, _) in enumerate(found.events):
        origin = found.origins[id]
        name = origin.what if origin.buffer < 0 else trace.buffers[origin.buffer].name.rpartition(".")[2] or "temporary"
        lines.append(marks.get(time, "") + ("-" if nbytes == RELEASE else "+") + f"{name}.{origin.step}")
    return lines


def test_three_steps_from_the_start() -> None:
    assert story(process_of_trace(step(), steps=2)) == [
        "[0 setup]+weight.0", "+x.0",
        "[1 forward]+h.1", "+loss.1",
        "[1 backward]+grad.1", "-h.1",
        "[1 optimizer]+step.1", "+exp_avg.1", "+temporary.1", "-temporary.1",  # state is made in the first step
        "[2 forward]-grad.1", "+h.2", "+loss.2", "-loss.1",  # zero_grad; the old loss until the new one is there
        "[2 backward]+grad.2", "-h.2",
        "[2 optimizer]+temporary.2", "-temporary.2",
    ]  # fmt: skip


def test_batches_that_come_with_each_step() -> None:
    each = [line for line in story(process_of_trace(step(), steps=2, data="each-step")) if ".exp" not in line]
    assert each[:3] == ["[0 setup]+weight.0", "[1 forward]+x.1", "+h.1"]
    assert each[each.index("-temporary.1") + 1 :][:3] == ["[2 forward]-x.1", "+x.2", "-grad.1"]
    handed = story(process_of_trace(step(), steps=2, data="handed-over"))
    assert handed[handed.index("-temporary.1") + 1 :][:3] == ["[2 forward]+x.2", "-x.1", "-grad.1"]


def test_a_process_ends_with_what_lives() -> None:
    found = process_of_trace(step())
    replay = simulate(found.events)
    alive = [found.origins[p.id].buffer for p in replay.placements() if p.died < 0]
    assert sorted(alive) == [0, 1, 2, 3, 6, 7]
    assert [mark.step for mark, _ in found.spans()] == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    mark = found.mark_at(replay.peak_allocated_at)
    assert (mark.step, mark.phase) == (2, "backward")


class Model:
    """Workspaces for two kernels: one that is kept, and two around the result of another."""

    def taken(self) -> list[tuple[int, Sequence[Workspace]]]:
        around = (
            Workspace(MIB, after=FIRST, what="first", fallbacks=(0,)),
            Workspace(MIB, held=True, what="held"),
            Workspace(MIB, what="last"),
        )
        return [(3, (Workspace(8 * MIB, keep="cublas forward", what="cublas"),)), (5, around)]


def test_workspaces_come_when_their_kernel_runs() -> None:
    found = process_of_trace(step(), Model(), steps=2)
    told = story(found)
    at = told.index("[1 forward]+h.1")
    assert told[at : at + 3] == ["[1 forward]+h.1", "+cublas.1", "+loss.1"]
    assert "+cublas.2" not in told  # kept from the first step on
    assert "-cublas.1" not in told
    at = told.index("[1 backward]+first.1")
    assert told[at : at + 7] == [
        "[1 backward]+first.1", "-first.1", "+grad.1", "+held.1", "+last.1", "-last.1", "-held.1",
    ]  # fmt: skip
    first = next(id for id, origin in enumerate(found.origins) if origin.what == "first")
    assert found.fallbacks[first].sizes == (0,)
    assert simulate(found.events).oom is None


def test_what_grows_with_the_batch() -> None:
    """Inputs, activations, the loss and workspaces that are let go. Not what belongs to parameters, nor what has the
    shape of one, such as the lists of an optimizer; nor a workspace that stays."""
    found = process_of_trace(step(), Model(), steps=1)
    names = [line[line.index("+") + 1 :] for line in story(found) if "+" in line]
    assert len(names) == len(found.scales)
    grows = {name for name, scale in zip(names, found.scales, strict=True) if scale}
    assert grows == {"x.0", "h.1", "loss.1", "first.1", "held.1", "last.1"}
    assert set(names) - grows == {"weight.0", "grad.1", "step.1", "exp_avg.1", "temporary.1", "cublas.1"}


class InPlace:
    """A workspace of 4 MiB for each kernel but the model's."""

    def taken(self) -> Iterator[tuple[int, Sequence[Workspace]]]:
        yield from ((kernel, (Workspace(4 * MIB, what=f"of {kernel}"),)) for kernel in range(1, 6))


def test_a_kernel_that_allocates_nothing_takes_its_workspace_before_the_next_that_does() -> None:
    """Kernels 1, 3 and 5 write in place. Behind 5 nothing is allocated: its workspace is not counted."""
    rows = [("w", "parameter", 0, 0, 2 * MIB), ("h", "activation", 1, 2, 3 * MIB), ("y", "activation", 2, 4, MIB)]
    trace = Trace(
        kernels=Kernels([Kernel(f"k{k}", "forward", k) for k in range(6)]),
        buffers=Buffers([buffer(i, n, c, born, None, k, size) for i, (n, c, born, k, size) in enumerate(rows)]),
        phases=[("setup", 0), ("forward", 1)],
        ticks=3,
    )
    found = process_of_trace(trace, InPlace(), steps=1)
    whats = [o.what or trace.buffers[o.buffer].name for o in found.origins]
    said = [f"+{whats[call]}" if call >= 0 else f"-{whats[~call]}" for call in found.calls]
    assert said == [
        "+w", "+of 1", "-of 1", "+h", "+of 2", "-of 2", "+of 3", "-of 3", "+y", "+of 4", "-of 4",
    ]  # fmt: skip


def test_model_to_places_children_before_their_parents_own() -> None:
    """Module._apply: children, then parameters, then buffers."""
    names = [("cls_token", "parameter"), ("conv.weight", "parameter"), ("bn.weight", "parameter"),
             ("head.fc.weight", "parameter"), ("bn.running_mean", "buffer"), ("mask", "buffer")]  # fmt: skip
    order = model_to_order(buffer(i, name, category, i, None, 0) for i, (name, category) in enumerate(names))
    assert [b.name for b in order] == [
        "conv.weight", "bn.weight", "bn.running_mean", "head.fc.weight", "cls_token", "mask",
    ]  # fmt: skip


def test_dropout_allocates_its_mask_before_its_result() -> None:
    """at::native::dropout_cuda of Dropout.cu; the trace has the result first, as the op returns it."""
    rows = [
        ("w", "parameter", 0, None, 0, MIB),
        ("y", "activation", 1, 4, 1, 4 * MIB),
        ("mask", "activation", 2, 3, 1, MIB),
    ]
    trace = Trace(
        kernels=Kernels([Kernel("model", "setup", -1), Kernel("aten.native_dropout.default", "forward", 0)]),
        buffers=Buffers([buffer(i, n, c, b, d, k, size) for i, (n, c, b, d, k, size) in enumerate(rows)]),
        phases=[("setup", 0), ("forward", 1)],
        ticks=5,
    )
    found = process_of_trace(trace, steps=1)
    names = [trace.buffers[origin.buffer].name for origin in found.origins]
    assert names == ["w", "mask", "y"]
    assert [names[~call] for call in found.calls if call < 0] == ["mask", "y"]


def test_gradients_that_are_zeroed_stay_from_the_first_step_on() -> None:
    """zero_grad(set_to_none=False): the first backward makes them, no later step makes or releases them."""
    rows = [
        ("fc.weight", "parameter", 0, None, 0, 2 * MIB),
        ("fc.weight.grad", "gradient", 1, None, 1, 2 * MIB),
        ("fc.weight.exp_avg", "optimizer_state", 2, None, 1, 2 * MIB),
        ("h", "activation", 3, 5, 2, 3 * MIB),
        ("added", "temporary", 4, 6, 3, 2 * MIB),
    ]
    names = ("model", "aten.zeros_like", "aten.addmm", "aten.mm")
    for phases in ([("optimizer", 7)], []):
        trace = Trace(
            kernels=Kernels([Kernel(name, "forward", -1) for name in names]),
            buffers=Buffers([buffer(i, n, c, b, d, k, size) for i, (n, c, b, d, k, size) in enumerate(rows)]),
            phases=[("setup", 0), ("forward", 3), ("backward", 4), *phases],
            ticks=8,
        )
        found = process_of_trace(trace)
        made = [origin for origin in found.origins if origin.buffer == 1]
        assert [origin.step for origin in made] == [1]
        assert ~found.origins.index(made[0]) not in found.calls
        assert simulate(found.events).peak_allocated >= (2 + 2 + 3 + 2) * MIB


def graphed() -> Trace:
    """Two CUDA graphs with eager code between: the first copies x and returns y, which the loop holds; the second
    copies the gradient of y and makes that of the weight. Products in both and between."""
    rows = [
        ("fc.weight", "parameter", 0, None, 0, 2 * MIB),
        ("x", "input", 1, None, 0, MIB),
        ("y of the previous step", "activation", 2, 7, 1, 0),
        ("x copied", "activation", 3, 6, 2, MIB),
        ("y", "activation", 4, None, 3, 3 * MIB),
        ("h", "activation", 5, 9, 4, 4 * MIB),
        ("dy", "temporary", 8, 11, 5, 3 * MIB),
        ("dy copied", "temporary", 10, 13, 6, 3 * MIB),
        ("fc.weight.grad", "gradient", 12, None, 7, 2 * MIB),
    ]
    names = "model previous empty_strided mm mm mm empty_strided mm".split()
    trace = Trace(
        kernels=Kernels([Kernel(name, "forward", -1) for name in names]),
        buffers=Buffers([buffer(i, n, c, b, d, k, size) for i, (n, c, b, d, k, size) in enumerate(rows)]),
        phases=[("setup", 0), ("forward", 3), ("backward", 8)],
        ticks=14,
    )
    trace.cuda_graphs += [CudaGraph(2, 3, 4, {3: 1}), CudaGraph(6, 7, 8, {7: 6})]
    return trace


class Handles:
    """A product takes a workspace that stays."""

    def taken(self) -> Iterator[tuple[int, Sequence[Workspace]]]:
        for kernel in (3, 4, 5, 7):
            yield kernel, (Workspace(MIB, keep="cuBLAS"),)


def test_cuda_graphs_over_four_steps() -> None:
    """A warm-up, over the inputs themselves; a recording; replays. * is in the pool of the graphs."""
    found = process_of_trace(graphed(), Handles(), steps=4)
    trace, marks = graphed(), {mark.event: f"[{mark.step}]" for mark in found.marks if mark.phase != "backward"}
    lines = []
    for time, (id, nbytes, _) in enumerate(found.events):
        origin = found.origins[id]
        name = origin.what if origin.buffer < 0 else trace.buffers[origin.buffer].name
        star = "*" if id in found.private else ""
        lines.append(marks.get(time, "") + ("-" if nbytes == RELEASE else "+") + f"{name}{star}.{origin.step}")
    handle = ["+workspace*.{0}", "-workspace*.{0}"]  # goes when its graph ends
    first, second = [
        [line.format(step) for line in lines]
        for step, lines in ((1, ["+y*.{0}", *handle]), (2, ["+x copied*.{0}", "+empty_cache*.{0}", "+y*.{0}", *handle]))
    ]
    assert lines == [
        "[0]+fc.weight.0", "+x.0",
        "[1]+empty_cache.1", *first,
        "+h.1", "+workspace.1", "+dy.1", "-h.1",
        "-workspace.1", "+fc.weight.grad*.1", "+workspace*.1", "-dy.1", "-workspace*.1",  # dy itself is read
        "[2]-fc.weight.grad*.1", "-y*.1", *second,
        "+h.2", "+workspace.2", "-x copied*.2", "+dy.2", "-h.2",
        "-workspace.2", "+dy copied*.2", "-dy.2", "+empty_cache*.2",
        "+fc.weight.grad*.2", "+workspace*.2", "-dy copied*.2", "-workspace*.2",
        "[3]-fc.weight.grad*.2", "-y*.2", "+h.3", "+workspace.3", "+dy.3", "-h.3", "-workspace.3", "-dy.3",
        "[4]+h.4", "+workspace.4", "+dy.4", "-h.4", "-workspace.4", "-dy.4",
    ]  # fmt: skip
    simulate(found.events)


@pytest.mark.parametrize("parallel", [None, "ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_micro_batches_are_replayed_from_the_first_on(parallel: str | None) -> None:
    """What the first micro-batch makes and frees (gathered parameters, buckets) is no part of the model, and what it
    makes for the others is there: the replay holds at its peak what is alive at the peak of the trace (the first steps
    of ZeRO differ from the steady one by 0.03 %)."""
    words: dict[str, Any] = {"batch": 2, "optimizer": "adamw", "accumulate": 3}
    if parallel is not None:
        words |= {"parallel": parallel, "devices": 4}
    study = Study.open(BLOCKS, request_of(words))
    process = process_of_trace(study.result.trace)
    calls = joined(process.calls, len(process.sizes))
    allocated, live = serve(calls, list(process.sizes)).peaks.allocated, study.lifetimes.peak_bytes
    assert live <= allocated <= live + live // 1000
