"""Features of a step: each row is a class, and the step knows none of them."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from typing import get_type_hints

import pytest

from staticmem.engine import interpreter, step
from staticmem.engine.features import FEATURES, Feature, Row


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_a_row_is_a_feature(row: Row) -> None:
    made = getattr(import_module(f"staticmem.engine.{row.module}"), row.name)
    if inspect.isfunction(made):  # it chooses between features
        made = get_type_hints(made)["return"]
    assert issubclass(made, Feature)
    moments = {name for name, value in vars(Feature).items() if callable(value) and not name.startswith("_")}
    assert moments & set(vars(made)), "it acts at no moment"


@pytest.mark.parametrize("module", [step, interpreter])
def test_a_step_knows_no_feature_by_name(module: object) -> None:
    tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    files = {f"staticmem.engine.{row.module}" for row in FEATURES}
    # the type of what a report is told of compiled code
    assert imported & files <= {"staticmem.engine.compiled_step"}
