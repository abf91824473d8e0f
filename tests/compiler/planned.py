"""The plan of a graph in one call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from staticmem.compiler import inductor
from staticmem.compiler.graphs import NodeGraph
from staticmem.compiler.plan import Kernels, Plan
from staticmem.tracing.nodes import Node


def plan(graph: NodeGraph, freeable: Collection[Node] = (), kernels: Kernels = "expected", **asked: Any) -> Plan:
    """`asked`: see `inductor.schedule_of`."""
    return inductor.plan(graph, inductor.schedule_of(graph, **asked), freeable, kernels)
