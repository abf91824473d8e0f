"""Translations of ONNX operators to ATen calls: their table, and the context with arguments, numbers and names.

With the translation of com.microsoft's operators stand the sizes of their results, for which onnx has no inference.
Source: onnxruntime/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from staticmem.ir.graph import NO_KWARGS, Arg, Frame, Op, Ref, Value
from staticmem.ir.onnx_graph import Attr, Net, Node
from staticmem.ops.registry import load_until

if TYPE_CHECKING:
    import numpy as np


_MULTIPLYING = ("MatMul", "Gemm", "Attention")  # by input 1
_REARRANGING = ("Slice", "Concat", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Identity", "Split")


class Context:
    """Translates nodes of one graph. `renamed` has results that are the same tensor as another value."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.renamed: dict[str, str] = {}
        self.transposed: set[str] = set()  # 2-D weights that the file stores as [in, out]
        self.copied_masks = 0  # attention masks whose contiguous() was put back
        self.frames: tuple[Frame, ...] = ()
        # last arguments of convolutions by the identity of attributes, which nodes share; they are kept, so that no
        # other object gets it
        self.geometry: dict[int, tuple[Mapping[str, Attr], str, tuple[Arg, ...]]] = {}
        self._fresh = 0
        self._producer: dict[str, Node] | None = None
        self._as_stored: set[str] | None = None
        self._read: set[str] | None = None

    @property
    def read(self) -> set[str]:
        """Names that a node reads, or that the graph returns."""
        if self._read is None:
            self._read = {*self.net.outputs, *(name for node in self.net.nodes for name in node.inputs if name)}
        return self._read

    def turnable(self, name: str) -> bool:
        """Whether a weight [in, out] can be a Linear's, which is [out, in]: all that read it multiply by it, and it is
        a parameter. By another tensor the code multiplies as it is."""
        if self._as_stored is None:
            self._as_stored = set(self.net.outputs)
            for node in self.net.nodes:
                place = 1 if node.op in _MULTIPLYING and not node.attrs.get("transB", 0) else -1
                self._as_stored.update(other for at, other in enumerate(node.inputs) if at != place)
        return name not in self._as_stored and name not in self.net.fixed

    def arg(self, name: str) -> Arg:
        """A value as an argument: a number where it is a scalar constant, None where it is absent."""
        if not name:
            return None
        if name not in self.net.weights:
            array = self.net.const(name)
            if array is not None and array.size == 1:
                return _number(array)
        return self.ref(name)

    def ref(self, name: str) -> Ref:
        """A tensor, under the name that it has now."""
        return Ref(self.renamed.get(name, name))

    def producer(self, name: str) -> Node | None:
        """The node that makes a value."""
        if self._producer is None:
            self._producer = {out: node for node in self.net.nodes for out in node.outputs}
        return self._producer.get(name)

    def sources(self, name: str) -> tuple[str, ...]:
        """The weights that a tensor is made of, if slicing, joining and reshaping are all that happened to them."""
        weights: dict[str, None] = {}
        pending, visited = [name], 0
        while pending:
            current = pending.pop()
            visited += 1
            if current in self.net.weights:
                weights[current] = None
                continue
            node = self.producer(current)
            if node is None or node.op not in _REARRANGING or visited > 1000:
                return ()
            pending.extend(reversed(node.inputs if node.op == "Concat" else node.inputs[:1]))
        return tuple(weights)

    def optional(self, node: Node, position: int) -> Arg:
        """A tensor input that may be absent."""
        if position >= len(node.inputs) or not node.inputs[position]:
            return None
        return self.ref(node.inputs[position])

    def rank(self, name: str) -> int:
        shape = self.net.shape(name)
        return len(shape) if shape is not None else 0

    def ints(self, node: Node, position: int, attr: str = "") -> tuple[int, ...] | None:
        """Integers from an input, or from an attribute (older operator sets)."""
        if position < len(node.inputs) and node.inputs[position]:
            return self.net.ints(node.inputs[position])
        value = node.attrs.get(attr)
        return value if isinstance(value, tuple) else None

    def number(self, node: Node, position: int) -> float | int | bool | None:
        """A scalar input with known contents."""
        if position >= len(node.inputs) or not node.inputs[position]:
            return None
        array = self.net.const(node.inputs[position])
        return _number(array) if array is not None and array.size == 1 else None

    def fresh(self, node: Node) -> str:
        """A new value name."""
        self._fresh += 1
        return f"{node.outputs[0] if node.outputs else node.name}::{self._fresh}"

    def op(
        self,
        node: Node,
        target: str,
        *args: Arg,
        outputs: Iterable[str] | None = None,
        kwargs: Mapping[str, Arg] | None = None,
    ) -> Op:
        """An op that stands for a node; its results are the node's first one unless named."""
        names = node.outputs[:1] if outputs is None else tuple(outputs)
        return Op(
            node.name or (names[0] if names else node.op),
            target,
            args,
            kwargs or NO_KWARGS,
            names,
            self.frames,
            node.op,
        )

    def alias(self, output: str, name: str) -> None:
        """Records that a result is the same tensor as another value."""
        self.renamed[output] = self.renamed.get(name, name)

    def define(self, name: str, like: str, shape: tuple[int, ...] | None) -> None:
        """Notes the sizes of a new value with the dtype of another."""
        value = self.net.values.get(like)
        if value is not None:
            self.net.values[name] = Value(name, value.dtype, shape)


class Calls:
    """The ops of one node that is several calls, with the sizes of the values between them. These have the dtype of the
    value `like`, the node's first input unless named."""

    def __init__(self, ctx: Context, node: Node, like: str = "") -> None:
        self.ctx, self.node, self.like = ctx, node, like or node.inputs[0]
        self.ops: list[Op] = []

    def call(
        self,
        target: str,
        *args: Arg,
        shape: tuple[int, ...] | None,
        out: str = "",
        kwargs: Mapping[str, Arg] | None = None,
    ) -> Ref:
        name = out or self.ctx.fresh(self.node)
        self.ctx.define(name, self.like, shape)
        self.ops.append(self.ctx.op(self.node, f"aten::{target}", *args, outputs=(name,), kwargs=kwargs))
        return Ref(name)


Translation = Callable[[Context, Node], "list[Op] | None"]
TRANSLATIONS: dict[str, Translation] = {}
Shape = tuple[int, ...]
# Each result's sizes and the position of the input whose dtype it has, or None where they are not known
Results = Sequence["tuple[Shape, int] | None"]
# Called with the node and the sizes of its inputs, None where one is absent or unknown; that of the first is known
Sizes = Callable[..., Results]
SIZES: dict[str, Sizes] = {}
# operators of other domains that are known; an equal name elsewhere may mean something else
_DOMAINS = ("", "com.microsoft")


def translation(*operators: str, sizes: Sizes | None = None) -> Callable[[Translation], Translation]:
    """Registers the translation of ONNX operators. It gives None for a node that no ATen call stands for. `sizes`: of
    the results, for operators of com.microsoft."""
    if sizes is not None:
        declare_sizes(" ".join(operators), sizes)

    def register(function: Translation) -> Translation:
        for operator in operators:
            if operator in TRANSLATIONS:
                raise ValueError(f"two translations of {operator}")
            TRANSLATIONS[operator] = function
        return function

    return register


def declare_sizes(operators: str, sizes: Sizes) -> None:
    """Registers sizes of results of com.microsoft's operators; those without a translation keep their names."""
    SIZES.update(dict.fromkeys(operators.split(), sizes))


def like_first(_: Node, first: Shape, *__: Shape | None) -> Results:
    """The first result has the sizes and the dtype of the first input."""
    return [(first, 0)]


def product(a: Shape, b: Shape) -> Shape:
    """Sizes of the product of matrices, of which the axes in front broadcast."""
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a[:-2], (1,) * (rank - len(b)) + b[:-2], strict=True)
    return (*(y if x == 1 else x for x, y in pairs), a[-2], b[-1])


def windows(node: Node, sizes: Shape, kernel: Shape) -> Shape:
    """Sizes after a window has gone over spatial axes: those of Conv and of the pools (onnx/docs/Operators.md)."""
    rank = len(sizes)
    strides, pads = integers(node, "strides", (1,) * rank), integers(node, "pads", (0,) * 2 * rank)
    dilations = integers(node, "dilations", (1,) * rank)
    auto = text(node, "auto_pad", "NOTSET")
    counts = []
    for i, size in enumerate(sizes):
        reach = (kernel[i] - 1) * dilations[i] + 1
        same, padded = auto.startswith("SAME"), auto == "NOTSET"
        covered = size - 1 if same else size + (pads[i] + pads[i + rank] if padded else 0) - reach
        upwards = integer(node, "ceil_mode", 0) and not same
        counts.append((-(-covered // strides[i]) if upwards else covered // strides[i]) + 1)
    return tuple(counts)


def sized_results(node: Node, values: Mapping[str, Value]) -> list[Value]:
    """The results of one of com.microsoft's operators whose sizes follow from those of its inputs."""
    if not load_until(lambda: node.op in SIZES or node.op in TRANSLATIONS) or node.op not in SIZES:
        return []
    inputs = [value.shape if (value := values.get(name)) is not None else None for name in node.inputs]
    if not inputs or inputs[0] is None:
        return []
    try:
        results = SIZES[node.op](node, *inputs)
        return [
            Value(name, values[node.inputs[result[1]]].dtype, result[0])
            for name, result in zip(node.outputs, results, strict=False)
            if name and result is not None
        ]
    except (IndexError, KeyError, ValueError, TypeError, ZeroDivisionError):
        return []  # a node that breaks its operator's definition


def calls_of(ctx: Context, node: Node) -> tuple[list[Op], bool]:
    """The ops of a node, and whether it has a meaning in ATen."""
    if node.domain in _DOMAINS and load_until(lambda: node.op in TRANSLATIONS):
        try:
            ops = TRANSLATIONS[node.op](ctx, node)
        except (IndexError, KeyError, ValueError, TypeError, ZeroDivisionError):
            ops = None  # a node that breaks its operator's definition
        if ops is not None and ((len(node.outputs) < 2 and ops) or _has_results(ctx, node, ops)):
            return ops, True
    return [_fallback(ctx, node)], False


def _has_results(ctx: Context, node: Node, ops: list[Op]) -> bool:
    """Whether the ops give all results of a node that something reads; PyTorch's calls lack some."""
    results = [op.outputs for op in ops]
    missing = set(node.outputs).difference(ctx.renamed, ctx.net.consts, *results)
    return missing.isdisjoint(ctx.read)


def _fallback(ctx: Context, node: Node) -> Op:
    """The node under its own name: the engine assumes that its results are new and its inputs are kept."""
    args = tuple(ctx.arg(name) for name in node.inputs)
    outputs = tuple(name for name in node.outputs if name)
    return ctx.op(node, f"{node.domain or 'onnx'}::{node.op}", *args, outputs=outputs)


def one_input(operators: Mapping[str, str], sizes: Sizes | None = None) -> None:
    """Registers operators that are a call with their first input alone: by name the call without its namespace."""

    def define(target: str) -> Translation:
        return lambda ctx, node: [ctx.op(node, target, ctx.ref(node.inputs[0]))]

    for operator, name in operators.items():
        translation(operator, sizes=sizes)(define(f"aten::{name}"))


def _number(array: np.ndarray) -> int | float | bool:
    value = array.reshape(-1)[0]
    if array.dtype.kind == "b":
        return bool(value)
    return int(value) if array.dtype.kind in "iu" else float(value)


def integer(node: Node, name: str, default: int) -> int:
    value = node.attrs.get(name, default)
    return value if isinstance(value, int) else default


def real(node: Node, name: str, default: float) -> float:
    value = node.attrs.get(name, default)
    return float(value) if isinstance(value, (int, float)) else default


def text(node: Node, name: str, default: str) -> str:
    value = node.attrs.get(name, default)
    return value if isinstance(value, str) else default


def integers(node: Node, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    value = node.attrs.get(name)
    return tuple(int(v) for v in value) if isinstance(value, tuple) else default
