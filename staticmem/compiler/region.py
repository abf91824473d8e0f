"""Compiles a stretch of a graph as `torch.compile` does: from ops to what its two compiled graphs do to memory.

What keeps Inductor from recording a graph as a CUDA graph, where the graph shows it.

Tensors on the CPU and several devices do so too; an export does not show on which device its code runs.

Source: torch/_inductor/cudagraph_utils.py (`check_for_mutation`), torch/_inductor/utils.py (`FORBIDDEN_CUDAGRAPH_OPS`,
`_fx_node_is_input_dependent_cudagraph_unsafe`) and torch/_inductor/scheduler.py (`should_partition`: the graph is
cut there; without config.graph_partition it would not be recorded at all) of PyTorch 2.15.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property

from staticmem.compiler.aot.joint import trace
from staticmem.compiler.aot.joint_passes import run_joint_passes
from staticmem.compiler.checkpoints import Checkpointed
from staticmem.compiler.graphs import JointGraph, NodeGraph, Partition, recomputed_bytes
from staticmem.compiler.inductor import plan, schedule_of
from staticmem.compiler.inductor.autotuning import extra_bytes, partial_bytes
from staticmem.compiler.inductor.schedule import Schedule
from staticmem.compiler.partition import partition
from staticmem.compiler.plan import NO_TRACE, CompiledCall, Kernels, Plan
from staticmem.eager.strides import Form
from staticmem.ir import dtypes
from staticmem.ir.graph import Graph
from staticmem.ops.linear import FACTORS
from staticmem.ops.traces.registry import flops
from staticmem.passes.variables.releases import lasting_values
from staticmem.scenario.compiling import AUTOTUNED
from staticmem.scenario.step import Scenario
from staticmem.tracing.nodes import PLACEHOLDER, Node


def compile_region(
    graph: Graph,
    start: int,
    end: int,
    forms: Mapping[str, Form],
    needs_grad: Collection[str],
    scenario: Scenario,
    checkpoints: Checkpointed | None = None,
    dynamic: bool = False,
) -> CompiledCall:
    """The compiled graphs of the ops [start, end).

    `forms` are those of all values that these ops read from outside, and `needs_grad` the names among them that need a
    gradient. `checkpoints` are those inside of the ops. `dynamic`: sizes of inputs are symbols.

    Raises:
        NotTracedError: an op has no trace, so that the region runs eagerly.
    """
    outputs = returned(graph, start, end)
    joint = trace(
        graph, start, end, forms, needs_grad, outputs,
        training=scenario.training, amp=scenario.amp, checkpoints=checkpoints, sdpa=scenario.sdpa, cast=scenario.dtype,
    )  # fmt: skip
    notes = tuple([(NO_TRACE, op) for op in joint.fallbacks])
    graphs = Graphs(
        run_joint_passes(joint), outputs, dynamic, not scenario.retain_graph, scenario.activation_memory_budget
    )
    forward, backward = graphs.plans()
    autotuned = scenario.compile_mode in AUTOTUNED
    written, unsafe = _not_recorded(graphs, graph) if scenario.cuda_graphs else ((), ())
    if backward is None:
        joint = graphs.joint
        return CompiledCall(
            start, end, tuple([node.name for node in joint.primals]), outputs, forward, None,
            padded=padded_products(joint, autotuned=autotuned), notes=(*notes, *forward.notes), graphs=graphs,
            written_inputs=written, unsafe_ops=unsafe, choices=tuple(joint.choices),
        )  # fmt: skip
    parts = graphs.parts
    return CompiledCall(
        start, end, tuple([node.name for node in joint.primals]), outputs, forward, backward,
        saved=tuple([_described(node, graph) for node in parts.saved]), on_ctx=sum(node.on_ctx for node in parts.saved),
        differentiable=tuple([outputs.index(node.name) for node in joint.tangents]),
        recomputed_bytes=recomputed_bytes(parts), recomputed_flops=sum(map(flops, parts.recomputed)),
        padded=padded_products(parts.forward, parts.backward, autotuned=autotuned),
        notes=(*notes, *forward.notes, *backward.notes), graphs=graphs,
        written_inputs=written, unsafe_ops=unsafe, choices=tuple(joint.choices),
    )  # fmt: skip


class Graphs:
    """The graphs of a region before Inductor, from which its plans are made: those that are expected, and others for
    the band of the peak, which differ behind the schedule. `joint` is after the passes over it, `once`: the backward
    runs once."""

    def __init__(self, joint: JointGraph, outputs: Sequence[str], dynamic: bool, once: bool, budget: float) -> None:
        self.joint, self.returned, self.dynamic, self.once, self.budget = joint, len(outputs), dynamic, once, budget
        self.backwards: dict[Hashable, Backward] = {}  # by what the forward's plan decides of it

    @cached_property
    def parts(self) -> Partition:
        return partition(self.joint, self.budget)

    @cached_property
    def forward(self) -> Schedule:
        """The schedule of the forward, or of inference."""
        if not self.joint.tangents:
            return schedule_of(self.joint, inference=True, dynamic=self.dynamic)
        return schedule_of(self.parts.forward, visible=self.returned, dynamic=self.dynamic)

    def plans(self, kernels: Kernels = "expected") -> tuple[Plan, Plan | None]:
        """The plans of the forward and of the backward; inference has no backward. `kernels`: see `inductor.plan`."""
        joint = self.joint
        if not joint.tangents:
            return plan(joint, self.forward, kernels=kernels), None
        parts = self.parts
        forward = plan(parts.forward, self.forward, kernels=kernels)
        backward = self._backward(forward)
        return forward, plan(parts.backward, backward.schedule, backward.freeable, kernels)

    def _backward(self, forward: Plan) -> Backward:
        """The backward, which is compiled for the strides that the forward's outputs have.

        It may write over what the forward saved for it alone: no input or copy of one, and nothing that the module
        returns (`donated_buffer` of torch/_functorch/_aot_autograd/graph_compile.py); nor anything where the graph is
        kept, which the backward knows when it is compiled (`saved_tensors_use_once` of runtime_wrappers.py).
        """
        parts = self.parts
        placeholders = parts.backward.placeholders
        saved = [output for output in forward.outputs[self.returned :] if output is not None]
        given = {output.storage for output in forward.outputs[: self.returned] if output is not None}
        own = [
            at
            for at, (output, node) in enumerate(zip(saved, parts.saved, strict=False))
            if self.once and node.target != PLACEHOLDER
            if output.storage >= forward.inputs and output.storage not in given
        ]
        key = (tuple([output.form for output in saved]), tuple(own))
        if key not in self.backwards:
            schedule = schedule_of(
                parts.backward,
                backward=True,
                forms={placeholder: output.form for placeholder, output in zip(placeholders, saved, strict=False)},
                donated=[placeholders[at] for at in own],
                dynamic=self.dynamic,
            )
            freeable = [p for p, node in zip(placeholders, parts.saved, strict=False) if node.target != PLACEHOLDER]
            self.backwards[key] = Backward(schedule, freeable)
        return self.backwards[key]


class Backward:
    """The backward of a region before its plan: see `inductor.plan`."""

    def __init__(self, schedule: Schedule, freeable: Sequence[Node]) -> None:
        self.schedule, self.freeable = schedule, freeable


def _not_recorded(graphs: Graphs, graph: Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What `CompiledCall` has as `written_inputs` and `unsafe_ops`."""
    owned = {p.value.name for p in (*graph.parameters, *graph.buffers)}
    nodes = graphs.joint.nodes if not graphs.joint.tangents else graphs.parts.forward.nodes
    return written_inputs(nodes, owned), unsafe_ops(graphs.joint.nodes)


def padded_products(*graphs: NodeGraph, autotuned: bool = False) -> tuple[tuple[int, int], ...]:
    """The ops whose products Inductor may pad, with the bytes that it would take (`inductor.autotuning`); where kernels
    are timed, also those that it may divide (`inductor.autotuning`)."""
    extra: dict[int, int] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.base not in FACTORS:
                continue
            nbytes = max(extra_bytes(node), partial_bytes(node) if autotuned else 0)
            if nbytes:
                extra[node.op] = max(nbytes, extra.get(node.op, 0))
    return tuple(extra.items())


def returned(graph: Graph, start: int, end: int) -> tuple[str, ...]:
    """Names of the values that the ops [start, end) give and later ops, the caller or a module keep, in order."""
    read = {*graph.outputs, *lasting_values(graph)}
    for op in graph.ops[end:]:
        read.update(graph.reads(op))
    names = (name for op in graph.ops[start:end] for name in op.outputs if name in read)
    return tuple(dict.fromkeys(names))


def _described(node: Node, graph: Graph) -> str:
    """What a saved tensor is: "aten::convolution of layer1.0.conv1"."""
    if node.target == PLACEHOLDER:
        return node.name
    modules = graph.ops[node.op].modules if node.op >= 0 else ()
    path = modules[-1].path if modules else ""
    call = node.inputs[0] if node.target.startswith("operator::") else node
    return f"{call.base} of {path}" if path else call.base


UNSAFE = (
    "aten::_fused_moving_avg_obs_fq_helper", "aten::_fused_moving_avg_obs_fq_helper_functional",
    "aten::_local_scalar_dense", "aten::_linalg_eigh",
)  # fmt: skip
WRITES_AT_INDICES = ("aten::index_put", "aten::index_put_", "aten::_unsafe_index_put")
MASKS = (dtypes.bool_, dtypes.uint8)  # as an index they are made numbers of, which waits for the GPU


def written_inputs(nodes: Iterable[Node], static: Collection[str]) -> tuple[str, ...]:
    """Names of inputs that the graph writes to and that are not `static`, as parameters and buffers are."""
    written = (node.inputs[0] for node in nodes if node.target == "aten::copy_")
    return tuple([node.name for node in written if node.target == PLACEHOLDER and node.name not in static])


def unsafe_ops(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Ops that a CUDA graph cannot record."""
    return tuple(dict.fromkeys(node.base for node in nodes if node.base in UNSAFE or _writes_at_a_mask(node)))


def _writes_at_a_mask(node: Node) -> bool:
    if node.base not in WRITES_AT_INDICES:
        return False
    return any(type(index) is Node and index.dtype in MASKS for index in node.args[1])
