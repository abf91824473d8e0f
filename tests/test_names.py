"""Names in the package say what a thing is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import staticmem
from staticmem.cli.main import HIDDEN, MODULES
from staticmem.engine.features import FEATURES
from staticmem.passes import pipeline

PACKAGE = Path(staticmem.__file__).parent
VAGUE = {"found", "made", "known", "words", "these", "stuff", "thing", "foo"}
PUBLIC = {("report/changes.py", "made")}  # a field of printed JSON keeps its name


def names_bound(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Variables, parameters, attributes and functions that a file makes, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name.strip("_"), node.lineno


def test_names_say_what_a_thing_is() -> None:
    vague = [
        f"{path}:{line} {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for path in [file.relative_to(PACKAGE).as_posix()]
        for name, line in names_bound(ast.parse(file.read_text("utf-8")))
        if name in VAGUE and (path, name) not in PUBLIC
    ]
    assert not vague


def test_the_check_sees_every_kind_of_name() -> None:
    code = "def made(known, *, words=1):\n    self.found = [these for these in known]\n"
    assert {name for name, _ in names_bound(ast.parse(code))} == {"made", "known", "words", "found", "these"}


def test_what_is_imported_late_is_there() -> None:
    """Modules that are named in texts, and imported when they are needed."""
    verbs = [(f"cli.{module}", f"add_{verb.replace('-', '_')}") for verb, module in {**MODULES, **HIDDEN}.items()]
    features = [(f"engine.{row.module}", row.name) for row in FEATURES]
    listed = [*pipeline.FX_TEXTS, *pipeline.NODES, *pipeline.EXPORTED, *pipeline.STEP, *pipeline.RECORDED]
    functions = [each.function.partition(":")[::2] for each in listed]
    passes = [(f"passes.{module}", name) for module, name in functions]
    missing = [
        f"{module}.{name}"
        for module, name in (*verbs, *features, *passes)
        if not hasattr(import_module(f"staticmem.{module}"), name)
    ]
    assert not missing
