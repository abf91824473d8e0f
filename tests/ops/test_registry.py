"""Facts of ops that other stages ask the registry for."""

from __future__ import annotations

from staticmem.ir.graph import Op, Ref
from staticmem.ops import argument, in_place, kinds_of, parameters


def test_kinds_are_those_of_the_target_without_overload() -> None:
    assert kinds_of("aten::split") == {"split", "view"}
    assert "batch_norm" in kinds_of("aten::_native_batch_norm_legit_functional")  # no rule: exports alone have it
    assert kinds_of("mylib::unknown") == frozenset()


def test_another_name_of_an_op_is_of_the_same_kinds() -> None:
    assert kinds_of("aten::unsafe_chunk") == kinds_of("aten::chunk")


def test_what_writes_to_its_argument_ends_in_one_underscore() -> None:
    assert in_place("aten::add_")
    assert not in_place("aten::__and__")


def test_arguments_are_found_by_position_and_by_name() -> None:
    bias = Ref("bias")
    given = Op("c", "aten::conv2d", (Ref("x"), Ref("w"), bias), {}, ("y",))
    named = Op("c", "aten::conv2d", (Ref("x"), Ref("w")), {"bias": bias}, ("y",))
    assert argument(given, "bias") == argument(named, "bias") == bias
    assert argument(given, "groups") is None
    assert argument(Op("u", "mylib::unknown", (bias,), {}, ("y",)), "bias") is None
    assert parameters("aten::cosine_similarity") == ("x1", "x2", "dim", "eps")  # behind a decorator
