"""Dtypes that a float32 export has lost: casts that returned their input, and those that code takes from a tensor.

Casts to float32 matter once the model is cast (`--dtype bfloat16`): norms and rotary embeddings of transformers compute
in float32 whatever the model's dtype is (transformers, `modeling_llama.py`: LlamaRMSNorm.forward,
LlamaRotaryEmbedding.forward; `modeling_t5.py`: T5LayerNorm.forward).

`x.to(y.dtype)`, `torch.randn(n, dtype=y.dtype)` and `onehot.type_as(y)` are in the file as casts to, and tensors of,
float32. Under autocast `y` may be of its dtype, so that the cast returns its input or makes half the bytes: the band
has both. In a model that is cast as a whole (`--dtype bf16`) `y` has the dtype of the model. Source lines tell which
dtypes the code names itself (`x.float()`, `dtype=torch.float32`), except those that call functions of which no trace
shows the lines; ops of published libraries are as their code has them. Where no line tells, `ops.whole_model_cast`
takes the likelier one, and the band has both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import is_
from typing import TYPE_CHECKING, Any

from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Arg, Graph, Note, Op, Ref
from staticmem.ir.stacks import is_published, is_published_line
from staticmem.ops import kinds_of, parameters
from staticmem.passes.variables.line_texts import assigns_one_result, calls_hidden_code
from staticmem.passes.variables.source_lines import names_of_children

if TYPE_CHECKING:
    from staticmem.scenario.step import Scenario


def restore_casts(graph: Graph, source: object) -> tuple[Graph, Sequence[Note]]:
    """The graph with the casts put back."""
    ops = graph.ops
    editor = _Editor()
    for group in _modules(ops):
        rule = _rule(group[0])
        if rule is None or any(op.target == "aten::to.dtype" and _reads_float(op, group) for op in group):
            editor.ops.extend(group)
        else:
            rule(editor, group, ops)
    if not editor.count:
        return graph, ()
    text = "casts to float32 of norms and rotary embeddings were put back: a float32 export leaves them out"
    return replace(graph, ops=tuple(editor.ops)), [Note("assumption", "SM255", text, editor.count)]


def casts_of_lines(graph: Graph, source: object) -> tuple[Graph, Sequence[Note]]:
    """The graph with a cast behind each statement of the model's own code that ends with one: `return head(x).float()`.

    Under autocast, and in a cast model, the cast makes a tensor. Code of libraries is left as it was compared.
    """
    ops = graph.ops
    last: dict[int, int] = {}  # the op that ends such a statement -> the depth of its frame
    for index, op in enumerate(ops):
        for depth, line in enumerate(op.stack):
            if _CAST.search(line.text) and not is_published_line(line) and assigns_one_result(line.text):
                after = ops[index + 1].stack if index + 1 < len(ops) else ()
                if after[: depth + 1] != op.stack[: depth + 1]:
                    last[index] = depth
                break
    if not last:
        return graph, ()
    count = 0
    readers = {name for op in ops for name in op.refs()}.union(graph.outputs)
    edited: list[Op] = []
    for index, op in enumerate(ops):
        name = op.outputs[0] if len(op.outputs) == 1 else ""
        if index not in last or name not in readers or "cast" in kinds_of(op.base):
            edited.append(op)
            continue
        plain = f"{name}::float32"
        above = len(op.stack) - 1 - last[index]  # calls within the statement
        modules = op.modules[: len(op.modules) - above] if above else op.modules
        edited.append(replace(op, outputs=(plain,)))
        cast = Op(name, "aten::to.dtype", (Ref(plain), dtypes.float32), {}, (name,), modules)
        edited.append(replace(cast, stack=op.stack[: last[index] + 1]))
        count += 1
    text = "casts to float32 that end a line were put back: a float32 export leaves them out"
    return replace(graph, ops=tuple(edited)), [Note("assumption", "SM255", text, count)]


def _reads_float(op: Op, group: list[Op]) -> bool:
    """Whether a cast is one of those that would be added: of a value that the group did not get as an integer."""
    maker = next((o for o in group if isinstance(op.args[0], Ref) and op.args[0].name in o.outputs), None)
    return maker is not None and maker.base in ("aten::mul", "aten::pow")


def _modules(ops: Sequence[Op]) -> list[list[Op]]:
    """Consecutive ops of one module call."""
    groups: list[list[Op]] = []
    for op in ops:
        if groups and op.modules and groups[-1][-1].modules == op.modules:
            groups[-1].append(op)
        else:
            groups.append([op])
    return groups


_CAST = re.compile(r"\)\.float\(\)\s*(?:#.*)?$")
Rule = Callable[["_Editor", list[Op], Sequence[Op]], None]


def _rule(op: Op) -> Rule | None:
    cls = op.modules[-1].cls if op.modules else ""
    if not cls.startswith("transformers."):
        return None
    leaf = cls.rpartition(".")[2]
    if leaf.endswith("RMSNorm"):
        return _rms_norm
    if leaf == "T5LayerNorm":
        return _t5_norm
    return _rotary if leaf.endswith("RotaryEmbedding") else None


class _Editor:
    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.count = 0

    def cast(self, like: Op, name: str) -> str:
        """Adds a cast of a value in the module of an op; gives the result's name."""
        self.count += 1
        result = f"{name}::float32.{self.count}"
        self.ops.append(Op(result, "aten::to.dtype", (Ref(name), dtypes.float32), {}, (result,), like.modules))
        return result


def _replace_argument(op: Op, old: str, new: str) -> Op:
    def swap(arg: Arg) -> Arg:
        if arg == Ref(old):
            return Ref(new)
        return tuple(swap(a) for a in arg) if isinstance(arg, tuple) else arg

    return replace(op, args=tuple(swap(a) for a in op.args))


def _rms_norm(editor: _Editor, group: list[Op], ops: Sequence[Op]) -> None:
    """hidden = x.to(float32); ...; return weight * (hidden * rsqrt(...)).to(dtype of x)."""
    source = cast = product = back = ""
    for op in group:
        if op.base == "aten::pow" and not source and isinstance(op.args[0], Ref):
            source = op.args[0].name
            cast = editor.cast(op, source)
        if source:
            op = _replace_argument(op, source, cast)
        if product and Ref(product) in op.args and not back:
            back = editor.cast(op, product)
        if back:
            op = _replace_argument(op, product, back)
        editor.ops.append(op)
        if source and op.base == "aten::mul" and Ref(cast) in op.args:
            product = op.outputs[0]


def _t5_norm(editor: _Editor, group: list[Op], ops: Sequence[Op]) -> None:
    """Only the variance is computed in float32."""
    for op in group:
        if op.base == "aten::pow" and isinstance(op.args[0], Ref):
            cast = editor.cast(op, op.args[0].name)
            op = _replace_argument(op, op.args[0].name, cast)
        editor.ops.append(op)


def _rotary(editor: _Editor, group: list[Op], ops: Sequence[Op]) -> None:
    """Frequencies in float32, cos and sin back in the dtype of the hidden states."""
    computed = {name for op in group for name in op.outputs}
    inside = {id(op) for op in group}
    leaving = {name for op in ops if id(op) not in inside for name in op.refs()} & computed
    products = [op for op in group if op.base in ("aten::mul", "aten::cos", "aten::sin")]
    results: dict[str, str] = {}
    for op in group:
        if op is products[0] if products else False:
            for name in [n for n in op.refs() if n not in computed and "inv_freq" in n]:
                op = _replace_argument(op, name, editor.cast(op, name))
        out = op.outputs[0] if op.outputs else ""
        if out in leaving:  # the result keeps its name, so the cast makes it
            plain = f"{out}::float32"
            results[out] = plain
            op = replace(op, outputs=(plain, *op.outputs[1:]))
        editor.ops.append(op)
    for out, plain in results.items():
        editor.count += 1
        last = group[-1]
        editor.ops.append(Op(out, "aten::to.dtype", (Ref(plain), dtypes.float32), {}, (out,), last.modules))


_OWN_DTYPE = re.compile(r"\.dtype\b|\btype_as\(|dtype=(?!torch\.)[a-z_]\w*|\.to\((?!torch\.float|dtype=torch\.)")
_NAMED_DTYPE = re.compile(r"\btorch\.float|\.float\(")


def ends_under_autocast(graph: Graph, scenario: Scenario) -> tuple[Graph, Graph] | None:
    """The graph with autocast's dtype wherever float32 may stand for a tensor's dtype, and as it is; None where it does
    nowhere."""
    amp = scenario.amp
    if amp is None:
        return None
    ops, count = list(graph.ops), 0
    kinds = {target: kinds_of(target.split(".", 1)[0]) for target in {op.target for op in ops}}
    children = names_of_children(graph)
    for index, op in enumerate(ops):
        if kinds[op.target].isdisjoint(("cast", "factory")) or not op.amp or not _is_open(op, children):
            continue
        args = tuple(_swap(arg, amp) for arg in op.args)
        kwargs = {key: _swap(arg, amp) for key, arg in op.kwargs.items()}
        if (
            "factory" in kinds[op.target]
            and "self" not in parameters(op.base)
            and not any(isinstance(arg, (DType, bool, int)) for arg in op.args[1:])
            and "dtype" not in kwargs
        ):
            kwargs["dtype"] = amp
        if args != op.args or kwargs != op.kwargs:
            ops[index] = op.changed(args=args, kwargs=kwargs)
            count += 1
    return (replace(graph, ops=tuple(ops)), graph) if count else None


def dtypes_of_lines(graph: Graph, cast: DType) -> tuple[Graph, Sequence[Note]]:
    """The graph of a model that is cast to a 16-bit type, with what lines say of float32 in casts and new tensors."""
    from staticmem.ops.whole_model_cast import cast_of  # few steps have it

    if cast_of(graph, cast) is None:  # the file is in 16 bits itself, and its casts are real ones
        return graph, ()
    ops, named, left_open = _restore_types_before_casts(graph), set[str](), set[str]()
    children = names_of_children(graph)
    for index, op in enumerate(ops):
        if not _has_float32(op) or is_published(op):
            continue
        text = op.stack[-1].text if op.stack else ""
        of_tensor, of_code = _OWN_DTYPE.search(text) is not None, _NAMED_DTYPE.search(text) is not None
        if calls_hidden_code(text, children) or of_tensor == of_code:
            if _is_open(op, children):
                left_open.add(op.name)
        elif of_code:
            named.add(op.name)
        else:
            ops[index] = _replace_dtype(op, cast)
    if not named and not left_open and all(map(is_, ops, graph.ops)):
        return graph, ()
    return replace(graph, ops=tuple(ops), named_float32=frozenset(named), open_float32=frozenset(left_open)), ()


def _restore_types_before_casts(graph: Graph) -> list[Op]:
    """The ops, with `y.type_as(x)` of an `x` that a cast to float32 returned as it was: in the export the tensor has
    the name of that cast's result since, and the code means the one before (`self._norm(x.float()).type_as(x)`)."""
    ops, sources = list(graph.ops), dict[str, Arg]()
    for index, op in enumerate(ops):
        source = op.args[0] if op.args else None
        if op.base == "aten::type_as" and len(op.args) > 1 and isinstance(op.args[1], Ref):
            other = sources.get(op.args[1].name)
            if other is not None:
                ops[index] = op.changed(args=(op.args[0], other, *op.args[2:]))
        elif isinstance(source, Ref) and _has_float32(op) and "cast" in kinds_of(op.base):
            value = graph.values.get(source.name)
            if value is not None and value.dtype is dtypes.float32:
                sources[op.outputs[0]] = sources.get(source.name, source)
    return ops


def ends_of_cast(graph: Graph, scenario: Scenario) -> tuple[Graph, Graph] | None:
    """The graphs of a model that is cast to 16 bits as a whole with this dtype, and with float32, wherever nothing
    tells which of them the code has; None where there is no such place."""
    left_open, low = graph.open_float32, scenario.dtype
    if not left_open or low not in dtypes.HALVES:
        return None
    lowest = tuple(_replace_dtype(op, low) if op.name in left_open else op for op in graph.ops)
    return replace(graph, ops=lowest), replace(graph, named_float32=graph.named_float32 | left_open)


def _replace_dtype(op: Op, dtype: DType) -> Op:
    args = tuple(_swap(arg, dtype) for arg in op.args)
    return op.changed(args=args, kwargs={key: _swap(arg, dtype) for key, arg in op.kwargs.items()})


def _has_float32(op: Op) -> bool:
    """Whether an op casts to float32, or makes a tensor of it; `x.to(device)` does not."""
    from staticmem.ops.whole_model_cast import TO_DEVICE

    if op.target == TO_DEVICE or kinds_of(op.base).isdisjoint(("cast", "factory")):
        return False
    return dtypes.float32 in op.args or dtypes.float32 in op.kwargs.values()


def _swap(arg: Any, amp: DType) -> Any:
    return amp if arg is dtypes.float32 else arg


def _is_open(op: Op, children: frozenset[str]) -> bool:
    if is_published(op):
        return False
    text = op.stack[-1].text if op.stack else ""
    return not op.stack or _may_be_a_tensors(text) or calls_hidden_code(text, children)


@lru_cache(4096)
def _may_be_a_tensors(text: str) -> bool:
    """Whether a line may take a dtype from a tensor: it does so, or is a part of a statement."""
    if _OWN_DTYPE.search(text) is not None:
        return True
    return _NAMED_DTYPE.search(text) is None and text.count("(") != text.count(")")
