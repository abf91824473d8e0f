"""The notebook of the documentation runs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "first-steps.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run(source: str, names: dict[str, Any]) -> Any:
    """The value of the last line, which a notebook shows."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "<cell>", "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a folder of a checkout; the cell that installs is the first, and the only one of IPython's own words."""
    install, *cells = code_cells()
    assert install == "%pip install --quiet ."
    folder = tmp_path / "work"
    folder.mkdir()
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    shown = [run(cell, names) for cell in cells]
    assert "RTX 4090" in capsys.readouterr().out
    assert shown[2]._repr_html_().count("<tr>") == 1 + 6
    assert (folder / "report.html").stat().st_size > 10_000


def test_no_outputs_are_kept() -> None:
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
