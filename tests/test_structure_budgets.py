"""Budgets of structure: each is a number that a change may lower and never raises (docs/adr/0024)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import staticmem
from staticmem.ops.registry import rules
from staticmem.scenario.strategies import STRATEGIES

PACKAGE = Path(staticmem.__file__).parent
ROOT = Path(__file__).parents[1]

TABLES_OF_OPS = 25  # module-level constants outside of ops/ that list three or more ops; aim: 40
FILES_OF_STRATEGIES = 4  # that name a strategy of several GPUs
SKIPS_OF_FORMAT = 182  # aim: 40
NESTED_CONDITIONALS = 0  # conditional expressions within one another
PLACES_OF_COMBINATIONS = 1  # files that refuse options for others that are given
# of the package; aim: 88,000, with 1,500 for the liveness graph, 1,500 for the first minute, 4,000 for models by name,
# 4,000 for runs, 2,500 for serving engines
LINES = 112_892
WALK = {"files": 172, "functions": 1_808, "switches": 312}  # of one request; aim: 150, 1,500, 200


@cache
def sources() -> dict[str, ast.Module]:
    """The syntax of every file of the package, by its path."""
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}


def strings(node: ast.AST) -> Iterator[str]:
    """The texts within a node."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


@cache
def names_of_ops() -> frozenset[str]:
    """The names without overloads that rules are registered for."""
    return frozenset(name.split("::")[-1].split(".")[0] for name in rules())


def tables_of_ops() -> list[str]:
    """Constants outside of the room of ops that list three or more of them."""
    tables = []
    for path, tree in sources().items():
        if path.startswith("ops/"):
            continue
        for node in tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            listed = [word.split("::")[-1].split(".")[0] for text in strings(node.value) for word in text.split()]
            ops = [word for word in listed if word in names_of_ops()]
            if len(ops) >= 3 and 2 * len(ops) >= len(listed):
                tables.append(f"{path}:{node.lineno}")
    return tables


def test_what_is_known_of_ops_stands_in_their_room() -> None:
    assert len(tables_of_ops()) <= TABLES_OF_OPS


def test_strategies_are_named_where_they_are_declared() -> None:
    naming = [path for path, tree in sources().items() if set(strings(tree)) & set(STRATEGIES)]
    assert len(naming) <= FILES_OF_STRATEGIES, naming


def test_a_formatter_writes_the_code() -> None:
    assert sum(path.read_text("utf-8").count("# fmt: skip") for path in PACKAGE.rglob("*.py")) <= SKIPS_OF_FORMAT


def test_conditions_are_read_one_at_a_time() -> None:
    nested = [
        f"{path}:{node.lineno}"
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.IfExp) and any(isinstance(part, ast.IfExp) for part in (node.body, node.orelse))
    ]
    assert len(nested) <= NESTED_CONDITIONALS


def test_combinations_are_refused_in_one_place() -> None:
    """A file counts that has a text which says that options cannot be combined, or that one needs another."""
    said = re.compile(r"cannot be combined|both given|needs (--|\{)")
    refusing = {path for path, tree in sources().items() if any(map(said.search, strings(tree)))}
    assert len(refusing) <= PLACES_OF_COMBINATIONS, refusing


def test_the_package_does_not_grow_by_itself() -> None:
    assert sum(len(path.read_text("utf-8").splitlines()) for path in PACKAGE.rglob("*.py")) <= LINES


def test_one_request_can_be_followed() -> None:
    """What `analyze models/resnet50.onnx --optimizer adam` runs through."""
    command = [sys.executable, str(ROOT / "benchmarks" / "walk.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    walked = dict(zip(printed[1::2], map(int, printed[::2]), strict=True))
    assert {name: count for name, count in walked.items() if count > WALK[name]} == {}
