"""The memory of a session of the ONNX Runtime, from the graph alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from staticmem.allocators.onnxruntime.arena import Arena, ArenaFullError, SystemMemory
from staticmem.allocators.onnxruntime.build import build, written_out
from staticmem.allocators.onnxruntime.kernel_memory import WeightBytes, weight_bytes, workspace
from staticmem.allocators.onnxruntime.replay import NodeRow, Session, value_bytes
from staticmem.allocators.onnxruntime.sizes import RunSizes, bound_sizes
from staticmem.errors import UsageError
from staticmem.ir.graph import Note
from staticmem.scenario.session import SessionOptions


@dataclass(frozen=True)
class SessionPrediction:
    """Bytes of a session after `options.runs` runs.

    Attributes:
        tensors: the largest sum of buffers of intermediate values and results at the end of a node, in the first run.
        requested: the same in the last run, in which a memory pattern has its block, plus what weights reserve.
        held: what the arena holds after the last run, weights included; without an arena the most at one moment.
        weights: initializers, in the arena and outside.
        block: the block of the memory pattern, 0 without one.
        inputs: what the caller's inputs have; they are the caller's memory.
        workspace: the most that a kernel takes for itself, as far as it is known (`workspace_known`).
        rows: the arena at the end of each node of each run, initializers not counted.
        exact: whether all sizes are known and nothing was assumed of the executed graph.
    """

    options: SessionOptions
    tensors: int
    requested: int
    held: int
    weights: WeightBytes
    block: int
    inputs: int
    workspace: int
    workspace_known: bool
    rows: tuple[NodeRow, ...]
    exact: bool
    notes: tuple[Note, ...] = field(default=())


def predict_session(
    model: Any,
    shapes: Mapping[str, tuple[int, ...]],
    symbols: Mapping[str, int] | None = None,
    options: SessionOptions | None = None,
    in_file_order: bool = False,
    executed: bool = False,
) -> SessionPrediction:
    """The memory of a session that runs an ONNX graph.

    Args:
        model: a ModelProto, weights not needed. The graph is taken as it is: where the runtime optimizes it first,
            give the graph that it saved (`optimized_model_filepath`).
        shapes: sizes of every input of a run.
        symbols: sizes of open dimensions by name.
        options: what the session is set to.
        in_file_order: the runtime saved this graph after changing it; its nodes are in execution order.
        executed: the graph is the one that is executed: no assumption is noted about optimization.

    Raises:
        UsageError: an option is unknown, or `gpu_mem_limit` is too small for the session (SM508).
    """
    options = options or SessionOptions()
    if not in_file_order and options.provider == "cpu":
        model = written_out(model)
    graph = build(model, in_file_order)
    without = options.provider == "cpu" and not options.enable_cpu_mem_arena
    arena = SystemMemory() if without else Arena(options.arena_extend_strategy, options.gpu_mem_limit)
    weights = weight_bytes(graph, options.provider)
    sizes = bound_sizes(model, shapes, symbols or {})
    kernels = workspace(options.intra_op_num_threads) if options.provider == "cpu" else None
    session = Session(graph, arena, options.enable_mem_pattern, options.enable_mem_reuse, in_file_order, kernels)
    try:
        arena.reserve(weights.reserved)
        for _ in range(options.runs):
            session.run(sizes)
    except ArenaFullError as full:
        raise UsageError(
            f"gpu_mem_limit {options.gpu_mem_limit} is too small for this session",
            f"{full.needed} bytes more were needed, {full.left} were left of the limit.",
            "Raise the limit, or choose smaller dimensions.",
            code="SM508",
        ) from full
    result = session.result
    notes = _notes(options, sizes, list(result.unknown), list(result.unmodelled), executed or in_file_order)
    known = executed or in_file_order or options.graph_optimization_level == "disable"
    exact = known and not (result.unknown or result.unmodelled or sizes.guessed or without)
    exact = exact and options.provider == "cpu"
    inputs = sum(value_bytes(sizes.values.get(name)) or 0 for name in graph.inputs)
    return SessionPrediction(
        options,
        tensors=result.peak[0],
        requested=result.peak[-1] + weights.reserved,
        held=arena.most_held,
        weights=weights,
        block=result.block,
        inputs=inputs,
        workspace=max((row.workspace for row in result.rows), default=0),
        workspace_known=options.provider == "cpu",
        rows=tuple(result.rows),
        exact=exact,
        notes=notes,
    )


def _notes(
    options: SessionOptions, sizes: RunSizes, unknown: list[str], unmodelled: list[str], executed: bool
) -> tuple[Note, ...]:
    notes: list[Note] = []
    if options.graph_optimization_level != "disable" and not executed:
        text = "the runtime optimizes the graph before it runs; this is the graph of the file, not the executed one"
        notes.append(Note("assumption", "SM520", text))
    if sizes.guessed:
        text = "data decides which branch or how many iterations run; the larger branch and one iteration were taken: "
        notes.append(Note("assumption", "SM521", text + _some(sizes.guessed), len(sizes.guessed)))
    if unknown:
        text = f"sizes that depend on data are not counted: {_some(unknown)}"
        notes.append(Note("warning", "SM522", text, len(unknown)))
    if unmodelled:
        text = f"values that are no tensors are not counted: {_some(unmodelled)}"
        notes.append(Note("warning", "SM523", text, len(unmodelled)))
    if not options.enable_cpu_mem_arena and options.provider == "cpu":
        text = "without an arena memory comes from the system and goes back to it: held is the most at one moment"
        notes.append(Note("assumption", "SM524", f"{text}, not what stays"))
    if options.provider == "cuda":
        text = (
            "predictions for CUDA follow the runtime's source and were not compared with a device: nodes that fall "
            "back to the CPU, copies between devices and the CUDA kernels' in-place rules may differ"
        )
        notes.append(Note("warning", "SM525", text))
        text = "workspaces of cuDNN and cuBLAS come on top and are not in these numbers"
        if options.cudnn_conv_algo_search == "EXHAUSTIVE":
            text = (
                "cudnn_conv_algo_search=EXHAUSTIVE tries every convolution algorithm with its whole workspace, taken "
                "from the arena; it is not in these numbers and can exceed them (HEURISTIC or DEFAULT avoid it)"
            )
        notes.append(Note("warning", "SM526", text))
    return tuple(notes)


def _some(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
