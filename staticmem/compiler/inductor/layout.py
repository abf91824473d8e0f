"""Strides that Inductor chooses: orders, padding, and whether convolutions run in channels last.

Sources, all of PyTorch 2.15: `torch/_inductor/ir.py` (`FlexibleLayout`, `Layout._pad_strides`),
`torch/_inductor/scheduler.py` (`pick_loop_order`), `torch/_inductor/graph.py` (`decide_layout_opt`,
`find_nodes_prefer_channels_last`).

Strides that values have in eager where inputs are not as the graph was traced with: a backward whose saved tensors
are in channels last.

Source: `fake_tensor_prop` of `torch/_inductor/compile_fx.py` (PyTorch 2.15) traces the graph again with the strides
that the forward gave; here are the rules that matter for tensors of four dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cmp_to_key, lru_cache
from itertools import pairwise

from staticmem.compiler.graphs import NodeGraph
from staticmem.compiler.inductor.post_grad import POINTWISE
from staticmem.eager.strides import (
    Form,
    Shape,
    Strides,
    channels_last_strides,
    contiguous_strides,
    form_of,
    is_channels_last_contiguous,
    pointwise_strides,
    prefers_channels_last,
    view_strides,
)
from staticmem.ir.dtypes import DType
from staticmem.ops.tags import LOWERED_VIEWS
from staticmem.ops.traces.registry import flops
from staticmem.tracing.nodes import GETITEM, PLACEHOLDER, Node, Result, users_of

PADDING_BYTES = 128  # config.padding_alignment_bytes
PADDING_THRESHOLD = 1024  # config.padding_stride_threshold, in elements
NODES_PER_CONVOLUTION = 300  # decide_layout_opt: "only a few conv"
# decide_layout_opt: speed in channels last of kinds of convolutions, < 1 is faster
GROUPED, DEFAULT, IN_OUT, SMALL = 1.358, 0.823, 0.725, 0.783


def fill_ordered(shape: Shape, order: Sequence[int]) -> Strides:
    """Dense strides where `order` lists dimensions from the fastest (`FlexibleLayout.fill_ordered`)."""
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def fill_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Dimensions from the fastest (`get_fill_order`: a stable sort by stride)."""
    return tuple(sorted(range(len(strides)), key=strides.__getitem__))


def stride_order(strides: Sequence[int]) -> tuple[int, ...]:
    """The rank of each dimension (`get_stride_order`)."""
    order = [0] * len(strides)
    for rank, dim in enumerate(fill_order(strides)):
        order[dim] = rank
    return tuple(order)


def stride_ordered(shape: Shape, order: Sequence[int]) -> Strides:
    """Dense strides of this stride order."""
    return fill_ordered(shape, sorted(range(len(order)), key=order.__getitem__))


def channels_last_order(rank: int) -> tuple[int, ...]:
    return (3, 0, 2, 1) if rank == 4 else (4, 0, 3, 2, 1)  # NHWC_STRIDE_ORDER, NHWDC_STRIDE_ORDER


def is_stride_ordered(shape: Shape, strides: Strides, order: Sequence[int]) -> bool:
    """`Layout.is_stride_ordered`: dimensions of size 1 do not matter."""
    dims = [dim for dim in sorted(range(len(order)), key=order.__getitem__) if shape[dim] != 1]
    return all(strides[a] <= strides[b] for a, b in pairwise(dims))


def same_where_it_matters(one: Sequence[int], other: Sequence[int], shape: Shape) -> bool:
    """`significant_strides_equal`: strides of dimensions of size 1 do not matter."""
    return all(size <= 1 or a == b for size, a, b in zip(shape, one, other, strict=True))


@lru_cache(1 << 12)
def pad_strides(shape: Shape, strides: Strides, dtype: DType) -> Strides:
    """Strides above the threshold become multiples of 128 bytes (`Layout._pad_strides`); channels last is kept."""
    if not strides or is_channels_last_contiguous(shape, strides):
        return strides
    align = PADDING_BYTES // dtype.itemsize
    order = fill_order(strides)
    padded = [0] * len(strides)
    padded[order[0]] = 1
    changed = False
    for before, dim in pairwise(order):
        stride = padded[before] * shape[before]
        if stride > PADDING_THRESHOLD and stride % align:
            stride = -(-stride // align) * align
            changed = True
        padded[dim] = stride
    return tuple(padded) if changed else strides


def pick_loop_order(
    strides: Sequence[Sequence[int]], sizes: Sequence[int], times: Sequence[int] | None = None
) -> list[int]:
    """Loops from the innermost, by the strides of all accesses (`pick_loop_order`), each made so many times."""

    def compare(a: int, b: int) -> int:
        if sizes[a] == 1 or sizes[b] == 1:
            return (sizes[a] == 1) - (sizes[b] == 1)
        a_first = b_first = 0
        for row, count in zip(strides, times or [1] * len(strides), strict=True):
            one, other = abs(row[a]), abs(row[b])
            a_first += count * (other == 0 or one < other)
            b_first += count * (one == 0 or other < one)
        if a_first != b_first:
            return -1 if a_first > b_first else 1
        return (b > a) - (b < a)

    order = list(reversed(range(len(sizes))))  # the comparison is no order: where the sort begins matters
    order.sort(key=cmp_to_key(compare))
    return order


def decide_layout_opt(graph: NodeGraph, inference: bool) -> bool:
    """Whether the convolutions of this graph run in channels last (`GraphLowering.decide_layout_opt`, CUDA).
    A backward has none that counts: there each follows the strides that it has in eager."""
    convolutions = [node for node in graph.nodes if node.target == "aten::convolution"]
    # PyTorch counts the node "output" too
    if not convolutions or len(graph.nodes) + 1 >= NODES_PER_CONVOLUTION * len(convolutions):
        return False
    kinds = [_kind(node) for node in convolutions]
    if inference:
        counted = {GROUPED: 0, DEFAULT: 0, IN_OUT: 0, SMALL: 0}
        for node, (grouped, narrows, small) in zip(convolutions, kinds, strict=True):
            of_sizes = ((grouped, GROUPED), (small, SMALL), (narrows, IN_OUT), (True, DEFAULT))
            kind = next(kind for holds, kind in of_sizes if holds)
            counted[kind] += flops(node)
        return sum(kind * count for kind, count in counted.items()) <= sum(counted.values())
    return not (
        any(grouped for grouped, _, _ in kinds)
        or any(narrows for _, narrows, _ in kinds)
        or all(small for _, _, small in kinds)
    )


def _kind(node: Node) -> tuple[bool, bool, bool]:
    """A convolution is grouped with more than one channel each; has half the channels behind it; is small."""
    weight = node.args[1].shape
    groups = node.args[8]
    narrows = weight[0] * 2 <= weight[1] and len(weight) > 2 and weight[2] > 1
    return groups > 1 and weight[1] > 1, narrows, weight[0] <= 64 and weight[1] <= 64


def prefer_channels_last(graph: NodeGraph) -> set[Node]:
    """Convolutions, what leads to them, and what reads of that before the last one
    (`find_nodes_prefer_channels_last`)."""
    users = users_of(graph.nodes)
    last = None
    preferring: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.target == "aten::convolution":
            preferring.add(node)
            last = last or node
        elif node.target != "aten::bmm" and any(user in preferring for user in users[node]):
            preferring.add(node)
    for node in graph.nodes:
        if node is last:
            break
        if node in preferring:
            preferring.update(user for user in users[node] if user.target != "aten::bmm")
    return preferring


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
