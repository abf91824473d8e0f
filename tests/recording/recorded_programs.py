"""Programs of recorded modules, and what tests ask of them."""

from __future__ import annotations

from typing import Any

from coded_models import Coded, on_meta

from staticmem.frontends.recorded import RecordedModel
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Graph, Op
from staticmem.ir.model_file import resolve
from staticmem.recording.record import record


def recorded(module: Any, *inputs: Any, loss: Any = None) -> RecordedModel:
    return RecordedModel("<m>", record(module, inputs, loss=loss), "pt2")


def graph_of(model: RecordedModel, training: bool = True, amp: DType | None = None, **symbols: int) -> Graph:
    from staticmem.frontends.recorded import decode

    graph = decode(model, resolve(model, dims=symbols or {"batch": 2} if "batch" in model.symbols else {}))
    assert graph.programs is not None
    return graph.programs.of(training, amp)


def program(cls: type[Coded], training: bool = True, amp: DType | None = None) -> Graph:
    module, inputs = on_meta(cls)
    return graph_of(recorded(module, *inputs), training, amp)


def bases(graph: Graph) -> list[str]:
    return [op.target.partition("::")[2].partition(".")[0] for op in graph.ops]


def ops_named(graph: Graph, base: str) -> list[Op]:
    return [op for op, name in zip(graph.ops, bases(graph), strict=True) if name == base]


def let_go_after(graph: Graph, op: Op) -> str | None:
    """The op after which Python lets go of what `op` made; None: at the end."""
    assert graph.recorded is not None
    index = graph.recorded.last_held.get(op.outputs[0])
    return None if index is None or index >= len(graph.ops) else bases(graph)[index]
