"""Graphs of `torch.fx` as `staticmem.tracing.nodes`: what tests compare ours with."""

from __future__ import annotations

import operator
from typing import Any

import torch

from staticmem.eager.strides import form_of
from staticmem.ir import dtypes
from staticmem.tracing.nodes import GETITEM, PLACEHOLDER, Node, Result

Nodes = tuple[list[Node], tuple[Any, ...]]


def nodes_of(graph: Any) -> Nodes:
    """The nodes of an `fx.Graph` in order, and what it returns. Attributes of the module are placeholders."""
    known: dict[Any, Node] = {}
    outputs: tuple[Any, ...] = ()
    for fx_node in graph.nodes:
        args = tuple(argument(a, known) for a in fx_node.args)
        if fx_node.op == "output":
            outputs = args[0] if isinstance(args[0], tuple) else (args[0],)
            continue
        form = form_of_value(fx_node.meta.get("val"))
        if fx_node.op in ("placeholder", "get_attr"):
            known[fx_node] = Node(PLACEHOLDER, (), form, name=str(fx_node.target))
            continue
        kwargs = {name: argument(value, known) for name, value in fx_node.kwargs.items()}
        known[fx_node] = Node(target_of(fx_node.target), args, form, kwargs)
    return list(known.values()), outputs


def target_of(target: Any) -> str:
    """As `Node.target` spells it."""
    if target is operator.getitem:
        return GETITEM
    name = str(target)
    namespace, _, rest = name.partition(".")
    return f"{namespace}::{rest.removesuffix('.default')}" if rest else name


def form_of_value(value: Any) -> Result:
    if isinstance(value, torch.Tensor):
        return form_of(tuple(value.shape), tuple(value.stride()), dtype_of(value.dtype))
    if isinstance(value, (tuple, list)):
        return tuple([form_of_value(v) for v in value])  # type: ignore[misc]
    return None


def dtype_of(dtype: Any) -> dtypes.DType:
    name = str(dtype).removeprefix("torch.")
    found: dtypes.DType = getattr(dtypes, "bool_" if name == "bool" else name)
    return found


def argument(value: Any, known: dict[Any, Node]) -> Any:
    if isinstance(value, torch.fx.Node):
        return known[value]
    if isinstance(value, (tuple, list)):
        return tuple([argument(v, known) for v in value])
    if isinstance(value, torch.dtype):
        return dtype_of(value)
    if isinstance(value, (torch.memory_format, torch.layout, torch.device)):
        return str(value).removeprefix("torch.")
    return value
