"""The table of calls that autograd sees: ATen target -> function that makes its nodes and records its gradients.

A function has the tracer first, then the arguments of the ATen schema, tensors as nodes. Composite calls (`linear`,
`layer_norm` of tensors in a list) call other functions of the table, as their C++ does; what has a formula in
tools/autograd/derivatives.yaml makes the nodes of its decomposition and records a gradient.

What autocast does with a call, and which calls only check something, stands with the op's rule (`ops.registry`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from staticmem.eager.strides import Form
from staticmem.ir.graph import Op, Ref
from staticmem.ops.registry import flop_formula, in_place, one_name, rules
from staticmem.tracing.nodes import Node

Function = TypeVar("Function", bound=Callable[..., Any])

# The files of this folder, the most common ones first. Each traces ops of the family of rules that has its name.
FAMILIES = (
    "linear convolution normalization activations arithmetic views softmax pooling joining factories rearranging "
    "resample casts indexing attention einsum unary comparison binary sorting reduction scattering loss distances "
    "recurrent"
).split()
TRACED: dict[str, Callable[..., Any]] = {}
_CALLED: dict[str, str] = {}  # see `traced`; of the families that are imported
_imported = 0


def traced(names: str, calls: str | None = None) -> Callable[[Function], Function]:
    """Registers a function for calls, with or without an overload: `"add sub.Tensor torchvision::nms"`. Names without a
    namespace are those of ATen. In-place calls (`relu_`) need no entry: they are the call and a write.

    `calls`: of a composite call, the one that a dispatch mode sees in its place; "" where it sees the nodes themselves.
    """

    def register(function: Function) -> Function:
        for name in names.split():
            target = name if "::" in name else f"aten::{name}"
            if calls is not None:
                _CALLED[target] = calls
            if target in TRACED:
                raise ValueError(f"two traces of {target}")
            TRACED[target] = function
        return function

    return register


def lookup(target: str) -> Callable[..., Any] | None:
    """The function for `aten::add.Tensor`, else that for `aten::add`; None for a call that the table lacks."""
    global _imported
    base = target.split(".", 1)[0]
    while True:
        function = TRACED.get(target) or TRACED.get(base)
        if function is not None or _imported == len(FAMILIES):
            return function
        import_module(f"staticmem.ops.traces.{FAMILIES[_imported]}")
        _imported += 1


def trace_of(target: str) -> Callable[..., Any]:
    """The function for a call that the table has: composite ops call others by name."""
    function = lookup(target)
    if function is None:
        raise KeyError(target)
    return function


def called_by(base: str) -> str:
    """What a dispatch mode sees of a call that is traced, without namespace (see `traced`)."""
    return _CALLED.get(base, base.removeprefix("aten::"))


def flops(node: Node) -> int:
    """Floating-point operations of a product, a convolution or an attention, as its rule counts them; 0 for all other
    calls."""
    formula = flop_formula(node.base)
    if formula is None:
        return 0
    forms = {str(k): arg.form for k, arg in enumerate((*node.args, node)) if type(arg) is Node}
    shapes = {name: form.shape for name, form in forms.items() if isinstance(form, Form)}
    args = tuple([Ref(str(k)) if type(arg) is Node else arg for k, arg in enumerate(node.args)])
    return formula(Op("", node.target, args, {}, (str(len(args)),)), args, shapes)


def untraced() -> list[str]:
    """Rules without a trace of any overload; ops in place and those that only check something need none, nor do
    gradients, which code has from `torch.autograd.grad` alone: a break of the compiled graph."""
    lookup("aten::not_an_op")  # imports all families
    with_trace = {target.split(".", 1)[0] for target in TRACED}
    bases = {rule.target: rule.target.split(".", 1)[0] for rule in rules().values() if rule.state == "ruled"}
    needed = {t: base for t, base in bases.items() if not in_place(base) and not base.endswith("_backward")}
    return sorted(target for target, base in needed.items() if one_name(base) not in with_trace)
