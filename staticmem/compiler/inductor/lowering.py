"""From a graph of ATen calls to Inductor's operations: which values have a buffer, and in which layout.

Source: `torch/_inductor/graph.py` (`GraphLowering.run_node`) and `torch/_inductor/ir.py` (`ExternKernel`:
`realize_input`, `require_strides`, `copy_input`) of PyTorch 2.15. The families of ops are in the modules beside this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from staticmem.compiler.graphs import NodeGraph
from staticmem.compiler.inductor import buffers as b
from staticmem.compiler.inductor import layout
from staticmem.compiler.inductor.buffers import Box, Buffer, Loops, Operation, Read, Value
from staticmem.compiler.inductor.indexing import NO_VIEWS
from staticmem.compiler.inductor.layout import restrided
from staticmem.compiler.inductor.post_grad import rewrite
from staticmem.eager.strides import Form, Shape, Strides, channels_last_strides, contiguous_strides, is_dense, numel
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.tags import LIKE_PADDING, LOWERED_VIEWS, NEED_REALIZED
from staticmem.tracing.nodes import PLACEHOLDER, Node, users_of

Lowered: TypeAlias = "Value | tuple[Value | None, ...] | None"
Rule: TypeAlias = "Callable[[Lowering, Node], Lowered]"
RULES: dict[str, Rule] = {}  # by target without overload

NEED_FIXED_LAYOUT = ("aten::convolution_backward", "aten::mm", "aten::_int_mm")  # graph.py, need_fixed_layout
# graph.py, mark_nodes_dislike_padding
DISLIKE_PADDING = frozenset(("aten::convolution", "aten::convolution_backward", "aten::_scaled_mm"))
AS_STRIDED = ("aten::as_strided", "aten::as_strided_", "aten::as_strided_scatter", "aten::resize", "aten::resize_as")


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Registers the lowering of ops, named without overload."""

    def register(function: Rule) -> Rule:
        for target in targets:
            RULES[target] = function
        return function

    return register


class Lowering:
    """Lowers one graph. After `run`, `operations` and `outputs` are what the scheduler reads.

    Attributes:
        graph: what is lowered.
        layout_opt: convolutions run in channels last.
        backward: it is the backward; implicit fallbacks then want contiguous inputs.
        strides: those of the node's value in eager, which user-visible outputs have to keep.
        operations, buffers: in order of creation.
        inputs: buffers of the placeholders.
        outputs: of the graph; None where it is no tensor.
    """

    def __init__(
        self,
        graph: NodeGraph,
        *,
        inference: bool,
        backward: bool,
        visible: int | None = None,
        forms: Mapping[Node, Form] | None = None,
        fallback: Rule | None = None,
        dynamic: bool = False,
    ) -> None:
        shown = range(len(graph.outputs) if visible is None else visible)
        graph = rewrite(graph, inference=inference)
        self.graph, self.inference, self.backward = graph, inference, backward
        self.fallback = fallback
        self.users = users_of(graph.nodes)
        self.dynamic = dynamic  # then `decide_layout_opt` says no, and strides are not padded (pad_dynamic_shapes)
        self.layout_opt = not dynamic and layout.decide_layout_opt(graph, inference)
        self.prefers = layout.prefer_channels_last(graph) if self.layout_opt else set()
        self.forms = restrided(graph, forms or {})
        self.returned = {node for node in graph.outputs if node is not None}
        self.visible = {node for at in shown if (node := graph.outputs[at]) is not None}
        # what the backward reads, and this graph too
        self.saved = set(graph.outputs[len(shown) :]) if visible is not None else set()
        self.dislikes = self._dislike_padding()
        self.env: dict[Node, Lowered] = {}
        self.operations: list[Operation] = []
        self.buffers: list[Buffer] = []
        self.inputs: list[Buffer] = []
        self.outputs: list[Value | None] = []
        # values that read an input which the graph writes to, by the number of its buffer (`name_to_users`)
        self.readers: dict[int, list[Value]] = {}
        self.overwritten = {node.args[0] for node in graph.nodes if node.target == "aten::copy_"}
        self.current: Node = graph.nodes[0] if graph.nodes else Node(PLACEHOLDER)

    # ---- strides

    def strides_of(self, node: Node) -> Strides:
        """The strides that the value has in eager."""
        form = self.forms.get(node)
        return form.strides if form is not None else node.tensor.strides

    @property
    def pads(self) -> bool:
        """The node that is lowered does not dislike padding."""
        return not self.dynamic and self.current not in self.dislikes

    def _dislike_padding(self) -> set[Node]:
        """`mark_nodes_dislike_padding`: what leads to a convolution other than through a reduction, and outputs."""
        shown = set(self.visible)
        queue = list(shown)
        while queue:
            node = queue.pop()
            if node.base in LOWERED_VIEWS and node.inputs and node.inputs[0] not in shown:
                shown.add(node.inputs[0])
                queue.append(node.inputs[0])
        disliking: set[Node] = set()
        for node in reversed(self.graph.nodes):
            if node.target.startswith("operator::"):  # no overload packet
                continue
            if node.base in DISLIKE_PADDING:
                disliking.add(node)
            if node in disliking:
                disliking.update(
                    read
                    for read in node.inputs
                    if not read.target.startswith("operator::") and read.base not in LIKE_PADDING
                )
            if node in shown and node.base not in LIKE_PADDING:
                disliking.add(node)
        return disliking

    # ---- buffers

    def new_buffer(self, shape: Shape, dtype: DType, strides: Strides | None = None, *, fresh: bool = False) -> Buffer:
        node = self.current
        what = node.name if node.target == PLACEHOLDER else node.target  # a copy of an input
        buffer = Buffer(len(self.buffers), shape, dtype, strides, fresh=fresh, what=what, op=node.op)
        buffer.recomputed = node.recomputed
        self.buffers.append(buffer)
        return buffer

    def add(self, operation: Operation) -> Operation:
        self.operations.append(operation)
        return operation

    def compute(self, loops: Loops, strides: Strides | None = None) -> Buffer:
        """A buffer for what loops compute (`ComputedBuffer`)."""
        buffer = self.new_buffer(loops.shape, loops.dtype, strides)
        node = self.current
        self.add(
            Operation(
                len(self.operations), buffer, [r.buffer for r in loops.reads], loops=loops, what=buffer.what, op=node.op
            )
        )
        return buffer

    def extern(
        self, kernel: str, reads: Sequence[Buffer], buffer: Buffer, part_of: Operation | None = None
    ) -> Operation:
        node = self.current
        operation = Operation(len(self.operations), buffer, reads, kernel=kernel, what=node.target, op=node.op)
        operation.part_of, operation.call = part_of, node if part_of is None else None
        return self.add(operation)

    def realize(self, value: Value) -> Buffer:
        """The buffer of the box of this value (`StorageBox.realize`)."""
        data = value.box.data
        if isinstance(data, Loops):
            data = value.box.data = self.compute(data)
        return data

    def realize_hint(self, value: Value) -> None:
        """`StorageBox.realize_hint`: unless it reads one tensor at most."""
        loops = value.loops
        if loops is not None and sum(1 for read in loops.reads if numel(read.buffer.shape) > 1) > 1:
            self.realize(value)

    def copy(self, value: Value) -> Value:
        """`ExternKernel.copy_input`: a buffer of its own for a view, or for what is not computed yet."""
        reads, weights = value.load()
        copied = Value.of(Loops(value.shape, value.dtype, reads, weights))
        self.realize(copied)
        return copied

    def realize_input(self, value: Value) -> Value:
        """`ExternKernel.realize_input`: a buffer, or a view of one that strides can express."""
        buffer = self.realize(value)
        if not value.views:
            return value
        if buffer.flexible:
            buffer.freeze(pad=self.pads)
        return value if value.strides() is not None else self.copy(value)

    def require(
        self, value: Value, *, order: Sequence[int] | None = None, exact: Strides | None = None, pad: bool = False
    ) -> Value:
        """`ExternKernel.require_strides`: in this order, or with these strides; a copy where it has others."""
        if exact is None and numel(value.shape) <= 1:
            return value
        buffer = value.buffer
        if buffer is not None and not value.views and buffer.flexible:
            if order is not None:
                if layout.is_stride_ordered(buffer.shape, buffer.strides, order):
                    buffer.freeze(pad=self.pads)
                else:
                    buffer.freeze_as(layout.stride_ordered(buffer.shape, order), pad=pad and self.pads)
            elif exact is not None:
                buffer.freeze_as(exact, pad=pad and self.pads)
            return value
        if value.views and buffer is not None and buffer.flexible and not buffer.fresh:
            buffer.freeze(pad=self.pads)
        placed = value.strides()
        if placed is not None:
            have = placed[0]
            if order is not None:
                if layout.is_stride_ordered(value.shape, have, order):
                    return value
            elif exact is not None:
                if layout.same_where_it_matters(exact, have, value.shape):
                    return value
                padded = layout.pad_strides(value.shape, exact, value.dtype) if pad and self.pads else exact
                if layout.same_where_it_matters(padded, have, value.shape):
                    return value
        if exact is not None:
            expanded = [d for d, s in enumerate(exact) if s == 0 and value.shape[d] > 1]
            if expanded:
                small = value
                for dim in expanded:
                    shape = tuple(1 if d == dim else s for d, s in enumerate(small.shape))
                    small = small.view(("slice", dim, 0, 1, shape), pad=self.pads)
                copied = self.copy(small)
                buffer = self.realize(copied)
                buffer.freeze_as(exact, pad=False)
                buffer.strides = tuple(
                    s if n > 1 else 1 for s, n in zip(contiguous_strides(small.shape), small.shape, strict=True)
                )
                return copied.view(("expand", value.shape))
        copied = self.copy(value)
        buffer = self.realize(copied)
        if order is not None:
            buffer.freeze_as(layout.stride_ordered(buffer.shape, order), pad=pad and self.pads)
        elif exact is not None:
            buffer.freeze_as(exact, pad=pad and self.pads)
        return copied

    def channels_last(self, value: Value) -> Value:
        return self.require(value, order=layout.channels_last_order(len(value.shape)))

    def as_in_eager(self, value: Value, node: Node) -> Value:
        """`constrain_to_fx_strides`: in the order of strides that the node has in eager."""
        return self.require(value, order=layout.stride_order(self.strides_of(node)))

    # ---- values of nodes

    def value(self, node: Node) -> Value:
        value = self.env[node]
        assert isinstance(value, Value), f"{node} is no tensor"
        return value

    def pointwise(self, shape: Shape, dtype: DType, reads: Sequence[Read], weights: b.Weights) -> Value:
        return Value.of(Loops(shape, dtype, reads, weights))

    def rounding(self, dtype: DType) -> b.Weights:
        """What `make_pointwise` computes besides: in this graph too a saved value has the digits that its type has in
        memory (config.emulate_precision_casts_on_saved_tensors)."""
        node = self.current
        narrow = dtype in dtypes.HALVES
        return {("rounded", node): 2} if narrow and node in self.saved and self.users[node] else {}

    def overwrite(self, target: Buffer) -> None:
        """What reads the old value gets a buffer before it is gone (`mark_buffer_mutated`)."""
        if target.operation is not None:
            target.operation.inlined = False
        for value in self.readers.pop(target.number, ()):
            self.realize(value)

    # ---- the graph

    def run(self) -> Lowering:
        for node in self.graph.nodes:
            self.current = node
            result = self._input(node) if node.target == PLACEHOLDER else self._call(node)
            self.env[node] = result = self._after(node, result)
            if isinstance(result, Value) and result.loops is not None and self.readers:
                for read in result.loops.reads:
                    if read.buffer.number in self.readers:
                        self.readers[read.buffer.number].append(result)
        self.current = Node(PLACEHOLDER)
        for output in self.graph.outputs:
            value = self.env[output] if output is not None else None
            self.outputs.append(self.realize_input(value) if isinstance(value, Value) else None)
        for buffer in self.buffers:  # GraphLowering.finalize
            if buffer.into is None:
                buffer.decide()
        return self

    def _input(self, node: Node) -> Value:
        form = self.forms.get(node) or node.tensor
        buffer = Buffer(-1 - len(self.inputs), form.shape, form.dtype, form.strides, what=node.name or "input")
        self.inputs.append(buffer)
        if node in self.overwritten:
            self.readers[buffer.number] = []
        return Value(Box(buffer), form.shape, form.dtype, NO_VIEWS)

    def _call(self, node: Node) -> Lowered:
        rule = RULES.get(node.base) or self.fallback
        assert rule is not None
        return rule(self, node)

    def _after(self, node: Node, result: Lowered) -> Lowered:
        """What `run_node` does with the result of a lowering: realize it for outputs and readers that need it."""
        if not isinstance(result, Value):
            return result
        users = self.users[node]
        returned, visible = node in self.returned, node in self.visible
        for_strides = any(user.base in AS_STRIDED for user in users)
        if returned and result.views:
            self.realize(result)
        if (returned or for_strides) and result.shape:
            result = self._require_strides(node, result, visible, for_strides)
        count = len(set(users)) + returned
        if count > 1:
            for user in users:
                if self.needs_realized(user):
                    self.realize_hint(result)
                    if user.base in NEED_FIXED_LAYOUT or (user.base == "aten::convolution" and not self.layout_opt):
                        order = layout.stride_order(self.strides_of(node))
                        result = self.require(result, order=order, pad=True)
            if returned and result.loops is not None and (result.loops.reads or result.loops.op_count > 30):
                self.realize(result)
            loops = result.loops
            if loops is not None and reused(loops):
                result = self._require_channels_last(node, result)
            loops = result.loops
            if loops is not None and reused(loops):
                self.realize(result)
        loops = result.loops
        if loops is not None and too_many(loops):
            result = self._require_channels_last(node, result)
            self.realize_hint(result)
        if result.loops is not None and not result.views and result.loops.op_count > b.OPS_AT_MOST:
            self.realize(result)
        return result

    def needs_realized(self, user: Node) -> bool:
        return user.base in NEED_REALIZED or (user.base not in RULES and user.target != PLACEHOLDER)

    def _require_strides(self, node: Node, result: Value, visible: bool, for_strides: bool) -> Value:
        strides = self.strides_of(node)
        pad = not visible and not for_strides
        if (
            len(result.shape) == 4
            and node in self.prefers
            and not visible
            and not for_strides
            and is_dense(result.shape, strides)
        ):
            strides = channels_last_strides(result.shape)
        if result.views or node.base in LOWERED_VIEWS:
            return self.require(result, order=layout.stride_order(strides), pad=pad)
        return self.require(result, exact=strides, pad=pad)

    def _require_channels_last(self, node: Node, result: Value) -> Value:
        """`maybe_apply_channels_last_stride_order`."""
        if (
            len(result.shape) == 4
            and node in self.prefers
            and node not in self.visible
            and is_dense(result.shape, self.strides_of(node))
            and not any(user.base in AS_STRIDED for user in self.users[node])
        ):
            return self.require(result, order=layout.channels_last_order(4))
        return result


def reused(loops: Loops) -> bool:
    """`StorageBox.should_realize_on_reuse` on a GPU."""
    return loops.op_count > b.OPS_WHERE_REUSED or len(loops.reads) > b.READS_WHERE_REUSED


def too_many(loops: Loops) -> bool:
    """`StorageBox.has_exceeded_max_reads`."""
    return not loops.reduction and (len(loops.reads) > b.READS_AT_MOST or loops.op_count > b.OPS_WHERE_REUSED)
