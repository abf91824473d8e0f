"""docs/generated/ops.md is what the registry says."""

from __future__ import annotations

from pathlib import Path

import pytest

from staticmem.ops import lookup, rules
from staticmem.ops.document import render
from staticmem.ops.registry import rule

DOCUMENT = Path(__file__).parents[2] / "docs" / "generated" / "ops.md"


def test_the_document_is_fresh() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), f"run: python -m staticmem.ops.document > {DOCUMENT}"


def test_every_rule_states_its_facts() -> None:
    assert [target for target, found in rules().items() if not found.facts] == []


def test_an_overload_falls_back_to_its_op() -> None:
    assert lookup("aten::add.Tensor") is rules()["aten::add"]
    assert lookup("aten::max.dim") is rules()["aten::max.dim"]
    assert lookup("aten::no_such_op.default") is None


def test_a_target_has_one_rule() -> None:
    with pytest.raises(ValueError, match="two rules for aten::add"):
        rule("aten::add")(lambda e: None)
