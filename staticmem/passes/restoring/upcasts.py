"""Casts to float32 that a float32 export has lost, because they returned their input.

They matter once the model is cast (`--dtype bfloat16`): norms and rotary embeddings of transformers compute in float32
whatever the model's dtype is (transformers, `modeling_llama.py`: LlamaRMSNorm.forward, LlamaRotaryEmbedding.forward;
`modeling_t5.py`: T5LayerNorm.forward).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Graph, Note, Op, Ref
from staticmem.ops import kinds_of
from staticmem.passes.variables.line_texts import assigns_one_result
from staticmem.passes.variables.source_lines import is_published


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
            if _CAST.search(line.text) and not is_published(line) and assigns_one_result(line.text):
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


def _with(op: Op, old: str, new: str) -> Op:
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
            op = _with(op, source, cast)
        if product and Ref(product) in op.args and not back:
            back = editor.cast(op, product)
        if back:
            op = _with(op, product, back)
        editor.ops.append(op)
        if source and op.base == "aten::mul" and Ref(cast) in op.args:
            product = op.outputs[0]


def _t5_norm(editor: _Editor, group: list[Op], ops: Sequence[Op]) -> None:
    """Only the variance is computed in float32."""
    for op in group:
        if op.base == "aten::pow" and isinstance(op.args[0], Ref):
            cast = editor.cast(op, op.args[0].name)
            op = _with(op, op.args[0].name, cast)
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
                op = _with(op, name, editor.cast(op, name))
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
