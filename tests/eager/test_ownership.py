"""Who keeps a storage alive: scopes, owners, backward nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from staticmem.eager.autograd import Formula, Grads, run_backward
from staticmem.eager.context import Eager, result_type
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Owner, Tensor
from staticmem.eager.trace import round_up
from staticmem.ir import dtypes
from staticmem.ops.arithmetic import add, mul


@pytest.fixture
def e() -> Eager:
    eager = Eager()
    eager.trace.begin("forward")
    return eager


def leaf(e: Eager, *shape: int) -> Tensor:
    tensor = e.empty(shape, dtypes.float32)
    tensor.requires_grad = True
    e.hold(tensor, Owner(Reason.MODEL, "w"))
    return tensor


def died(e: Eager, tensor: Tensor) -> bool:
    return e.trace.buffers[tensor.storage.id].died is not None


def test_a_scope_frees_what_nobody_took(e: Eager) -> None:
    e.open_scope()
    lost, kept, owned = (e.empty((4,), dtypes.float32) for _ in range(3))
    e.hold(owned, Owner(Reason.VALUE, "x"))
    e.close_scope(keep=[kept])
    assert (died(e, lost), died(e, kept), died(e, owned)) == (True, False, False)


def test_a_storage_lives_as_long_as_one_view_is_held(e: Eager) -> None:
    base = e.empty((4, 6), dtypes.float32)
    view = e.alias(base, (24,), (1,))
    first, second = Owner(Reason.VALUE, "a"), Owner(Reason.VALUE, "b")
    e.hold(base, first)
    e.hold(view, second)
    e.release(first)
    assert not died(e, base)
    e.release(second)
    assert died(e, base)


def test_holds_say_who_and_when(e: Eager) -> None:
    tensor = e.empty((4,), dtypes.float32)
    owner = Owner(Reason.FRAME, "layer1.0")
    e.hold(tensor, owner)
    e.empty((4,), dtypes.float32)
    e.release(owner)
    hold = e.trace.holds[-1]
    assert (hold.kind, hold.who, hold.buffer) == ("frame", "layer1.0", tensor.storage.id)
    assert hold.end is not None
    assert hold.end > hold.start


def test_releasing_what_is_not_held_is_an_error(e: Eager) -> None:
    tensor = e.empty((4,), dtypes.float32)
    with pytest.raises(AssertionError, match="does not hold"):
        e.drop(tensor, Owner(Reason.VALUE, "x"))


def test_a_freed_tensor_cannot_be_taken(e: Eager) -> None:
    e.open_scope()
    tensor = e.empty((4,), dtypes.float32)
    e.close_scope()
    with pytest.raises(AssertionError, match="was freed"):
        e.hold(tensor, Owner(Reason.VALUE, "x"))


def test_saved_tensors_die_with_the_result_when_there_is_no_backward(e: Eager) -> None:
    x, w = leaf(e, 4, 4), leaf(e, 4, 4)
    e.open_scope()
    hidden = add(e, x, w)
    out = mul(e, hidden, w)  # saves `hidden`
    result = Owner(Reason.VALUE, "out")
    e.hold(out, result)
    e.close_scope()
    assert not died(e, hidden)
    e.release(result)
    assert died(e, hidden)


def test_nothing_is_saved_without_gradients(e: Eager) -> None:
    x, w = leaf(e, 4, 4), leaf(e, 4, 4)
    e.grad_enabled = False
    e.open_scope()
    hidden = add(e, x, w)
    out = mul(e, hidden, w)
    e.hold(out, Owner(Reason.VALUE, "out"))
    e.close_scope()
    assert died(e, hidden)
    assert out.grad_fn is None


def test_a_parameter_without_path_to_the_loss_gets_no_gradient(e: Eager) -> None:
    used, unused = leaf(e, 4), leaf(e, 4)
    out = mul(e, used, 2.0)
    e.hold(out, Owner(Reason.VALUE, "out"))
    root = e.empty_like(out)
    grads: dict[int, Tensor] = {}
    run_backward(e, out, root, grads)
    assert id(used) in grads
    assert id(unused) not in grads


def test_a_formula_without_needed_gradient_is_not_run(e: Eager) -> None:
    x, w = e.empty((4,), dtypes.float32), leaf(e, 4)
    e.hold(x, Owner(Reason.OUTSIDE, "x"))
    ran = []

    def formula(name: str) -> Formula:
        def compute(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor | None:
            ran.append(name)
            return grads[0]

        return Formula((0 if name == "x" else 1,), compute)

    out = e.empty((4,), dtypes.float32)
    e.record("Both", out, [x, w], [formula("x"), formula("w")])
    e.hold(out, Owner(Reason.VALUE, "out"))
    run_backward(e, out, e.empty_like(out), {})
    assert ran == ["w"]


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_blocks_are_multiples_of_512_bytes(nbytes: int, expected: int) -> None:
    assert round_up(nbytes) == expected


def test_dimensioned_tensors_decide_the_dtype(e: Eager) -> None:
    half, scalar = e.empty((4,), dtypes.bfloat16), e.empty((), dtypes.float32)
    whole = e.empty((4,), dtypes.int64)
    assert result_type([half, scalar]) is dtypes.bfloat16
    assert result_type([whole, scalar]) is dtypes.float32
    assert result_type([half, e.empty((4,), dtypes.float16)]) is dtypes.float32
