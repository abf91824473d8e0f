"""One backward node: its formulas, and the checks of their results (`call_function`, `validate_outputs`)."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.strides import Strides
from staticmem.eager.tensor import Node, Owner, Packed, Storage, Tensor
from staticmem.ir.dtypes import DType


def cast_gradient(e: Eager, grad: Tensor, dtype: DType) -> Tensor:
    """A gradient as `dtype`: a copy, but the real part of a complex one is a view (`handle_r_to_c`)."""
    if grad.dtype.kind == "complex" and dtype.kind == "float":
        return Tensor(grad.storage, grad.shape, tuple(2 * s for s in grad.strides), dtype)
    return e.to_dtype(grad, dtype)


def apply(e: Eager, node: Node, slots: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Evaluates the formulas. Temporaries of one formula live until its end; results coexist."""
    packed, edges = node.packed, node.edges
    outputs: list[Tensor | None] = [None] * len(edges)
    if packed is not None:
        packed.unpack(e, slots)
    if slots.count(None) == len(slots):
        return outputs
    if packed is not None:
        return _apply_unpacked(e, node, packed, slots, outputs)
    _run_formulas(e, node, slots, outputs)
    return outputs


def _apply_unpacked(
    e: Eager, node: Node, packed: Packed, slots: Sequence[Tensor | None], outputs: list[Tensor | None]
) -> list[Tensor | None]:
    """Formulas refer to the saved tensors of the forward: while they run, these are the ones that came back."""
    of_forward = [(tensor, tensor.storage, tensor.strides) for tensor in packed.saved]
    present, unpacked = {}, packed.tensors()
    if len(unpacked) == len(packed.saved):  # a checkpoint that has run before has none
        for tensor, (back, _) in zip(packed.saved, unpacked, strict=True):
            present[id(tensor)] = back
            _take_place(tensor, back.storage, back.strides)
    _run_formulas(e, node, slots, outputs)
    for tensor, storage, strides in of_forward:
        _take_place(tensor, storage, strides)
    packed.applied(e)
    return [output if output is None else present.get(id(output), output) for output in outputs]


def _take_place(tensor: Tensor, storage: Storage, strides: Strides) -> None:
    tensor.storage, tensor.strides, tensor.known_form = storage, strides, None


def _run_formulas(e: Eager, node: Node, slots: Sequence[Tensor | None], outputs: list[Tensor | None]) -> None:
    edges = node.edges
    for indices, compute in node.formulas:
        needed = [edges[i] is not None for i in indices]
        if True not in needed:
            continue
        e.open_scope()
        result = compute(e, slots, needed)
        results: Sequence[Tensor | None] = [result] if isinstance(result, Tensor) or result is None else result
        e.close_scope(keep=[t for t in results if t is not None])
        for index, need, tensor in zip(indices, needed, results, strict=True):
            if need:
                outputs[index] = tensor


def validate(e: Eager, node: Node, outputs: list[Tensor | None]) -> list[tuple[Tensor, int] | None]:
    """Each output is reduced to the shape, then cast to the dtype, of the value that it is a gradient of.

    The list holds its tensors from here on, so a full-size one is released as soon as it was reduced. Returns for each
    edge the gradient and the hold that keeps it.
    """
    owner = Owner(Reason.GRADIENT, node.name, node.op)
    edges = node.edges
    for index, output in enumerate(outputs):
        if output is not None:
            if edges[index] is None:
                outputs[index] = None
            else:
                e.hold(output, owner)
    e.collect()
    for index, output in enumerate(outputs):
        edge = edges[index]
        if output is None or edge is None:
            continue
        meta = edge[0].metadata[edge[1]]
        if output.shape != meta.shape:
            reduced = e.sum_to(output, meta.shape)
            e.hold(reduced, owner)
            e.drop(output, owner)
            outputs[index] = output = reduced
        if output.dtype is not meta.dtype and meta.dtype.is_differentiable:
            cast = cast_gradient(e, output, meta.dtype)
            e.hold(cast, owner)
            e.drop(output, owner)
            outputs[index] = cast
    held = owner.held
    kept: list[tuple[Tensor, int] | None] = []
    for output in outputs:
        if output is None:
            kept.append(None)
        else:  # one tensor may be held for several edges: its last hold comes first
            index = next(k for k in range(len(held) - 1, -1, -1) if held[k][0] is output)
            kept.append(held.pop(index))
    return kept
