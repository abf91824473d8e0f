"""Facts of ops that other stages ask the registry for."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from staticmem import ops
from staticmem.ir.graph import Op, Ref
from staticmem.ops import argument, in_place, kinds_of, lookup, parameters, rules
from staticmem.ops.registry import FAMILIES, rule

SHARED = {"__init__", "registry", "dispatch", "onnx", "pointwise", "size_arithmetic", "tags", "whole_model_cast"}
LOADED = """
import sys
from staticmem.ops import lookup
lookup({!r})
print(*sorted(name.removeprefix("staticmem.ops.") for name in sys.modules if name.startswith("staticmem.ops.")))
"""


def test_every_file_with_rules_is_a_family() -> None:
    files = {path.stem for path in Path(ops.__file__).parent.glob("*.py")}
    assert sorted(FAMILIES) == sorted(files - SHARED)


def test_overloads_of_an_op_stand_in_one_family() -> None:
    """Else the one that is imported first would stand for an overload of the other."""
    families = defaultdict(set)
    for target, found in rules().items():
        families[target.split(".", 1)[0]].add(found.function.__module__)
    assert {target: names for target, names in families.items() if len(names) > 1} == {}


def test_a_family_is_imported_when_an_op_of_it_is_asked_for() -> None:
    def loaded(target: str) -> list[str]:
        run = [sys.executable, "-c", LOADED.format(target)]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()

    assert "attention" not in loaded("aten::conv2d")
    assert "attention" in loaded("aten::scaled_dot_product_attention")


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


def test_every_rule_states_its_facts() -> None:
    assert [target for target, found in rules().items() if not found.facts] == []


def test_an_overload_falls_back_to_its_op() -> None:
    assert lookup("aten::add.Tensor") is rules()["aten::add"]
    assert lookup("aten::max.dim") is rules()["aten::max.dim"]
    assert lookup("aten::no_such_op.default") is None


def test_a_target_has_one_rule() -> None:
    with pytest.raises(ValueError, match="two rules for aten::add"):
        rule("aten::add")(lambda e: None)
