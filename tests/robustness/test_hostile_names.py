"""Whatever a model's names are, each format stays what it is: no escape, tag, formula, workflow command or object."""

from __future__ import annotations

import csv
import io
import json
import pickletools
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import hostile
import pytest

from staticmem.cli.main import main

STEP = ("--optimizer", "sgd")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SEED = str(hostile.SEED)
LARGEST = 4_000_000  # characters of any output: names are cut, or there are few


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
