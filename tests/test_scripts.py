"""scripts/: names that tell them from the package's modules, and what they say of the package still holds."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))


def test_no_script_has_the_name_of_a_module() -> None:
    modules = {path.stem for path in (ROOT / "staticmem").rglob("*.py")}
    assert [path.name for path in SCRIPTS if path.stem in modules] == []


def test_every_script_is_in_the_readme() -> None:
    text = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in SCRIPTS if f"`{path.name}`" not in text] == []


def test_every_module_of_the_core_has_tests_that_mutants_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    mutants = importlib.import_module("mutants")
    modules = mutants.modules_of(mutants.CORE)
    assert [module for module in modules if not mutants.tests_of(module)] == []
    assert mutants.tests_of("allocators/peaks.py")[0] == "tests/allocators/test_peaks.py"
    assert mutants.tests_of("allocators/onnxruntime/plan.py")[0] == "tests/allocators/test_onnxruntime_plan.py"


def test_sources_of_fuzz_targets_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
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
