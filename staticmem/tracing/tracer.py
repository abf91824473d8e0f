"""Writes down the nodes of a joint graph: ATen calls with the forms of their results, and autograd's tape over them.

Methods make nodes and know nothing of gradients. The functions of the families (`registry.traced`) are the calls that
autograd sees: they make nodes, and `record` what the gradients are. `backward` then runs the tape as autograd's engine
does, which adds the nodes of the backward.

Sources: torch/_functorch/_aot_autograd/graph_capture.py (`create_joint`), torch/csrc/autograd/engine.cpp (order,
`validate_outputs`), input_buffer.cpp (sums), aten/src/ATen/ExpandUtils.h (`sum_to`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from staticmem.eager import strides as layout
from staticmem.eager.strides import Form, Shape, Strides, form_of
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import NO_KWARGS
from staticmem.tracing.nodes import GETITEM, PLACEHOLDER, Argument, Node, Result

Outputs = TypeVar("Outputs", bound=Node | Sequence[Node])
Gradients: TypeAlias = "Sequence[Node | None]"
# The gradients of an entry's inputs, of those of its outputs and of which inputs need one. None: there is none.
Gradient: TypeAlias = "Callable[[Gradients, Sequence[bool]], Gradients]"

_KINDS = ("bool", "int", "float", "complex")


def gradient_of(grads: Gradients) -> Node:
    """The gradient of a call's only output."""
    grad = grads[0]
    assert grad is not None
    return grad


class Entry:
    """A call on autograd's tape."""

    __slots__ = ("gradient", "inputs", "need", "op", "outputs", "region")

    def __init__(
        self, outputs: Sequence[Node], inputs: Sequence[Node | None], need: tuple[bool, ...], gradient: Gradient,
        op: int, region: int,
    ) -> None:  # fmt: skip
        self.outputs, self.inputs, self.need, self.gradient = outputs, inputs, need, gradient
        self.op, self.region = op, region


class Tracer:
    """The graph so far.

    Attributes:
        nodes: in order.
        op, region: what new nodes are marked with (`Node.op`, `Node.must_recompute`).
        training: of the step; dropout and batch norm ask.
        grad_enabled: whether `record` records.
        autocast: the backward runs under `torch.autocast` as the forward does (`backward_pass_autocast` of
            torch/_functorch/config.py), so that sums of autograd's own have float32 results.
        writes: buffers of the module that take a new value when the forward is over.
        fallbacks: how many calls of an op are one extern call for want of a trace (`aot.fallback`).
        choices: of kernels: what was chosen, and why.
    """

    def __init__(self, training: bool) -> None:
        self.nodes: list[Node] = []
        self.op, self.region = -1, 0
        self.training = self.grad_enabled = training
        self.writes: dict[Node, Node] = {}
        self.fallbacks: dict[str, int] = {}
        self.choices: list[tuple[str, str]] = []
        self.sdpa = "auto"
        self.autocast = False
        self._tape: list[Entry] = []
        self._history: dict[Node, tuple[Entry, int]] = {}
        self._leaves: set[Node] = set()
        self._seeds: Node | None = None
        self._random_calls = 0

    # -- nodes ---------------------------------------------------------------------------------------------------

    def node(
        self, target: str, args: tuple[Argument, ...], form: Result, kwargs: Mapping[str, Argument] = NO_KWARGS
    ) -> Node:
        """A call with the form of its result, which the caller has worked out."""
        node = Node(target, args, form, kwargs, self.op, "", self.region)
        self.nodes.append(node)
        return node

    def placeholder(self, name: str, form: Form, needs_grad: bool = False) -> Node:
        node = Node(PLACEHOLDER, (), form, name=name)
        self.nodes.append(node)
        if needs_grad:
            self._leaves.add(node)
        return node

    def leaf(self, node: Node) -> None:
        """`backward` gives a gradient for a node from elsewhere."""
        self._leaves.add(node)

    def several(
        self, target: str, args: tuple[Argument, ...], forms: Sequence[Form | None], **kwargs: Argument
    ) -> list[Node]:
        """A call with several results, and a node for each of them that is a tensor."""
        call = self.node(target, args, tuple(forms), kwargs)
        return [self.node(GETITEM, (call, k), form) for k, form in enumerate(forms) if form is not None]

    def new(
        self,
        target: str,
        args: tuple[Argument, ...],
        shape: Shape,
        dtype: DType,
        strides: Strides | None = None,
        **kwargs: Argument,
    ) -> Node:
        """A call with one result; contiguous unless `strides` are given."""
        return self.node(target, args, form(shape, dtype, strides), kwargs)

    def pointwise(self, target: str, *args: Argument, dtype: DType | None = None, **kwargs: Argument) -> Node:
        """An elementwise call: sizes broadcast, strides as TensorIterator's, `dtype` by promotion unless given."""
        operands = [arg for arg in args if type(arg) is Node]
        if len(operands) == 1:
            shape = operands[0].shape
        else:
            shape = layout.broadcast_shapes(*[operand.shape for operand in operands])
        strides = layout.pointwise_strides(shape, tuple([(operand.shape, operand.strides) for operand in operands]))
        return self.node(target, args, form_of(shape, strides, dtype or promoted(args)), kwargs)

    def add(self, a: Argument, b: Argument) -> Node:
        return self.pointwise("aten::add.Tensor", a, b)

    def sub(self, a: Argument, b: Argument) -> Node:
        return self.pointwise("aten::sub.Tensor", a, b)

    def mul(self, a: Argument, b: Argument) -> Node:
        return self.pointwise("aten::mul.Tensor", a, b)

    def div(self, a: Node, b: Argument) -> Node:
        return self.pointwise("aten::div.Tensor", a, b)

    def call(self, name: str, *args: Argument) -> Node:
        """An elementwise call by its name: `cos`."""
        return self.pointwise(f"aten::{name}", *args)

    def scale(self, a: Node, factor: float) -> Node:
        return self.pointwise("aten::mul.Scalar", a, factor)

    def plus(self, a: Node, number: float) -> Node:
        return self.pointwise("aten::add.Scalar", a, number)

    def minus(self, a: Node, number: float) -> Node:
        return self.pointwise("aten::sub.Scalar", a, number)

    def power(self, a: Node, exponent: float) -> Node:
        return self.pointwise("aten::pow.Tensor_Scalar", a, exponent)

    def one_minus(self, a: Node) -> Node:
        """`rsub` (torch/_refs)."""
        return self.sub(self.full_like(a, 1), a)

    def sgn(self, a: Node) -> Node:
        return self.cast(self.call("sign", self.opmath(a)), a.dtype)

    def compare(self, name: str, a: Node, b: Argument) -> Node:
        """`name` is that of the call without its overload: `le`."""
        return self.pointwise(f"aten::{name}.{'Tensor' if type(b) is Node else 'Scalar'}", a, b, dtype=dtypes.bool_)

    def where(self, condition: Node, a: Argument, b: Argument) -> Node:
        """Numbers become tensors without dimensions, the second one first (torch/_refs, `where`)."""
        dtype = promoted((a, b))
        b = b if type(b) is Node else self.full((), b, dtype)
        a = a if type(a) is Node else self.full((), a, dtype)
        return self.pointwise("aten::where.self", condition, a, b, dtype=dtype)

    def opmath(self, self_: Node) -> Node:
        """In the dtype that elementwise kernels compute in (torch/_decomp/decompositions.py, `pw_cast_for_opmath`)."""
        return self.cast(self_, self.computes_in(self_.dtype))

    @staticmethod
    def computes_in(dtype: DType) -> DType:
        return dtypes.float32 if dtype in dtypes.HALVES else dtype

    def cast(self, self_: Node, dtype: DType) -> Node:
        """`_to_copy`, which decomposes to a conversion; the tensor itself where it has the dtype."""
        if self_.dtype is dtype:
            return self_
        strides = layout.dense_like(self_.shape, self_.strides)
        return self.new("prims::convert_element_type", (self_, dtype), self_.shape, dtype, strides)

    def full(self, shape: Shape, value: float, dtype: DType = dtypes.float32) -> Node:
        return self.node("aten::full", (shape, value), form(shape, dtype), {"dtype": dtype})

    def zeros_like(self, self_: Node) -> Node:
        return self.full_like(self_, 0)

    def full_like(self, self_: Node, value: float, dtype: DType | None = None) -> Node:
        """One value in the layout of a tensor: dimensions in the order of memory, and a view (torch/_refs, `full_like`,
        `empty_permuted`)."""
        strides = layout.dense_like(self_.shape, self_.strides)
        if layout.is_contiguous(self_.shape, strides):
            return self.full(self_.shape, value, dtype or self_.dtype)
        order = sorted(range(self_.ndim), key=lambda d: -strides[d])
        dense = self.full(tuple([self_.shape[d] for d in order]), value, dtype or self_.dtype)
        return self.permute(dense, [order.index(d) for d in range(self_.ndim)])

    def clone(self, self_: Node, strides: Strides | None = None) -> Node:
        """A copy, contiguous unless `strides` are given."""
        return self.new("aten::clone", (self_,), self_.shape, self_.dtype, strides, memory_format="contiguous_format")

    def contiguous(self, self_: Node) -> Node:
        """The tensor where it is contiguous, or a copy."""
        return self_ if layout.is_contiguous(self_.shape, self_.strides) else self.clone(self_)

    def iota(self, size: int, start: int = 0) -> Node:
        """The positions of a dimension (`arange` of one number)."""
        kwargs = {"start": start, "step": 1, "dtype": dtypes.int64, "requires_grad": False}
        return self.node("prims::iota", (size,), form((size,), dtypes.int64), kwargs)

    def random(self, shape: Shape, dtype: DType = dtypes.float32, mode: str = "rand") -> Node:
        """Random numbers; torch/_inductor/fx_passes/replace_random.py takes seeds of the graph for them."""
        result = self.new("prims::inductor_random", (shape, self._seed(), mode), shape, dtypes.float32)
        return self.cast(result, dtype)

    def random_integers(self, low: int, high: int, shape: Shape, dtype: DType) -> Node:
        result = self.new("prims::inductor_randint", (low, high, shape, self._seed()), shape, dtypes.int64)
        return self.cast(result, dtype)

    def _seed(self) -> Node:
        if self._seeds is None:
            self._seeds = self.new("prims::inductor_seeds", (0,), (0,), dtypes.int64)
        seed = self.new("prims::inductor_lookup_seed", (self._seeds, self._random_calls), (), dtypes.int64)
        self._random_calls += 1
        self._seeds.args = (self._random_calls,)
        self._seeds.form = form((self._random_calls,), dtypes.int64)
        return seed

    # -- views ---------------------------------------------------------------------------------------------------

    def view(self, self_: Node, shape: Sequence[int]) -> Node:
        """`view` where strides allow it, else a contiguous copy first (`reshape`), also to the sizes that it has.

        -1 stays in the arguments where ATen leaves it (`reshape_symint`): equal nodes are merged by their arguments.
        """
        asked, shape = tuple(shape), sized(shape, self_.numel)
        strides = layout.view_strides(self_.shape, self_.strides, shape)
        if strides is None:
            self_ = self.clone(self_)
        if strides is None or not layout.is_contiguous(self_.shape, self_.strides):
            asked = shape
        return self.new("aten::view", (self_, asked), shape, self_.dtype, strides)

    def permute(self, self_: Node, dims: Sequence[int]) -> Node:
        order = tuple([self_.dim(d) for d in dims])
        shape, strides = tuple([self_.shape[d] for d in order]), tuple([self_.strides[d] for d in order])
        return self.new("aten::permute", (self_, order), shape, self_.dtype, strides)

    def transpose(self, self_: Node, a: int, b: int) -> Node:
        order = list(range(self_.ndim))
        a, b = self_.dim(a), self_.dim(b)
        order[a], order[b] = b, a
        return self.permute(self_, order) if a != b else self.alias(self_)

    def expand(self, self_: Node, shape: Sequence[int]) -> Node:
        missing = len(shape) - self_.ndim
        target = tuple([self_.shape[k - missing] if size == -1 else size for k, size in enumerate(shape)])
        strides = layout.expand_strides(self_.shape, self_.strides, target)
        return self.new("aten::expand", (self_, tuple(shape)), target, self_.dtype, strides)

    def alias(self, self_: Node) -> Node:
        """Another node of the same values, without a history."""
        return self.new("aten::alias", (self_,), self_.shape, self_.dtype, self_.strides)

    def unsqueeze(self, self_: Node, dim: int) -> Node:
        at = dim if dim >= 0 else dim + self_.ndim + 1
        shape, strides = list(self_.shape), list(self_.strides)
        strides.insert(at, shape[at] * strides[at] if at < len(shape) else 1)
        shape.insert(at, 1)
        return self.new("aten::unsqueeze", (self_, dim), tuple(shape), self_.dtype, tuple(strides))

    def squeeze(self, self_: Node, dims: Sequence[int] | int | None) -> Node:
        """Without the dimensions of size 1 among `dims`, all of them where it is None. Each is a call of its own."""
        asked = range(self_.ndim) if dims is None else layout.listed(dims)
        gone = {self_.dim(d) for d in asked if self_.shape and self_.shape[self_.dim(d)] == 1}
        kept = [d for d in range(self_.ndim) if d not in gone]
        shape, strides = tuple([self_.shape[d] for d in kept]), tuple([self_.strides[d] for d in kept])
        if dims is None:
            return self.new("aten::squeeze", (self_,), shape, self_.dtype, strides)
        if isinstance(dims, int):
            return self.new("aten::squeeze.dim", (self_, dims), shape, self_.dtype, strides)
        return self.new("aten::squeeze.dims", (self_, tuple(dims)), shape, self_.dtype, strides)

    def squeeze_dim(self, self_: Node, dim: int) -> Node:
        """Without a dimension of size 1."""
        axis = self_.dim(dim)
        shape, strides = self_.shape[:axis] + self_.shape[axis + 1 :], self_.strides[:axis] + self_.strides[axis + 1 :]
        return self.new("aten::squeeze.dim", (self_, dim), shape, self_.dtype, strides)

    def slice(self, self_: Node, dim: int, start: int, end: int, step: int = 1) -> Node:
        """`start` and `end` as in Python: from the end where they are negative, cut to the tensor."""
        at = self_.dim(dim)
        shape, strides = list(self_.shape), list(self_.strides)
        first, last, _ = slice(start, end).indices(shape[at])
        shape[at], strides[at] = max(0, -(-(last - first) // step)), strides[at] * step
        return self.new("aten::slice.Tensor", (self_, dim, start, end, step), tuple(shape), self_.dtype, tuple(strides))

    def select(self, self_: Node, dim: int, index: int) -> Node:
        at = self_.dim(dim)
        shape, strides = self_.shape[:at] + self_.shape[at + 1 :], self_.strides[:at] + self_.strides[at + 1 :]
        return self.new("aten::select.int", (self_, dim, index), shape, self_.dtype, strides)

    # -- sums and products ---------------------------------------------------------------------------------------

    def reduce(
        self,
        target: str,
        self_: Node,
        dims: Sequence[int],
        keepdim: bool = False,
        dtype: DType | None = None,
        **kwargs: Argument,
    ) -> Node:
        """A reduction over dimensions, all of them where `dims` is empty."""
        shape = reduced(self_.shape, [self_.dim(d) for d in dims] or range(self_.ndim), keepdim)
        return self.new(target, (self_, tuple(dims), keepdim), shape, dtype or self_.dtype, **kwargs)

    def sum(self, self_: Node, dims: Sequence[int], keepdim: bool = False, dtype: DType | None = None) -> Node:
        return self.reduce("aten::sum.dim_IntList", self_, dims, keepdim, dtype)

    def mm(self, a: Node, b: Node) -> Node:
        """A product; an outer one is elementwise (`mm` of torch/_inductor/decomposition.py)."""
        rows, shared, columns = a.shape[0], a.shape[1], b.shape[1]
        if shared != b.shape[0]:
            raise ValueError(f"cannot multiply {list(a.shape)} by {list(b.shape)}")
        if shared == 1 and rows != 1 and columns != 1:
            return self.outer(a, b)
        return self.new("aten::mm", (a, b), (rows, columns), a.dtype)

    def bmm(self, a: Node, b: Node) -> Node:
        """As `mm`, for each of a batch (`bmm` there)."""
        batch, rows, shared = a.shape
        if (batch, shared) != b.shape[:2]:
            raise ValueError(f"cannot multiply {list(a.shape)} by {list(b.shape)}")
        if shared == 1:
            return self.outer(a, b)
        return self.new("aten::bmm", (a, b), (batch, rows, b.shape[2]), a.dtype)

    def outer(self, a: Node, b: Node) -> Node:
        """An elementwise product, in float32 where its operands have half precision (`pw_cast_for_opmath`)."""
        return self.cast(self.pointwise("aten::mul.Tensor", self.opmath(a), self.opmath(b)), a.dtype)

    # -- autograd ------------------------------------------------------------------------------------------------

    def needs_grad(self, *nodes: Node | None) -> bool:
        return any(node is not None and (node in self._history or node in self._leaves) for node in nodes)

    def record(self, outputs: Outputs, inputs: Sequence[Node | None], gradient: Gradient) -> Outputs:
        """Puts a call on the tape, unless nothing needs a gradient; gives `outputs` back, which are those with one."""
        need = tuple([self.needs_grad(node) for node in inputs])
        if not self.grad_enabled or not any(need):
            return outputs
        results: Sequence[Node] = [outputs] if isinstance(outputs, Node) else outputs
        entry = Entry(results, inputs, need, gradient, self.op, self.region)
        self._tape.append(entry)
        for k, output in enumerate(results):
            self._history[output] = (entry, k)
        return outputs

    def derive(self, out: Node, input: Node, gradient: Callable[[Node], Node]) -> Node:
        """Records a call of one tensor; `gradient` makes its gradient from that of the result, which comes back."""
        return self.derive_each(out, [input], (0, gradient))

    def derive_each(
        self, out: Node, inputs: Sequence[Node | None], *gradients: tuple[int, Callable[[Node], Node]]
    ) -> Node:
        """Records a call whose inputs have a gradient each, in the order in which autograd's code computes them."""

        def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
            grad = gradient_of(grads)
            results: list[Node | None] = [None] * len(inputs)
            for index, compute in gradients:
                if need[index]:
                    results[index] = compute(grad)
            return results

        self.record(out, inputs, gradient)
        return out

    def entry_of(self, node: Node) -> Entry | None:
        """The call on the tape that gave a node."""
        entry = self._history.get(node)
        return entry[0] if entry is not None else None

    def is_last(self, entry: Entry) -> bool:
        """Nothing is on the tape behind this call."""
        return self._tape[-1] is entry

    def forget(self, entry: Entry) -> bool:
        """Takes the last call off the tape again; False where another is the last."""
        if not self.is_last(entry):
            return False
        self._tape.pop()
        return True

    def written(self, self_: Node, dtype: DType) -> Node:
        """The result of a call in the dtype of the tensor that it is written to; its gradient has that dtype."""
        out = self.cast(self_, dtype)
        if out is not self_ and self_ in self._history:
            entry, k = self._history[out] = self._history.pop(self_)
            entry.outputs = [out if index == k else output for index, output in enumerate(entry.outputs)]
        return out

    def backward(self, outputs: Iterable[tuple[Node, Node]]) -> dict[Node, Node]:
        """Adds the backward of `outputs`, each with its tangent; gives the gradients of the leaves.

        Later calls run first, so each has all gradients of its outputs when it runs (the engine's queue takes the
        highest sequence number).
        """
        gradients: dict[Node, Node] = {}
        for output, tangent in outputs:
            self._add(gradients, output, tangent)
        self.grad_enabled = False
        for entry in reversed(self._tape):
            incoming = [gradients.pop(output, None) for output in entry.outputs]
            if all(gradient is None for gradient in incoming):
                continue
            self.op, self.region = entry.op, 0
            computed = entry.gradient(incoming, entry.need)
            # all are computed, then each is brought to its input's form, then each is added
            results = [
                (node, self._like(gradient, node))
                for node, gradient, need in zip(entry.inputs, computed, entry.need, strict=True)
                if need and node is not None and gradient is not None
            ]
            for node, gradient in results:
                self._add(gradients, node, gradient)
        return {node: gradient for node, gradient in gradients.items() if node in self._leaves}

    def _add(self, gradients: dict[Node, Node], node: Node, gradient: Node) -> None:
        before = gradients.get(node)
        gradients[node] = gradient if before is None else self.pointwise("aten::add.Tensor", before, gradient)

    def _like(self, gradient: Node, node: Node) -> Node:
        """`validate_outputs`: sums over what the forward broadcast, and the dtype of the input."""
        return self.cast(self.sum_to(gradient, node.shape), node.dtype)

    def sum_to(self, gradient: Node, shape: Shape) -> Node:
        """`at::sum_to`: one sum with all dimensions kept, and a view without the leading ones. `sum` is a call that
        autocast runs in float32 (`fp32_set_opt_dtype`)."""
        if gradient.shape == shape:
            return gradient
        is_wide = not self.autocast or not gradient.dtype.is_floating_point or gradient.dtype is dtypes.float64
        kwargs: dict[str, Argument] = {} if is_wide else {"dtype": dtypes.float32}
        dtype = gradient.dtype if is_wide else dtypes.float32
        if not shape:
            return self.node("aten::sum", (gradient,), form((), dtype), kwargs)
        leading = gradient.ndim - len(shape)
        dims = [*range(leading)]
        dims += [k for k in range(leading, gradient.ndim) if shape[k - leading] == 1 and gradient.shape[k] != 1]
        if dims:
            summed = form(reduced(gradient.shape, dims, True), dtype)
            gradient = self.node("aten::sum.dim_IntList", (gradient, tuple(dims), True), summed, kwargs)
        return self.view(gradient, shape) if leading else gradient


def form(shape: Sequence[int], dtype: DType, strides: Strides | None = None) -> Form:
    """A form, contiguous unless `strides` are given."""
    shape = tuple(shape)
    return form_of(shape, layout.contiguous_strides(shape) if strides is None else strides, dtype)


def sized(shape: Sequence[int], numel: int) -> Shape:
    """Sizes with -1 worked out.

    Raises:
        ValueError: they do not have that many elements.
    """
    elements = layout.numel([size for size in shape if size != -1])
    result = tuple([numel // elements if size == -1 and elements else size for size in shape])
    if layout.numel(result) != numel:
        raise ValueError(f"{numel} elements in the sizes {list(shape)}")
    return result


def reduced(shape: Shape, dims: Iterable[int], keepdim: bool) -> Shape:
    """Sizes after a reduction over dimensions, counted from the front."""
    gone = set(dims)
    if keepdim:
        return tuple([1 if k in gone else size for k, size in enumerate(shape)])
    return tuple([size for k, size in enumerate(shape) if k not in gone])


def promoted(args: Iterable[Any]) -> DType:
    """The dtype of an elementwise result: tensors with dimensions, then those without, then numbers, each of which
    counts only where it is of a higher kind (torch/_prims_common, `elementwise_dtypes`)."""
    best: list[DType | None] = [None, None, None]
    for arg in args:
        if type(arg) is Node:
            level, dtype = (0 if arg.shape else 1), arg.dtype
        elif isinstance(arg, bool):
            level, dtype = 2, dtypes.bool_
        elif isinstance(arg, int):
            level, dtype = 2, dtypes.int64
        elif isinstance(arg, float):
            level, dtype = 2, dtypes.float32
        else:
            continue
        before = best[level]
        best[level] = dtype if before is None else dtypes.promote(before, dtype)
    result: DType | None = None
    for candidate in best:
        if candidate is None:
            continue
        if result is None or _KINDS.index(candidate.kind) > _KINDS.index(result.kind):
            result = candidate
    assert result is not None, "an elementwise call without operands"
    return result
