"""The joint graph of a case of tests/ops: as PyTorch's AOTAutograd makes it, and as `aot.joint` does.

PyTorch traces on the meta device: forms of kernels without their data, and none of the decompositions that are for the
CPU alone. A case is a program (`observe.call`). Results that share memory with an input, and inputs that are written
to, are cloned in both, because AOTAutograd keeps such aliases out of its graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from fx import nodes_of
from observe import Case
from our_joint import Program, ours
from torch._functorch.aot_autograd import aot_function
from torch.utils._pytree import tree_leaves
from torch_side import convert, group, make

from staticmem.eager.strides import Form
from staticmem.tracing.nodes import GETITEM, PLACEHOLDER, Node

__all__ = ["ours", "real", "text", "traced_module"]
_SEEDS = ("prims::inductor_seeds", "prims::inductor_lookup_seed")
_DEVICE = ["meta"]  # where calls without tensors make them
_UNREAD = ("device", "layout", "pin_memory", "memory_format", "non_blocking")  # forms have what matters of them


class _Tried(Exception):  # noqa: N818
    """PyTorch has made the graph: what would follow is of no interest."""


def real(case: Case, pattern: tuple[bool, ...]) -> tuple[list[Node], tuple[Any, ...], Program, list[int]]:
    """PyTorch's graph; the program, and how many results each of its calls has."""
    module, program, counts = traced_module(case, pattern)
    nodes, results = nodes_of(module.graph)
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
    with contextlib.suppress(_Tried), mock.patch("torch._inductor.decomposition.is_gpu", return_value=True):
        compiled(*inputs)
    _DEVICE.pop()
    return seen[0], program, list(counts)


@cache
def _decompositions() -> Any:
    from torch._inductor.decomposition import select_decomp_table

    import_module("torch._inductor.lowering")  # the decomposition of max_pool2d asks it

    return select_decomp_table()


def _call(target: str, *args: Any, **kwargs: Any) -> Any:
    namespace, _, name = target.partition("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    function = getattr(packet, overload) if overload else packet
    named = {key: convert(value, key) for key, value in kwargs.items()}
    converted = [convert(a) for a in args]
    if not any(isinstance(t, torch.Tensor) for t in tree_leaves([converted, named])):
        named["device"] = torch.device(_DEVICE[-1])
    return function(*converted, **named)


def lost_gradients(outputs: Sequence[Any], pattern: Sequence[bool]) -> bool:
    """`torch.ops` gives no gradients for some calls that are composed in Python, which their functions do."""
    gradients = outputs[-len(pattern) :] if any(pattern) else ()
    return any(needs and gradient is None for needs, gradient in zip(pattern, gradients, strict=False))


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
        elif _is_a_copy(node):
            numbers[node] = numbers[node.inputs[0]]
        elif node in keep and node.base not in _SEEDS:
            for line in _lines(node, numbers, len(lines)):
                numbers[node] = f"%{len(lines)}"
                lines.append(f"%{len(lines)} {line}")
    return [*lines, f"return {', '.join([_shown(out, numbers) for out in outputs])}"]


def _lines(node: Node, numbers: dict[Node, str], first: int) -> list[str]:
    """A node as it is after joint-graph passes, in one line or two."""
    shown = _shown_form(node.form)
    if node.target == "aten::scalar_tensor":
        return [f"aten::full(size=[], fill_value={_shown(node.args[0], numbers)}): {shown}"]
    if node.target == "prims::inductor_random":  # passes draw it from seeds
        return [f"aten::{node.args[2]}(size={_shown(node.args[0], numbers)}): {shown}"]
    if node.target in ("prims::inductor_randint", "aten::randint.low"):
        return [f"aten::randint.low({', '.join([_shown(a, numbers) for a in node.args[:3]])}): {shown}"]
    if node.target in ("aten::rand", "aten::randn") and node.dtype.name != "float32":  # passes draw float32
        drawn = shown.replace(node.dtype.name, "float32")
        cast = f"prims::convert_element_type(a=%{first}, dtype={node.dtype}): {shown}"
        return [f"{node.target}(size={_shown(node.args[0], numbers)}): {drawn}", cast]
    return [f"{node.target}({', '.join(_arguments(node, numbers))}): {shown}"]


def _is_a_copy(node: Node) -> bool:
    """What a joint-graph pass removes: `detach` of what is saved, and copies in the same layout."""
    if node.target == "aten::alias":
        return True
    if node.target not in ("aten::clone", "aten::view"):
        return False
    return _shown_form(node.form) == _shown_form(node.inputs[0].form)


def _placeholder(name: str) -> str:
    """PyTorch's `primals_1` and `arg0_1` are the input 0; a tangent has one name."""
    if name.startswith("primals_"):
        return f"in{int(name.removeprefix('primals_')) - 1}"
    if name.startswith("arg"):
        return f"in{name[3:].split('_')[0]}"
    return name if name.startswith("in") else "tangent"


def _arguments(node: Node, numbers: dict[Node, str]) -> list[str]:
    """By the names of the schema, with its defaults. A view has the sizes of its result in place of -1, and
    dimensions count from the front."""
    if node.target == GETITEM:
        return [_shown(a, numbers) for a in node.args]
    if node.target == "aten::permute":
        return [_shown(node.args[0], numbers), str([dim % len(node.args[1]) for dim in node.args[1]])]
    if node.target == "aten::view":
        return [_shown(node.args[0], numbers), str(list(node.shape))]
    values = list(node.args)
    named = dict(node.kwargs)
    schema = _schema(node.target)
    if schema is None:
        return [*[_shown(a, numbers) for a in values], "NOT OF PYTORCH"]
    shown = []
    for position, argument in enumerate(schema.arguments):
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
    except AttributeError:  # the backward of a call without a trace
        return None


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
