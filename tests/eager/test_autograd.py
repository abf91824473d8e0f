"""The backward engine against PyTorch's: order, accumulation and `.grad`, by the sequence of what is allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from observe import Spec, f

from staticmem.eager.autograd import run_backward
from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Owner, Tensor
from staticmem.ir import dtypes
from staticmem.ops import lookup
from staticmem.ops.dispatch import call

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
Net = Callable[..., Any]


def mlp(op: Any, x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    hidden = op("aten::relu", op("aten::linear", x, w1, b1))
    return op("aten::log_softmax.int", op("aten::linear", hidden, w2, b2), -1)


def residual(op: Any, x: Any, w1: Any, w2: Any) -> Any:
    """Both branches of an addition receive one and the same gradient."""
    start = op("aten::mm", x, w1)
    return op("aten::add.Tensor", start, op("aten::mm", op("aten::tanh", start), w2))


def two_residuals(op: Any, x: Any, w1: Any, w2: Any) -> Any:
    return residual(op, residual(op, x, w1, w2), w1, w2)


def joined(op: Any, x: Any, w: Any) -> Any:
    a = op("aten::mm", x, w)
    return op("aten::cat", (op("aten::sigmoid", a), a, op("aten::exp", a)), 1)


def parted(op: Any, x: Any, w: Any) -> Any:
    a, b, _ = op("aten::chunk", op("aten::mm", x, w), 3, 1)
    return op("aten::mul.Tensor", op("aten::sigmoid", a), b)


def summed(op: Any, x: Any, w: Any) -> Any:
    """The gradient of `w` arrives expanded: it is not dense, so `.grad` is a clone."""
    return op("aten::sum", op("aten::add.Tensor", w, x))


def shared_by_leaves(op: Any, v: Any, w: Any) -> Any:
    return op("aten::add.Tensor", op("aten::mul.Tensor", v, 2.0), op("aten::add.Tensor", v, w))


def used_twice(op: Any, x: Any, w: Any) -> Any:
    return op("aten::mm", op("aten::mm", x, w), w)


def used_three_times(op: Any, x: Any, w: Any) -> Any:
    return op("aten::mm", op("aten::tanh", op("aten::mm", op("aten::tanh", op("aten::mm", x, w)), w)), w)


def transposed_leaf(op: Any, x: Any, w: Any) -> Any:
    """The gradient arrives transposed: another layout than the parameter's, so `.grad` is a clone."""
    return op("aten::mul.Tensor", x, op("aten::t", w))


def sliced(op: Any, x: Any, w: Any) -> Any:
    h = op("aten::mm", x, w)
    parts = [op("aten::slice.Tensor", h, 1, k, k + 2) for k in (0, 2, 4)]
    return op("aten::mul.Tensor", op("aten::mul.Tensor", parts[0], parts[1]), parts[2])


def attention(op: Any, x: Any, w: Any) -> Any:
    h = op("aten::linear", x, w)
    q, k, v = op("aten::unbind.int", op("aten::reshape", h, (2, 5, 3, 4)), 2)
    scores = op("aten::softmax.int", op("aten::matmul", q, op("aten::transpose.int", k, -2, -1)), -1)
    return op("aten::matmul", scores, v)


def broadcast(op: Any, x: Any, scale: Any, shift: Any) -> Any:
    return op("aten::gelu", op("aten::add.Tensor", op("aten::mul.Tensor", x, scale), shift))


def projections(op: Any, x: Any, a: Any, b: Any, c: Any) -> Any:
    """Three linears of one value: the first gradient is a view of a product, so the second is not added in place."""
    y = op("aten::relu", x)
    q, k, v = (op("aten::tanh", op("aten::linear", y, w)) for w in (a, b, c))
    return op("aten::add.Tensor", op("aten::mul.Tensor", q, k), v)


def two_sums_of_one_node(op: Any, x: Any, w: Any) -> Any:
    """Both gradients of the product are added to others: the first stays until the second is added, too."""
    return op("aten::add.Tensor", op("aten::add.Tensor", op("aten::mul.Tensor", w, x), x), w)


def changed_in_place(op: Any, x: Any, w: Any, scale: Any) -> Any:
    """The view is read on after the change: its history is that of the changed base."""
    h = op("aten::mm", x, w)
    view = op("aten::slice.Tensor", h, 1, 0, 2)
    op("aten::mul_.Tensor", view, scale)
    return op("aten::exp", view)


NETS: tuple[tuple[Net, tuple[Spec, ...]], ...] = (
    (mlp, (f(8, 6).fixed, f(10, 6), f(10), f(7, 10), f(7))),
    (residual, (f(8, 6).fixed, f(6, 6), f(6, 6))),
    (two_residuals, (f(8, 6).fixed, f(6, 6), f(6, 6))),
    (joined, (f(8, 6).fixed, f(6, 5))),
    (parted, (f(8, 5).fixed, f(5, 9))),
    (summed, (f(8, 6).fixed, f(8, 6))),
    (shared_by_leaves, (f(8, 6), f(8, 6))),
    (used_twice, (f(8, 6).fixed, f(6, 6))),
    (used_three_times, (f(8, 6).fixed, f(6, 6))),
    (transposed_leaf, (f(8, 6).fixed, f(6, 8))),
    (sliced, (f(8, 5).fixed, f(5, 6))),
    (attention, (f(2, 5, 8).fixed, f(12, 8))),
    (projections, (f(2, 3, 6), f(6, 6), f(6, 6), f(6, 6))),
    (two_sums_of_one_node, (f(6, 6), f(6, 6))),
    (changed_in_place, (f(8, 5).fixed, f(5, 6), f(8, 2))),
    (broadcast, (f(4, 5, 6).fixed, f(6), f(5, 1))),
)
SCALAR = 8  # bytes: Python numbers become tensors of a CPU, never of a GPU


def theirs(net: Net, specs: Sequence[Spec]) -> list[tuple[int, int]]:
    """(bytes, alive) of each allocation in backward; gradients stay in `.grad`."""
    from real_side import steps_of
    from torch_side import op

    leaves = [torch.ones(s.shape, requires_grad=s.grad is not False) for s in specs]
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = net(op, *leaves)
        with profiler.record_function("roots"):
            root = torch.ones_like(out)
        edge = torch.autograd.graph.get_gradient_edge(out)
        del out
        with profiler.record_function("backward"):
            torch.autograd.backward([edge], [root])
    return list(steps_of(profile)["backward"])


def ours(net: Net, specs: Sequence[Spec]) -> list[tuple[int, int]]:
    e = Eager(training=True)
    e.trace.begin("forward")
    values = Owner(Reason.VALUE, "variables of the program")

    def op(target: str, *args: Any) -> Any:
        rule = lookup(target)
        assert rule is not None
        made = call(e, rule, args, {})
        for value in (made,) if isinstance(made, Tensor) else made:
            e.hold(value, values)  # until the program returns: then what nothing else needs goes, with its history
        return made

    leaves = []
    for spec in specs:
        leaf = e.empty(spec.shape, dtypes.float32)
        leaf.requires_grad = spec.grad is not False
        e.hold(leaf, Owner(Reason.MODEL, ""))
        leaves.append(leaf)
    start = len(e.trace.buffers)
    e.open_scope()
    out: Tensor = net(op, *leaves)
    result = Owner(Reason.VALUE, "out")
    e.hold(out, result)
    e.release(values)
    e.close_scope()
    root = e.empty_like(out)
    held = Owner(Reason.GRADIENT, "root")
    e.hold(root, held)
    e.trace.begin("backward")
    e.grad_enabled = False
    first = len(e.trace.buffers)
    keep = Tensor(out.storage, out.shape, out.strides, out.dtype)  # a gradient edge, without the result
    keep.grad_fn, keep.output_nr, keep.requires_grad = out.grad_fn, out.output_nr, True
    assert out.grad_fn is not None
    out.grad_fn.refs += 1
    e.release(result)
    run_backward(e, keep, root, {})
    counted = [b for b in e.trace.buffers[start:] if b.id != root.storage.id and b.nbytes > SCALAR]
    return [
        (b.nbytes, sum(o.nbytes for o in counted if o.born <= b.born and (o.died is None or o.died > b.born)))
        for b in counted
        if b.id >= first
    ]


@pytest.mark.parametrize(("net", "specs"), NETS, ids=[net.__name__ for net, _ in NETS])
def test_backward_allocates_what_pytorch_allocates(net: Net, specs: Sequence[Spec]) -> None:
    assert ours(net, specs) == theirs(net, specs)


# -- programs that nobody chose ------------------------------------------------------------------------------------

UNARY = ("aten::relu", "aten::tanh", "aten::sigmoid", "aten::exp", "aten::neg", "aten::t", "aten::contiguous")
BINARY = ("aten::add.Tensor", "aten::sub.Tensor", "aten::mul.Tensor", "aten::mm")
STEP = st.tuples(st.sampled_from((*UNARY, *BINARY, *BINARY)), st.integers(0, 9), st.integers(0, 9))


def program(steps: Sequence[tuple[str, int, int]]) -> Net:
    """Each step takes values by their distance from the newest one, or leaves where there are not as many; what is
    added in the end is every leaf, so that the result needs a gradient."""

    def net(op: Any, *leaves: Any) -> Any:
        values = list(leaves)
        for target, first, second in steps:
            a, b = (values[-1 - k % len(values)] for k in (first, second))
            values.append(op(target, a) if target in UNARY else op(target, a, b))
        total = values[-1]
        for leaf in leaves:
            total = op("aten::add.Tensor", total, leaf)
        return total

    return net


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEP, max_size=12), st.integers(1, 3), st.booleans())
def test_any_program_allocates_in_backward_what_it_does_in_pytorch(
    steps: list[tuple[str, int, int]], leaves: int, fixed: bool
) -> None:
    """Gradients that meet, are shared, expanded, transposed or stolen, in whatever order."""
    specs = [f(6, 6) for _ in range(leaves)]
    if fixed:
        specs.append(f(6, 6).fixed)
    assert ours(program(steps), specs) == theirs(program(steps), specs)
