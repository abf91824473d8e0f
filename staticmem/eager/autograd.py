"""Autograd's nodes and its engine, as PyTorch runs them, over tensors without data.

Sources: torch/csrc/autograd/engine.cpp (`evaluate_function`, `call_function`, `validate_outputs`: order of release and
of accumulation; `ReadyQueue`: highest sequence number first), input_buffer.cpp (`can_accumulate_inplace`),
functions/accumulate_grad.h (when a gradient is stolen), accumulate_grad.cpp (a leaf that needs none any more).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from staticmem.eager import strides as layout
from staticmem.eager.calls import RepeatedNode, backward_again
from staticmem.eager.context import Eager
from staticmem.eager.evaluate import apply, cast_gradient, validate
from staticmem.eager.reasons import Reason
from staticmem.eager.recording import recorded_backward
from staticmem.eager.tensor import TOP_PRIORITY, Formula, Grads, Node, Owner, TakingNode, Tensor, gradient_edge
from staticmem.eager.trace import Addition

__all__ = ["Formula", "Grads", "InputBuffer", "cast_gradient", "free_graph", "inner_backward", "run_backward"]


_RAN: list[tuple[Node, int] | None] = []  # `edges` of a node that has run


class AskedBackward:
    """A backward that the code asks for. `captures`: as `torch.autograd.grad`, which takes the gradients themselves.
    `owners` are those of the gradients, by id(leaf)."""

    def __init__(self, captures: bool) -> None:
        self.captures, self.owners = captures, dict[int, Owner]()


class InputBuffer(Owner):
    """Gradients that wait for a node: one slot for each of its forward outputs. It holds them."""

    __slots__ = ("slots",)

    def __init__(self, node: Node) -> None:
        self.kind, self.who, self.op = Reason.GRADIENT, node.name, node.op
        self.held = []
        self.slots: list[Tensor | None] = [None] * len(node.metadata)


def run_backward(
    e: Eager,
    roots: Tensor | Sequence[Tensor],
    gradients: Tensor | Sequence[Tensor],
    grads: dict[int, Tensor],
    retain_graph: bool = False,
    of_code: AskedBackward | None = None,
) -> set[int]:
    """Runs the graph below one root or several, as `torch.autograd.backward`. `grads` maps id(parameter) to its
    `.grad`; owners are recorded in `e`. Returns the ids of the parameters that a gradient came to.

    `gradients` are those of the roots; the caller owns them (Python holds them for the whole of backward).
    `retain_graph`: what nodes have saved stays until `free_graph`. `of_code`: the code that is running asks for it.
    """
    roots = [roots] if isinstance(roots, Tensor) else roots
    gradients = [gradients] if isinstance(gradients, Tensor) else gradients
    received: set[int] = set()
    order = 0
    waiting: dict[Node, InputBuffer] = {}
    ready: list[tuple[int, int, Node, InputBuffer]] = []
    start = Node("GraphRoot", TOP_PRIORITY, -1)
    start.edges = [gradient_edge(root) for root in roots]
    _count_dependencies(start)
    for edge, gradient in zip(start.edges, gradients, strict=True):
        assert edge is not None
        node, slot = edge
        node.dependencies -= 1
        buffer = waiting.get(node) or InputBuffer(node)
        old = buffer.slots[slot]
        if old is None:
            buffer.slots[slot] = gradient
            e.hold(gradient, buffer)
        else:  # one output twice
            buffer.slots[slot] = both = e.pointwise("aten.add.Tensor", old, gradient)
            e.hold(both, buffer)
            e.drop(old, buffer)
        if node.dependencies:
            waiting[node] = buffer
        else:
            waiting.pop(node, None)
            order += 1
            heapq.heappush(ready, (-node.sequence, order, node, buffer))
    while ready:
        _, _, node, buffer = heapq.heappop(ready)
        e.trace.op = node.op
        if node.leaf is not None:  # the loss itself is a parameter
            _accumulate_grad(e, node.leaf, buffer, grads, received, of_code)
            continue
        if node.edges is _RAN:
            raise ValueError(
                "backward would run a second time through what an earlier micro-batch has left, which PyTorch refuses"
            )
        if e.gradient_hooks:
            _run_hooks(e, node, buffer)
        e.open_scope()
        call = recorded_backward(e, node, buffer.slots) if type(node) is RepeatedNode else None
        if call is not None:
            outputs = backward_again(e, node, call, buffer.slots)
        elif isinstance(node, TakingNode):
            outputs = validate(e, node, node.run(e, buffer, buffer.slots, retain_graph))
        else:
            outputs = validate(e, node, apply(e, node, buffer.slots))
        if e.post_hooks:
            for hook in e.post_hooks:
                hook()
            e.post_hooks.clear()
        e.release(buffer)
        if not retain_graph:
            e.forget(node)
        elif node.packed is not None:  # a checkpoint lets go of what it computed again
            node.packed.release(e)
        added = []  # `outputs` of evaluate_function has them until it returns
        leaves = []  # they have the highest sequence number, so they run before other ready nodes
        for edge, output in zip(node.edges, outputs, strict=True):
            if edge is None:
                continue
            target, slot = edge
            left = target.dependencies = target.dependencies - 1
            into = waiting.get(target) if left else waiting.pop(target, None)
            if into is None:
                into = InputBuffer(target)
                if left:
                    waiting[target] = into
            if output is not None and _add(e, into, slot, *output):
                added.append(output)
            if left:
                continue
            if target.leaf is not None:
                leaves.append((target.leaf, into))
                continue
            order += 1
            heapq.heappush(ready, (-target.sequence, order, target, into))
        for output in added:
            e.end(*output)
        if not retain_graph:
            if of_code is not None and of_code.captures:  # it lets go of leaves that the code made
                for target in [edge[0] for edge in node.edges if edge is not None and edge[0].keeps_leaf]:
                    e.unref(target)
            node.edges, node.formulas = _RAN, ()  # it does not run again: large graphs need the memory
        e.close_scope()
        if leaves:
            e.trace.op = -1
            for leaf, into in leaves:
                _accumulate_grad(e, leaf, into, grads, received, of_code)
        if e.held_by_node:
            for owner in e.held_by_node:
                e.release(owner)
            e.held_by_node.clear()
    return received


def inner_backward(
    e: Eager,
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
    retain_graph: bool,
    captures: bool,
) -> list[Tensor | None]:
    """A backward that code runs: `torch.autograd.backward`, or `torch.autograd.grad` (`captures`). Returns the
    gradients of `leaves`, which belong to the present scope; None where it has none.

    `.grad` of other leaves accumulates in `e.grads`; `torch.autograd.grad` computes nothing for them.
    """
    if not roots or None in [gradient_edge(root) for root in roots]:
        raise ValueError("autograd begins with a tensor that needs no gradient")
    seeds = Owner(
        Reason.GRADIENT, "autograd"
    )  # those of Python, which makes ones that are not given, in the roots' dtypes
    for given, root in zip(gradients, roots, strict=True):
        gradient = e.empty_like(root, kernel="aten.ones_like.default") if given is None else given
        e.hold(gradient if gradient.dtype is root.dtype else cast_gradient(e, gradient, root.dtype), seeds)
    asked = {id(leaf) for leaf in leaves}
    if captures:
        _prune([edge[0] for root in roots if (edge := gradient_edge(root)) is not None], asked)
    state = e.grad_enabled, e.saved_hooks, e.trace.op
    e.grad_enabled, e.saved_hooks = False, []
    of_code = AskedBackward(captures)
    grads = {} if captures else e.grads
    received = run_backward(e, roots, [tensor for tensor, _ in seeds.held], grads, retain_graph, of_code)
    e.grad_enabled, e.saved_hooks, e.trace.op = state
    e.received |= received - asked
    results: list[Tensor | None] = []
    for leaf in leaves:
        owner = of_code.owners.get(id(leaf))
        results.append(grads.pop(id(leaf)) if owner is not None else None)
        for held in owner.held if owner is not None else ():
            e.leave_to_scope(*held)
    e.release(seeds)
    return results


def _prune(roots: Sequence[Node], leaves: set[int]) -> None:
    """Cuts the edges that lead to none of the leaves."""
    leads: dict[Node, bool] = {}
    stack = [(node, False) for node in roots]
    while stack:
        node, below = stack.pop()
        if not below:
            if node in leads:
                continue
            leads[node] = node.leaf is not None and id(node.leaf) in leaves
            stack.append((node, True))
            stack += [(edge[0], False) for edge in node.edges if edge is not None]
        else:
            edges = [edge if edge is None or leads[edge[0]] else None for edge in node.edges]
            if edges != node.edges and type(node) is RepeatedNode:
                node.recorded = None  # its record is of a backward that needs all gradients
            node.edges = edges
            leads[node] = leads[node] or any(edge is not None for edge in node.edges)


def free_graph(e: Eager, roots: Iterable[Tensor]) -> None:
    """The graph below the roots dies: nothing refers to it any more."""
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node.edges is _RAN:
            continue
        e.forget(node)
        stack += [edge[0] for edge in node.edges if edge is not None]
        if node.leaf is None:
            node.edges, node.formulas = _RAN, ()


def leaves_below(roots: Iterable[Tensor]) -> set[int]:
    """The ids of the leaves that the backward of the roots comes to."""
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        new = {edge[0] for edge in stack.pop().edges if edge is not None} - seen
        seen |= new
        stack += new
    return {id(node.leaf) for node in seen if node.leaf is not None}


def _count_dependencies(root: Node) -> None:
    """Counts the edges to each node below `root` in `dependencies`, which the backward brings down to 0 again."""
    stack = [root]
    while stack:
        for edge in stack.pop().edges:
            if edge is not None:
                node = edge[0]
                if node.dependencies == 0:
                    stack.append(node)
                node.dependencies += 1


def _add(e: Eager, buffer: InputBuffer, slot: int, new: Tensor, hold: int) -> bool:
    """Moves a gradient, which `hold` keeps, into a slot. A second one is added, in place where nothing but the engine
    owns the first and its storage. Returns whether it was added; the caller then ends its hold."""
    old = buffer.slots[slot]
    if old is None:
        buffer.slots[slot] = new
        trace = e.trace
        trace.holds.ends[hold] = now = trace.ticks
        hold = trace.holds.take(new.storage.id, Reason.GRADIENT, buffer.who, now, buffer.op)
        buffer.held.append((new, hold))
        return False
    if old.is_dense and old.refs == 1 and old.storage.refs == 1 and not old.view:
        e.kernel("aten.add_.Tensor")
        return True
    result = e.pointwise("aten.add.Tensor", old, new)
    e.hold(result, buffer)
    buffer.slots[slot] = result
    e.drop(old, buffer)
    return True


def _accumulate_grad(
    e: Eager,
    leaf: Tensor,
    buffer: InputBuffer,
    grads: dict[int, Tensor],
    received: set[int],
    of_code: AskedBackward | None,
) -> None:
    """`.grad` takes the gradient itself where it has no other owner and the parameter's strides, else a clone."""
    new = buffer.slots[0]
    if new is None:
        return
    if not leaf.requires_grad:  # the code has switched it off since
        e.release(buffer)
        return
    if e.gradient_hooks and leaf.accumulate is not None:
        _run_hooks(e, leaf.accumulate, buffer)
        new = buffer.slots[0] or new
    received.add(id(leaf))
    steals = new.refs == 1 and (
        new.strides == leaf.strides or _same_layout(new, leaf) or (not leaf.is_dense and new.is_contiguous)
    )
    if grads.get(id(leaf)) is not None:  # gradient accumulation over micro-batches, or a second backward
        e.kernel("aten.add_.Tensor")
        e.trace.additions.append(Addition(leaf.name, new.storage.id, steals, e.trace.ticks))
        e.release(buffer)
        return
    if steals or (of_code is not None and of_code.captures):
        grad = new
    else:
        strides = leaf.strides if leaf.is_dense else layout.contiguous_strides(leaf.shape)
        grad = e.empty(leaf.shape, new.dtype, strides, "aten.new_empty_strided.default")
    grads[id(leaf)] = grad
    grad.name = leaf.name
    owner = Owner(Reason.GRAD, leaf.name)
    e.hold(grad, owner)
    e.release(buffer)
    if of_code is not None:
        of_code.owners[id(leaf)] = owner
    e.categorise(grad, "gradient", f"{leaf.name}.grad")


def _run_hooks(e: Eager, node: Node, buffer: InputBuffer) -> None:
    """Runs the hooks of the gradients that have arrived at a node."""
    for hook in e.gradient_hooks.get(node, ()):
        hook(buffer)


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Strides agree wherever a dimension has more than one element (`obeys_layout_contract`)."""
    return all(s == t for s, t, size in zip(a.strides, b.strides, b.shape, strict=True) if size > 1)
