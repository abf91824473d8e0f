"""Our joint graph of a case of tests/ops, without PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from observe import Case

from staticmem.compiler.aot import joint
from staticmem.compiler.graphs import JointGraph
from staticmem.eager.strides import form_of
from staticmem.ir.graph import Graph, Op, Ref, Value
from staticmem.ops.registry import in_place
from staticmem.tracing.nodes import Node


@dataclass
class Program:
    """A case with clones where they are needed."""

    case: Case
    pattern: tuple[bool, ...]
    cloned: list[bool]  # which results share memory with an input or with another result

    def run(self, op: Callable[..., Any], flat: Sequence[Any]) -> list[Any]:
        def call(target: str, *args: Any, **kwargs: Any) -> Any:
            if in_place(target.split(".", 1)[0]):
                written = next((k for k, value in enumerate(flat) if value is args[0]), None)
                if written is not None and any(self.pattern):
                    args = (op("aten::clone", args[0]), *args[1:])
            return op(target, *args, **kwargs)

        result = self.case.program(call, *grouped(self.case.inputs, flat))
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        outputs = [out for out in outputs if out is not None]
        return [op("aten::clone", out) if cloned else out for out, cloned in zip(outputs, self.cloned, strict=True)]


def grouped(inputs: Sequence[Any], flat: Sequence[Any]) -> list[Any]:
    """Inputs one by one as the case groups them in lists."""
    given = iter(flat)
    return [[next(given) for _ in spec] if isinstance(spec, tuple) else next(given) for spec in inputs]


def traced(program: Program, counts: Sequence[int]) -> JointGraph:
    """Our graph of a program, whose calls have so many results in a list, 0 for one that is no list.

    Raises:
        NotTracedError: the table lacks a call.
    """
    given = iter(counts)
    ops: list[Op] = []

    def op(target: str, *args: Any, **kwargs: Any) -> Any:
        count = next(given)
        names = tuple([f"{len(ops)}.{k}" for k in range(count or 1)])
        arguments = tuple([tuple(a) if isinstance(a, list) else a for a in args])
        ops.append(Op(f"op{len(ops)}", target, arguments, kwargs, names))
        return tuple([Ref(name) for name in names]) if count else Ref(names[0])

    case = program.case
    refs = [Ref(f"in{k}") for k in range(len(case.flat))]
    outputs = tuple([ref.name for ref in program.run(op, refs)])
    values = [Value(ref.name, spec.dtype, spec.shape) for ref, spec in zip(refs, case.flat, strict=True)]
    graph = Graph("case", "pt2", "", tuple(values), (), (), tuple(ops), outputs)
    forms = {r.name: form_of(s.shape, s.layout, s.dtype) for r, s in zip(refs, case.flat, strict=True)}
    needed = {ref.name for ref, needs in zip(refs, program.pattern, strict=True) if needs}
    return joint.trace(graph, 0, len(ops), forms, needed, outputs, training=True)


def ours(program: Program, counts: Sequence[int]) -> tuple[list[Node], tuple[Any, ...]]:
    """The nodes of our graph, and what it returns: gradients in the order of the inputs."""
    made = traced(program, counts)
    by_name = dict(zip([p.name for p in made.primals], made.outputs[made.forward_outputs :], strict=True))
    names = [f"in{k}" for k in range(len(program.pattern))]
    gradients = tuple([by_name.get(name) for name in names]) if made.tangents else ()
    return list(made.nodes), (*made.outputs[: made.forward_outputs], *gradients)
