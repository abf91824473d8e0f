"""scripts/class_tables.py: a run that was stopped goes on, and what no model shows again stays in the tables."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")  # what the script watches

SCRIPTS = Path(__file__).parents[3] / "scripts"
VERSIONS = "lib 1.0"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, with tables of one class in a package of its own."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("class_names", "class_in_place", "class_tables"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    made = importlib.import_module("class_tables")
    monkeypatch.setattr(made, "PACKAGE", tmp_path)
    entries = {"passes/frames/published_names": {"names": {"conv": "y"}}, "passes/inplace": {"act": True}}
    for table, entry in entries.items():
        (tmp_path / table).parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"about": "", "classes": {"lib.Old": entry}})
        (tmp_path / f"{table}.json").write_text(text, encoding="utf-8")
    (tmp_path / "models.txt").write_text("a\nstops\nb\n", encoding="utf-8")
    return made


def table(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def test_a_stopped_run_goes_on_behind_the_model_that_it_was_at(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def look(name: str, names: Any, places: Any) -> None:
        looked.append(name)
        if name == "stops":
            raise KeyboardInterrupt
        seen = script.class_names.Seen({"conv": {1: [f"x_{name}"]}})
        names[f"lib.{name}"] = seen
        places[f"lib.{name}"] = {"act": {name == "a"}}

    monkeypatch.setattr(script, "look", look)
    monkeypatch.setattr(script.logging, "disable", lambda level: None)
    state = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        script.main(VERSIONS, tmp_path / "models.txt", state)
    assert set(table(tmp_path, "passes/inplace")["classes"]) == {"lib.Old"}
    script.main(VERSIONS, tmp_path / "models.txt", state)
    assert looked == ["a", "stops", "b"]
    made = table(tmp_path, "passes/inplace")
    assert made["classes"] == {"lib.Old": {"act": True}, "lib.a": {"act": True}, "lib.b": {"act": False}}
    assert made["about"].endswith(VERSIONS)
    names = table(tmp_path, "passes/frames/published_names")["classes"]
    assert {cls: entry["names"] for cls, entry in names.items()} == {
        "lib.Old": {"conv": "y"}, "lib.a": {"conv": "x_a"}, "lib.b": {"conv": "x_b"}
    }  # fmt: skip


def test_models_that_fail_are_said_and_left_out(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(name: str, names: Any, places: Any) -> None:
        if name == "stops":
            raise ValueError("no such model")

    monkeypatch.setattr(script, "look", look)
    monkeypatch.setattr(script.logging, "disable", lambda level: None)
    script.main(VERSIONS, tmp_path / "models.txt", None)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("a: seen")
    assert said[1].startswith("stops: ValueError 'no such model'")
    assert set(table(tmp_path, "passes/frames/published_names")["classes"]) == {"lib.Old"}
