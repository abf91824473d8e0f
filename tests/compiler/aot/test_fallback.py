"""Every op with a rule has a trace, or falls back to extern calls, or is one that `torch.compile` does not compile."""

from __future__ import annotations

from typing import Any

import pytest
from observe import Case, call, f
from our_joint import Program, grouped, traced
from suite import CASES

from staticmem.compiler.aot import fallback
from staticmem.compiler.aot.joint import NotTracedError
from staticmem.eager.context import Eager
from staticmem.eager.strides import form_of
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.registry import in_place, rule_of
from staticmem.ops.traces.registry import lookup
from staticmem.tracing.nodes import GETITEM
from staticmem.tracing.tracer import Tracer


def program_of(case: Case, pattern: tuple[bool, ...]) -> tuple[Program, list[int]]:
    """The program of a case, with what the rules say of aliases and of numbers of results."""
    e = Eager(training=False)
    e.trace.begin("forward")
    counts: list[int] = []

    def op(target: str, *args: Any, **kwargs: Any) -> Any:
        result = rule_of(target).function(e, *args, **kwargs)
        counts.append(0 if isinstance(result, Tensor) or result is None else len(result))
        return result

    flat = [e.empty(spec.shape, spec.dtype, spec.layout) for spec in case.flat]
    result = case.program(op, *grouped(case.inputs, flat))
    outputs = [result] if isinstance(result, Tensor) else [t for t in result or () if t is not None]
    seen = {tensor.storage.id for tensor in flat}
    cloned = []
    for tensor in outputs:
        cloned.append(tensor.storage.id in seen)
        seen.add(tensor.storage.id)
    written = any(in_place(t.split(".", 1)[0]) for t in case.targets)
    return Program(case, pattern, cloned), ([0] if written and any(pattern) else []) + counts + [0] * sum(cloned)


def _traced(target: str) -> bool:
    base, _, overload = target.partition(".")
    return lookup(target) is not None or (
        in_place(base) and lookup(f"{base[:-1]}.{overload}" if overload else base[:-1]) is not None
    )


FALLING_BACK = [case for case in CASES if len(case.targets) == 1 and not _traced(case.targets[0])]


@pytest.mark.parametrize("case", FALLING_BACK, ids=[case.name for case in FALLING_BACK])
def test_an_op_without_a_trace_is_an_extern_call(case: Case) -> None:
    pattern = case.patterns()[0]
    target = case.targets[0]
    program, counts = program_of(case, pattern)
    made = traced(program, counts)
    base = target.split(".", 1)[0]
    assert made.fallbacks in ({base[:-1] if in_place(base) else base: 1}, {})
    assert all(node.target == GETITEM or node.form is not None for node in made.nodes)


def test_what_an_extern_call_saves_and_gives() -> None:
    """`grid_sampler_2d`, or whatever has no trace, reads in its backward what the rule saves."""
    case = call("aten::cdist", f(4, 3), f(5, 3))
    made = traced(*program_of(case, (True, True)))
    forward, backward, *gradients = [node for node in made.nodes if node.args]
    assert (forward.target, forward.shape) == ("aten::cdist", (4, 5))
    assert backward.target == "aten::cdist_backward"
    assert {forward, *made.primals, *made.tangents} == set(backward.inputs)
    assert [node.shape for node in gradients] == [(4, 3), (5, 3)]
    assert made.outputs == (forward, *gradients)


def test_recurrent_layers_are_not_compiled() -> None:
    """Dynamo breaks the graph in front of nn.LSTM."""
    weights = (f(16, 3), f(16, 4), f(16), f(16))
    arguments = (True, 1, 0.0, False, False, False)
    case = call("aten::lstm.input", f(5, 2, 3), (f(1, 2, 4), f(1, 2, 4)), weights, *arguments)
    program = Program(case, (True,) * len(case.flat), [False] * 3)
    with pytest.raises(NotTracedError, match="recurrent layers"):
        traced(program, [3])


def test_an_op_that_returns_its_operand_is_no_call() -> None:
    """`x.to(x.dtype)` is x: gradients go on through it."""
    t = Tracer(training=True)
    x = t.placeholder("x", form_of((4, 8), (8, 1), dtypes.float32), needs_grad=True)
    assert fallback.call(t, rule_of("aten::to.dtype"), "aten::to.dtype", (x, dtypes.float32), {}) == [x]
    assert not t.fallbacks
