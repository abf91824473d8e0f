"""Routed experts in a decode step, which transformers multiplies in another way than in the prefill.

The prefill sorts tokens by expert and runs `_grouped_mm`; a decode step on a GPU copies the weights of the experts that
each token goes to, and runs `bmm`. Source: transformers 5.23, generation/utils.py, `_optimize_model_for_decode`;
integrations/moe.py, `batched_mm_experts_forward` and `_batched_linear`.
"""

from __future__ import annotations

from dataclasses import replace

from staticmem.ir.graph import NO_KWARGS, Arg, Frame, Graph, Op, Ref
from staticmem.passes.edit import with_named_ops
from staticmem.passes.requested.generation.draft import readers, renamed
from staticmem.passes.requested.generation.reading import ref_name

_GROUPED = "aten::_grouped_mm"


def with_batched_experts(graph: Graph) -> Graph:
    """The graph of a decode step, with `bmm` over copied weights where the file has grouped products."""
    by_module: dict[tuple[Frame, ...], list[Op]] = {}
    for op in graph.ops:
        if op.base == _GROUPED and any(frame.cls.startswith("transformers.") for frame in op.modules):
            by_module.setdefault(op.modules, []).append(op)
    for products in by_module.values():
        graph = _batched(graph, products)
    return graph


def _batched(graph: Graph, products: list[Op]) -> Graph:
    """The graph with the products of one module call replaced; as it is where they are not those of the source."""
    modules = products[0].modules
    maker = {name: op for op in graph.ops for name in op.outputs}
    own = [op for op in graph.ops if op.modules[: len(modules)] == modules]
    sort = next((op for op in own if op.base == "aten::sort"), None)
    if sort is None or len(sort.outputs) < 2:
        return graph
    order, ids = sort.outputs[1], ref_name(sort.args[0])
    tokens = next((op for op in own if op.base == "aten::floor_divide" and ref_name(op.args[0]) == order), None)
    back = next((op for op in own if op.base == "aten::index_put_"), None)
    if tokens is None or back is None:
        return graph
    inverse = {ref_name(back.args[0]), *back.outputs}
    gone = {sort.name, tokens.name, back.name, *(maker[name].name for name in inverse if name in maker)}
    names: dict[str, str] = {sort.outputs[0]: ids}  # biases are those of the experts in the order of tokens
    ends: dict[str, str] = {}
    ops: list[Op] = []
    selected: list[str] = []
    biases: list[Op] = []  # selected after the weights
    last = own[-1].name
    for op in graph.ops:
        inside = op.modules[: len(modules)] == modules
        rows = ref_name(op.args[1][0]) if op.base == "aten::index" and isinstance(op.args[1], tuple) else ""
        if op.name in gone:
            continue
        if inside and rows == sort.outputs[0]:
            biases.append(renamed(op, names))
            continue
        if inside and rows == tokens.outputs[0]:
            ops += _repeated(renamed(op, names), tokens.args[1])
        elif inside and rows and (rows == order or rows in inverse):
            names[op.outputs[0]] = names.get(ref_name(op.args[0]), ref_name(op.args[0]))
        elif inside and op.base == _GROUPED:
            new = _product(renamed(op, names), maker.get(ref_name(op.args[1])), ids)
            for weights in selected:
                ends[weights] = new[0].name
            selected = [new[0].outputs[0]]
            ends |= {value.outputs[0]: op.name for value in new[1:-1]}
            ops += [new[0], *biases, *new[1:]]
            biases.clear()
        else:
            ops.append(renamed(op, names))
    ends |= dict.fromkeys(selected, last)
    return with_named_ops(graph, _without_unread(ops, own, graph.outputs), ends, names)


def _repeated(op: Op, times: Arg) -> list[Op]:
    """`hidden_states.repeat_interleave(num_top_k, dim=0)` in place of the rows that were sorted."""
    return [replace(op, target="aten::repeat_interleave.self_int", args=(op.args[0], times, 0))]


def _product(op: Op, turned: Op | None, ids: str) -> list[Op]:
    """`bmm(weights[ids], x.unsqueeze(-1)).squeeze(-1)`; the last op has the name of the grouped product. `turned` makes
    its weights where they are no parameter as it is."""
    name, transposed = op.outputs[0], turned is None or turned.base != "aten::transpose"
    source = ref_name(op.args[1]) if turned is None or transposed else ref_name(turned.args[0])
    axis = 1 if transposed else -1

    def call(part: str, target: str, *args: Arg) -> Op:
        return Op(f"{op.name}.{part}", target, args, NO_KWARGS, (f"{name}.{part}",), op.modules)

    chosen = call("weights", "aten::index.Tensor", Ref(source), (Ref(ids),))
    column = call("column", "aten::unsqueeze", op.args[0], axis)
    pair = (Ref(column.outputs[0]), Ref(chosen.outputs[0]))
    result = call("bmm", "aten::bmm", *(pair if transposed else pair[::-1]))
    squeezed = replace(op, target="aten::squeeze.dim", args=(Ref(result.outputs[0]), axis), kwargs=NO_KWARGS)
    return [chosen, column, result, squeezed]


def _without_unread(ops: list[Op], own: list[Op], outputs: tuple[str, ...]) -> list[Op]:
    """Without the ops of the module that only led to the offsets of groups."""
    names = {op.name for op in own}
    while True:
        read = readers(ops)
        left = [op for op in ops if op.name not in names or any(n in read or n in outputs for n in op.outputs)]
        if len(left) == len(ops):
            return left
        ops = left
