"""Plants one fault at a time in the core and lists those that no test notices.

    python scripts/faults/mutants.py --sample 100 --seed 1            # of all modules of the core
    python scripts/faults/mutants.py --module liveness/intervals.py   # every fault of one
    python scripts/faults/mutants.py --folder liveness                # every fault of one folder
    python scripts/faults/mutants.py --list --tests                   # the faults, and the tests of each module

A fault is a comparison, an operator, a number, a condition, a result or a statement that is another one, or is gone. It
is planted in a copy of the repository, and the module's tests run against the copy until one fails; tests/ mirrors the
package, so that they are found by their names (`tests_of`). A fault that none notices is printed with its place: either
a test is missing, or the two programs do the same. scripts/README.md says why this is not mutmut.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "staticmem"
CORE = ("allocators", "eager", "engine", "liveness", "ops", "parallel", "passes", "studies")  # whose figures count
COPIED = ("staticmem", "tests", "models", "scripts", "docs", "schemas", "README.md", "pyproject.toml")

# Tests that look at one area from elsewhere, quickest to fail first: they follow those of the module itself.
_BESIDE = {
    "eager/": ["tests/eager/test_by_hand.py", "tests/report/test_golden.py"],
    "engine/": ["tests/report/test_golden.py"],
    "liveness/": ["tests/eager/test_by_hand.py", "tests/report/test_golden.py"],
    "ops/": ["tests/eager/test_by_hand.py", "tests/ops/test_rules_by_hand.py", "tests/ops/test_rules.py"],
}
# Tests that compare every operator: of a module of ops/ those of its operators, by their names
_BY_OPERATOR = ("tests/ops/test_rules.py", "tests/ops/test_rules_by_hand.py")


def tests_of(module: str) -> list[str]:
    """What pytest is given for a module: tests that mirror it, those of its folder, and those that look from elsewhere.

    `tests/` mirrors the package: `allocators/peaks.py` has `tests/allocators/test_peaks*.py`; what lies deeper may also
    have its folders' names in the file's, as `ort/memory/plan.py` has
    `tests/ort/test_memory_plan.py`.
    """
    path = Path(module)
    own: list[Path] = []
    for depth in range(len(path.parts) - 1, -1, -1):
        folder = ROOT / "tests" / Path(*path.parts[:depth])
        stem = "_".join([*path.parts[depth:-1], path.stem])
        own += sorted(folder.glob(f"test_{stem}.py")) + sorted(folder.glob(f"test_{stem}_*.py"))
    folder = ROOT / "tests" / path.parent
    while not folder.is_dir():
        folder = folder.parent
    chosen = [str(file.relative_to(ROOT)) for file in own]
    chosen += [name for area, names in _BESIDE.items() if module.startswith(area) for name in names]
    if folder != ROOT / "tests":
        chosen += [str(file.relative_to(ROOT)) for file in sorted(folder.glob("test_*.py"))]
    chosen = [name for name in dict.fromkeys(chosen) if (ROOT / name).exists()]
    operators = set(re.findall(r'"aten::([a-z_0-9]+)', (PACKAGE / module).read_text(encoding="utf-8")))
    if module.startswith("ops/") and operators:
        return [*chosen, "-k", " or ".join(["by_hand", path.stem, *sorted(operators)])]
    return [name for name in chosen if name not in _BY_OPERATOR]


_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """`source`: the module with the fault; `line`, `was`, `now`: where and what it is."""

    module: str
    line: int
    was: str
    now: str
    source: str


def mutants_of(module: str, text: str) -> Iterator[Mutant]:
    """Every fault of a module: each changes one node."""
    count = len(list(_changes(ast.parse(text))))
    for number in range(count):
        tree = ast.parse(text)
        node, change = list(_changes(tree))[number]
        line = getattr(node, "lineno", 0)
        was = ast.unparse(node)
        now = change()
        yield Mutant(module, line, _short(was), _short(now), ast.unparse(ast.fix_missing_locations(tree)))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."


Change = tuple[ast.AST, Callable[[], str]]


def _changes(tree: ast.Module) -> Iterator[Change]:
    """(node, how to change it in place) for each fault; annotations, decorators and messages are left alone."""
    for parent in _bodies(tree):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(parent, name, None)
            if not isinstance(statements, list):
                continue
            for index, statement in enumerate(statements):
                if isinstance(statement, ast.stmt):
                    yield from _of_statement(statements, index, statement)


def _bodies(node: ast.AST) -> Iterator[ast.AST]:
    """Functions and what is in them; of classes and modules only their functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _blocks(child)
        elif isinstance(child, ast.ClassDef):
            yield from _bodies(child)


def _blocks(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            yield child
            yield from _blocks(child)


def _of_statement(statements: list[ast.stmt], index: int, statement: ast.stmt) -> Iterator[Change]:
    def dropped() -> str:
        statements[index] = ast.copy_location(ast.Pass(), statement)
        return "pass"

    if isinstance(statement, ast.Raise | ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assert):
        return
    calls = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call | ast.Await)
    stores = isinstance(statement, ast.Assign) and not any(isinstance(t, ast.Name) for t in statement.targets)
    if calls or stores or isinstance(statement, ast.AugAssign | ast.Continue | ast.Break | ast.Delete):
        yield statement, dropped
    if isinstance(statement, ast.If):
        yield statement.test, lambda: _set(statement, "test", ast.UnaryOp(ast.Not(), statement.test))
    result = statement.value if isinstance(statement, ast.Return) else None
    if result is not None and not (isinstance(result, ast.Constant) and result.value is None):
        yield statement, lambda: _set(statement, "value", ast.Constant(None))
    if isinstance(statement, ast.AugAssign) and type(statement.op) in _OPERATORS:
        yield statement, lambda: _set(statement, "op", _OPERATORS[type(statement.op)]())
    for field, value in ast.iter_fields(statement):
        if field in ("body", "orelse", "finalbody", "handlers", "annotation", "cases"):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.expr) and not (isinstance(item, ast.Constant) and isinstance(item.value, str)):
                yield from _of_expression(item)


def _of_expression(top: ast.expr) -> Iterator[Change]:
    strict = {id(k.value) for k in ast.walk(top) if isinstance(k, ast.keyword) and k.arg == "strict"}  # of zip()
    for node in ast.walk(top):
        if id(node) in strict:
            continue
        if isinstance(node, ast.Compare):
            for k, operator in enumerate(node.ops):
                yield node, lambda node=node, k=k, operator=operator: _compare(node, k, _COMPARED[type(operator)]())
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            yield node, lambda node=node: _set(node, "op", _OPERATORS[type(node.op)]())
        elif isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield node, lambda node=node, other=other: _set(node, "op", other)
        elif isinstance(node, ast.IfExp):
            yield node, lambda node=node: _set(node, "test", ast.UnaryOp(ast.Not(), node.test))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, lambda node=node: _set(node, "value", not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield node, lambda node=node: _set(node, "value", node.value + 1)


def _set(node: ast.AST, field: str, value: object) -> str:
    setattr(node, field, value)
    return ast.unparse(ast.fix_missing_locations(node))


def _compare(node: ast.Compare, index: int, operator: ast.cmpop) -> str:
    node.ops[index] = operator
    return ast.unparse(node)


# -- running the tests ---------------------------------------------------------------------------------------------


def run_tests(copy: Path, words: list[str], limit: float, log: Path) -> int:
    """pytest's exit code in a child of this process; -1: it took longer than `limit` seconds.

    The child is a fork that has the large libraries in memory already, and has not seen staticmem.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.environ |= {"PYTHONPATH": str(copy), "CI": "1", "PYTHONHASHSEED": "0"}
        code = 99
        try:
            import pytest

            found = importlib.util.find_spec("staticmem")  # not imported: pytest rewrites plugins as they are imported
            assert found is not None
            assert found.origin == str(copy / "staticmem" / "__init__.py"), found.origin
            code = int(pytest.main([*words, "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header"]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def preload() -> None:
    """Imports what the tests need and staticmem does not change."""
    import networkx  # noqa: F401
    import onnx  # noqa: F401

    with contextlib.suppress(ImportError):
        import torch  # noqa: F401
    if any(name.partition(".")[0] == "staticmem" for name in sys.modules):
        raise SystemExit("staticmem is in memory already: a fork would not see the copy")


def modules_of(folders: Iterable[str]) -> list[str]:
    """The modules of folders of the package, by their paths in it."""
    files = sorted(file for folder in folders for file in (PACKAGE / folder).rglob("*.py"))
    return [file.relative_to(PACKAGE).as_posix() for file in files if file.name != "__init__.py"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults that no test notices.")
    parser.add_argument("--module", action="append", default=[], help="of these modules: liveness/intervals.py, ...")
    parser.add_argument("--folder", action="append", help="of all modules in these; default: those of the core")
    parser.add_argument("--at", action="append", metavar="MODULE:LINE", help="only those of this line; may be repeated")
    parser.add_argument("--sample", type=int, help="this many, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600, help="stop after this time")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the tests of one fault")
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    parser.add_argument("--tests", action="store_true", help="print the tests of each module too")
    given = parser.parse_args()
    modules = [*given.module, *modules_of(given.folder or ([] if given.module else CORE))]
    for module in modules:
        if not (PACKAGE / module).is_file():
            parser.error(f"there is no staticmem/{module}")
    planted = [m for module in modules for m in mutants_of(module, (PACKAGE / module).read_text(encoding="utf-8"))]
    for module in modules if given.tests else ():
        print(f"{module}: {' '.join(tests_of(module))}")
    if given.at:
        planted = [mutant for mutant in planted if f"{mutant.module}:{mutant.line}" in given.at]
    print(f"{len(planted):,} faults in {len(modules)} modules", flush=True)
    if given.list:
        for mutant in planted:
            print(f"{mutant.module}:{mutant.line}: {mutant.was}  ->  {mutant.now}")
        return 0
    if given.sample is not None:
        planted = random.Random(given.seed).sample(planted, min(given.sample, len(planted)))
    preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        return plant(planted, Path(folder), given.seconds, given.limit)


def plant(planted: list[Mutant], copy: Path, seconds: float, limit: float) -> int:
    """Runs the tests with each fault; prints survivors and counts. 1 where a fault survived."""
    started, log = time.monotonic(), copy / "log.txt"
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copy / name)
    sys.dont_write_bytecode = True  # a changed module of the same size and second would not be read again
    counts: dict[str, dict[str, int]] = {}
    sound: dict[str, bool] = {}
    for mutant in planted:
        if time.monotonic() - started > seconds:
            break
        if mutant.module not in sound:
            sound[mutant.module] = run_tests(copy, tests_of(mutant.module), limit, log) == 0
            if not sound[mutant.module]:
                print(f"{mutant.module}: its tests fail without a fault\n{log.read_text()[-1500:]}", flush=True)
        if not sound[mutant.module]:
            continue
        path = copy / "staticmem" / mutant.module
        original = path.read_text(encoding="utf-8")
        path.write_text(mutant.source, encoding="utf-8")
        code = run_tests(copy, tests_of(mutant.module), limit, log)
        path.write_text(original, encoding="utf-8")
        result = {0: "survived", -1: "timed out"}.get(code, "killed")
        of = counts.setdefault(mutant.module, {"killed": 0, "timed out": 0, "survived": 0})
        of[result] += 1
        if result == "survived":
            print(f"{mutant.module}:{mutant.line}: {mutant.was}  ->  {mutant.now}", flush=True)
    for module, of in counts.items():
        print(f"{module}: " + ", ".join(f"{number} {word}" for word, number in of.items()))
    total = {word: sum(of[word] for of in counts.values()) for word in ("killed", "timed out", "survived")}
    print(f"all: {', '.join(f'{number} {word}' for word, number in total.items())}")
    return total["survived"] > 0 or not all(sound.values())


if __name__ == "__main__":
    raise SystemExit(main())
