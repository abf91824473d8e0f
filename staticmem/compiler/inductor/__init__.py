"""What Inductor makes of a graph: which values have a buffer, in which layout, in which order, and who reuses whose."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from staticmem.compiler.graphs import NodeGraph
from staticmem.compiler.inductor import movement, reductions
from staticmem.compiler.inductor.autotuning import in_templates, notes
from staticmem.compiler.inductor.fusion import Fusion
from staticmem.compiler.inductor.kernels import fallback
from staticmem.compiler.inductor.lowering import Lowering
from staticmem.compiler.inductor.order import Sizes, reorder
from staticmem.compiler.inductor.schedule import Schedule
from staticmem.compiler.inductor.wrapper import Planner, Wrapper
from staticmem.compiler.plan import Kernels, Plan
from staticmem.eager.strides import Form
from staticmem.tracing.nodes import Node

RULE_MODULES = (movement, reductions)


def schedule_of(
    graph: NodeGraph,
    *,
    backward: bool = False,
    inference: bool = False,
    visible: int | None = None,
    forms: Mapping[Node, Form] | None = None,
    donated: Collection[Node] = (),
    dynamic: bool = False,
) -> Schedule:
    """The operations of a graph after AOTAutograd, before any is fused with another. No plan changes it.

    Args:
        graph: a forward, a backward, or the graph of inference.
        visible: how many of the outputs the user sees (the others are saved for the backward); None: all.
        forms: of placeholders that have other strides than their nodes, such as what a forward saved.
        donated: placeholders whose memory this graph may write over.
        dynamic: sizes of inputs are symbols (Dynamo has seen others): no channels last, no padding.
    """
    low = Lowering(
        graph, inference=inference, backward=backward, visible=visible, forms=forms, fallback=fallback, dynamic=dynamic
    ).run()
    given = dict(zip(graph.placeholders, low.inputs, strict=True))
    return Schedule(low, [given[node] for node in donated])


def plan(graph: NodeGraph, schedule: Schedule, freeable: Collection[Node] = (), kernels: Kernels = "expected") -> Plan:
    """The plan of a graph.

    Args:
        graph: as in `schedule_of`, which made the schedule.
        freeable: placeholders that the estimate of the peak counts as freed: saved values that are no primals.
        kernels: the kernels that Inductor is expected to make; "apart": none is fused with another; "fresh": nor does
            a result take over the memory of what dies in its kernel; "templates": see `autotuning.in_templates`.
    """
    number = {node: buffer.number for node, buffer in zip(graph.placeholders, schedule.low.inputs, strict=True)}
    may_go = {number[node] for node in freeable}
    fusion = Fusion(schedule)
    fused = kernels in ("expected", "templates")
    nodes = reorder(Sizes(schedule, fusion.run() if fused else fusion.nodes, may_go))
    wrapper = Wrapper(schedule, nodes, may_go, takes_over=kernels != "fresh")
    wrapper.write()
    expected = Planner(wrapper).plan(notes(graph))
    return in_templates(expected) if kernels == "templates" else expected
