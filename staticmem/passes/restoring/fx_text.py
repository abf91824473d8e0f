"""The texts of FX nodes that the dynamo exporter stores with each ONNX node: a parser, and the sizes that they compute.

    %relu : [num_users=1] = call_function[target=torch.ops.aten.relu.default](args = (%x,), kwargs = {})

The format is `torch.fx.Node.format_node` (torch/fx/node.py, `_format_arg`): nodes have a percent sign, lists,
tuples and dicts are bracketed, and everything else is `str(value)` without quotes. Nothing of a text is evaluated but
arithmetic on sizes, which torch.export records as ops: a bound graph has integer sizes only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Op, Ref, Value
from staticmem.ir.onnx_graph import Net, Node
from staticmem.ir.record import record
from staticmem.ops import kinds_of, parameters
from staticmem.ops.size_arithmetic import NUMBERS

if TYPE_CHECKING:
    import numpy as np


MAX_TEXT = 1 << 16
SHORT = 1 << 10  # characters of a text whose node is remembered; most have two hundred
MAX_DEPTH = 16

_HEAD = re.compile(r"%(?P<name>[A-Za-z_]\w*) : (?:\[[^\]]*\] )?= (?P<kind>\w+)\[target=(?P<target>[^\]]+)\]\(args = ")
_ATOM = re.compile(r"[^,()\[\]{}]+")
_KEY = re.compile(r"\w+")
_INT = re.compile(r"-?\d{1,19}\Z")
_FLOAT = re.compile(r"-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|inf|nan)\Z")
_WORDS: dict[str, Arg] = {"None": None, "True": True, "False": False}


class FxTextError(ValueError):
    """The text is not a node in FX's format."""


@record(frozen=True, slots=True)
class FxNode:
    """A parsed node. `target` is `aten::conv2d` (overload `default` left out), `prims::...` or `operator::mul`."""

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]


def parse(text: str) -> FxNode:
    """The node of a text.

    Raises:
        FxTextError: the text has another form, or is too long or too deeply nested.
    """
    return _remembered(text) if len(text) <= SHORT else _parsed(text)


@lru_cache(2048)
def _remembered(text: str) -> FxNode:
    """Texts are read again for every binding of a model."""
    return _parsed(text)


def _parsed(text: str) -> FxNode:
    if len(text) > MAX_TEXT:
        raise FxTextError("too long")
    head = _HEAD.match(text)
    if head is None:
        raise FxTextError("no node")
    reader = _Reader(text, head.end())
    args = reader.value(0)
    reader.expect(", kwargs = ")
    kwargs = reader.value(0)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise FxTextError("no arguments")
    target = target_of(head["target"])
    return FxNode(head["name"], target, _join_equation(target, args), kwargs)


def target_of(text: str) -> str:
    """`torch.ops.aten.add.Tensor` as `aten::add.Tensor`; `torch.ops.aten.relu.default` as `aten::relu`."""
    text = text.strip().removeprefix("torch.ops.").removeprefix("_operator.").removeprefix("<built-in function ")
    if text.startswith("operator."):
        return "operator::" + text[9:]
    namespace, dot, rest = text.partition(".")
    if not dot:
        return "operator::" + namespace.rstrip(">")
    return f"{namespace}::{rest.removesuffix('.default')}"


def _join_equation(target: str, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
    """The equation of einsum has commas and no quotes: it comes out as several words."""
    if target != "aten::einsum":
        return args
    parts = [a for a in args if isinstance(a, str)]
    return (",".join(parts), *(a for a in args if not isinstance(a, str)))


class _Reader:
    def __init__(self, text: str, position: int) -> None:
        self.text, self.position = text, position

    def expect(self, word: str) -> None:
        if not self.text.startswith(word, self.position):
            raise FxTextError(f"{word!r} expected at {self.position}")
        self.position += len(word)

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH or self.position >= len(self.text):
            raise FxTextError("too deep or cut")
        start = self.text[self.position]
        if start == "(":
            return self._items(")", depth)
        if start == "[":
            return self._items("]", depth)
        if start == "{":
            return self._dict(depth)
        match = _ATOM.match(self.text, self.position)
        if match is None:  # an empty string prints as nothing
            return ""
        self.position = end = match.end()
        word = match[0]
        if self.text[end : end + 1] == "(":  # slice(0, 1, None), device(type='cpu')
            return (word, *self._items(")", depth))
        return _atom(word.strip())

    def _items(self, close: str, depth: int) -> tuple[Any, ...]:
        self.position += 1
        items: list[Any] = []
        text = self.text
        while text[self.position : self.position + 1] != close:
            items.append(self.value(depth + 1))
            after = text[self.position : self.position + 1]
            if after == ",":
                self.position += 2 if text[self.position + 1 : self.position + 2] == " " else 1
                while text[self.position : self.position + 1] == " ":
                    self.position += 1
            elif after != close:
                raise FxTextError(f"{close!r} expected at {self.position}")
        self.position += 1
        return tuple(items)

    def _dict(self, depth: int) -> dict[str, Any]:
        self.position += 1
        items: dict[str, Any] = {}
        while not self.text.startswith("}", self.position):
            match = _KEY.match(self.text, self.position)
            if match is None:
                raise FxTextError(f"key expected at {self.position}")
            self.position = match.end()
            self.expect(": ")
            items[match.group()] = self.value(depth + 1)
            self._comma("}")
        self.position += 1
        return items

    def _comma(self, close: str) -> None:
        if self.text.startswith(",", self.position):
            self.position += 1
            while self.text.startswith(" ", self.position):
                self.position += 1
        elif not self.text.startswith(close, self.position):
            raise FxTextError(f"{close!r} expected at {self.position}")


@lru_cache(4096)
def _atom(word: str) -> Arg:
    if word.startswith("%"):
        return Ref(word[1:])
    if word in _WORDS:
        return _WORDS[word]
    if _INT.match(word):
        return int(word)
    if _FLOAT.match(word):
        return float(word)
    if word.startswith("torch."):
        dtype = dtypes.ALL.get(word[6:])
        return dtype if dtype is not None else word
    return word


LIMIT = 2**62
_ATTENTION = "aten::scaled_dot_product_attention"


def is_symbolic(target: str) -> bool:
    """Whether an FX target computes a number rather than a tensor."""
    if target in ("aten::sym_size.int", "aten::sym_numel", "aten::sym_stride.int"):
        return True
    namespace, _, name = target.partition("::")
    name = name.rpartition(".")[2]
    return namespace in ("operator", "math", "torch", "builtins") and name in NUMBERS


def evaluate(target: str, args: Sequence[Arg], net: Net) -> int | float | bool | None:
    """The number, or None where a size is not known."""
    name = target.partition("::")[2].rpartition(".")[2] if not target.startswith("aten") else target
    if target.startswith("aten"):
        return _size(target, args, net)
    numbers = [a for a in args if isinstance(a, (int, float))]
    if len(numbers) != len(args) or any(abs(n) > LIMIT for n in numbers):
        return None
    if name == "pow" and any(abs(n) > 64 for n in numbers[1:]):
        return None
    try:
        number = NUMBERS[name](*numbers)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None
    return number if isinstance(number, (int, float)) else None


def _size(target: str, args: Sequence[Arg], net: Net) -> int | None:
    if not args or not isinstance(args[0], Ref):
        return None
    shape = net.shape(args[0].name)
    if shape is None:
        return None
    if target == "aten::sym_numel":
        return math.prod(shape)
    if len(args) < 2 or not isinstance(args[1], int) or not -len(shape) <= args[1] < len(shape):
        return None
    if target == "aten::sym_stride.int":
        return math.prod(shape[args[1] % len(shape) + 1 :])
    return shape[args[1]]


def base_of(name: str) -> str:
    """The call that a name of an FX graph was made of: `layer_norm` of `layer_norm_3` (torch/fx/graph.py)."""
    stem, _, number = name.rpartition("_")
    return stem if stem and number.isdigit() else name


def number_of(name: str) -> int:
    """The number that a name of an FX graph ends with, -1 without one."""
    digits = name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1


def is_folded_norm(fx: FxNode, node: Node) -> bool:
    """Whether a convolution or a linear layer stands for itself and a batch norm."""
    norm = "batch_norm" in kinds_of(fx.target.split(".", 1)[0])
    return norm and node.op in ("Conv", "ConvTranspose", "Gemm") and len(node.inputs) > 1


def joins_axes(args: Sequence[Arg], node: Node, net: Net) -> bool:
    """Whether an optimiser made one node of several `unsqueeze`: its text is that of the last."""
    given = net.shape(args[0].name) if args and isinstance(args[0], Ref) else None
    result = net.shape(node.outputs[0]) if node.outputs else None
    return given is not None and result is not None and abs(len(result) - len(given)) > 1


def in_order(fx: FxNode, lost: Sequence[str], nodes: Sequence[Node]) -> Sequence[tuple[str, str]]:
    """Several arguments of a call whose makers an optimiser merged with equal ones, each with the tensor that the one
    node of the call reads in its place: `dot(%clone_2, %mv_5)`."""
    args = [arg.name for arg in fx.args if isinstance(arg, Ref)]
    if len(lost) < 2 or len(nodes) > 1 or fx.kwargs or not len(args) == len(fx.args) == len(nodes[0].inputs):
        return ()
    return [pair for pair in zip(args, nodes[0].inputs, strict=True) if pair[0] in lost]


def as_called(op: Op, nodes: Sequence[Node], net: Net) -> Op:
    """The op as its code has it: transposes that were merged are one, and bounds of `clamp` are numbers, of which the
    type promotion for ONNX makes tensors."""
    if op.target == "aten::clamp.Tensor":
        bounds = tuple(_read_number(arg, net) for arg in op.args[1:])
        if not any(isinstance(bound, Ref) for bound in bounds):
            return op.changed(target="aten::clamp", args=(op.args[0], *bounds))
    return _permuted_at_once(op, nodes)


def _read_number(arg: Arg, net: Net) -> Arg:
    """A constant without dimensions as a number."""
    array = net.consts.get(arg.name) if isinstance(arg, Ref) else None
    return array.item() if array is not None and array.ndim == 0 and array.dtype.kind in "if" else arg


def _permuted_at_once(op: Op, nodes: Sequence[Node]) -> Op:
    """Transposes one after the other, of which an optimiser made one node: its text is that of the last.

    Source: onnxscript/rewriter/rules/common/_basic_rules.py, `TransposeTranspose`.
    """
    if "permuted" not in kinds_of(op.base) or len(nodes) != 1 or nodes[0].op != "Transpose" or not op.args:
        return op
    axes, rest = nodes[0].attrs.get("perm"), op.args[1:]
    if not isinstance(axes, (list, tuple)) or not axes:
        return op
    own = [*range(len(axes))]
    if op.base == "aten::permute":
        dims = rest[0] if rest and isinstance(rest[0], tuple) else ()
        own = [dim % len(axes) for dim in dims if isinstance(dim, int)]
    else:
        i, j = rest if len(rest) == 2 else (0, -1)
        if (
            isinstance(i, int)
            and isinstance(j, int)
            and i in range(-len(own), len(own))
            and j in range(-len(own), len(own))
        ):
            own[i], own[j] = own[j], own[i]
    return op if own == [*axes] else op.changed(target="aten::permute", args=(op.args[0], tuple(axes)))


def as_written(op: Op, text: str) -> Op:
    """Attention that was found by its pattern, with the mask, dropout and causality that its text says."""
    if op.target != _ATTENTION or not text:
        return op
    try:
        fx = parse(text)
    except FxTextError:
        return op
    if fx.target != _ATTENTION:
        return op
    given = fx.args[3:6]
    defaults: tuple[Arg, ...] = (None, 0.0, False)
    mask = op.args[3] if given and isinstance(given[0], Ref) else None
    return replace(op, args=(*op.args[:3], mask, *given[1:], *defaults[max(len(given), 1) :]), kwargs=fx.kwargs)


def before(ops: Sequence[Op], name: str) -> int:
    """Where the last ops begin that do nothing but make this value."""
    needed, index = {name}, len(ops)
    while index and not needed.isdisjoint(ops[index - 1].outputs):
        index -= 1
        needed.update(ops[index].refs())
    return index


def list_length(op: Op, net: Net) -> int:
    """How many tensors a split or unbind gives."""
    args = dict(enumerate(op.args))
    shape = net.shape(args[0].name) if isinstance(args[0], Ref) else None
    axis = args.get(1, 0) if op.base == "aten::unbind" else op.kwargs.get("dim", args.get(2, 0))
    sizes = args.get(1)
    if isinstance(sizes, tuple):
        return len(sizes) + (op.base == "aten::tensor_split")
    if shape is None or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        return 0
    if op.base == "aten::unbind":
        return min(shape[axis], 1 << 16)
    if not isinstance(sizes, int) or sizes < 1:
        return 0
    count = -(-shape[axis] // sizes)
    return min(count if op.base in ("aten::split", "aten::unsafe_split") else sizes, 1 << 16)


def numbers(consts: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Constants that were Python numbers: type promotion for ONNX wraps them (`scalar_tensor_default`)."""
    named = ((name, array) for name, array in consts.items() if name.startswith("scalar_tensor"))
    return {name: array.item() for name, array in named if array.ndim == 0 and array.dtype.kind in "if"}


def with_numbers(op: Op, numbers: Mapping[str, float]) -> Op:
    """The op with the numbers that its code has: `2 * x`, `x > 0`, `1 - x`."""
    if len(op.args) != 2 or kinds_of(op.base).isdisjoint(("arithmetic", "comparison")):
        return op
    left, right = op.args
    if isinstance(right, Ref) and right.name in numbers and isinstance(left, Ref):
        target = op.target.removesuffix(".Tensor") + ".Scalar" if "comparison" in kinds_of(op.base) else op.target
        return op.changed(target=target, args=(left, numbers[right.name]))
    if (
        isinstance(left, Ref)
        and left.name in numbers
        and isinstance(right, Ref)
        and op.base in ("aten::sub", "aten::mul")
    ):
        target = "aten::rsub.Scalar" if op.base == "aten::sub" else op.target
        return op.changed(target=target, args=(right, numbers[left.name]))
    return op


PARAMETRIZED = (".parametrizations.weight.original1", ".parametrizations.weight.original0")


def computed_weights(names: Set[str], left: Set[str]) -> dict[str, tuple[str, str]]:
    """Modules with the names of weight_norm's parameters, direction and length, of which the direction is not `left` in
    the file: an optimiser has computed what small parameters give (torch/nn/utils/weight_norm.py, parametrize.py)."""
    gone: dict[str, tuple[str, str]] = {}
    for direction, length in ((".weight_v", ".weight_g"), PARAMETRIZED):
        for name in names - left:
            path = name.removesuffix(direction)
            if path != name and path + length in names:
                gone[path] = (name, path + length)
    return gone


def padding_within(args: Sequence[Arg], node: Node, net: Net) -> tuple[int, ...] | None:
    """What a Conv node pads more than the convolution of its text, as `pad` takes it: the last axis first.

    Source: onnxscript/rewriter/rules/common/_fuse_pad_into_conv.py.
    """
    shape, pads = net.shape(node.inputs[0]), node.attrs.get("pads")
    axes = len(shape) - 2 if shape is not None else 0
    if not isinstance(pads, (list, tuple)) or not axes or len(pads) != 2 * axes:
        return None
    own = args[4] if len(args) > 4 and isinstance(args[4], tuple) else ()
    sides: list[int] = []
    for axis in reversed(range(axes)):
        fixed = own[min(axis, len(own) - 1)] if own else 0
        for pad in (pads[axis], pads[axis + axes]):
            if not isinstance(pad, int) or not isinstance(fixed, int):
                return None
            sides.append(pad - fixed)
    return tuple(sides)


def in_another_form(fx: FxNode, lost: Sequence[str], nodes: Sequence[Node], net: Net) -> Sequence[Value]:
    """The tensors of a module that a call reads, where an optimiser stored what the nodes of the call read instead.

    An index is stored with those of other axes, stacked along a last axis (`aten_index` of onnxscript's torchlib makes
    a GatherND), and the weight of `bilinear` as (input 1, output, input 2) (`aten_bilinear`).
    """
    if fx.target == "aten::index.Tensor":
        stored = next((net.values.get(n.inputs[1]) for n in nodes if n.op == "GatherND" and len(n.inputs) > 1), None)
        shape = stored.shape if stored is not None else None
        return [Value("", stored.dtype, shape[:-1])] * len(lost) if stored and shape and shape[-1] == len(lost) else ()
    if fx.target == "aten::bilinear" and len(lost) == 1:
        read = (net.values.get(name) for node in nodes if node.op in ("Reshape", "Transpose") for name in node.inputs)
        stored = next((v for v in read if v is not None and v.name in net.weights and len(v.shape or ()) == 3), None)
        if stored is not None and stored.shape is not None:
            first, results, second = stored.shape
            return [Value("", stored.dtype, (results, first, second))]
    return ()


def resized(op: Op, net: Net) -> Op:
    """An op whose text has the sizes of the export, at the sizes that inference found now."""
    shape = net.shape(op.outputs[0]) if op.outputs else None
    if shape is None:
        return op
    args, names = list(op.args), parameters(op.base)
    position = names.index("size") if "size" in names else len(args)
    if position < len(args) and isinstance(args[position], tuple):
        args[position] = shape
    elif op.base.startswith("aten::upsample") and len(args) > 1 and isinstance(args[1], tuple):
        args[1] = shape[2:]
    return replace(op, args=tuple(args))
