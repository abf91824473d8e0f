"""scripts/classes/class_tables.py: a run that was stopped goes on, and what no model shows again stays in the table."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")  # what the script watches

SCRIPTS = Path(__file__).parents[3] / "scripts" / "classes"
VERSIONS = "lib 1.0"
TABLE = "passes/frames/published_names.json"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, with a table of one class in a package of its own."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("class_names", "class_tables"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    made = importlib.import_module("class_tables")
    monkeypatch.setattr(made, "PACKAGE", tmp_path)
    (tmp_path / TABLE).parent.mkdir(parents=True)
    text = json.dumps({"about": "", "classes": {"lib.Old": {"names": {"conv": "y"}}}})
    (tmp_path / TABLE).write_text(text, encoding="utf-8")
    (tmp_path / "models.txt").write_text("a\nstops\nb\n", encoding="utf-8")
    return made


def table(folder: Path) -> Any:
    return json.loads((folder / TABLE).read_text(encoding="utf-8"))


def test_a_stopped_run_goes_on_behind_the_model_that_it_was_at(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def look(name: str, names: Any) -> None:
        looked.append(name)
        if name == "stops":
            raise KeyboardInterrupt
        names[f"lib.{name}"] = script.class_names.Seen({"conv": {1: [f"x_{name}"]}})

    monkeypatch.setattr(script, "look", look)
    monkeypatch.setattr(script.logging, "disable", lambda level: None)
    state = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        script.main(VERSIONS, tmp_path / "models.txt", state)
    assert set(table(tmp_path)["classes"]) == {"lib.Old"}
    script.main(VERSIONS, tmp_path / "models.txt", state)
    assert looked == ["a", "stops", "b"]
    made = table(tmp_path)
    assert made["about"].endswith(VERSIONS)
    assert {cls: entry["names"] for cls, entry in made["classes"].items()} == {
        "lib.Old": {"conv": "y"}, "lib.a": {"conv": "x_a"}, "lib.b": {"conv": "x_b"}
    }  # fmt: skip


def test_models_that_fail_are_said_and_left_out(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(name: str, names: Any) -> None:
        if name == "stops":
            raise ValueError("no such model")

    monkeypatch.setattr(script, "look", look)
    monkeypatch.setattr(script.logging, "disable", lambda level: None)
    script.main(VERSIONS, tmp_path / "models.txt", None)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("a: seen")
    assert said[1].startswith("stops: ValueError 'no such model'")
    assert set(table(tmp_path)["classes"]) == {"lib.Old"}
