"""Names in backticks in docstrings and comments of the package exist: `folder.module.name`, and paths of files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "staticmem"
DOTTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`")
FILE = re.compile(r"(?<![\w/.*])((?:staticmem|scripts|docs|tests|benchmarks|schemas)/[a-z\d_/.-]*[a-z\d](?![A-Z]))")
COMMENT = re.compile(r"(?:^|\s)#\s(.*)")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# What other programs call by a word that is also one of our folders or modules: libraries, and values of users' code
OTHERS = (
    "autocast.__", "autograd.Function", "cudnn.benchmark", "graph.__enter__", "loss.backward", "model.", "onnx.",
    "onnxruntime.", "ops.constant", "session.collect_node_memory_stats_to_file", "tensor.data", "torchao.",
)  # fmt: skip


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def places() -> dict[str, list[Path]]:
    """Folders and modules of the package by the names that imports give them."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        place = path.parent if path.stem == "__init__" else path
        found[place.stem].append(place)
    return found


@cache
def defined(tree: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    """What a module or class defines, imports or assigns, attributes that methods set on `self` included."""
    names: dict[str, ast.AST] = {}
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, DEFINITIONS):
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update({(alias.asname or alias.name).split(".")[0]: node for alias in node.names})
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = node
        if not isinstance(node, DEFINITIONS):
            waiting += ast.iter_child_nodes(node)
    if isinstance(tree, ast.ClassDef):
        attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        names.update({node.attr: node for node in attributes if isinstance(node.value, ast.Name)})
    return names


def leads_somewhere(place: Path, parts: list[str]) -> bool:
    """Whether the names `parts` are found one within the other, from a folder or module on."""
    if not parts:
        return True
    if place.is_dir():
        inner = next((p for p in (place / parts[0], place / f"{parts[0]}.py") if p.exists()), None)
        if inner is not None:
            return leads_somewhere(inner, parts[1:])
        place = place / "__init__.py"
    node = defined(parsed(place)).get(parts[0])
    if node is None:
        return False
    if isinstance(node, ast.ClassDef) and len(parts) > 1:
        return parts[1] in defined(node) or bool(node.bases)  # a base class may have it
    return True


@cache
def attributes_of_values(path: Path) -> frozenset[str]:
    """`trace.kernels`, where the code of a file reads that of a variable which is called as a module is."""
    reads = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute))
    return frozenset(f"{node.value.id}.{node.attr}" for node in reads if isinstance(node.value, ast.Name))


def texts(path: Path) -> Iterator[str]:
    """Docstrings and comments of a file."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.Module, *DEFINITIONS)):
            yield ast.get_docstring(node, clean=False) or ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if comment := COMMENT.search(line):
            yield comment[1]


def stale_names(path: Path, text: str) -> Iterator[str]:
    """Names of our folders and modules in a text that nothing has."""
    for name in DOTTED.findall(text):
        first, *rest = name.split(".")
        found = [PACKAGE] if first == "staticmem" else places().get(first, [])
        if not found or rest[-1] == "py" or name.startswith(OTHERS):
            continue
        if not any(leads_somewhere(place, rest) for place in found) and name not in attributes_of_values(path):
            yield name


def test_dotted_names_lead_somewhere() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    stale = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for text in texts(path)
        for name in stale_names(path, text)
    ]
    assert stale == []


def test_paths_of_files_lead_somewhere() -> None:
    files = [path for folder in ("staticmem", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
    stale = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for text in texts(path)
        for name in FILE.findall(text)
        if not (ROOT / name).exists() and not any(ROOT.glob(f"{name}*"))
    ]
    assert stale == []


def test_what_is_stale_is_found() -> None:
    here = PACKAGE / "liveness" / "intervals.py"
    assert list(stale_names(here, "`liveness.intervals.Lifetimes`, `liveness.lifetimes` and `units.no_such_name`")) == [
        "liveness.lifetimes",
        "units.no_such_name",
    ]
