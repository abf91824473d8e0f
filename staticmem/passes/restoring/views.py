"""Views as eager code takes them: once, with writes into them in place.

`run_decompositions` makes in-place ops functional. Views of what such an op writes to are made again from the new base,
each where it is read next (torch/_functorch, "view replay"): `a, b = x.split(n)` becomes one split in the convolution
that reads `a` and one where `b` is read. Eager makes them once, in the module that has the base.

Writes into a part of a tensor, `x[a:b] = value` and `x[a:b] += y`, become the view, the op on it, and one
`slice_scatter` or `select_scatter` for each view on the way back to the base
(torch/_functorch and aten/src/ATen/FunctionalInverses.cpp).

And noise: `empty` + `bernoulli` + `div` + `mul` is stochastic depth with in-place steps, or in-place dropout.

torchvision/ops/stochastic_depth.py: `noise = torch.empty(...).bernoulli_(survival_rate); noise.div_(survival_rate)`.
ATen/native/Dropout.cpp, `_dropout_impl<inplace=true>`: `noise = empty_like(input).bernoulli_(1 - p).div_(1 - p)`.

The noise of stochastic depth has the dtype of the tensor that it multiplies. torchvision and timm make
`empty(shape, dtype=x.dtype).bernoulli_(p)` and multiply `x` by it; an export has resolved `x.dtype` to float32, which
is wrong as soon as `x` is in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile

from staticmem.ir.graph import Arg, Frame, Graph, Note, Op, Ref
from staticmem.ir.onnx_graph import Net
from staticmem.ops.registry import SIGNS, Kind, kinds_of
from staticmem.passes.edit import Ops

# Modules whose forward is one op; none of them makes a view of its input (torch/nn/modules)
_ONE_OP = tuple(
    f"torch.nn.modules.{name}."
    for name in ("conv", "linear", "batchnorm", "normalization", "pooling", "dropout", "activation", "instancenorm")
)
_NOT_ONE_OP = ("torch.nn.modules.activation.MultiheadAttention",)


def views_once(ops: Ops, net: Net) -> None:
    """Puts views together again, and where the base is known."""
    groups: dict[tuple[object, ...], list[Op]] = {}
    for op in ops.ops:
        if op is not None and "view" in kinds_of(op.base) and op.outputs and isinstance(op.args[0], Ref):
            groups.setdefault((op.target, op.args, tuple(op.kwargs.items())), []).append(op)
    for group in groups.values():
        if any(_is_one_op(op.modules) for op in group) or (len(group) > 1 and "split" in kinds_of(group[0].base)):
            _merge(ops, group)


def _is_one_op(modules: tuple[Frame, ...]) -> bool:
    return bool(modules) and modules[-1].cls.startswith(_ONE_OP) and modules[-1].cls not in _NOT_ONE_OP


def _shared(a: tuple[Frame, ...], b: tuple[Frame, ...]) -> tuple[Frame, ...]:
    return tuple(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _merge(ops: Ops, group: list[Op]) -> None:
    first = group[0]
    modules = first.modules
    for op in group[1:]:
        modules = _shared(modules, op.modules)
    maker = ops.made_by(first.args[0])
    if _is_one_op(modules):
        if maker is None:
            return
        modules = _shared(modules, maker.modules)
    outputs = []
    for position in range(max(len(op.outputs) for op in group)):
        names = [op.outputs[position] for op in group if position < len(op.outputs)]
        chosen = next((name for name in names if name in ops.outputs or ops.readers.get(name)), names[0])
        outputs.append(chosen)
        ops.renamed.update({name: chosen for name in names if name != chosen})
    for op in group[1:]:
        ops.drop(op)
    ops.put(first, replace(first, modules=modules, outputs=tuple(outputs)))


_SCATTERS = ("aten::slice_scatter", "aten::select_scatter")
_FULL = 2**63 - 1


def writes_into_parts(ops: Ops, net: Net) -> None:
    """Puts in-place writes into views back."""
    for index, op in enumerate(list(ops.ops)):
        if op is None or op.base not in _SCATTERS or len(op.args) < 2 or ops.ops[index] is not op:
            continue
        if not _write(ops, net, op):
            _assign(ops, op)


def _write(ops: Ops, net: Net, scatter: Op) -> bool:
    """Undoes the chain of scatters that ends the innermost write; `scatter` is its first one."""
    source = ops.made_by(scatter.args[1])
    if source is None or source.base in _SCATTERS or ops.only_reader(source.outputs[0]) is not scatter:
        return False
    view = ops.made_by(source.args[0]) if source.args else None
    if view is None or not _matches(view, scatter):
        return False
    chain: list[Op] = []
    current: Op | None = scatter
    inner: Op | None = view
    base: Arg = None
    while len(chain) < _STEPS and current is not None and inner is not None and _matches(inner, current):
        chain.append(current)
        base = inner.args[0]
        if current.args[0] == base and ops.made_by(base) is None:
            break
        outer = ops.only_reader(current.outputs[0])
        if outer is None or outer.base not in _SCATTERS or outer.args[1] != Ref(current.outputs[0]):
            break
        current, inner = outer, ops.made_by(base)
    last = chain[-1]
    if not isinstance(base, Ref) or last.args[0] != base:
        return False
    for op in chain[:-1]:  # the views that scatters were written into are taken again for that only
        again = ops.made_by(op.args[0])
        if again is not None and ops.only_reader(again.outputs[0]) is op:
            ops.drop(again)
        ops.drop(op)
    ops.alias(last, base.name)
    ops.put(source, _write_in_place(ops, net, source))
    return True


def _assign(ops: Ops, scatter: Op) -> None:
    """`x[a:b] = value` whose view and copy an optimiser left out, as nothing reads the view: both are put back.

    A call of `slice_scatter` in the model's code makes a new tensor: its line says so.
    """
    if (
        not scatter.outputs
        or not scatter.stack
        or "scatter" in scatter.stack[-1].text
        or not isinstance(scatter.args[1], Ref)
    ):
        return
    chain = [scatter]
    outer = ops.only_reader(scatter.outputs[0])
    while outer is not None and outer.base in _SCATTERS and outer.args[1:2] == (Ref(chain[-1].outputs[0]),):
        if not outer.outputs or len(chain) == _STEPS:
            return
        view = ops.made_by(chain[-1].args[0])
        if view is None or not _matches(view, outer) or view.args[0] != outer.args[0]:
            break
        chain.append(outer)
        outer = ops.only_reader(outer.outputs[0])
    last, base = chain[-1], chain[-1].args[0]
    if not isinstance(base, Ref) or base.name not in ops.producer or base.name in ops.outputs:
        return
    end = ops.producer[last.outputs[0]]
    if any(index > end for index in ops.readers.get(base.name, ())):
        return  # somebody reads what was there before
    part = f"{scatter.outputs[0]}::part"
    index = ops.producer[scatter.outputs[0]]
    view_of = scatter.base.removesuffix("_scatter") + (".int" if scatter.base == "aten::select_scatter" else ".Tensor")
    ops.insert(index, replace(scatter, target=view_of, args=(scatter.args[0], *scatter.args[2:]), outputs=(part,)))
    written = replace(scatter, target="aten::copy_", args=(Ref(part), scatter.args[1]), outputs=(f"{part}::written",))
    ops.insert(index, written)
    for op in chain[:-1]:
        ops.drop(op)
    ops.alias(last, base.name)


_STEPS = 64  # of views in views, at most: names may form a circle in a damaged file


def augmented_parts(ops: Ops, net: Net) -> None:
    """`x[a:b] += y` as the TorchScript exporter writes it: the sum is made anew and written to the part twice.

    The trace has `__iadd__` of the view and `__setitem__` of its result; the exporter makes an assignment of each
    (torch/csrc/jit/passes/onnx/remove_inplace_ops_for_onnx.cpp). `x[a:b] = x[a:b] + y` is written once.
    """
    writes = [op for op in ops.given if op.target == "aten::copy_" and len(op.args) > 1]
    for first, second in pairwise(writes):
        value, way = _origin(ops, first.args[1], ("expanded", "reshaped"))
        maker = ops.made_by(value)
        if maker is None or maker.base.removeprefix("aten::") not in SIGNS.values():
            continue
        if _origin(ops, second.args[1], ("expanded", "reshaped"))[0] != value:
            continue
        base, part = _origin(ops, first.args[0], ("part",))
        again, same = _origin(ops, second.args[0], ("part",))
        view, _ = _origin(ops, maker.args[0], ("part",))
        if not base == again == view or [op.args[1:] for op in part] != [op.args[1:] for op in same]:
            continue
        if len(ops.readers[maker.outputs[0]]) != 2 or maker.outputs[0] in ops.outputs:
            continue
        ops.drop(first)
        for op in (*way, *part):
            if all(ops.ops[i] in (None, *way, *part) for i in ops.readers.get(op.outputs[0], ())):
                ops.drop(op)
        namespace, _, overload = maker.target.partition(".")
        ops.put(maker, replace(maker, target=f"{namespace}_.{overload}"))


def _origin(ops: Ops, arg: Arg, kinds: Sequence[Kind]) -> tuple[Arg, list[Op]]:
    """What ops of these kinds were made of, and the ops, the last first; a damaged file may have them in a circle."""
    way: list[Op] = []
    while len(way) < _STEPS and (maker := ops.made_by(arg)) is not None and maker.args:
        if kinds_of(maker.base).isdisjoint(kinds):
            break
        way.append(maker)
        arg = maker.args[0]
    return arg, way


def _matches(view: Op, scatter: Op) -> bool:
    """Whether a scatter writes what the view reads."""
    return view.base == scatter.base.removesuffix("_scatter") and _range(view, 1) == _range(scatter, 2)


def _range(op: Op, position: int) -> tuple[Arg, ...]:
    args = op.args[position:]
    if op.base in ("aten::select", "aten::select_scatter"):
        return args
    full: tuple[Arg, ...] = (*args, *(0, 0, _FULL, 1)[len(args) :])
    dim, start, end, step = full[:4]
    return (dim, start or 0, _FULL if end is None else end, step)


def _write_in_place(ops: Ops, net: Net, op: Op) -> Op:
    if op.base == "aten::copy":
        return replace(op, target="aten::copy_")
    if op.base == "aten::fill":
        value = op.args[1]
        maker = ops.made_by(value)
        if maker is not None and maker.base in ("aten::clone", "aten::dropout") and maker.args:
            if ops.only_reader(maker.outputs[0]) is op:
                ops.drop(maker)
            value = maker.args[0]
        if isinstance(value, Ref):
            array = net.consts.get(value.name)
            value = float(array.reshape(-1)[0]) if array is not None and array.size == 1 else 0.0
        return replace(op, target="aten::fill_.Scalar", args=(op.args[0], value))
    namespace, _, overload = op.target.partition(".")
    return replace(op, target=f"{namespace}_" + (f".{overload}" if overload else ""))


def in_place_noise(ops: Ops, net: Net) -> None:
    """Puts the in-place noise ops and `dropout_` back."""
    for op in ops.of("aten::bernoulli"):
        if len(op.args) < 2:
            continue
        noise = ops.made_by(op.args[0])
        if noise is None or not noise.base.startswith("aten::empty") or ops.only_reader(noise.outputs[0]) is None:
            continue
        scaled = ops.only_reader(op.outputs[0])
        if scaled is not None and (scaled.base != "aten::div" or isinstance(scaled.args[1], Ref)):
            scaled = None
        if noise.base == "aten::empty_like" and scaled is not None and _dropout(ops, net, noise, op, scaled):
            continue
        ops.put(op, replace(op, target="aten::bernoulli_.float"))
        if scaled is not None:
            ops.put(scaled, replace(scaled, target="aten::div_.Tensor"))


def _dropout(ops: Ops, net: Net, noise: Op, draw: Op, scaled: Op) -> bool:
    """`dropout_(x, p)` from its noise, where the product of x and the noise is the only use of it."""
    product = ops.only_reader(scaled.outputs[0])
    keep = draw.args[1]
    if product is None or product.base != "aten::mul" or not isinstance(keep, float):
        return False
    x = noise.args[0]
    if x not in product.args or not isinstance(x, Ref):
        return False
    for op in (noise, draw, scaled):
        ops.drop(op)
    p = round(1.0 - keep, 12)
    ops.put(product, replace(product, target="aten::dropout_", args=(x, p, True), kwargs={}))
    _collapse(ops, net, product.outputs[0])
    return True


def _collapse(ops: Ops, net: Net, name: str) -> None:
    """Functionalisation writes a changed view back to its base and takes the view again: both are the same tensor."""
    back = ops.only_reader(name)
    if back is None or back.base not in ("aten::view", "aten::_unsafe_view", "aten::reshape"):
        return
    again = ops.only_reader(back.outputs[0])
    if again is None or again.base != back.base:
        return
    if net.shape(again.outputs[0]) == net.shape(name) and net.shape(name) is not None:
        ops.drop(back)
        ops.alias(again, name)


_FILLS = ("aten::bernoulli", "aten::div")


def follow_operand(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """`empty(size)` that only becomes noise for `x` is made `new_empty(x, size)`, which follows x's dtype."""
    readers: dict[str, list[Op]] = {}
    made_at: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        for read in op.refs():
            readers.setdefault(read, []).append(op)
        made_at.update(dict.fromkeys(op.outputs, index))
    ops = list(graph.ops)
    changed = False
    for index, op in enumerate(graph.ops):
        if op.base != "aten::empty" or len(op.outputs) != 1:
            continue
        name: str | None = op.outputs[0]
        other: str | None = None
        for _ in range(4):  # empty, bernoulli_, div_, mul
            followers = [r for r in readers.get(name or "", ()) if r.outputs]
            if not followers:
                break
            step = followers[-1]
            if step.base == "aten::mul":
                other = next((n for n in step.refs() if n != name), None)
                break
            if step.base.rstrip("_") not in _FILLS:
                break
            name = step.outputs[0]
        if other is not None and made_at.get(other, len(ops)) < index:
            kwargs = {k: v for k, v in op.kwargs.items() if k != "dtype"}
            ops[index] = replace(op, target="aten::new_empty", args=(Ref(other), *op.args), kwargs=kwargs)
            changed = True
    return (replace(graph, ops=tuple(ops)) if changed else graph), ()
