"""Views that functionalization made again where they are used.

`run_decompositions` makes in-place ops functional. Views of what such an op writes to are made again from the new
base, each where it is read next (torch/_functorch, "view replay"): `a, b = x.split(n)` becomes one split in the
convolution that reads `a` and one where `b` is read. Eager makes them once, in the module that has the base.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from staticmem.ir.graph import Frame, Op, Ref
from staticmem.ir.onnx_graph import Net
from staticmem.ops import kinds_of
from staticmem.passes.edit import Ops

# Modules whose forward is one op; none of them makes a view of its input (torch/nn/modules)
_ONE_OP = tuple(
    f"torch.nn.modules.{name}."
    for name in ("conv", "linear", "batchnorm", "normalization", "pooling", "dropout", "activation", "instancenorm")
)
_NOT_ONE_OP = ("torch.nn.modules.activation.MultiheadAttention",)


def rewrite(ops: Ops, net: Net) -> None:
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
