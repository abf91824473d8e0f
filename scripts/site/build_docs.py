"""Builds the site of the documentation: a folder for any web server, from the pages as they are.

    pip install -e ".[docs]"
    python scripts/site/build_docs.py OUT       # ends with exit code 1 where a link leads nowhere
    python -m http.server --directory OUT

README.md is the first page, and `docs/README.md` decides the navigation. OUT also has each page as Markdown and
`llms.txt`, for programs that read.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
LINK = re.compile(r"(?<=\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
# files beside docs/ that pages link to, by their names on the site
BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "records/README.md": "records.md",
    "docs/README.md": "pages.md",
}
ASSETS = (".png", ".svg", ".ipynb", ".txt")


def site_paths() -> dict[str, str]:
    """Every file that the site has: from its path in the repository to its path on the site."""
    paths = dict(BESIDE)
    for file in sorted((ROOT / "docs").rglob("*")):
        inside = file.relative_to(ROOT / "docs")
        if inside.parts[0] != "browser" and file.suffix in (".md", *ASSETS):
            paths.setdefault(file.relative_to(ROOT).as_posix(), inside.as_posix())
    return paths


def with_site_links(source: str, paths: dict[str, str]) -> str:
    """The text of a page with its links to files as the site has them."""

    def changed(match: re.Match[str]) -> str:
        if "://" in match[1]:
            return match[0]
        target = os.path.normpath(os.path.join(os.path.dirname(source), match[1]))
        if target not in paths:
            raise SystemExit(f"{source} links to {match[1]}, which the site does not have: see BESIDE of {__file__}")
        return os.path.relpath(paths[target], os.path.dirname(paths[source])) + match[2]

    return LINK.sub(changed, (ROOT / source).read_text(encoding="utf-8"))


def with_blank_lines(text: str) -> str:
    """A list right after a paragraph gets a blank line between, which GitHub does not need and Python-Markdown does."""
    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        begins = re.match(r"([-*]|\d+\.) ", line)
        if begins and not fenced and lines and lines[-1] and not re.match(r"\s|[-*] |\d+\. ", lines[-1]):
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def navigation(paths: dict[str, str]) -> list[object]:
    """The sections of `docs/README.md` with the pages that they name; a page's title is its heading."""
    sections: list[object] = ["index.md"]
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for part in re.split(r"^## ", index, flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        pages = linked_pages("docs/README.md", body, paths)
        sections.append({title: [with_decisions(page, paths) for page in pages]})
    return [*sections, "pages.md", "changelog.md"]


def with_decisions(page: str, paths: dict[str, str]) -> object:
    """A page, and with the list of decisions each of them."""
    if page != "internals/decisions.md":
        return page
    source = "docs/internals/decisions.md"
    text = (ROOT / source).read_text(encoding="utf-8")
    return {"Decisions": [page, *linked_pages(source, text, paths)]}


def linked_pages(source: str, text: str, paths: dict[str, str]) -> list[str]:
    """What a part of a page links to, each once."""
    targets = [os.path.normpath(os.path.join(os.path.dirname(source), target)) for target, _ in LINK.findall(text)]
    return [paths[target] for target in dict.fromkeys(targets)]


def toml_of(value: object) -> str:
    """Lists, and tables of one key, as TOML on one line."""
    if isinstance(value, list):
        return "[" + ", ".join(toml_of(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_of(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def stage(folder: Path) -> dict[str, str]:
    """Writes pages and configuration into a folder, as Zensical reads them."""
    paths = site_paths()
    for source, target in paths.items():
        there = folder / "pages" / target
        there.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".md"):
            there.write_text(with_blank_lines(with_site_links(source, paths)), encoding="utf-8")
        else:
            shutil.copy(ROOT / source, there)
    shutil.copy(HERE / "site.css", folder / "pages" / "site.css")
    config = (HERE / "zensical.toml").read_text(encoding="utf-8")
    nav = f"nav = {toml_of(navigation(paths))}"
    (folder / "zensical.toml").write_text(config.replace("# navigation", nav), encoding="utf-8")
    return paths


def build(out: Path) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        paths = stage(folder)
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", "zensical.toml"]
        if subprocess.run(command, cwd=folder, check=False).returncode:
            return 1
        for source, target in paths.items():
            if source.endswith(".md"):
                shutil.copy(folder / "pages" / target, folder / "site" / target)
        shutil.copytree(folder / "site", out, dirs_exist_ok=True)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Builds the site of the documentation.")
    parser.add_argument("out", type=Path, help="the folder of the site")
    raise SystemExit(build(parser.parse_args().out))
