"""What the documentation shows is what the program does.

Refresh the examples: pytest tests/cli/test_docs.py --overwrite-golden
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from staticmem.cli.main import VERBS, main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
EXAMPLE = re.compile(
    r"(<!-- example: staticmem (?P<command>[^(]*?)(?: \(sections: (?P<sections>[^)]*)\))? -->\n```\n)"
    r".*?(```\n<!-- end of example -->)",
    re.S,
)
CHANGED_DECISION = r"(amended on \d+ \w+ 2026|replaced in part by \[\d+\]\(\d{4}-[\w-]+\.md\))"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))
FOR_USERS = (README, *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "how-to").glob("*.md"))
WORDS = 37_000  # of all pages for users, as `wc -w` counts: half of what they had when readers said they were too long


def output_of(command: str) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n")
    with contextlib.redirect_stdout(stream):
        assert main(shlex.split(command)) == 0
    stream.seek(0)
    return stream.read()


def shown(found: re.Match[str]) -> str:
    """An example with what its command prints now: all of it, or the sections that begin with the words named."""
    text = output_of(found["command"])
    if found["sections"]:
        heads = found["sections"].split(", ")
        parts = text.rstrip("\n").split("\n\n")
        text = "\n\n".join(part for part in parts if part.startswith(tuple(heads))) + "\n"
        assert all(any(part.startswith(head) for part in parts) for head in heads)
    return found[1] + text + found[4]


@pytest.mark.parametrize("page", [page for page in PAGES if EXAMPLE.search(page.read_text(encoding="utf-8"))])
def test_examples_are_real(page: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What a page shows of an output is what the command prints."""
    monkeypatch.chdir(ROOT)
    text = page.read_text(encoding="utf-8")
    now = EXAMPLE.sub(shown, text)
    if request.config.getoption("--overwrite-golden"):
        page.write_text(now, encoding="utf-8", newline="\n")
    else:
        assert now == text


def test_every_example_is_found() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(EXAMPLE.findall(text)) == text.count("<!-- example:"), page.name


def test_readme_begins_with_the_command() -> None:
    """The first line of code, the two commands, and a length that people read."""
    lines = README.read_text(encoding="utf-8").splitlines()
    blocks = re.sub(r"```.*?```", "", "\n".join(lines), flags=re.S)
    code = [line.strip() for line in blocks.splitlines() if line.startswith("    ")]
    assert code[0] == "staticmem analyze model.onnx --optimizer adam"
    assert code[1] == "pip install . && staticmem analyze models:resnet50 --batch 256 --optimizer adamw --gpu rtx-4090"
    assert f"<!-- example: {code[1].partition(' && ')[2]} (" in "\n".join(lines)  # what it shows is its own output
    assert code[2] == 'pip install ".[dev]" && pytest'
    assert len(lines) < 160
    assert {verb for verb in VERBS if f"`{verb}`" in "".join(lines)} == set(VERBS)


def test_readme_claims_the_accuracy_that_was_measured() -> None:
    """Every percentage of the README's section is one of docs/accuracy.md, as it is there or rounded."""
    section = README.read_text(encoding="utf-8").split("## How accurate it is\n")[1].split("\n## ")[0]
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    known = {float(figure) for figure in re.findall(r"(\d+(?:\.\d+)?) %", page)}
    claimed = {float(figure) for figure in re.findall(r"(\d+(?:\.\d+)?) %", section)}
    assert claimed
    assert claimed <= known | {float(round(figure)) for figure in known}


def test_messages_are_in_plain_words() -> None:
    """No text of the package but docstrings, no code and no page for users has a phrase that readers stumbled over."""
    found = re.compile(r"\b(but for|says? so|in place of|has to|have to|of its own|behind)\b")
    texts = {"codes.yaml": (ROOT / "staticmem" / "cli" / "codes.yaml").read_text(encoding="utf-8")}
    texts |= {page.name: page.read_text(encoding="utf-8") for page in FOR_USERS}
    for path in (ROOT / "staticmem").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts |= {
            f"{path.name}:{node.lineno}": node.value
            for parent in ast.walk(tree)
            for node in ast.iter_child_nodes(parent)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and not isinstance(parent, ast.Expr)
        }
    assert [(place, match[0]) for place, text in texts.items() for match in found.finditer(text)] == []


def test_users_read_few_words() -> None:
    """Whoever adds a page shortens others, or moves what users do not need to docs/internals."""
    lengths = {page.relative_to(ROOT): len(page.read_text(encoding="utf-8").split()) for page in FOR_USERS}
    longest = ", ".join(f"{page}: {lengths[page]:,}" for page in sorted(lengths, key=lambda page: -lengths[page])[:5])
    total = sum(lengths.values())
    assert total <= WORDS, f"README, docs/ and docs/how-to/ have {total:,} words of {WORDS:,}; the longest: {longest}"


def test_flags_in_the_docs_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Every flag of every verb is on some page of the docs, and the pages name no other."""
    known: set[str] = set()
    for verb in VERBS:
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        known |= set(re.findall(r"--[a-z][a-z0-9-]+", capsys.readouterr().out))
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    used = {name: set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) for name, text in pages.items()}
    assert used["usage.md"] <= known
    missing = known - set().union(*used.values())
    assert not missing - {"--help", "--quiet", "--verbose", "--output", "--format"}  # by their short names


def test_links_of_the_docs_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            file, _, anchor = target.partition("#")
            if "://" in file:
                continue
            there = page.parent / file if file else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


def test_changelog_says_each_thing_once_and_releases_are_short() -> None:
    """Merges of two branches may bring back what was taken away."""
    first, *sections = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")
    assert [section.splitlines()[0].partition("]")[0] for section in sections] == ["[Unreleased", "[0.1.0"]
    lines = [line for section in sections for line in section.splitlines() if line]
    assert len(lines) == len(set(lines))
    lengths = [len(section.rstrip().splitlines()) for section in sections]
    assert lengths[0] <= 200  # more is old text that a merge brought back, or a release is due
    assert max(lengths[1:]) <= 60
    assert "Keep a Changelog" in first


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_in_the_index() -> None:
    indexes = (ROOT / "docs" / "README.md", ROOT / "docs" / "internals" / "decisions.md")
    linked = {
        (index.parent / target).resolve()
        for index in indexes
        for target in re.findall(r"\]\(([^)#]+)", index.read_text(encoding="utf-8"))
        if "://" not in target
    }
    assert set(PAGES) - {README, ROOT / "docs" / "README.md"} <= linked


def test_every_package_is_in_the_architecture() -> None:
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    for path in (ROOT / "staticmem").iterdir():
        if path.suffix == ".py" and not path.stem.startswith("__"):
            assert f"`{path.name}`" in page, path.name
        elif (path / "__init__.py").exists():
            assert f"`{path.name}/`" in page, path.name


def test_decisions_are_numbered_without_gaps() -> None:
    pages = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert re.match(rf"# {int(page.name[:4])}\. \w.*\n\nStatus: accepted(; {CHANGED_DECISION})*\n\n## ", text), (
            page.name
        )
        assert ("\n## Amended\n" in text) == ("; amended on " in text), page.name


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
