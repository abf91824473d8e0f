"""Which ops ran in place: exporting to ONNX makes every op out of place, and memory depends on the difference.

It is a guess from structure, made for networks with convolutions only, because `nn.ReLU(inplace=True)` is the habit.

An ONNX file of the dynamo exporter keeps the source lines of every op, but not whether it wrote to its input. A line of
the model says so itself, unless it leaves that to a module (`self.relu(x)`, whose `inplace` no line shows).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

from staticmem.ir.graph import Graph, Note, Op, Ref, count_bases
from staticmem.ir.stacks import LIBRARIES
from staticmem.ops.activations import MISH, SWISH
from staticmem.ops.registry import SIGNS, kinds_of
from staticmem.passes.variables.line_texts import calls_hidden_code, without_indices
from staticmem.passes.variables.source_lines import names_of_children

_TRUE = re.compile(r"inplace\s*=\s*True|,\s*True\s*\)|\(\s*True\s*\)")


def written(op: Op) -> bool | None:
    """Whether the line says that the op ran in place; None where it leaves that open."""
    if not op.stack:
        return None
    said = _line_says(op.base, op.stack[-1].text)
    if said is None and len(op.stack) > 1 and "self.inplace" in op.stack[-1].text:
        if "activation" not in kinds_of(op.base):
            return None
        # a module that the caller's line makes: `nn.ReLU(True)(x)`
        module = op.base.removeprefix("aten::").replace("_", "")
        calls = re.findall(rf"(?i)\b{module}\(([^()]*)\)\(", op.stack[-2].text)
        return _TRUE.search(f"({calls[0]})") is not None if len(calls) == 1 else None
    return said


@lru_cache(4096)
def _line_says(base: str, text: str) -> bool | None:
    name = base.removeprefix("aten::")
    if re.search(rf"\.{name}_\(", text) or re.search(rf"\b(?:torch|F)\.{name}_\(", text):
        return True
    if name == "scatter" and "gumbel_softmax(" in text:
        return True  # torch/nn/functional.py, `gumbel_softmax`: zeros_like(logits).scatter_(dim, index, 1.0)
    sign = next((sign for sign, called in SIGNS.items() if called == name), None)
    if sign is not None:
        sign = re.escape(sign)
        augmented = re.match(rf"\s*[A-Za-z_][\w.]*(?:\[[^]]*\])?\s*{sign}=(?!=)(.*)", text)
        if augmented is not None:
            # the statement's own op, unless its right side has one of the kind too
            right = without_indices(augmented[1])
            return None if re.search(rf"[\w)\]]\s*{sign}\s*[\w(]", right) else True
        return False if re.search(rf"[\w)\]]\s*{sign}\s*[\w(]", text) else None
    calls = re.findall(rf"\b{name}\(", text)
    if not calls or "inplace=self." in text or "self.inplace" in text:
        return None
    if _TRUE.search(text) is None or "activation" not in kinds_of(base):
        return False
    return True if len(calls) == 1 else None


def may_be_in_place(base: str) -> bool:
    """Whether code may write an op in place: a method with an underscore, an augmented assignment, or `inplace=True`.
    Views and dropout have such forms too, and exports have neither."""
    kinds = kinds_of(base)
    return "has_in_place" in kinds and kinds.isdisjoint(("dropout", "view"))


def writes_into_views(graph: Graph, ops: Sequence[Op]) -> bool:
    """Whether the first operand of an op is a view of what a linear layer computed, as of more than two dimensions: in
    place, autograd copies gradients for it (torch/csrc/autograd/functions/tensor.cpp, `CopySlices`)."""
    first = {op.args[0].name for op in ops if op.args and isinstance(op.args[0], Ref)}
    layers = (op for op in graph.ops if op.base == "aten::linear" and not first.isdisjoint(op.outputs))
    return any(_dimensions(graph, op.outputs[0]) != 2 for op in layers)


def _dimensions(graph: Graph, name: str) -> int:
    """0 where they are not known."""
    value = graph.values.get(name)
    return len(value.shape) if value is not None and value.shape is not None else 0


class _Facts:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.ops, self.parameters = graph, graph.ops, graph.parameters
        self.again = graph.read_again
        self.producer = {name: op for op in graph.ops for name in op.outputs}
        bases = count_bases(graph.ops)
        self.convolutional = bases["aten::conv2d"] + bases["aten::conv1d"] + bases["aten::conv3d"] > 1
        # in place is a habit of code for images: that for signals and points leaves it to the default
        self.of_images = bases["aten::conv2d"] + bases["aten::conv3d"] > 0
        self.normalised = bases["aten::batch_norm"] > 0
        # results that are no intermediate tensors of the graph's own
        kept = {p.value.name for p in (*graph.parameters, *graph.buffers)}
        kept.update((v.name for v in graph.inputs), graph.outputs)
        self.kept = kept & self.producer.keys()

    @cached_property
    def of_library(self) -> bool:
        """Whether some module is of a library, by its class or by the names of its parts."""
        return any(frame.cls.startswith(LIBRARIES) for op in self.ops for frame in op.modules)

    @cached_property
    def layer_scaled(self) -> bool:
        """Whether a parameter is a scale of a layer."""
        return any("layer_scale" in p.value.name for p in self.parameters)

    def fills(self, op: Op, maker: Op) -> bool:
        """Whether an op fills a new tensor, which nobody has another use for, in a function of which no trace shows the
        lines."""
        if "scatter" not in kinds_of(op.base) or "factory" not in kinds_of(maker.base) or not op.stack:
            return False
        return calls_hidden_code(op.stack[-1].text, self.children)

    def grows(self, op: Op, name: str) -> bool:
        """Whether a result is larger than the operand of this name, which then has no room for it (`bias + x`)."""
        operand, result = self.graph.values.get(name), self.graph.values.get(op.outputs[0])
        return operand is not None and result is not None and operand.shape != result.shape

    @cached_property
    def children(self) -> frozenset[str]:
        return names_of_children(self.graph)

    @cached_property
    def last_reader(self) -> Mapping[str, Op]:
        """The op that reads a value last."""
        return {name: op for op in self.ops for name in op.refs()}

    @cached_property
    def first_reader(self) -> Mapping[str, Op]:
        """Of those that take a value as an argument of its own, not in a list."""
        first: dict[str, Op] = {}
        for op in self.ops:
            for arg in op.args:
                if isinstance(arg, Ref):
                    first.setdefault(arg.name, op)
        return first


def run_in_place(graph: Graph, policy: str) -> tuple[Graph, Sequence[Note]]:
    """The graph with in-place targets (`aten::relu_`) where the policy says so. Unchanged where the file knows.

    "none" leaves everything out of place, "all" takes every activation whose input has no other reader. "least" and
    "most" are "auto" where a source line tells, and none and all of the others: the ends of what is left open.
    """
    if graph.inplace_known or policy == "none":
        return graph, ()
    candidates = {op.target for op in graph.ops}
    candidates = {target for target in candidates if may_be_in_place(target.split(".", 1)[0])}
    if not candidates:
        return graph, ()
    facts = _Facts(graph)
    ops, count = [], 0
    for op in graph.ops:
        if op.target in candidates and _may(op, graph, facts, policy):
            op = _write_in_place(op)
            count += 1
        ops.append(op)
    if not count:
        return graph, ()
    text = (
        "activations and residual adds are assumed in place (ONNX does not record it); otherwise the peak may be higher"
    )
    return graph.with_targets(tuple(ops)), [Note("assumption", "SM254", text, count)]


_GATES = {SWISH: ("sigmoid",), MISH: ("softplus", "tanh")}  # of such products: what their second factor is made by


def take_apart(graph: Graph, policy: str) -> tuple[Graph, Sequence[Note]]:
    """The graph with products with `sigmoid` in the place of `silu`, and with `tanh(softplus(x))` in that of `mish`,
    where both have the same nodes, under "least".

    The products save more. The other policies take them for `silu` and `mish`, which modules and functions of PyTorch
    run.
    """
    ops: list[Op] = []
    count = 0
    for op in graph.ops:
        if not _may_be_product(op):
            ops.append(op)
            continue
        count += 1
        if policy == "least":
            gate = op.args
            for name in _GATES[op.source]:
                result = f"{op.outputs[0]}::{name}"
                ops.append(Op(result, f"aten::{name}", gate, {}, (result,), op.modules))
                gate = (Ref(result),)
            op = op.changed(target="aten::mul.Tensor", args=(op.args[0], *gate))
        ops.append(op)
    if not count:
        return graph, ()
    text = (
        "x * sigmoid(x) is taken for silu, and x * tanh(softplus(x)) for mish, which have the same nodes: where the "
        "code writes it, the peak is higher"
    )
    note = Note("assumption", "SM264", text, count)
    return (replace(graph, ops=tuple(ops)) if policy == "least" else graph), [note]


def _may_be_product(op: Op) -> bool:
    if op.source not in _GATES or op.base.rstrip("_") not in ("aten::silu", "aten::mish"):
        return False
    return not (op.modules[-1].cls if op.modules else "").startswith("torch.nn.")


def ops_left_open(graph: Graph) -> list[int] | None:
    """Where ops are that "least" and "most" may decide differently: those, and some that a line decides.

    None where they may save other tensors for backward."""
    candidates = {op.target for op in graph.ops}
    bases = {target: target.split(".", 1)[0] for target in candidates}
    candidates = {
        target
        for target, base in bases.items()
        if base in ("aten::add", "aten::add_") or not kinds_of(base).isdisjoint(("activation", "scatter"))
    }
    if not candidates:
        return []
    if any(op.source in _GATES and _may_be_product(op) for op in graph.ops):
        return None
    return [index for index, op in enumerate(graph.ops) if op.target in candidates]


def _may(op: Op, graph: Graph, facts: _Facts, policy: str) -> bool:
    """Whether an op is taken to run in place: where its line says so, the code that ran allowed it."""
    if not op.grad or not op.amp:
        return False  # of a region whose generated code says it (`module_calls`)
    if op.stack and op.args and isinstance(op.args[0], Ref) and written(op):
        name = op.args[0].name
        maker = facts.producer.get(name)
        return maker is not None and name not in facts.kept and facts.last_reader[name] is op and not _is_view(maker)
    maker = _overwritten(op, facts)
    return maker is not None and _should(op, maker, graph, facts, policy)


def _overwritten(op: Op, facts: _Facts) -> Op | None:
    """What made the first operand, where autograd allows that it is written over: an intermediate tensor that nobody
    else reads."""
    first = op.args[0] if op.args else None
    if not isinstance(first, Ref):
        return None
    name = first.name
    maker = facts.producer.get(name)
    if maker is None or name in facts.again or name in facts.kept:
        return None
    if op.base == "aten::add":
        # not saved for the backward of what made it
        fresh = maker.base in _FRESH or not kinds_of(maker.base).isdisjoint(("convolution", "norm"))
        allowed = fresh and len(op.args) > 1 and isinstance(op.args[1], Ref) and not facts.grows(op, name)
    else:
        allowed = not _is_view(maker)
    return maker if allowed else None


_FRESH = ("aten::mul", "aten::linear")


def _is_view(maker: Op) -> bool:
    return maker.base == "aten::select" or not kinds_of(maker.base).isdisjoint(("expanded", "split"))


def _should(op: Op, maker: Op, graph: Graph, facts: _Facts, policy: str) -> bool:
    said = written(op) if op.stack else None
    if said is not None:
        return said
    if op.base != "aten::add" and "activation" not in kinds_of(op.base):  # a line alone can say it
        return policy != "least" and facts.fills(op, maker)
    if policy == "all":
        return True
    return _guess(op, maker, graph, facts) if policy == "auto" else policy == "most"


# what an activation in place follows
_ACTIVATED = frozenset(
    ("aten::batch_norm", "aten::conv2d", "aten::linear", "aten::add", "aten::group_norm", "aten::instance_norm")
)


def _guess(op: Op, maker: Op, graph: Graph, facts: _Facts) -> bool:
    """In a network of convolutions, after a convolution, a norm, a linear layer or a residual add."""
    if not facts.convolutional or not facts.of_images:
        return False
    leaf = op.modules[-1].path if op.modules else ""
    if op.base == "aten::add":
        return _guess_add(op, maker, leaf, graph, facts)
    if maker.base not in _ACTIVATED:
        return False
    if maker.base == "aten::conv2d" and op.base == "aten::relu" and _squeezed(maker, facts):
        return False
    if _is_leaky_by_default(op, maker):
        return False
    if op.base in _RARELY_IN_PLACE and (_is_own(op) or not facts.of_library):
        return False
    if maker.base == "aten::linear" and _dimensions(graph, maker.outputs[0]) > 2:
        return False  # layers on tokens are of code that has no in-place activations by habit
    if "classifier" not in leaf:
        return True
    return {"classifier", "aux_classifier"}.isdisjoint(leaf.split(".")) or not _has_backbone(graph)


_SLOPE = 0.01  # torch/nn/modules/activation.py, LeakyReLU


def _is_leaky_by_default(op: Op, maker: Op) -> bool:
    """Whether a leaky ReLU has the slope that `nn.LeakyReLU()` has without arguments, `inplace` among them. Code for
    volumes, which has instance norms, names both (nnU-Net: `negative_slope=0.01, inplace=True`)."""
    if op.base != "aten::leaky_relu" or maker.base == "aten::instance_norm":
        return False
    slope = op.args[1] if len(op.args) > 1 else op.kwargs.get("negative_slope", _SLOPE)
    return isinstance(slope, float) and abs(slope - _SLOPE) < _SLOPE / 100


# torchvision and timm ask for these in place (`inplace=True`); code of one's own has the default, which is out of place
_RARELY_IN_PLACE = frozenset(("aten::silu", "aten::mish", "aten::hardswish", "aten::selu", "aten::celu"))


def _is_own(op: Op) -> bool:
    """Whether the classes around an op are known and of no library."""
    classes = [frame.cls for frame in op.modules if frame.cls and not frame.cls.startswith("torch.nn.")]
    return bool(classes) and not any(cls.startswith(LIBRARIES) for cls in classes)


def _guess_add(op: Op, maker: Op, leaf: str, graph: Graph, facts: _Facts) -> bool:
    if maker.base == "aten::batch_norm" and "-" not in leaf:
        after = facts.first_reader.get(op.outputs[0])
        return after is not None and after.base == "aten::relu"  # torchvision's ResNet; MobileNetV2 has no ReLU there
    scaled = [a for a in maker.args if isinstance(a, Ref)]
    if maker.base != "aten::mul" or len(scaled) != 2:
        return False
    chain = [facts.producer.get(a.name) for a in scaled]
    noise = any(c is not None and c.base in ("aten::div_", "aten::bernoulli_") for c in chain)
    if noise:
        return facts.normalised or facts.layer_scaled
    return any("layer_scale" in a.name for a in scaled)


def _squeezed(conv: Op, facts: _Facts) -> bool:
    """Whether a convolution reads a globally pooled tensor: squeeze and excitation."""
    maker = facts.producer.get(conv.args[0].name) if isinstance(conv.args[0], Ref) else None
    return maker is not None and maker.base.startswith(("aten::adaptive_avg_pool", "aten::mean"))


def _has_backbone(graph: Graph) -> bool:
    return any(".backbone." in f".{p.fqn}" for p in graph.parameters)


def _write_in_place(op: Op) -> Op:
    return op.changed(target=_written(op.target))


@lru_cache(256)
def _written(target: str) -> str:
    """The target that writes into its operand: one text for all ops."""
    base, dot, overload = target.partition(".")
    return f"{base}_{dot}{overload}"
