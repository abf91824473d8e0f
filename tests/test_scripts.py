"""scripts/: names that tell them from the package's modules, and what they say of the package still holds."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))


def test_no_script_has_the_name_of_a_module() -> None:
    modules = {path.stem for path in (ROOT / "staticmem").rglob("*.py")}
    assert [path.name for path in SCRIPTS if path.stem in modules] == []


def test_every_script_is_in_the_readme() -> None:
    text = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in SCRIPTS if f"`{path.name}`" not in text] == []


def imported(path: Path) -> Iterator[str]:
    """Modules that a script imports anywhere, in functions and for types alone too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_scripts_lie_in_folders_by_task() -> None:
    assert [path.name for path in SCRIPTS if path.parent.parent != ROOT / "scripts"] == []
    names = [path.stem for path in SCRIPTS]
    assert len(names) == len(set(names))


def test_scripts_import_from_their_own_folder_and_never_in_a_circle() -> None:
    folders = {path.stem: path.parent.name for path in SCRIPTS}
    edges = {path.stem: {name for name in imported(path) if name in folders} for path in SCRIPTS}
    assert sum(map(len, edges.values())) > 20
    across = {(one, other) for one, names in edges.items() for other in names if folders[one] != folders[other]}
    assert across == set()
    assert len(list(TopologicalSorter(edges).static_order())) == len(SCRIPTS)  # raises CycleError


def test_every_module_of_the_core_has_tests_that_mutants_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "faults"))
    mutants = importlib.import_module("mutants")
    modules = mutants.modules_of(mutants.CORE)
    assert [module for module in modules if not mutants.tests_of(module)] == []
    assert mutants.tests_of("allocators/peaks.py")[0] == "tests/allocators/test_peaks.py"
    assert mutants.tests_of("ort/memory/plan.py")[0] == "tests/ort/test_memory_plan.py"


def test_sources_of_fuzz_targets_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "faults"))
    importlib.import_module("fuzz_targets").check_modules()


def test_the_walk_of_a_small_model() -> None:
    """benchmarks/walk.py counts in a process of its own, without what this one has imported."""
    command = [sys.executable, str(ROOT / "benchmarks" / "walk.py"), str(ROOT / "models" / "seed.pt2"), "--packages"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    figures = dict(zip(lines[0].split()[1::2], map(int, lines[0].split()[0::2]), strict=True))
    assert set(figures) == {"files", "functions", "switches"}
    rows = [line.split() for line in lines[2:]]
    assert figures["files"] == sum(int(row[1]) for row in rows)
    assert figures["functions"] == sum(int(row[2]) for row in rows)
    assert "allocators" in {row[0] for row in rows}


def test_changes_of_a_release_name_the_files_that_they_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "releases"))
    changes = importlib.import_module("release_changes")
    before = {"aten::fmax": "one", "aten::nobody": "1", "aten::exp": "same"}
    after = {"aten::fmax": "two", "aten::exp": "same"}
    assert list(changes.compare("derivatives", before, after)) == [
        "  aten::fmax  (ops/sorting.py, ops/traces/sorting.py)",
        "    - one",
        "    + two",
        "  and 1 that nothing here relies on",
    ]


def test_facts_of_the_installed_release(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "releases"))
    facts = importlib.import_module("release_facts").collect()
    assert facts["autocast"]["aten::mm"] == "AT_FORALL_LOWER_PRECISION_FP"
    assert facts["optimizers"]["AdamW.weight_decay"] == "0.01"
    assert "pointwise" in facts["ops"]["aten::exp"]
    assert "grad * result" in facts["derivatives"]["aten::exp"]
    assert facts["decompositions"]["aten::addcmul.default"] == "core"
    assert "torch._inductor.config.max_fusion_size" in facts["settings"]
