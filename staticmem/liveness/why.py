"""Why a buffer is alive: its owners as text."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager.trace import Buffer, Hold, Kernel
from staticmem.ir.graph import Graph

_COMPILED = "CompiledFunctionBackward of "
_FUNCTION = "staticmem::function."


def short(kernel: str) -> str:
    """The plain name of a kernel or op: `native_batch_norm` of `aten.native_batch_norm.default`, `Swish` of a custom
    function."""
    name = kernel.removeprefix("aten.").removeprefix("aten::").removeprefix("onnx::").removeprefix(_FUNCTION)
    return name.split(".", 1)[0] if kernel.startswith("aten") else name


def op_place(graph: Graph, op: int) -> str:
    """`relu in layer1.0.relu`; empty for what belongs to no op of the graph (loss, optimizer)."""
    if not 0 <= op < len(graph.ops):
        return ""
    target = graph.ops[op].target
    module = module_of_op(graph, op)
    return f"{short(target)} in {module}" if module else short(target)


def module_of_op(graph: Graph, op: int) -> str:
    """The innermost module that runs an op; empty outside of all."""
    if not 0 <= op < len(graph.ops):
        return ""
    modules = graph.ops[op].modules
    return modules[-1].path if modules else ""


def module_of(graph: Graph, category: str, name: str, op: int) -> str:
    """The module that a buffer belongs to: its owner in the model, else the module whose op (an index) made it."""
    if category in ("parameter", "buffer"):
        return name.rpartition(".")[0]
    if category in ("gradient", "optimizer_state"):
        return name.rpartition(".")[0].rpartition(".")[0]
    return module_of_op(graph, op)


def reasons(graph: Graph, kernel: Kernel, buffer: Buffer, holds: Sequence[Hold]) -> tuple[str, ...]:
    """One reason for each owner, without repetition. `holds` are those that are open at the moment.

    Where an owner keeps the buffer for the whole step (the model, the optimizer), the other owners are left out.
    `kernel` allocated the buffer.
    """
    if not holds:
        return (f"in use by {short(kernel.name)}",)
    lasting = [hold for hold in holds if hold.kind.lasts]
    return tuple(dict.fromkeys(_reason(graph, buffer, hold) for hold in lasting or holds))


def _reason(graph: Graph, buffer: Buffer, hold: Hold) -> str:
    place, kernel = op_place(graph, hold.op), short(hold.who)
    use = f", for {place}" if place else ""
    node, op = place or _loss(hold.who), place or kernel
    return hold.kind.sentence(buffer.category, who=hold.who, short=kernel, node=node, op=op, use=use)


def _loss(node: str) -> str:
    """A node of no op in the graph belongs to the loss (`NllLossBackward0`), or is that of compiled code."""
    return (
        f"the compiled {node[len(_COMPILED) :].removeprefix('the ')}"
        if node.startswith(_COMPILED)
        else f"the loss ({node})"
    )
