"""Every code has an explanation, and every explanation a code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from staticmem.cli import explain
from staticmem.cli.main import main
from staticmem.documents import DocumentError

ROOT = Path(__file__).resolve().parents[2]


def test_codes_are_those_of_the_source() -> None:
    used: set[str] = set()
    for path in (ROOT / "staticmem").rglob("*.py"):
        used |= set(re.findall(r"SM\d{3}\b", path.read_text(encoding="utf-8")))
    codes = list(explain.entries())
    assert used == set(codes)
    assert codes == sorted(codes)


def test_entries_are_sentences() -> None:
    for code, (title, text) in explain.entries().items():
        assert re.fullmatch(r"SM[1-6]\d\d", code)
        assert not title.endswith(".")
        assert text.endswith(".")
        assert "|" not in text


@pytest.mark.parametrize("word", ["SM301", "sm301", "[SM301]", "301"])
def test_explain(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", word]) == 0
    assert capsys.readouterr().out.startswith("SM301: batch assumed (assumptions and levers)\n\n")


def test_list_and_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(explain.entries())
    assert main(["explain", "SM999"]) == 2
    assert "[SM134]" in capsys.readouterr().err


def test_a_code_that_stands_twice_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "codes.yaml").write_text("SM100: {title: a, text: b.}\nSM100: {title: c, text: d.}\n", encoding="utf-8")
    monkeypatch.setattr(explain, "__file__", str(tmp_path / "explain.py"))
    with pytest.raises(DocumentError, match="'SM100' is given twice"):
        explain.entries()
