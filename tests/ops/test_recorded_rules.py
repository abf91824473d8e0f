"""What is recorded of a rule and repeated is what the rule does: buffers, kernels and holds, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
from observe import Case
from our_side import Run
from suite import CASES

from staticmem.eager.calls import call_again
from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.recording import record_call
from staticmem.eager.tensor import Owner, Tensor
from staticmem.eager.trace import Trace
from staticmem.engine.call_records import call_of, tensors_of
from staticmem.ir import dtypes
from staticmem.ops import lookup

# ops that make up most of every network: a change that makes one of them unrepeatable makes large graphs slow
COMMON = {
    "aten::conv2d", "aten::relu", "aten::relu_", "aten::add.Tensor", "aten::mul.Tensor", "aten::linear", "aten::matmul",
    "aten::layer_norm", "aten::batch_norm", "aten::gelu", "aten::softmax.int", "aten::view", "aten::transpose.int",
    "aten::permute", "aten::cat", "aten::embedding", "aten::split.Tensor", "aten::dropout", "aten::max_pool2d",
}  # fmt: skip


class Repeated(Run):
    """A case whose rules are recorded first, and then repeated."""

    def op(self, target: str, *args: Any, **kwargs: Any) -> Any:
        rule = lookup(target)
        assert rule is not None
        operands = tensors_of((*args, *kwargs.values()))
        call = record_call(self.e, call_of(rule, args, kwargs), operands) if self.e.autocast is None else None
        if call is None:
            return super().op(target, *args, **kwargs)
        SEEN.add(target)
        results = call_again(self.e, call, operands, True)
        return results[0] if len(results) == 1 else tuple(results)


SEEN: set[str] = set()


def everything(trace: Trace) -> tuple[Any, ...]:
    return (
        list(trace.kernels), list(trace.buffers), list(trace.holds), trace.ticks, trace.reads,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_record_repeats_the_rule(case: Case) -> None:
    for pattern in case.patterns():
        rule, record = Run(case, pattern, 0), Repeated(case, pattern, 0)
        assert rule.run() == record.run()
        assert everything(rule.e.trace) == everything(record.e.trace), f"with gradients for {pattern}"


def operand(e: Eager, *shape: int) -> Tensor:
    tensor = e.empty(shape, dtypes.float32)
    tensor.requires_grad = True
    e.hold(tensor, Owner(Reason.MODEL, "w"))
    return tensor


def test_a_rule_that_changes_a_view_in_place_runs_itself() -> None:
    """The history of the base moves on, which no record of one call shows."""
    e = Eager()
    e.trace.begin("forward")
    base = e.alias(operand(e, 4, 4), (4, 4), (4, 1))
    view = e.alias(base, (4,), (1,))
    view.base, view.requires_grad = base, True
    rule = lookup("aten::relu_")
    assert rule is not None
    assert record_call(e, call_of(rule, [view], {}), [view]) is None
    assert record_call(e, call_of(rule, [operand(e, 4)], {}), [operand(e, 4)]) is not None


def test_what_a_rule_raises_is_not_recorded() -> None:
    e = Eager()
    e.trace.begin("forward")
    operands = [operand(e, 2, 3), operand(e, 4, 5)]
    rule = lookup("aten::add.Tensor")
    assert rule is not None
    assert record_call(e, call_of(rule, operands, {}), operands) is None
    assert e.trace.ticks == 2  # the step itself is as it was
