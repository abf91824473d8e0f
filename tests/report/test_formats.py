"""The registry of formats: what is in its folder is what `-f`, `-o` and help know."""

from __future__ import annotations

from pathlib import Path

import pytest

import staticmem
from staticmem.cli.main import main
from staticmem.report import formats
from staticmem.report.formats import Formats
from staticmem.report.text import View

FOLDER = Path(formats.__file__).parent
KINDS = sorted({path.stem.partition("_")[0] for path in FOLDER.glob("*.py")} - {""})
SEED = str(Path(__file__).parents[2] / "models" / "seed.pt2")
NEW = """
from staticmem.report.formats import Format
FORMATS = (Format("words", "words", lambda report, view: f"{report.peak.tensors} tensors\\n"),)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_suffixes_are_unique(kind: str) -> None:
    all_of_kind = Formats(kind).all
    names = [f.name for f in all_of_kind]
    suffixes = [suffix for f in all_of_kind for suffix in f.suffix.split()]
    assert len(names) == len(set(names))
    assert len(suffixes) == len(set(suffixes))
    assert names[0] == "table"
    assert "json" in names
    assert all(Formats(kind)[name].name == name for name in names)


def test_the_longest_suffix_counts() -> None:
    report = Formats("report")
    chosen = [report.of_file(name) for name in ("a.JSON", "a.perfetto.json", "a.pickle", "a.html")]
    assert [f and f.name for f in chosen] == ["json", "perfetto", "snapshot", "html"]
    assert report.of_file("a.docx") is None


def test_a_saved_report_has_the_formats_that_need_no_step() -> None:
    assert set(Formats("report")) - set(Formats("report", saved=True)) == {"snapshot", "perfetto"}


def test_a_file_in_the_folder_is_a_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing else is touched: not the command line, not its help."""
    (tmp_path / "report_words.py").write_text(NEW, encoding="utf-8")
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    from staticmem.cli import analyze, saved

    monkeypatch.setattr(analyze, "FORMATS", Formats("report"))
    monkeypatch.setattr(saved, "REPORT_FORMATS", Formats("report", saved=True))
    assert main(["analyze", SEED, "--batch", "2", "-f", "words"]) == 0
    assert capsys.readouterr().out.endswith(" tensors\n")
    assert main(["analyze", SEED, "--batch", "2", "-o", str(tmp_path / "report.words")]) == 0
    assert (tmp_path / "report.words").read_text(encoding="utf-8").endswith(" tensors\n")
    with pytest.raises(SystemExit):
        main(["analyze", "--help"])
    assert "words" in capsys.readouterr().out.partition("--format FORMAT")[2].partition("--output")[0]


def test_bytes_are_in_the_units_that_are_asked_for() -> None:
    assert [View(units=units).size(2**30) for units in ("binary", "decimal", "bytes")] == [
        "1.00 GiB",
        "1.07 GB",
        "1,073,741,824 B",
    ]


def test_results_print_and_save_themselves(tmp_path: Path) -> None:
    """`print` has the text of the terminal, and a file has the format of its suffix."""
    model = SEED.replace("seed", "resnet18")
    report = staticmem.analyze(model, batch=2, optimizer="adam", gpu="l4")
    swept = staticmem.sweep(model, {"batch": [2, 4]}, optimizer="adam")
    levers = staticmem.levers(model, batch=2, optimizer="adam")
    for result, suffixes in ((report, "txt json md html"), (swept, "txt json md csv"), (levers, "txt json md")):
        for suffix in suffixes.split():
            path = tmp_path / f"{type(result).__name__}.{suffix}"
            result.save(path)
            assert path.read_text(encoding="utf-8")
            with pytest.raises(staticmem.StaticmemError, match="exists"):
                result.save(path)
            result.save(str(path), overwrite=True)
        name = type(result).__name__
        assert (tmp_path / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n") == str(result)
        assert (tmp_path / f"{name}.md").read_text(encoding="utf-8") == result.to_markdown()
        assert (tmp_path / f"{name}.json").read_text(encoding="utf-8") == result.to_json()
        assert "<" in result._repr_html_()
    assert (tmp_path / "Report.html").read_text(encoding="utf-8") == report.to_html()
    assert str(report).startswith("Fits an L4: ")
    for path, code in ((tmp_path / "x.docx", "SM141"), (tmp_path / "none" / "x.md", "SM142")):
        with pytest.raises(staticmem.StaticmemError) as error:
            report.save(path)
        assert error.value.code == code
