"""Strides that values have in eager where inputs are not as the graph was traced with: a backward whose saved tensors
are in channels last.

Source: `fake_tensor_prop` of `torch/_inductor/compile_fx.py` (PyTorch 2.15) traces the graph again with the strides
that the forward gave; here are the rules that matter for tensors of four dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping

from staticmem.compiler.graphs import NodeGraph
from staticmem.compiler.inductor.post_grad import POINTWISE
from staticmem.eager.strides import (
    Form,
    channels_last_strides,
    contiguous_strides,
    form_of,
    pointwise_strides,
    prefers_channels_last,
    view_strides,
)
from staticmem.ops.tags import LOWERED_VIEWS
from staticmem.tracing.nodes import GETITEM, PLACEHOLDER, Node, Result


def restrided(graph: NodeGraph, given: Mapping[Node, Form]) -> dict[Node, Form]:
    """Forms of the nodes whose strides are not those of `node.form`; `given` has those of placeholders."""
    forms: dict[Node, Result] = {node: form for node, form in given.items() if form is not node.form}
    if not forms:
        return {}
    for node in graph.nodes:
        if node.target == PLACEHOLDER or not any(read in forms for read in node.inputs):
            continue
        form = _form(node, forms)
        if form is not None and form != node.form:
            forms[node] = form
    return {node: form for node, form in forms.items() if isinstance(form, Form)}


def _form(node: Node, forms: Mapping[Node, Result]) -> Result:
    if node.target == GETITEM:
        parts = forms.get(node.args[0], node.args[0].form)
        return parts[node.args[1]] if isinstance(parts, tuple) else None
    reads = [form for read in node.inputs if isinstance(form := forms.get(read, read.form), Form)]
    if node.base in ("aten::convolution", "aten::convolution_backward"):
        last = any(len(form.shape) in (4, 5) and prefers_channels_last(form.shape, form.strides) for form in reads)
        return _in_channels_last(node.form) if last else None
    if not isinstance(node.form, Form):
        return None
    shape, dtype = node.form.shape, node.form.dtype
    if node.base in POINTWISE and reads:
        operands = tuple((form.shape, form.strides) for form in reads)
        return form_of(shape, pointwise_strides(shape, operands), dtype)
    if node.base in LOWERED_VIEWS:
        return _viewed(node, reads[0])
    return None


def _viewed(node: Node, form: Form) -> Form:
    shape, strides = node.shape, None
    if node.base in ("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::squeeze", "aten::unsqueeze"):
        strides = view_strides(form.shape, form.strides, shape)
    elif node.base == "aten::permute":
        strides = tuple(form.strides[dim] for dim in node.args[1])
    elif len(shape) == len(form.shape) and node.base in ("aten::slice", "aten::alias", "aten::detach"):
        strides = form.strides
    return form_of(shape, contiguous_strides(shape) if strides is None else strides, node.tensor.dtype)


def _in_channels_last(form: Result) -> Result:
    if isinstance(form, tuple):
        return tuple(part and _last(part) for part in form)
    return form and _last(form)


def _last(form: Form) -> Form:
    if len(form.shape) not in (4, 5):
        return form
    return form_of(form.shape, channels_last_strides(form.shape), form.dtype)
