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
    lasting = [hold for hold in holds if hold.kind in ("model", "optimizer", "grad")]
    return tuple(dict.fromkeys(_reason(graph, buffer, hold) for hold in lasting or holds))


def _reason(graph: Graph, buffer: Buffer, hold: Hold) -> str:
    place = op_place(graph, hold.op)
    if hold.kind == "saved":
        return f"saved for the backward of {place or _loss(hold.who)}"
    if hold.kind == "recomputed":
        return f"run again for the backward of {place or _loss(hold.who)}"
    if hold.kind == "compiled":
        return f"used later by the compiled code: {short(hold.who)}" + (f", for {place}" if place else "")
    if hold.kind == "recomputed in backward":
        return f"recomputed in backward: {place or short(hold.who)}"
    if hold.kind == "checkpoint":
        return f"input of the checkpoint of {hold.who or 'the model'}, which runs again from it"
    if hold.kind == "local":
        return f"variable {hold.who} of optimizer.step()"
    if hold.kind == "gradient":
        if hold.who == "root gradient":
            return "first gradient of backward()"
        if hold.who == "AccumulateGrad":
            return "gradient on its way to its parameter"
        return f"gradient on its way to the backward of {place or _loss(hold.who)}"
    if hold.kind == "grad":
        return f"gradient of {hold.who}"
    if hold.kind == "frame":
        return f"argument of {hold.who}, which has not returned" if hold.who else "held by the model's forward"
    if hold.kind == "outputs":
        return f"{hold.who}, which the loop holds"
    if hold.kind == "value":
        return "the loss" if hold.who == "loss" else f"value {hold.who}, which is used later"
    if hold.kind == "optimizer":
        return f"optimizer state of {hold.who}"
    if hold.kind == "autocast":
        return "autocast's cache of cast weights"
    if hold.kind == "model":
        return {"parameter": "parameter", "buffer": "buffer of the model", "input": "given by the caller"}.get(
            buffer.category, "held by the model"
        )
    return f"{hold.kind} {hold.who}".strip()


def _loss(node: str) -> str:
    """A node of no op in the graph belongs to the loss (`NllLossBackward0`), or is that of compiled code."""
    return (
        f"the compiled {node[len(_COMPILED) :].removeprefix('the ')}"
        if node.startswith(_COMPILED)
        else f"the loss ({node})"
    )
