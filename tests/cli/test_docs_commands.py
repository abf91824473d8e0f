"""The commands and the Python of README and how-to pages run, in the order of the page, as a reader would."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from staticmem.cli.main import main
from staticmem.ops import registry

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
PAGES = (ROOT / "README.md", *GUIDES)
ALL = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
COMMAND = re.compile(
    r"^ {4,}(?:[^\n]*&& )?staticmem (?P<words>[^#\n]*)(?P<comment>#[^\n]*)?$"
    r"|```(?:yaml|python)\n# (?P<file>\S+)\n(?P<text>[\s\S]*?)```",
    re.M,
)
NEEDS = {"export": "torch", "torch": "torch", "validate": "onnxruntime"}  # words that take what is not required


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(autouse=True)
def _a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder with the examples in it; what a page writes is there for its next command."""
    (tmp_path / "models").symlink_to(ROOT / "models", target_is_directory=True)
    monkeypatch.chdir(tmp_path)


def possible(words: list[str], missing: set[str]) -> bool:
    """Whether there is what the command takes: packages, and files of earlier commands; else its own is missing too."""
    packages = {"torch"} if "torch" in words else {NEEDS[word] for word in words if word in NEEDS}
    if all(map(importlib.util.find_spec, packages)) and not missing & set(words):
        return True
    missing |= {words[at + 1] for at, word in enumerate(words) if word == "-o"}
    return False


def commands(page: Path) -> Iterator[tuple[str, int]]:
    """The command lines of a page and their exit codes: 0, or that of a comment `# exit code 1`.

    A block of YAML or Python that begins with the name of a file is written to it.
    """
    for match in COMMAND.finditer(page.read_text(encoding="utf-8")):
        if match["file"]:
            Path(match["file"]).write_text(match["text"], encoding="utf-8")
            continue
        code = re.search(r"exit code (\d)", match["comment"] or "")
        yield match["words"].strip(), int(code[1]) if code else 0


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_run(page: Path) -> None:
    missing: set[str] = set()
    for command, code in commands(page):
        words = shlex.split(command)
        if "model.onnx" in words:  # the reader's own
            assert page not in GUIDES
            continue
        if not possible(words, missing):
            continue
        output, errors = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            assert main(words) == code, f"{command}\n{errors.getvalue()}"
        output.seek(0)
        assert output.read() or errors.getvalue(), command


def test_every_guide_has_commands() -> None:
    assert GUIDES
    assert [page.name for page in GUIDES if not list(commands(page))] == []


@pytest.mark.parametrize("page", [page for page in ALL if "```pycon" in page.read_text(encoding="utf-8")], ids=name)
def test_sessions_print_what_they_show(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """```pycon blocks are doctests; all of a page share their names, and rules that it registers end with it."""
    monkeypatch.setattr(registry, "RULES", dict(registry.rules()))
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```pycon\n(.*?)```", text, re.S))
    test = doctest.DocTestParser().get_doctest(blocks, {}, page.name, str(page), 0)
    report = io.StringIO()
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.write)
    printed = report.getvalue()
    assert not printed, printed


@pytest.mark.torch
@pytest.mark.parametrize("page", [ROOT / "docs" / "api.md", ROOT / "README.md"], ids=name)
def test_python_that_needs_pytorch(page: Path) -> None:
    """```python blocks of these pages run; what README's writes is a file that `analyze` reads."""
    pytest.importorskip("torch")
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, page.name, "exec"), {})
    if page.name == "README.md":
        assert main(["analyze", "model.pt2", "--batch", "64", "--optimizer", "adam", "-q"]) == 0
