"""Small graphs by hand: `make(x=(2, 3))` has the inputs, `call` adds an op and gives its result to the next."""

from __future__ import annotations

from typing import Any

from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Frame, Graph, Op, Parameter, Ref, SourceLine, Value


class Builder:
    """Collects ops; results are named after their order (`v0`, `v1`) unless `name` is given."""

    def __init__(self, **inputs: tuple[int, ...]) -> None:
        self.inputs = [Value(name, dtypes.float32, shape) for name, shape in inputs.items()]
        self.parameters: list[Parameter] = []
        self.buffers: list[Parameter] = []
        self.ops: list[Op] = []
        self.modules: tuple[Frame, ...] = ()
        self.stack: tuple[SourceLine, ...] = ()

    def input(self, name: str, *shape: int, dtype: DType = dtypes.float32) -> Ref:
        self.inputs.append(Value(name, dtype, shape))
        return Ref(name)

    def parameter(self, fqn: str, *shape: int) -> Ref:
        self.parameters.append(Parameter(Value(fqn, dtypes.float32, shape), fqn))
        return Ref(fqn)

    def within(self, *frames: str, root: str = "Net") -> Builder:
        """The modules of the next ops: `path:Class`, or `path:Class@n` for a repeated call."""
        made = [Frame("", root)]
        for text in frames:
            path, _, cls = text.partition(":")
            cls, _, number = cls.partition("@")
            made.append(Frame(path, cls, int(number or 0)))
        self.modules = tuple(made)
        return self

    def call(self, target: str, *args: Any, name: str = "", outputs: tuple[str, ...] = (), **kwargs: Any) -> Ref:
        name = name or f"v{len(self.ops)}"
        outputs = outputs or (name,)
        self.ops.append(Op(name, f"aten::{target}", args, kwargs, outputs, modules=self.modules, stack=self.stack))
        return Ref(outputs[0])

    def graph(self, *outputs: Ref) -> Graph:
        return Graph(
            "g", "pt2", "test", tuple(self.inputs), tuple(self.parameters), tuple(self.buffers), tuple(self.ops),
            tuple(r.name for r in outputs),
        )  # fmt: skip


def targets(graph: Graph) -> list[str]:
    """What a graph calls, without the namespace."""
    return [op.target.removeprefix("aten::") for op in graph.ops]
