"""The memory of a session of the ONNX Runtime, from the graph alone.

Operators that the CPU provider has no kernel for in the element type that they are given: it refuses the session.

Tried on onnxruntime 1.32 for x86-64 with the operators of opset 21, one node at a time;
onnxruntime/docs/OperatorKernels.md lists the same. Left out: operators that ONNX defines by others, which the runtime
writes out where a kernel is missing, and float16, around which it casts (`half.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from staticmem.errors import ModelFileError, UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Note
from staticmem.ort.memory.arena import Arena, ArenaFullError, SystemMemory
from staticmem.ort.memory.build import build, copied, written_out
from staticmem.ort.memory.graph import ExecGraph, ExecNode
from staticmem.ort.memory.half import cast_around, half_without_kernel
from staticmem.ort.memory.kernel import BOUNDS
from staticmem.ort.memory.kernel_memory import WeightBytes, Workspaces, unknown_kernels, weight_bytes
from staticmem.ort.memory.replay import NodeRow, Session, value_bytes
from staticmem.ort.memory.sizes import RunSizes, bound_sizes
from staticmem.ort.options import SessionOptions

_DOUBLE = """
    Acos Acosh Asin Asinh Atan Atanh AveragePool Col2Im Conv ConvTranspose Cosh Det Erf GlobalAveragePool GlobalLpPool
    GlobalMaxPool Hardmax InstanceNormalization LRN LpPool MaxRoiPool MaxUnpool Mean Multinomial Sinh Tan
"""
_BFLOAT16 = """
    Abs Add ArgMax ArgMin BatchNormalization Ceil Col2Im CumSum DFT DepthToSpace Div Equal Erf Exp Expand Floor Gemm
    Greater Hardmax LRN Less Log MatMul Max Mean Min Mod Mul Neg NonZero Pow Reciprocal ReduceL2 ReduceLogSumExp
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Sigmoid Size SpaceToDepth Sqrt STFT Sub Sum Tanh Tile
    Trilu Where
"""
MISSING = {dtypes.float64: frozenset(_DOUBLE.split()), dtypes.bfloat16: frozenset(_BFLOAT16.split())}


def check_kernels(graph: ExecGraph) -> None:
    """Refuses a graph with a node that the CPU provider cannot run, as the runtime does when it makes the session.

    Raises:
        ModelFileError: no kernel computes in the node's element type (SM502).
    """
    for node, within in _all_nodes(graph):
        kinds = [within.planned(name) for name in node.inputs if name]
        for kind in kinds:
            if node.domain or kind is None or not kind.tensor or node.op not in MISSING.get(kind.dtype, ()):
                continue
            raise ModelFileError(
                f"the ONNX Runtime has no CPU kernel for {node.op} in {kind.dtype.name}",
                f"It would refuse the session because of node '{node.label}'.",
                "Export the model in float32 or float16, or choose another --provider.",
                code="SM502",
            )


def _all_nodes(graph: ExecGraph) -> Iterator[tuple[ExecNode, ExecGraph]]:
    for node in graph.nodes:
        yield node, graph
        for body in node.bodies.values():
            yield from _all_nodes(body)


@dataclass(frozen=True)
class SessionPrediction:
    """Bytes of a session after `SessionOptions.runs` runs.

    Attributes:
        tensors: the largest sum of buffers of intermediate values and results at the end of a node, in the first run.
        requested: the same in the last run, in which a memory pattern has its block, plus what weights reserve.
        held: what the arena holds after the last run, weights included; without an arena the most at one moment.
        weights: initializers, in the arena and outside.
        block: the block of the memory pattern, 0 without one.
        inputs: what the caller's inputs have; they are the caller's memory.
        workspace: the most that a kernel takes for itself, as far as it is known (`workspace_known`).
        rows: the arena at the end of each node of each run, initializers not counted.
        exact: whether nothing was assumed: the executed graph, all sizes, and the memory of every kernel are known.
        requested_band, held_band: the least and the most of them; None as the most where nothing bounds it.
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
    requested_band: tuple[int, int | None]
    held_band: tuple[int, int | None]
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
        ModelFileError: the CPU provider has no kernel for a node (SM502).
    """
    options = options or SessionOptions()
    if not in_file_order and options.provider == "cpu":
        model = cast_around(written_out(model))
    graph = build(model, in_file_order)
    if options.provider == "cpu" and not in_file_order:
        check_kernels(graph)
    without = options.provider == "cpu" and not options.enable_cpu_mem_arena
    arena = _arena(options)
    weights = weight_bytes(graph, options.provider, processor=options.processor)
    sizes = bound_sizes(model, shapes, symbols or {})
    kernels = Workspaces(options.intra_op_num_threads, options.processor)
    of = kernels.of if options.provider == "cpu" else None
    try:
        weights.place(arena)
        session = Session(graph, arena, options.enable_mem_pattern, options.enable_mem_reuse, in_file_order, of)
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
    given_order = executed or in_file_order or options.graph_optimization_level == "disable"
    open_kernels = list(dict.fromkeys([*unknown_kernels(graph), *kernels.unknown])) if of is not None else []
    doubts = _Doubts(
        graph=not given_order,
        casts=[] if in_file_order else half_without_kernel(graph),
        copied=[] if in_file_order or executed else copied(graph),
        guessed=list(sizes.guessed),
        unknown=list(result.unknown),
        unmodelled=list(result.unmodelled),
        kernels=open_kernels,
        packing=weights.packed_least != weights.packed_most,
        branches=list(result.unranked),
        doubled=weights.doubled > 0 and options.provider == "cpu",
    )
    exact = not doubts.any and not without and options.provider == "cpu"
    requested, held = result.peak[-1] + weights.total, arena.most_held
    requested_band: tuple[int, int | None] = (requested, requested)
    held_band: tuple[int, int | None] = (held, held)
    if not exact:
        certain = _certain(graph, sizes) + (
            0 if doubts.graph else max(weights.arena + weights.packed_least - weights.doubled, 0)
        )
        more = requested - weights.packed + weights.packed_most
        least = certain if doubts.less else requested - weights.packed + weights.packed_least
        requested_band = (least, None if doubts.more else more)
        # regions grow with what is asked of them, so that the arena has no bound of its own where that moves
        held_band = (least, None)
        if doubts.packing and not doubts.beside_packing:
            others = [_count_held(graph, sizes, options, in_file_order, name) for name in BOUNDS]
            held_band = (min(held, *others), max(held, *others))
    inputs = sum(value_bytes(sizes.values.get(name)) or 0 for name in graph.inputs)
    return SessionPrediction(
        options,
        tensors=result.peak[0],
        requested=requested,
        held=held,
        weights=weights,
        block=result.block,
        inputs=inputs,
        workspace=max((row.workspace for row in result.rows), default=0),
        workspace_known=options.provider == "cpu",
        rows=tuple(result.rows),
        exact=exact,
        requested_band=requested_band,
        held_band=held_band,
        notes=_notes(options, doubts),
    )


@dataclass(frozen=True, slots=True)
class _Doubts:
    """What keeps a prediction from being exact. `packing`: the CPU decides how weights are packed."""

    graph: bool
    casts: list[str]
    copied: list[str]
    guessed: list[str]
    unknown: list[str]
    unmodelled: list[str]
    kernels: list[str]
    packing: bool
    branches: list[str]
    doubled: bool

    @property
    def any(self) -> bool:
        return self.beside_packing or self.packing

    @property
    def beside_packing(self) -> bool:
        return self.less or self.more

    @property
    def less(self) -> bool:
        """Whether less may be requested: another graph or branch, or kernels that may work in place."""
        return bool(
            self.graph or self.casts or self.copied or self.guessed or self.kernels or self.branches or self.doubled
        )

    @property
    def more(self) -> bool:
        """Whether more may be, without a bound."""
        return bool(self.less or self.unknown or self.unmodelled)


def _certain(graph: ExecGraph, sizes: RunSizes) -> int:
    """What a run holds at its end whatever its kernels do: results that nodes of the graph make."""
    computed = {name for node in graph.nodes for name in node.outputs}
    return sum(value_bytes(sizes.values.get(name)) or 0 for name in {*graph.outputs} & computed)


def _arena(options: SessionOptions) -> Arena:
    if options.provider == "cpu" and not options.enable_cpu_mem_arena:
        return SystemMemory()
    return Arena(options.arena_extend_strategy, options.gpu_mem_limit)


def _count_held(graph: ExecGraph, sizes: RunSizes, options: SessionOptions, in_file_order: bool, processor: str) -> int:
    """What the arena holds on another CPU."""
    arena = _arena(options)
    weight_bytes(graph, options.provider, processor=processor).place(arena)
    of = Workspaces(options.intra_op_num_threads, processor).of
    session = Session(graph, arena, options.enable_mem_pattern, options.enable_mem_reuse, in_file_order, of)
    for _ in range(options.runs):
        session.run(sizes)
    return arena.most_held


# fields of `_Doubts` that have names: the kind, the code and the text of their notes
_LISTED: tuple[tuple[str, str, str, str], ...] = (
    (
        "guessed", "assumption", "SM521",
        "data decides which branch or how many iterations run; the larger branch and one iteration were taken",
    ),
    ("unknown", "warning", "SM522", "sizes that depend on data are not counted"),
    ("unmodelled", "warning", "SM523", "values that are no tensors are not counted"),
    (
        "casts", "warning", "SM529",
        "the CPU has no kernel of half precision for these; the runtime casts around them, which is not counted",
    ),
    (
        "copied", "assumption", "SM532",
        "the runtime makes a copy of a DequantizeLinear for each of its readers, which is not counted",
    ),
    ("kernels", "warning", "SM530", "what these kernels take beside their results is not known"),
    ("branches", "assumption", "SM533", "whether branches that read these get a memory pattern is not known"),
)  # fmt: skip


def _notes(options: SessionOptions, doubts: _Doubts) -> tuple[Note, ...]:
    notes: list[Note] = []
    if doubts.graph:
        text = "the runtime optimizes the graph before it runs; this is the graph of the file, not the executed one"
        notes.append(Note("assumption", "SM520", text))
    for doubt, kind, code, text in _LISTED:
        if names := getattr(doubts, doubt):
            notes.append(Note(kind, code, f"{text}: {_some(names)}", len(names)))
    if doubts.doubled:
        text = "weights of equal sizes in several branches may be equal, and are packed once then; each was counted"
        notes.append(Note("assumption", "SM533", text))
    if doubts.packing:
        text = "the CPU decides how integer weights are packed; an AVX-512 without AMX was assumed"
        notes.append(Note("assumption", "SM531", text))
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
