"""What a session needs beside values: initializers, the copies that kernels pack of them, and what CPU kernels take
from the arena while they run.

Source of initializers: onnxruntime/core/framework/session_state_utils.cc and graph.cc (those of more than 127 bytes are
used where they were loaded, smaller ones are copied into memory reserved in the arena), session_state.cc
(PrepackConstantInitializedTensors). Reserved bytes at the start of a session equal these sums on onnxruntime 1.32. On
CUDA initializers are one block on the device; that is read from the source and not verified.

Each kernel stands once: in `PACKED` where it packs weights, in `WORKSPACES` where it takes memory, in `PLAIN` where it
was tried and takes none. A session with a kernel in none of them is not exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from staticmem.ort.memory import quantized, recurrent, workspaces
from staticmem.ort.memory.arena import Arena
from staticmem.ort.memory.graph import ExecGraph, ExecNode
from staticmem.ort.memory.kernel import AVX512, BOUNDS, WIDEST, Kernel, PackRule, Processor, WorkRule
from staticmem.ort.memory.sizes import RunSizes

SMALL = 127  # bytes; kSmallTensorExternalDataThreshold of core/graph/graph.h
_DEVICE_ALIGNMENT = 256  # kAllocAlignment

PACKED: dict[tuple[str, str], PackRule] = {**workspaces.PACKED, **recurrent.PACKED, **quantized.PACKED}
WORKSPACES: dict[tuple[str, str], WorkRule] = {**workspaces.WORKSPACES, **recurrent.WORKSPACES, **quantized.WORKSPACES}

# Kernels of the CPU provider that take nothing from the arena beside their results. Tried on onnxruntime 1.32: every
# case of onnx.backend.test that the runtime takes, with `session.collect_node_memory_stats_to_file`, and the graphs of
# `scripts/sessions/session_graphs.py`. Which of these work in place is in `plan`.
_ONNX = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BitShift BitwiseAnd BitwiseNot BitwiseOr
    BitwiseXor Cast Ceil Celu Clip Compress Concat ConstantOfShape Cos Cosh CumSum DepthToSpace
    DequantizeLinear Div Dropout DynamicQuantizeLinear Elu Equal Erf Exp Expand EyeLike Flatten Floor Gather
    GatherElements GatherND Gelu GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual HardSigmoid HardSwish Identity
    InstanceNormalization IsInf IsNaN LayerNormalization LeakyRelu Less LessOrEqual Log LpNormalization LpPool MaxPool
    Mish Mod Mul Neg NonMaxSuppression NonZero Not Or PRelu Pad Pow QuantizeLinear Range Reciprocal ReduceL1 ReduceL2
    ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape
    ReverseSequence Round ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign SimplifiedLayerNormalization
    Sin Sinh Size Slice Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Tan Tanh ThresholdedRelu Tile TopK
    Transpose Trilu Unique Unsqueeze Xor SplitToSequence SequenceAt
"""
_MICROSOFT = """
    FastGelu Gelu QLinearAdd QLinearConcat QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearSigmoid
    QLinearSoftmax QuickGelu SkipLayerNormalization
"""
_NCHWC = "Conv MaxPool AveragePool GlobalMaxPool GlobalAveragePool ReorderInput ReorderOutput Upsample"

PLAIN = frozenset(
    (domain, op)
    for domain, names in (("", _ONNX), ("com.microsoft", _MICROSOFT), ("com.microsoft.nchwc", _NCHWC))
    for op in names.split()
)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of initializers: `arena` are those reserved in the provider's arena, `packed` the copies that kernels made
    there, `outside` those in ordinary memory.

    `packed_least` and `packed_most` bound the copies where the CPU decides. `within` is what kernels did in the regions
    of the arena instead of beside them: each a number of bytes that they keep, and requests that they gave back.
    `doubled` are copies of weights in branches that may be equal to others, so that the runtime keeps one.
    """

    arena: int
    packed: int
    outside: int
    packed_least: int
    packed_most: int
    within: tuple[tuple[int, tuple[int, ...]], ...] = ()
    doubled: int = 0

    @property
    def total(self) -> int:
        """What the arena holds for weights."""
        return self.arena + self.packed

    def place(self, arena: Arena) -> None:
        """Takes the memory of weights, as a session does before its first run."""
        arena.reserve(self.total - sum(kept for kept, _ in self.within))
        for kept, temporary in self.within:
            arena.allocate(kept)
            for chunk in [arena.allocate(size) for size in temporary]:
                arena.free(chunk)


def weight_bytes(
    graph: ExecGraph, provider: str = "cpu", prepacking: bool = True, processor: str = "unknown"
) -> WeightBytes:
    """Bytes of a session's initializers, bodies included, each counted once. Initializers that nothing reads are
    dropped, as the runtime drops them. `processor`: what is known of the CPU, a name of `PROCESSORS` or "unknown"."""
    arena = packed = outside = least = most = 0
    within: list[tuple[int, tuple[int, ...]]] = []
    copies: dict[tuple[str, str, int], dict[tuple[int, ...], ExecGraph]] = {}
    doubled = 0
    bounds = BOUNDS.get(processor)
    for level, used in _levels(graph):
        for name, kind in level.initializers.items():
            if name not in used:
                continue
            size = kind.dtype.nbytes(math.prod(dim if isinstance(dim, int) else 0 for dim in kind.dims or ()))
            if provider == "cuda":
                arena += math.ceil(size / _DEVICE_ALIGNMENT) * _DEVICE_ALIGNMENT
            elif size <= SMALL:
                arena += size
            else:
                outside += size
        if not prepacking or provider != "cpu":
            continue
        for node in level.nodes:
            rule = PACKED.get((node.domain, node.op))
            packing = rule(Kernel(node, level, processor=bounds or AVX512)) if rule is not None else None
            if rule is None or packing is None:
                continue
            # bodies have names of their own, and see the constants around them as the same objects
            weights = tuple(id(level.constants[name]) for name in node.inputs if name in level.constants)
            key = (node.domain, node.op, packing.kept)
            if packing.kept and weights in copies.setdefault(key, {}):
                continue  # one copy of equal contents: the same weights are
            if packing.kept:
                elsewhere = any(other is not level for other in copies[key].values())
                copies[key][weights] = level
                if elsewhere:  # weights of branches are often equal under names of their own
                    doubled += packing.kept
            packed += packing.kept
            if packing.within or packing.temporary:
                within.append((packing.kept if packing.within else 0, packing.temporary))
            others = {packing.kept} if bounds is not None else {packing.kept, *_elsewhere(rule, node, level)}
            least, most = least + min(others), most + max(others)
    return WeightBytes(arena, packed, outside, least, most, tuple(within), doubled)


def _elsewhere(rule: PackRule, node: ExecNode, graph: ExecGraph) -> list[int]:
    """What the same kernel keeps on other CPUs of x86-64 with AVX2 or more."""
    packings = (rule(Kernel(node, graph, processor=other)) for other in BOUNDS.values())
    return [packing.kept for packing in packings if packing is not None]


def unknown_kernels(graph: ExecGraph) -> list[str]:
    """Operators whose kernels' memory is not known, of a graph and its bodies."""
    names: dict[str, None] = {}
    for level, _ in _levels(graph):
        for node in level.nodes:
            key = (node.domain, node.op)
            rule = PACKED.get(key)
            has_rule = rule is not None or key in WORKSPACES or key in PLAIN or node.bodies
            if not has_rule or (rule is not None and rule(Kernel(node, level)) is None):
                names[_name(node)] = None
    return list(names)


def _name(node: ExecNode) -> str:
    return f"{node.domain}.{node.op}" if node.domain else node.op


def _levels(graph: ExecGraph) -> list[tuple[ExecGraph, set[str]]]:
    """Every graph and body with the names that it or its bodies read."""
    used = set(graph.outputs)
    levels = [(graph, used)]
    for node in graph.nodes:
        used.update(node.inputs, node.implicit)
        for body in node.bodies.values():
            levels += _levels(body)
    return levels


@dataclass(slots=True)
class Workspaces:
    """What kernels of the CPU take in a run. `unknown` collects the operators of which it is not known.

    Args:
        threads: of the session.
        processor: as for `weight_bytes`.
    """

    threads: int
    processor: str = "unknown"
    unknown: dict[str, None] = field(default_factory=dict)

    def of(self, node: ExecNode, graph: ExecGraph, sizes: RunSizes) -> Sequence[int]:
        """The requests of a node's kernel in bytes, in order; all are given back when it ends."""
        rule = WORKSPACES.get((node.domain, node.op))
        if rule is None:
            return ()
        bounds: Processor = BOUNDS.get(self.processor, AVX512)
        requests = rule(Kernel(node, graph, sizes, self.threads, bounds))
        if requests is None:
            self.unknown[_name(node)] = None
            return ()
        if self.processor not in BOUNDS:
            other = rule(Kernel(node, graph, sizes, self.threads, WIDEST))
            if other != requests:
                self.unknown[_name(node)] = None
        return requests
