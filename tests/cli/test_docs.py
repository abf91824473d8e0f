"""What the documentation shows is what the program does.

Refresh the README's example: pytest tests/cli --overwrite-golden
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from staticmem.cli.main import VERBS, main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
EXAMPLE = re.compile(r"(<!-- example: staticmem (.*?) -->\n```\n)(.*?)(```\n<!-- end of example -->)", re.S)


def output_of(command: str) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n")
    with contextlib.redirect_stdout(stream):
        assert main(shlex.split(command)) == 0
    stream.seek(0)
    return stream.read()


PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))


@pytest.mark.parametrize("page", [page for page in PAGES if EXAMPLE.search(page.read_text(encoding="utf-8"))])
def test_examples_are_real(page: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What a page shows of an output is what the command prints."""
    monkeypatch.chdir(ROOT)
    text = page.read_text(encoding="utf-8")
    shown = EXAMPLE.sub(lambda found: found[1] + output_of(found[2]) + found[4], text)
    if request.config.getoption("--overwrite-golden"):
        page.write_text(shown, encoding="utf-8", newline="\n")
    else:
        assert shown == text


def test_number_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = README.read_text(encoding="utf-8")
    found = EXAMPLE.search(text)
    assert found is not None
    assert f"{3_089_885_184:,} bytes in live tensors" in text
    assert "Peak 3,089,885,184 B " in output_of(f"{found[2]} -q --units bytes")


def commands() -> list[str]:
    found = re.findall(r"staticmem ([a-z-]+ models/[^#\n]*)", README.read_text(encoding="utf-8"))
    return [command.strip().removesuffix("-->").strip() for command in found]


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_readme_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert output_of(command)


def test_flags_in_the_docs_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Every flag of every verb is on some page of the docs, and the pages name no other."""
    known: set[str] = set()
    for verb in VERBS:
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        known |= set(re.findall(r"--[a-z][a-z0-9-]+", capsys.readouterr().out))
    pages = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    used = {name: set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) for name, text in pages.items()}
    assert used["usage.md"] <= known
    missing = known - set().union(*used.values())
    assert not missing - {"--help", "--quiet", "--verbose", "--output", "--format"}  # by their short names


def test_links_of_the_docs_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_fields_in_the_docs_exist() -> None:
    """Every field of the JSON report is on its page, and no other."""
    from staticmem.report.schema import schema

    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    described = schema()
    for name in described["properties"]:
        assert re.search(rf"`{name}[`.]", page), name
    for group in ("Multipliers", "Coverage", "Peak", "Phases"):
        for name in described["definitions"][group]["properties"]:
            assert f"{name}`" in page, f"{group}.{name}"
