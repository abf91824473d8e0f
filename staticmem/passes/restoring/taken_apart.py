"""Calls that the dynamo exporter took apart, where the parts tell which they were.

`std` and `var` become `prims::var`, a view that puts the dimension back, and a square root; `cdist` of more than 25
rows becomes a matrix product of vectors with their norms; `index_add` becomes an
`index_put` that accumulates, which its source line tells from a real one (in a function of which no trace shows the
lines it is taken for `index_add`, which code calls more often). Losses become element-wise ops: in PyTorch
each is one kernel forward and one backward, which keep the input and the target; of the parts autograd would keep every
intermediate. Code that has such a formula itself names its functions on that line; a call of a loss does not.

Source: torch/_refs/__init__.py (`std`, `var`), torch/_decomp/decompositions.py (`_euclidean_dist`, `_index_add`,
`binary_cross_entropy`, `smooth_l1_loss`, `huber_loss`, `soft_margin_loss`, `apply_loss_reduction`),
aten/src/ATen/native/Loss.cpp (`binary_cross_entropy_with_logits`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from staticmem.ir.graph import NO_KWARGS, Arg, Graph, Note, Op, Ref
from staticmem.ir.onnx_graph import Net
from staticmem.ir.record import record
from staticmem.ops import kinds_of
from staticmem.passes.edit import Ops
from staticmem.passes.restoring.templates import Finder, Match, Named, Template, regrouped
from staticmem.passes.variables.line_texts import calls_hidden_code
from staticmem.passes.variables.source_lines import names_of_children

# `exponential_`: -log(u), where u that rounds to 1 gives a little less than 0 (torch/_refs/__init__.py, `exponential`)
_UNIFORM = Named("u", ("rand_like", "given"))
_EXPONENTIAL = ("mul", ("where", ("ge", _UNIFORM, "limit"), "least", ("log", _UNIFORM)), "factor")
_RMS_NORM = re.compile(r"\brms_norm\(")
_CDIST = re.compile(r"\bcdist\(")
_INDEX_ADD = re.compile(r"\bindex_add_?\(")


def exponentials(ops: Ops, net: Net) -> None:
    """`empty_like(x).exponential_()`, which becomes a tensor of its own."""
    finder = Finder(ops, {})
    for op in ops.of("aten::mul"):
        match = finder.find(op, [_EXPONENTIAL])
        if match is None:
            continue
        maker = ops.made_by(match.values["given"])
        if maker is not None and maker.base in ("aten::empty_like", "aten::empty", "aten::new_empty"):
            finder.replaced(op, match, replace(op, target="aten::exponential_", args=(match.values["given"],)))


def statistics(graph: Graph, source: object) -> tuple[Graph, Sequence[Note]]:
    """`std`, `var` and `index_add`, put together again."""
    ops = graph.ops
    readers: Counter[str] = Counter(name for op in ops for name in op.refs())
    readers.update(graph.outputs)
    user = {name: op for op in ops for name in op.refs()}
    changed: dict[int, Op] = {}
    gone: set[int] = set()
    children = names_of_children(graph)
    maker = {name: op for op in ops for name in op.outputs}
    for op in ops:
        if op.base == "aten::sqrt" and op.stack and _CDIST.search(op.stack[-1].text):
            _distance(op, maker, readers, changed, gone)
        elif op.base == "prims::var":
            _variance(op, user, readers, changed, gone)
        elif op.base == "aten::index_put":
            added = _index_add(op, children)
            if added is not None:
                changed[id(op)] = added
    if not changed:
        return graph, ()
    return replace(graph, ops=tuple(changed.get(id(op), op) for op in ops if id(op) not in gone)), ()


def _variance(op: Op, user: dict[str, Op], readers: Counter[str], changed: dict[int, Op], gone: set[int]) -> None:
    """`std.correction` or `var.correction` in the place of the last op of the chain."""
    dims = op.args[1] if len(op.args) > 1 else None
    if not isinstance(dims, tuple):
        return
    chain, target = [op], "aten::var.correction"
    following = _only_reader(op, user, readers)
    if following is not None and following.base == "prims::broadcast_in_dim":
        chain.append(following)
        following = _only_reader(following, user, readers)
    if following is not None and following.base == "aten::sqrt":
        chain.append(following)
        target = "aten::std.correction"
    keepdim = any(part.base == "prims::broadcast_in_dim" for part in chain)
    correction = op.args[2] if len(op.args) > 2 else op.kwargs.get("correction", 1)
    last = chain[-1]
    changed[id(last)] = replace(
        last, target=target, args=(op.args[0], dims), kwargs={"correction": correction, "keepdim": keepdim}
    )
    gone.update(id(part) for part in chain[:-1])


def _distance(op: Op, maker: Mapping[str, Op], readers: Counter[str], changed: dict[int, Op], gone: set[int]) -> None:
    """`cdist` in the place of the last op of `clamp(cat(-2 * x1, |x1|^2, 1) @ cat(x2, 1, |x2|^2).mT, 0).sqrt()`."""

    def first(of: Op | None, *bases: str, at: int = 0) -> Op | None:
        arg = of.args[at] if of is not None and len(of.args) > at else None
        arg = arg[0] if isinstance(arg, tuple) and arg else arg
        source = maker.get(arg.name) if isinstance(arg, Ref) else None
        return source if source is not None and (source.base in bases or not bases) else None

    product = first(first(op, "aten::clamp_min", "aten::clamp"), "aten::matmul", "aten::bmm")
    left, turned = first(product, "aten::cat"), first(product, at=1)
    right = first(turned, "aten::cat") if turned is not None and "permuted" in kinds_of(turned.base) else None
    scaled = first(left, "aten::mul")
    joined = right.args[0] if right is not None else None
    if scaled is None or not isinstance(joined, tuple) or len(joined) != 3:
        return
    sides = (scaled.args[0], joined[0])
    if not all(isinstance(side, Ref) for side in sides):
        return
    parts: dict[int, Op] = {}
    inner: Counter[str] = Counter(op.refs())
    waiting = [*op.refs()]
    while waiting:
        part = maker.get(waiting.pop())
        if part is not None and id(part) not in parts and part.stack == op.stack and Ref(part.outputs[0]) not in sides:
            parts[id(part)] = part
            inner.update(part.refs())
            waiting = [*waiting, *part.refs()]
    if all(inner[name] == readers[name] for part in parts.values() for name in part.outputs):
        changed[id(op)] = replace(op, target="aten::cdist", args=sides, kwargs=NO_KWARGS)
        gone.update(parts)


def _only_reader(op: Op, user: dict[str, Op], readers: Counter[str]) -> Op | None:
    return user.get(op.outputs[0]) if len(op.outputs) == 1 and readers[op.outputs[0]] == 1 else None


def _index_add(op: Op, children: frozenset[str]) -> Op | None:
    """`index_put(self, (None, index), source, True)` of a call of `index_add`: None stands for dimensions before."""
    if len(op.args) < 4 or op.args[3] is not True or not op.stack:
        return None
    text = op.stack[-1].text
    if not _INDEX_ADD.search(text) and ("index_put" in text or not calls_hidden_code(text, children)):
        return None
    given, source = op.args[1], op.args[2]
    if not isinstance(given, tuple) or not given or not isinstance(given[-1], Ref) or any(given[:-1]):
        return None
    return replace(op, target="aten::index_add", args=(op.args[0], len(given) - 1, given[-1], source), kwargs={})


_MEAN, _SUM = 1, 2
_REDUCTIONS = {"aten::mean": _MEAN, "aten::sum": _SUM}
_IN_MODULE = "torch.nn.modules.loss."


@record(frozen=True)
class _Loss:
    target: str
    top: str  # the base of the last element-wise op
    templates: tuple[Template, ...]
    by_hand: re.Pattern[str]  # what a line says that computes this itself
    weighted: bool = False


_LOG_OF = ("max", ("log", "x"), -100)
_LOG_OF_REST = ("max", ("log1p", ("neg", "x")), -100)
_LOGITS: tuple[Template, ...] = tuple(
    ("sub", ("mul", rest, "x"), log)
    for rest in (("rsub", "y", 1), ("sub", 1, "y"))
    for log in (("log_sigmoid", "x"), ("mul", ("add", ("mul", ("sub", "pos", 1), "y"), 1), ("log_sigmoid", "x")))
)
_DISTANCE = Named("d", ("abs", ("sub", "x", "y")))
_LOSSES = (
    _Loss(
        "binary_cross_entropy", "aten::sub",
        (("sub", ("mul", ("sub", "y", 1), _LOG_OF_REST), ("mul", "y", _LOG_OF)),),
        re.compile(r"\blog1?p?\("), weighted=True,
    ),
    _Loss("binary_cross_entropy_with_logits", "aten::sub", _LOGITS, re.compile(r"log_?sigmoid\("), weighted=True),
    _Loss(
        "huber_loss", "aten::where",
        (("where", ("lt", _DISTANCE, "delta"), ("mul", ("mul", _DISTANCE, 0.5), _DISTANCE),
          ("mul", ("sub", _DISTANCE, "half"), "delta")),),
        re.compile(r"\bwhere\("),
    ),
    _Loss(
        "smooth_l1_loss", "aten::where",
        (("where", ("lt", _DISTANCE, "delta"), ("div", ("mul", ("pow", _DISTANCE, 2), 0.5), "delta"),
          ("sub", _DISTANCE, "half")),),
        re.compile(r"\bwhere\("),
    ),
    _Loss(
        "soft_margin_loss", "aten::log1p", (("log1p", ("exp", ("mul", ("neg", "x"), "y"))),), re.compile(r"\bexp\("),
    ),
)  # fmt: skip


def losses(ops: Ops, net: Net) -> Sequence[Note]:
    """Puts losses together again."""
    finder, count = Finder(ops, net.consts), 0
    possible = [loss for loss in _LOSSES if finder.possible(loss.templates)]
    tops = {loss.top for loss in possible}
    for op in ops.of(*tops):
        for loss in possible:
            if op.base == loss.top and not (op.stack and loss.by_hand.search(op.stack[-1].text)):
                match = finder.find(op, loss.templates)
                if match is not None and _same_call(op, match.ops.values()):
                    _replace(finder, loss, op, match)
                    count += 1
                    break
    return regrouped(count)


def _same_call(op: Op, others: Iterable[Op]) -> bool:
    """Whether ops are of one call: of one module, and of one line where their lines are known."""
    return all(
        other.modules == op.modules and (other.stack == op.stack or not other.stack or not op.stack) for other in others
    )


def _replace(finder: Finder, loss: _Loss, op: Op, match: Match) -> None:
    root, weight, reduction = op, None, 0
    text = op.stack[-1].text if op.stack else ""
    within = bool(op.modules) and op.modules[-1].cls.startswith(_IN_MODULE)
    if not re.search(r"reduction\s*=\s*['\"]none", text):
        reader = finder.ops.only_reader(root.outputs[0])
        told = within or "weight" in text or text.endswith(("(", ","))
        if loss.weighted and told and reader is not None and reader.base == "aten::mul" and _same_call(op, [reader]):
            weight = next((a for a in reader.args if a != Ref(root.outputs[0])), None)
            root = _extended(finder, match, reader)
        reader = finder.ops.only_reader(root.outputs[0])
        if reader is not None and len(reader.args) == 1 and not reader.kwargs and _same_call(op, [reader]):
            reduction = _REDUCTIONS.get(reader.base, 0)
            root = _extended(finder, match, reader) if reduction else root
    args = _arguments(loss, match.values, weight, reduction)
    finder.replaced(root, match, replace(root, target=f"aten::{loss.target}", args=args, kwargs={}))


def _extended(finder: Finder, match: Match, reader: Op) -> Op:
    match.ops[finder.ops.producer[reader.outputs[0]]] = reader
    return reader


def _arguments(loss: _Loss, values: Mapping[str, Arg], weight: Arg, reduction: int) -> tuple[Arg, ...]:
    x, y = values["x"], values["y"]
    if loss.target == "binary_cross_entropy":
        return x, y, weight, reduction
    if loss.target == "binary_cross_entropy_with_logits":
        return x, y, weight, values.get("pos"), reduction
    if loss.target == "soft_margin_loss":
        return x, y, reduction
    return x, y, reduction, values["delta"]


_DIRECTION = re.compile(r"(.*)(?:_v|\.original1)$")  # of weight_norm: its name without the ending


def weight_norms(ops: Ops, net: Net) -> None:
    """`v * (g / norm(v))` of parameters that weight_norm has named: one call. The TorchScript exporter divides `v`.

    Source: torch/_decomp/decompositions.py and torch/onnx/_internal/torchscript_exporter/symbolic_opset9.py,
    `_weight_norm`; names in torch/nn/utils/weight_norm.py and torch/nn/utils/parametrize.py.
    """
    for norm in ops.of("aten::linalg_vector_norm"):
        direction = norm.args[0] if norm.args else None
        match = _DIRECTION.match(direction.name) if isinstance(direction, Ref) else None
        ratio = ops.only_reader(norm.outputs[0]) if match is not None else None
        product = ops.only_reader(ratio.outputs[0]) if ratio is not None and ratio.base == "aten::div" else None
        if match is None or ratio is None or product is None or product.base != "aten::mul":
            continue
        length = next((Ref(match[1] + end) for end in ("_g", ".original0") if match[1] + end in net.values), None)
        operands = {arg for op in (ratio, product) for arg in op.args if isinstance(arg, Ref)}
        inner = {Ref(norm.outputs[0]), Ref(ratio.outputs[0])}
        value, reduced = net.values.get(direction.name) if isinstance(direction, Ref) else None, norm.args[2:3]
        axes = reduced[0] if reduced and isinstance(reduced[0], tuple) else ()
        rank = len(value.shape) if value is not None and value.shape is not None else 0
        left = [axis for axis in range(rank) if axis not in axes and axis - rank not in axes]
        if operands - inner != {direction, length} or len(left) != 1:
            continue
        reader = ops.only_reader(product.outputs[0])
        modules = reader.modules if reader is not None and length is not None and length.name.endswith("_g") else ()
        ops.drop(norm)
        ops.drop(ratio)
        call = replace(product, target="aten::_weight_norm", args=(direction, length, left[0]), kwargs=NO_KWARGS)
        ops.put(product, replace(call, modules=modules or product.modules))


def rms_norms(ops: Ops, net: Net) -> None:
    """`rms_norm`: powers, their mean, a root and products, on a line of PyTorch or the model that calls it.

    Source: aten/src/ATen/native/layer_norm.cpp, `rms_norm_composite`, which torch.export traces through.
    """
    for power in ops.of("aten::pow"):
        if not power.stack or _RMS_NORM.search(power.stack[-1].text) is None:
            continue
        x, chain = power.args[0], [power]
        for base in ("aten::mean", "aten::add", "aten::rsqrt", "aten::mul"):
            following = ops.only_reader(chain[-1].outputs[0])
            if following is None or following.base != base:
                break
            chain.append(following)
        if len(chain) < 5 or x not in chain[-1].args or not isinstance(x, Ref):
            continue
        weight: Arg = None
        for base in ("aten::mul", "aten::type_as"):
            following = ops.only_reader(chain[-1].outputs[0])
            if following is None or following.base != base or following.stack != power.stack:
                continue
            if base == "aten::mul":
                weight = next((a for a in following.args if a != Ref(chain[-1].outputs[0])), None)
            chain.append(following)
        shape = net.shape(weight.name if isinstance(weight, Ref) else x.name)
        axes = chain[1].args[1]
        if shape is None or not isinstance(axes, tuple):
            continue
        *parts, last = chain
        for part in parts:
            ops.drop(part)
        call = (x, tuple(shape[len(shape) - len(axes) :]), weight)
        ops.put(last, replace(last, target="aten::rms_norm", args=call, kwargs=NO_KWARGS))
