"""In-place ops without writes: a tensor that was written to has a new value from then on, and so have its views.

A write to a view goes to its base by the inverse of the view (`slice_scatter`), and views are made again from the base
when they are next read. In the backward, autograd cuts what the write hid out of the base's gradient.

Sources: torch/_subclasses/functional_tensor.py, aten/src/ATen/FunctionalStorageImpl.cpp (`apply_update`),
FunctionalInverses.cpp, torch/csrc/autograd/functions/tensor.cpp (`CopySlices::apply`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from staticmem.compiler.edit import replace_arguments
from staticmem.eager import strides as layout
from staticmem.ops.tags import TRACED_VIEWS
from staticmem.ops.traces.views import view as view_again
from staticmem.tracing.nodes import GETITEM, PLACEHOLDER, Node
from staticmem.tracing.tracer import Gradients, Tracer

_SPLITS = ("aten::split", "aten::split_with_sizes")
Replay = Callable[[Node], Node]


class _View:
    """What autograd knows of a view: its base, and the calls that make it."""

    __slots__ = ("base", "replays")

    def __init__(self, base: Node, replays: tuple[Replay, ...]) -> None:
        self.base, self.replays = base, replays


class _Outdated:
    """A view whose base was written to, until it is read."""

    __slots__ = ("value", "view")

    def __init__(self, view: _View) -> None:
        self.view = view
        self.value: Node | None = None


class Names(dict[str, Any]):
    """The values of names. A write asks for those of one memory, so these are found without a look at all others."""

    def __init__(self, views: dict[Node, _View]) -> None:
        super().__init__()
        self._views = views
        self._sharing: dict[Node, dict[str, None]] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        before = self._base(self.get(name))
        if before is not None:
            self._sharing[before].pop(name, None)
        base = self._base(value)
        if base is not None:
            self._sharing.setdefault(base, {})[name] = None
        super().__setitem__(name, value)

    def setdefault(self, name: str, value: Any = None) -> Any:
        if name not in self:
            self[name] = value
        return self[name]

    def sharing(self, base: Node) -> list[tuple[str, Any]]:
        """The names, with their values, that are the tensor `base` or views of it."""
        return [(name, self[name]) for name in self._sharing.get(base, ())]

    def _base(self, value: Any) -> Node | None:
        if isinstance(value, Node):
            view = self._views.get(value)
            return value if view is None else view.base
        return value.view.base if isinstance(value, _Outdated) else None


class Storages:
    """What the names of a trace share. `env` has the values of names; a write replaces those that are affected."""

    def __init__(self, t: Tracer) -> None:
        self.t = t
        self._views: dict[Node, _View] = {}
        self.env = Names(self._views)
        self._within: set[Node] = set()  # views of what nothing else sees
        self.of_module: dict[Node, Node] = {}  # the present value of a placeholder -> the placeholder

    def view_of(self, source: Any, results: Sequence[Any], replay: Callable[[Node], Sequence[Any]]) -> None:
        """Tells that `replay(source)` gave `results`, of which some may be views of `source`."""
        if not isinstance(source, Node):
            return
        before = self._views.get(source) or _View(source, ())
        root = _path(source)[0]
        for k, result in enumerate(results):
            if not isinstance(result, Node) or result is source or result in self._views:
                continue
            if _path(result)[0] is root:
                again: Replay = lambda node, k=k: _node(replay(node)[k])  # type: ignore[misc]  # noqa: E731
                self._views[result] = _View(before.base, (*before.replays, again))

    def view_within(self, results: Sequence[Any], makes: Sequence[Node]) -> None:
        """Tells that a call gave `results`, of which some are views of what it `makes`: `linear` of more than two
        dimensions is a view of a product. They are bases where a write to them cannot be traced."""
        for result in results:
            if not isinstance(result, Node) or result in self._views:
                continue
            root, path = _path(result)
            if path and root in makes and all(step.base == "aten::view" for step in path):
                again: Replay = lambda node, shape=result.shape: view_again(self.t, node, shape)  # type: ignore[misc]  # noqa: E731
                self._views[result] = _View(root, (again,))
                self._within.add(result)

    def value(self, name: str) -> Any:
        """The present value of a name; a view of what was written to is made again."""
        value = self.env.get(name)
        if value is None and name not in self.env:
            raise LookupError(f"{name} is read, which no traced call gives: a number that the data decide")
        if not isinstance(value, _Outdated):
            return value
        if value.value is None:
            node = value.view.base
            for replay in value.view.replays:
                node = replay(node)
            value.value = node
            self._views[node] = value.view
        self.env[name] = value.value
        return value.value

    def rename(self, old: Node, new: Node) -> Node:
        """`transpose_` and its like: another view in the place of one."""
        view = self._views.get(old)
        for name, value in self.env.sharing(old if view is None else view.base):
            if value is old:
                self.env[name] = new
        return new

    def write(self, old: Node, new: Node) -> Node:
        """`old` has the value `new` from now on."""
        view = self._views.get(old)
        if old in self._within and not self._can_go_to_base(old, new):
            view = None
        base = old if view is None else view.base
        written = new if view is None else self._into_base(base, old, new)
        placeholder = base if base.target == PLACEHOLDER else self.of_module.get(base)
        if placeholder is not None:
            self.t.writes[placeholder] = written
            self.of_module[written] = placeholder
        if not self.t.grad_enabled:
            self._keep_history(base, written)
        result: Any = written
        again: dict[int, _Outdated] = {}
        for name, value in self.env.sharing(base):
            if value is base:
                self.env[name] = written
                continue
            own_view = value.view if isinstance(value, _Outdated) else self._views[value]
            self.env[name] = again.setdefault(id(value), _Outdated(_View(written, own_view.replays)))
        if view is not None:
            result = again.get(id(old)) or _Outdated(_View(written, view.replays))
        return result  # type: ignore[no-any-return]

    def _keep_history(self, base: Node, written: Node) -> None:
        """A write under `torch.no_grad` leaves the history of a tensor as it was."""
        t = self.t
        t.grad_enabled = t.training
        t.record(written, [base], lambda grads, need: grads)
        t.grad_enabled = False

    def _can_go_to_base(self, old: Node, new: Node) -> bool:
        entry = self.t.entry_of(new)
        return entry is None or (entry.inputs[0] is old and self.t.is_last(entry))

    def _into_base(self, base: Node, old: Node, new: Node) -> Node:
        """The base with `new` in the place of its view `old`."""
        t = self.t
        path = _path(old)[1][len(_path(base)[1]) :]
        entry = t.entry_of(new)
        written = _inverse(t, base, path, new)
        if entry is None:
            return written
        if entry.inputs[0] is not old or not t.forget(entry):
            raise ValueError("an op that is composed of others writes to a view, which is not traced")

        def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
            grad = grads[0]
            assert grad is not None
            new_one = t.new(
                "aten::new_empty_strided", (grad, base.shape, base.strides), base.shape, base.dtype, base.strides
            )
            whole = copied(t, new_one, grad)
            part = _again(t, whole, path)
            strides = layout.dense_like(part.shape, part.strides)
            start = len(t.nodes)
            saved = _again(t, written, path)  # what the call has saved of its result is the view of the base
            results = list(entry.gradient([t.clone(part, strides)], entry.need))
            for node in t.nodes[start:]:
                if new in node.inputs:
                    replace_arguments(node, new, saved)
            hidden = results[0] if entry.need[0] else None
            if need[0]:
                hidden = t.full(part.shape, 0, part.dtype) if hidden is None else hidden
                results[0] = _inverse(t, whole, path, copied(t, part, hidden))
            return results

        return t.record(written, [base, *entry.inputs[1:]], gradient)


def copied(t: Tracer, self: Node, source: Node) -> Node:
    """`copy_` as a value: the layout of what is written to."""
    return t.new("aten::copy", (self, source), self.shape, self.dtype, self.strides)


def _node(value: Any) -> Node:
    assert isinstance(value, Node)
    return value


def _path(node: Node) -> tuple[Node, list[Node]]:
    """The tensor that a node is a view of, and the views from it to the node."""
    path: list[Node] = []
    while True:
        source = _source(node)
        if source is None:
            return node, path[::-1]
        path.append(node)
        node = source


def _source(node: Node) -> Node | None:
    """What a node is a view of, one step; a part of a split is one of what is split."""
    if node.target == GETITEM and node.inputs[0].base in _SPLITS:
        return node.inputs[0].inputs[0]
    return node.inputs[0] if node.base in TRACED_VIEWS else None


def _again(t: Tracer, base: Node, path: Sequence[Node]) -> Node:
    """The views of `path` of another base, which has the form of theirs."""
    node = base
    for view in path:
        calls = [view.inputs[0], view] if view.target == GETITEM else [view]
        for call in calls:
            args = tuple([node if arg is call.inputs[0] else arg for arg in call.args])
            node = t.node(call.target, args, call.form, call.kwargs)
    return node


def _inverse(t: Tracer, base: Node, path: Sequence[Node], new: Node) -> Node:
    """`apply_update`: the base in which the last view of `path` has the value `new`."""
    sources = [base]
    for view in path[:-1]:
        sources.append(_again(t, sources[-1], [view]))
    value = new
    for source, view in zip(reversed(sources), reversed(path), strict=True):
        value = _scattered(t, source, view, value)
    return value


def _scattered(t: Tracer, source: Node, view: Node, value: Node) -> Node:
    """FunctionalInverses.cpp, for one view."""
    base, rest = view.base, view.args[1:]
    strides = layout.dense_like(source.shape, source.strides)
    if base == "aten::alias":
        return value
    if view.target == GETITEM:
        call, part = view.args
        dim = call.args[2] if len(call.args) > 2 else 0
        sizes = [form.shape[source.dim(dim)] for form in call.form]
        start = sum(sizes[:part])
        rest = (value, dim, start, start + sizes[part])
        return t.new("aten::slice_scatter", (source, *rest), source.shape, source.dtype, strides)
    if base == "aten::view":
        return t.view(value, source.shape)
    if base == "aten::permute":
        return t.permute(value, tuple([view.args[1].index(d) for d in range(len(view.args[1]))]))
    if base == "aten::unsqueeze":
        return t.squeeze_dim(value, rest[0])
    if base == "aten::squeeze":
        dims = [d for d, size in enumerate(source.shape) if size == 1]
        if rest:
            asked = rest[0] if isinstance(rest[0], tuple) else rest[:1]
            dims = [d for d in dims if d in {source.dim(a) for a in asked}]
        for d in dims:
            value = t.unsqueeze(value, d)
        return value
    if base == "aten::expand":
        return t.sum_to(value, source.shape)
    scatter = {
        "aten::slice": "aten::slice_scatter",
        "aten::select": "aten::select_scatter",
        "aten::diagonal": "aten::diagonal_scatter",
        "aten::as_strided": "aten::as_strided_scatter",
    }.get(base)
    if scatter is None:
        raise ValueError(f"an op writes to a view by {view.target}, which is not traced")
    return t.new(scatter, (source, value, *rest), source.shape, source.dtype, strides)
