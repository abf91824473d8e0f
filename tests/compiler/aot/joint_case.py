"""The joint graph of a case of tests/ops: as PyTorch's AOTAutograd makes it, and as `aot.joint` does.

PyTorch traces on the meta device: forms of kernels without their data, and none of the decompositions that are for the
CPU alone. A case is a program (`observe.call`). Results that share memory with an input, and inputs that are written
to, are cloned in both, because AOTAutograd keeps such aliases out of its graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from fx import nodes_of
from observe import Case
from torch._functorch.aot_autograd import aot_function
from torch.utils._pytree import tree_leaves
from torch_side import group, make

from staticmem.compiler.aot import joint
from staticmem.compiler.nodes import GETITEM, PLACEHOLDER, Node
from staticmem.eager.strides import Form, form_of
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Graph, Op, Ref, Value
from staticmem.ops.registry import in_place

_DEVICE = ["meta"]  # where calls without tensors make them
_UNREAD = ("device", "layout", "pin_memory", "memory_format", "non_blocking")  # forms have what matters of them


@dataclass
class Program:
    """A case with clones where they are needed."""

    case: Case
    pattern: tuple[bool, ...]
    cloned: list[bool]  # which results share memory with an input or with another result

    def run(self, op: Callable[..., Any], flat: Sequence[Any]) -> list[Any]:
        def call(target: str, *args: Any, **kwargs: Any) -> Any:
            if in_place(target.split(".", 1)[0]):
                written = next((k for k, value in enumerate(flat) if value is args[0]), None)
                if written is not None and any(self.pattern):
                    args = (op("aten::clone", args[0]), *args[1:])
            return op(target, *args, **kwargs)

        result = self.case.program(call, *group(self.case.inputs, flat))
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        outputs = [out for out in outputs if out is not None]
        return [op("aten::clone", out) if cloned else out for out, cloned in zip(outputs, self.cloned, strict=True)]


class _Tried(Exception):  # noqa: N818
    """PyTorch has made the graph: what would follow is of no interest."""


def real(case: Case, pattern: tuple[bool, ...]) -> tuple[list[Node], tuple[Any, ...], Program, list[int]]:
    """PyTorch's graph; the program, and how many results each of its calls has."""
    module, program, counts = traced_module(case, pattern)
    nodes, results = nodes_of(_without_random(module).graph)
    return nodes, results, program, counts


def traced_module(case: Case, pattern: tuple[bool, ...], device: str = "meta") -> tuple[Any, Program, list[int]]:
    with torch.no_grad():
        flat = [make(spec, "meta") for spec in case.flat]
        storages = {t.untyped_storage()._cdata for t in flat}
        result = case.program(_call, *group(case.inputs, flat))
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        cloned = []
        for out in outputs:
            cloned.append(out.untyped_storage()._cdata in storages)
            storages.add(out.untyped_storage()._cdata)
    program, counts = Program(case, pattern, cloned), []

    def counting(target: str, *args: Any, **kwargs: Any) -> Any:
        out = _call(target, *args, **kwargs)
        counts.append(len(out) if isinstance(out, (tuple, list)) else 0)
        return out

    seen: list[Any] = []

    def keep(module: Any, *_: Any, **__: Any) -> Any:
        seen.append(module)
        raise _Tried

    def function(*inputs: Any) -> Any:
        counts.clear()
        return program.run(counting, inputs)

    compiled = aot_function(
        function, keep, keep, keep, decompositions=_decompositions(), keep_inference_input_mutations=True
    )
    inputs = [make(spec, device).requires_grad_(needs) for spec, needs in zip(case.flat, pattern, strict=True)]
    _DEVICE.append(device)
    with contextlib.suppress(_Tried):
        compiled(*inputs)
    _DEVICE.pop()
    return seen[0], program, list(counts)


@cache
def _decompositions() -> Any:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def _without_random(module: Any) -> Any:
    from torch._inductor.fx_passes.replace_random import replace_random_passes

    if any("rand" in str(node.target) or "bernoulli" in str(node.target) for node in module.graph.nodes):
        replace_random_passes(module)
    return module


def _call(target: str, *args: Any, **kwargs: Any) -> Any:
    namespace, _, name = target.partition("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    function = getattr(packet, overload) if overload else packet
    named = {key: _converted(value, key) for key, value in kwargs.items()}
    converted = [_converted(a) for a in args]
    if not any(isinstance(t, torch.Tensor) for t in tree_leaves([converted, named])):
        named["device"] = torch.device(_DEVICE[-1])
    return function(*converted, **named)


def _converted(value: Any, key: str = "") -> Any:
    if isinstance(value, DType):
        return getattr(torch, value.name)
    if isinstance(value, (tuple, list)):
        return [_converted(v) for v in value]
    return getattr(torch, value) if key == "memory_format" else value


def ours(program: Program, counts: Sequence[int]) -> tuple[list[Node], tuple[Any, ...]]:
    """Our graph of the same program.

    Raises:
        NotTracedError: the table lacks a call.
    """
    given = iter(counts)
    ops: list[Op] = []

    def op(target: str, *args: Any, **kwargs: Any) -> Any:
        count = next(given)
        names = tuple([f"{len(ops)}.{k}" for k in range(count or 1)])
        arguments = tuple([tuple(a) if isinstance(a, list) else a for a in args])
        ops.append(Op(f"op{len(ops)}", target, arguments, kwargs, names))
        return tuple([Ref(name) for name in names]) if count else Ref(names[0])

    case = program.case
    refs = [Ref(f"in{k}") for k in range(len(case.flat))]
    outputs = tuple([ref.name for ref in program.run(op, refs)])
    values = [Value(ref.name, spec.dtype, spec.shape) for ref, spec in zip(refs, case.flat, strict=True)]
    graph = Graph("case", "pt2", "", tuple(values), (), (), tuple(ops), outputs)
    forms = {r.name: form_of(s.shape, s.layout, s.dtype) for r, s in zip(refs, case.flat, strict=True)}
    needed = {ref.name for ref, needs in zip(refs, program.pattern, strict=True) if needs}
    made = joint.trace(graph, 0, len(ops), forms, needed, outputs, any(program.pattern))
    by_name = dict(zip([p.name for p in made.primals], made.outputs[made.forward_outputs :], strict=True))
    gradients = tuple([by_name.get(ref.name) for ref in refs]) if any(program.pattern) else ()
    return list(made.nodes), (*made.outputs[: made.forward_outputs], *gradients)


def text(nodes: Sequence[Node], outputs: Sequence[Any]) -> list[str]:
    """The nodes that anything depends on, one a line, in order; placeholders have the numbers of the inputs."""
    keep: set[Node] = set()
    stack = [out for out in outputs if isinstance(out, Node)] + [n for n in nodes if n.target == "aten::copy_"]
    while stack:
        node = stack.pop()
        if node not in keep:
            keep.add(node)
            stack += node.inputs
    numbers: dict[Node, str] = {}
    lines: list[str] = []
    for node in nodes:
        if node.target == PLACEHOLDER:
            numbers[node] = _placeholder(node.name)
        elif node.target == "aten::alias":  # autograd's `detach` of what it saves
            numbers[node] = numbers[node.inputs[0]]
        elif node in keep:
            numbers[node] = f"%{len(lines)}"
            call = f"{node.target}({', '.join(_arguments(node, numbers))})"
            if node.target == "aten::scalar_tensor":  # a joint-graph pass makes it a `full`; ours are from the start
                call = f"aten::full(size=[], fill_value={_shown(node.args[0], numbers)})"
            lines.append(f"%{len(lines)} {call}: {_shown_form(node.form)}")
    return [*lines, f"return {', '.join([_shown(out, numbers) for out in outputs])}"]


def _placeholder(name: str) -> str:
    """PyTorch's `primals_1` and `arg0_1` are the input 0; a tangent has one name."""
    if name.startswith("primals_"):
        return f"in{int(name.removeprefix('primals_')) - 1}"
    if name.startswith("arg"):
        return f"in{name[3:].split('_')[0]}"
    return name if name.startswith("in") else "tangent"


def _arguments(node: Node, numbers: dict[Node, str]) -> list[str]:
    """By the names of the schema, with its defaults. A view has the sizes of its result in place of -1."""
    if node.target == GETITEM:
        return [_shown(a, numbers) for a in node.args]
    if node.target == "aten::view":
        return [_shown(node.args[0], numbers), str(list(node.shape))]
    values = list(node.args)
    named = dict(node.kwargs)
    shown = []
    for position, argument in enumerate(_schema(node.target).arguments):
        value = values[position] if position < len(values) else named.pop(argument.name, argument.default_value)
        if argument.name in _UNREAD or (argument.name == "dtype" and position >= len(values)):
            continue
        shown.append(f"{argument.name}={_shown(value, numbers)}")
    unknown = [name for name in named if name not in _UNREAD and name != "dtype"]
    return shown + [f"{name}={_shown(named[name], numbers)} NOT IN THE SCHEMA" for name in unknown]


@cache
def _schema(target: str) -> Any:
    namespace, _, name = target.partition("::")
    name, _, overload = name.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")._schema
    except AttributeError:
        raise AssertionError(f"PyTorch has no {target}") from None


def _shown(value: Any, numbers: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return numbers.get(value, "?")
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join([_shown(v, numbers) for v in value]) + "]"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:.10g}"
    return str(value)


def _shown_form(form: Any) -> str:
    """Strides of dimensions of size 1 say nothing."""
    if isinstance(form, tuple):
        return "(" + ", ".join([_shown_form(f) for f in form]) + ")"
    if not isinstance(form, Form):
        return "-"
    strides = [0 if size == 1 else stride for size, stride in zip(form.shape, form.strides, strict=True)]
    return f"{form.dtype}{list(form.shape)}" + ("" if 0 in form.shape else f"/{strides}")
