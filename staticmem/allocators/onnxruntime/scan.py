"""A Scan: what it takes beside the values of its body.

Source: onnxruntime/core/providers/cpu/controlflow/scan_9.cc and scan_utils.cc (SetupInputs, AllocateOutput,
LoopStateVariable, IterateSequence, TransposeOutput). Results are made before the first turn where the file says how
large they are, else in it; each turn writes a slice of them. A state has up to two buffers beside its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from staticmem.allocators.onnxruntime.arena import Arena, Chunk
from staticmem.allocators.onnxruntime.graph import ExecGraph, ExecNode
from staticmem.allocators.onnxruntime.sizes import BodyRun, RunSizes


class Frame(Protocol):
    """The graph around the Scan, as it runs."""

    sizes: RunSizes

    @property
    def arena(self) -> Arena: ...

    def make(self, name: str) -> None:
        """Allocates the buffer of a result, once."""

    def size(self, name: str) -> int:
        """Bytes of a value."""

    def turn(self, node: ExecNode, body: ExecGraph, run: BodyRun, given: Mapping[str, Callable[[], None]]) -> None:
        """Runs the body."""


@dataclass(frozen=True, slots=True)
class ScanAxes:
    """Attributes of a Scan of opset 9 or later. Axes are as in the file."""

    scans: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, proto: Any) -> ScanAxes:
        ints = {a.name: tuple(a.ints) for a in proto.attribute}
        scans = next((int(a.i) for a in proto.attribute if a.name == "num_scan_inputs"), 0)
        states = len(proto.input) - scans
        results = len(proto.output) - states
        return cls(
            scans, ints.get("scan_input_axes") or (0,) * scans, ints.get("scan_output_axes") or (0,) * max(results, 0)
        )


def run_scan(frame: Frame, node: ExecNode, runs: list[BodyRun], length: int) -> int:
    """Allocates and frees as the kernel does; gives the bytes that it took for itself.

    Args:
        frame: the graph around it.
        node: the Scan.
        runs: executions of the body.
        length: how many turns the runtime makes.
    """
    arena, body, axes = frame.arena, node.bodies["body"], ScanAxes.of(node.proto)
    states = len(node.inputs) - axes.scans
    taken: list[Chunk | None] = [
        arena.allocate(frame.size(name)) for name, axis in zip(node.inputs[states:], axes.inputs, strict=False) if axis
    ]
    given: dict[str, Callable[[], None]] = dict.fromkeys(body.outputs[:states], _nothing)
    for name in node.outputs[:states]:
        frame.make(name)
    turned: list[str] = []
    for mine, theirs, axis in zip(node.outputs[states:], body.outputs[states:], axes.outputs, strict=False):
        if axis:
            turned.append(mine)
        place = _once(frame, mine, taken) if axis else _maker(frame, mine)
        given[theirs] = place
        kind = body.planned(theirs)
        if kind is not None and kind.dims is not None and all(isinstance(d, int) for d in kind.dims):
            place()
    for name in node.inputs[:states]:
        taken.extend(arena.allocate(frame.size(name)) for _ in range(min(max(length - 1, 0), 2)))
    for run in runs:
        frame.turn(node, body, run, given)
    for name in turned:
        frame.make(name)
    workspace = sum(chunk.requested for chunk in taken if chunk is not None)
    for chunk in taken:
        arena.free(chunk)
    return workspace


def _nothing() -> None:
    """The result has its place already."""


def _maker(frame: Frame, name: str) -> Callable[[], None]:
    return lambda: frame.make(name)


def _once(frame: Frame, name: str, taken: list[Chunk | None]) -> Callable[[], None]:
    """Takes memory for a result that is transposed at the end, the first time it is called."""
    done: list[bool] = []

    def place() -> None:
        if not done:
            done.append(True)
            taken.append(frame.arena.allocate(frame.size(name)))

    return place
