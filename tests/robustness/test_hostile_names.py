"""Whatever a model's names are, each format stays what it is: no escape, tag, formula, workflow command or object."""

from __future__ import annotations

import csv
import io
import json
import os
import pickletools
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import hostile
import pytest

from staticmem.cli.main import main

STEP = ("--optimizer", "sgd")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SEED = str(hostile.SEED)
LARGEST = 4_000_000  # characters of any output: names are cut, or there are few


Checks = dict[str, Callable[[str], Any]]


class Page(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]


def check_table(text: str) -> None:
    assert not CONTROLS.search(text.replace("\n", ""))
    assert "\u202e" not in text


def check_json(text: str) -> None:
    assert json.loads(text)["schema"]


def check_html(text: str, plain: Page) -> None:
    page = Page(text)
    assert page.tags.count("script") == plain.tags.count("script")
    assert set(page.tags) <= set(plain.tags) | {"details", "summary", "code", "span", "p", "li", "ul"}
    assert page.handlers == []
    assert not any("evil" in link or link.lower().startswith("javascript") for link in page.links)


def check_md(text: str) -> None:
    """Outside of code, where everything is shown as it is."""
    assert not CONTROLS.search(text.replace("\n", ""))
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", text)
    assert not re.search(r"^# heading", text, re.MULTILINE)
    assert not re.search(r"(?<!\\)\]\(|<script|<img", text)


def check_csv(text: str) -> None:
    rows = list(csv.reader(io.StringIO(text)))
    assert len({len(row) for row in rows}) == 1
    for row in rows:
        for cell in row:
            assert re.fullmatch(r"-?[\d.e+-]+", cell) or cell.lstrip()[:1] not in ("=", "+", "@", "-"), cell[:50]
            assert cell[:1] not in ("\t", "\r")


def check_github(text: str) -> None:
    """Every line that the runner takes for a command is one of ours; what a name says is within it, escaped."""
    for line in text.splitlines():
        assert "::" not in line or re.match(r"::(error|warning|notice) title=[^:]*::", line), line
        assert not re.match(r"\s*::(set-env|stop-commands|error file=a\.py)", line)


def check_xml(text: str) -> None:
    assert "<!ENTITY" not in text
    assert ElementTree.fromstring(text) is not None


def check_pickle(data: bytes) -> None:
    """Plain values only: a viewer that unpickles it runs nothing."""
    used = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert not used & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD"}


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    target = tmp_path_factory.mktemp("page") / "a.html"
    assert main(["analyze", SEED, *STEP, "-o", str(target)]) == 0
    return Page(target.read_text())


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
@pytest.mark.parametrize("name", hostile.NAMES)
def test_every_format_of_a_report(
    name: str, kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, plain_page: Page
) -> None:
    make = hostile.onnx_model if kind == "onnx" else hostile.pt2_model
    path = str(make(tmp_path / f"m.{kind}", hostile.NAMES[name]))
    target = tmp_path / "out"

    def output(verb: str, format_: str, *words: str) -> bytes:
        assert main([verb, path, *STEP, "-f", format_, "-o", str(target), "--force", *words]) == 0
        data = target.read_bytes()
        assert len(data) < LARGEST
        return data

    check_table(output("analyze", "table", "--explain-peak").decode())
    check_json(output("analyze", "json").decode())
    check_html(output("analyze", "html").decode(), plain_page)
    check_md(output("analyze", "md").decode())
    check_pickle(output("analyze", "snapshot"))
    assert json.loads(output("analyze", "perfetto"))["traceEvents"]
    check_csv(output("layers", "csv").decode())
    check_table(output("layers", "table").decode())
    check_table(output("trace", "table").decode())
    assert main(["diff", path, SEED, *STEP]) == 0
    check_table(capsys.readouterr().out)
    assert main(["diff", path, SEED, *STEP, "-f", "md"]) == 0
    check_md(capsys.readouterr().out)


def test_half_a_surrogate_pair(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(hostile.pt2_model(tmp_path / "m.pt2", hostile.LONE))
    for format_ in ("table", "json", "html", "md", "snapshot", "perfetto"):
        target = tmp_path / "out"
        assert main(["analyze", path, *STEP, "-f", format_, "-o", str(target), "--force"]) == 0, format_
        if format_ != "snapshot":
            target.read_bytes().decode("utf-8")
    for words in (["layers"], ["layers", "-f", "csv"], ["trace"], ["diff", SEED]):
        assert main([words[0], path, *words[1:], *STEP]) == 0
    assert "SM190" not in capsys.readouterr().err


@pytest.mark.parametrize("name", hostile.NAMES)
def test_names_in_a_config(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What a pull request may say in a config reaches the log of CI, and the file of its test results."""
    text = hostile.NAMES[name].replace("\x00", "").replace("\ufffe", "").replace("\x0b", "")
    config = tmp_path / "staticmem.yaml"
    document = {
        "version": 1, "model": SEED, "budgets": [{"metric": "live", "limit": "1 MiB"}],
        "scenarios": [{"name": text or "x", "batch": 1}, {"name": "other", "batch": 2}],
    }  # fmt: skip
    config.write_text(json.dumps(document))
    for format_, check in (("table", check_table), ("github", check_github), ("md", check_md), ("junit", check_xml)):
        code = main(["check", "--config", str(config), "-f", format_])
        captured = capsys.readouterr()
        assert "SM190" not in captured.err
        if code == 2:  # a name may be refused, with the reason
            assert captured.err.startswith("error: ")
        else:
            check(captured.out)


def clean(text: str) -> str:
    """What YAML and JSON files may have in a text."""
    return text.replace("\x00", "").replace("\ufffe", "").replace("\x0b", "") or "x"


def outputs(capsys: pytest.CaptureFixture[str], *words: str) -> str | None:
    """What a command prints; None: it was refused, with the reason in three lines that have nothing of a terminal."""
    code = main(list(words))
    captured = capsys.readouterr()
    assert "SM190" not in captured.err, captured.err
    assert len(captured.out) < LARGEST
    if code == 2:
        assert captured.err.startswith("error: ")
        assert not CONTROLS.search(captured.err.replace("\n", ""))
        return None
    return captured.out


@pytest.fixture(scope="module")
def plain_sizes(tmp_path_factory: pytest.TempPathFactory) -> Page:
    target = tmp_path_factory.mktemp("page") / "a.html"
    assert main(["size", SEED, *STEP, "--gpu", "l4", "-f", "html", "-o", str(target)]) == 0
    return Page(target.read_text())


@pytest.fixture(scope="module")
def saved_page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """That of a saved report, which has no trace."""
    saved, target = (tmp_path_factory.mktemp("page") / name for name in ("a.json", "a.html"))
    assert main(["analyze", SEED, *STEP, "-o", str(saved)]) == 0
    assert main(["report", str(saved), "-o", str(target)]) == 0
    return Page(target.read_text())


@pytest.mark.parametrize("name", hostile.NAMES)
def test_cards_and_prices(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, plain_sizes: Page) -> None:
    """A catalog and a price list are files of somebody."""
    text = clean(hostile.NAMES[name])
    card = {
        "name": text,
        "arch": "sm_89",
        "processors": 58,
        "nominal": 24576,
        "source": text,
        "form": text,
        "year": 2023,
    }
    ascii_only = name != "emoji"  # JSON writes it as two halves, which YAML does not put together
    catalog, prices = tmp_path / "gpus.yaml", tmp_path / "prices.yaml"
    catalog.write_text(
        json.dumps({"version": 1, "checked": "2026-01-01", "cards": {"mine": card}}, ensure_ascii=ascii_only)
    )
    prices.write_text(
        json.dumps(
            {"version": 1, "currency": text, "prices": {"mine": {"buy": 1, "hour": 1.5}}}, ensure_ascii=ascii_only
        )
    )
    checks: Checks = {"table": check_table, "csv": check_csv, "json": json.loads, "md": check_md}
    shown = 0
    for format_ in ("table", "csv", "json"):
        found = outputs(capsys, "gpus", "--gpus-file", str(catalog), "-f", format_)
        if found is not None:
            checks[format_](found)
            shown += 1
    for format_ in ("table", "csv", "json", "md", "html"):
        words = ["size", SEED, *STEP, "--gpu", "mine", "--gpus-file", str(catalog), "--prices", str(prices)]
        found = outputs(capsys, *words, "-f", format_)
        if found is None:
            continue
        shown += 1
        if format_ == "html":
            check_html(found, plain_sizes)
        else:
            checks[format_](found)
    assert shown == 8 or name == "empty"


@pytest.mark.parametrize("name", hostile.NAMES)
def test_records(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They come from other people's machines."""
    text = hostile.NAMES[name]
    document = json.loads((hostile.ROOT / "records" / "torch-cpu-resnet18.json").read_text())
    document["runtime"] = {"name": text, "version": text, "provider": text}
    document["device"] = {"kind": text, "name": text}
    document["model"]["name"] = document["created"] = text
    for meter in document["meters"]:
        meter["name"] = meter["note"] = text
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    checks: Checks = {"table": check_table, "csv": check_csv, "json": json.loads, "md": check_md}
    for format_, check in checks.items():
        found = outputs(capsys, "reconcile", str(path), "-f", format_)
        assert found is not None
        check(found)
    assert outputs(capsys, "calibrate", str(path)) is None


@pytest.mark.parametrize("name", hostile.NAMES)
def test_sessions_sweeps_and_saved_reports(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, saved_page: Page
) -> None:
    onnx = str(hostile.onnx_model(tmp_path / "m.onnx", hostile.NAMES[name]))
    pt2 = str(hostile.pt2_model(tmp_path / "m.pt2", hostile.NAMES[name]))
    session: Checks = {"table": check_table, "json": json.loads}
    for format_, check in session.items():
        found = outputs(capsys, "analyze", onnx, "--runtime", "onnxruntime", "-f", format_)
        if found is not None:
            check(found)
    others: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
        ("sweep", "table", check_table), ("sweep", "csv", check_csv), ("sweep", "json", json.loads),
        ("levers", "table", check_table), ("levers", "json", json.loads), ("trace", "csv", check_csv),
        ("layers", "json", json.loads),
    )  # fmt: skip
    for verb, format_, check in others:
        words = ["--what-if", "batch=1,2", "-j", "1"] if verb == "sweep" else []
        found = outputs(capsys, verb, pt2, *STEP, *words, "-f", format_)
        assert found is not None
        check(found)
    saved = tmp_path / "saved.json"
    assert main(["analyze", pt2, *STEP, "-o", str(saved)]) == 0
    document = json.loads(saved.read_text())
    document["scenario"]["optimizer"] = document["model"]["producer"] = hostile.NAMES[name]
    saved.write_text(json.dumps(document))
    capsys.readouterr()
    for format_, check in (("table", check_table), ("md", check_md), ("json", check_json)):
        found = outputs(capsys, "report", str(saved), "-f", format_)
        assert found is not None
        check(found)
    page = outputs(capsys, "report", str(saved), "-f", "html")
    assert page is not None
    check_html(page, saved_page)


FILES = {
    "terminal": "\x1b[2J\x1b]0;owned\x07", "html": "<img src=x onerror=alert(1)>", "formula": "=HYPERLINK(1)",
    "at": "@SUM(1)", "markdown": "[a](javascript:alert(1))|`x`", "workflow": "\n::error file=a.py::owned",
    "direction": "\u202egnp", "xml": "]]>&x;", "option": "-o", "percent": "%0A::set-env name=PATH::x",
}  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="names that only POSIX has")
@pytest.mark.parametrize("name", FILES)
def test_the_name_of_a_file(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, plain_page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull request may add a file of any name, and CI analyses what it finds."""
    monkeypatch.chdir(tmp_path)
    path = f"{FILES[name]}.pt2"
    Path(path).write_bytes(hostile.SEED.read_bytes())
    path = f"./{path}" if path.startswith("-") else path
    checks: Checks = {
        "table": check_table, "csv": check_csv, "json": json.loads, "md": check_md, "github": check_github,
        "junit": check_xml, "html": lambda text: check_html(text, plain_page),
    }  # fmt: skip
    for verb, formats, words in (
        ("analyze", ("table", "json", "html", "md"), STEP), ("layers", ("table", "csv"), STEP),
        ("trace", ("table", "csv"), STEP), ("sweep", ("table", "csv"), (*STEP, "--what-if", "batch=1,2", "-j", "1")),
        ("size", ("table", "csv", "md"), (*STEP, "--gpu", "l4")), ("diff", ("table", "md"), (SEED, *STEP)),
        ("check", ("table", "github", "md", "junit"), (*STEP, "--budget", "live=1MiB", "-j", "1")),
    ):  # fmt: skip
        for format_ in formats:
            found = outputs(capsys, verb, path, *words, "-f", format_)
            assert found is not None, (verb, format_)
            checks[format_](found)
    missing = outputs(capsys, "analyze", f"{path}x")
    assert missing is None


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every text of a document."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        if isinstance(value, str):
            yield (*path, key)
        elif isinstance(value, dict | list):
            yield from places(value, (*path, key))


def test_every_text_of_a_saved_report(capsys: pytest.CaptureFixture[str], tmp_path: Path, saved_page: Page) -> None:
    """Wherever the tag stands: it is refused, or shown."""
    saved = tmp_path / "a.json"
    assert main(["analyze", SEED, *STEP, "-o", str(saved)]) == 0
    document = json.loads(saved.read_text())
    document["top_tensors"] = document["top_tensors"][:2]
    document["peak"]["by_module"] = document["peak"]["by_module"][:2]
    texts = [path for path in places(document) if path != ("schema",)]
    assert len(texts) > 40
    shown = 0
    for path in texts:
        made = json.loads(json.dumps(document))
        holder = made
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = hostile.NAMES["html"]
        shown += _shown(made, saved, capsys, saved_page)
    assert shown > 25
    for key in ("by_category", "bands"):
        made = json.loads(json.dumps(document))
        made["peak"][key][hostile.NAMES["html"]] = 5 if key == "by_category" else {"low": 1, "high": 2}
        assert not _shown(made, saved, capsys, saved_page)


def _shown(document: Any, saved: Path, capsys: pytest.CaptureFixture[str], plain: Page) -> bool:
    saved.write_text(json.dumps(document))
    capsys.readouterr()
    page = outputs(capsys, "report", str(saved), "-f", "html")
    text = outputs(capsys, "report", str(saved), "-f", "md")
    assert (page is None) == (text is None)
    if page is not None and text is not None:
        check_html(page, plain)
        check_md(text)
    return page is not None
