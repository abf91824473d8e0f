"""What the action runs: budgets as annotations, a summary, outputs, a picture, and one comment that it updates.

    python scripts/action/pull_request.py

All of it comes from the environment: INPUT_TARGET, INPUT_ARGS, INPUT_TITLE, INPUT_COMMENT, INPUT_TOKEN, FOLDER for the
picture and the figures, and what GitHub sets. In a pull request the same check runs on the files of its base too. The
exit code is that of `staticmem check`. Nothing but Python's library and the installed command is used.
"""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_PAGES = 10  # of comments, 100 each, among which ours is looked for
MOST_ROWS = 50  # of the table; GitHub refuses a comment of more than 65,536 characters
COLOURS = {True: "#2da44e", False: "#cf222e"}  # kept, exceeded; readable on light and dark pages

# `python -m staticmem`, but for the current folder as a place of modules: its files are those of the pull request
STATICMEM = [
    sys.executable,
    "-c",
    "import sys; sys.path[:] = filter(None, sys.path); from staticmem.cli.main import main; sys.exit(main())",
]

Outcome = dict[str, Any]
Key = tuple[Any, ...]


def size(number: int) -> str:
    """`1.25 GiB`: three digits and a binary unit."""
    amount, units = float(abs(number)), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" else max(0, 2 - (amount >= 10) - (amount >= 100))
    return f"{'-' if number < 0 else ''}{amount:.{digits}f} {units[0]}"


def change(number: int | None) -> str:
    """What a need has become against the base: `+12.5 MiB`, `no change`; empty where the base does not have it."""
    if number is None:
        return ""
    return f"{'+' * (number > 0)}{size(number)}" if number else "no change"


def checked(words: list[str], folder: Path) -> dict[str, Any]:
    """The answer of `staticmem check` as JSON; an error has `what`, `why` and `hint`."""
    command = [*STATICMEM, "check", *words, "--exit-zero", "-f", "json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or ["staticmem check ended without an answer"]
        return {"what": lines[-1][:300], "why": "", "hint": ""}
    return answer


def checked_base(words: list[str], commit: str, folder: Path) -> dict[str, Any]:
    """The same of the files of a commit, which is fetched where the checkout does not have it."""
    for command in (  # the last one counts; an earlier use of the action may have left the folder
        ["git", "worktree", "remove", "--force", str(folder)],
        ["git", "fetch", "--quiet", "--depth=1", "origin", commit],
        ["git", "worktree", "add", "--quiet", "--force", "--detach", str(folder), commit],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"what": f"the base {commit[:10]} cannot be read: {done.stderr.strip()[:300]}", "why": "", "hint": ""}
    return checked(words, folder)


def key_of(one: Outcome) -> Key:
    return one["model"], one["configuration"], one["metric"], one["gpu"]


def with_changes(head: dict[str, Any], base: dict[str, Any]) -> list[Outcome]:
    """The outcomes, those with the least room first, each with its `change` against the base, None where unknown."""
    before = {key_of(one): one["bytes"] for one in base.get("outcomes", ())}
    rows = []
    for one in head.get("outcomes", ()):
        old = before.get(key_of(one))
        rows.append({**one, "change": None if old is None or one["bytes"] is None else one["bytes"] - old})
    return sorted(rows, key=lambda row: (row["error"] is None, row["passed"], row["margin_bytes"] or 0))


def verdict_of(rows: list[Outcome]) -> str:
    if not rows or any(row["error"] is not None for row in rows):
        return "not checked"
    return "kept" if all(row["passed"] or row["level"] == "warning" for row in rows) else "exceeded"


def code(text: str) -> str:
    """Text of a file within a table: neither Markdown nor HTML, and no mention of anybody."""
    return f"<code>{html.escape(' '.join(text.split()))}</code>".replace("|", "&#124;").replace("@", "&#64;")


def metric_of(row: Outcome) -> str:
    return f"{row['metric']} on {row['gpu']}" if row["gpu"] else str(row["metric"])


def body_of(title: str, head: dict[str, Any], base: dict[str, Any], rows: list[Outcome], run: str) -> str:
    """The comment: its marker, the verdict, a table, what could not be compared, and where the picture is."""
    lines = [marker_of(title), f"### {title}: budgets {verdict_of(rows)}", ""]
    if "what" in head:
        lines += [code(f"{head['what']} {head['why']} {head['hint']}"), ""]
    if rows:
        lines += ["| | budget | needs | limit | change | configuration |", "|---|---|---:|---:|---:|---|"]
    for row in rows[:MOST_ROWS]:
        mark = "kept" if row["passed"] else "**exceeded**"
        needs = "-" if row["bytes"] is None else size(row["bytes"])
        if row["error"] is not None:
            mark, needs = "not checked", code(row["error"]["what"])
        cells = [mark, code(metric_of(row)), needs, size(row["limit_bytes"]), change(row["change"])]
        lines.append(f"| {' | '.join(cells)} | {code(row['configuration'])} |")
    if len(rows) > MOST_ROWS:
        lines.append(f"\nand {len(rows) - MOST_ROWS} more")
    if "what" in base:
        lines += ["", f"No change is shown: {code(base['what'])}"]
    return "\n".join([*lines, "", f"Predicted by staticmem, measured by nobody. [Picture and figures]({run})", ""])


def marker_of(title: str) -> str:
    """What the comment begins with, so that it is found again. Nothing in it may end the HTML comment."""
    return f"<!-- staticmem: {''.join(c for c in title if c.isalnum() or c == ' ')} -->"


def picture_of(rows: list[Outcome]) -> str:
    """Bars of what is needed, with the limit as a line and the base as a mark, as SVG."""
    rows = [row for row in rows if row["bytes"] is not None][:MOST_ROWS]
    most = max([1, *(max(row["bytes"], row["limit_bytes"]) for row in rows)])
    parts = []
    for index, row in enumerate(rows):
        top = 10 + 44 * index
        width, limit = (700 * row[name] / most for name in ("bytes", "limit_bytes"))
        label = f"{metric_of(row)}, {row['configuration']}: {size(row['bytes'])} of {size(row['limit_bytes'])}"
        if row["change"]:
            label += f" ({change(row['change'])})"
        parts.append(f'<text x="10" y="{top + 12}">{html.escape(label)}</text>')
        parts.append(f'<rect x="10" y="{top + 18}" width="{width:.1f}" height="12" fill="{COLOURS[row["passed"]]}"/>')
        parts.append(f'<path d="M{10 + limit:.1f} {top + 15}v18" stroke="#888" stroke-width="2"/>')
        if row["change"]:
            before = 10 + 700 * (row["bytes"] - row["change"]) / most
            parts.append(f'<path d="M{before:.1f} {top + 18}v12" stroke="#fff" stroke-width="2"/>')
    style = "text{font:12px sans-serif;fill:#888}"
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{20 + 44 * len(rows)}">'
    return "\n".join([frame, f"<style>{style}</style>", *parts, "</svg>\n"])


def asked(api: str, token: str, path: str, method: str = "GET", body: str | None = None) -> Any:
    """The answer of GitHub's API."""
    data = None if body is None else json.dumps({"body": body}).encode()
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/vnd.github+json"}
    request = urllib.request.Request(f"{api}{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def put_comment(environment: Mapping[str, str], number: int, title: str, body: str) -> None:
    """Writes the comment over the one with the same marker, or as a new one."""
    api, token = environment.get("GITHUB_API_URL", "https://api.github.com"), environment["INPUT_TOKEN"]
    repository = f"/repos/{environment['GITHUB_REPOSITORY']}"
    for page in range(1, MOST_PAGES + 1):
        comments = asked(api, token, f"{repository}/issues/{number}/comments?per_page=100&page={page}")
        for one in comments:
            if one["body"].startswith(marker_of(title)):
                asked(api, token, f"{repository}/issues/comments/{one['id']}", "PATCH", body)
                return
        if len(comments) < 100:
            break
    asked(api, token, f"{repository}/issues/{number}/comments", "POST", body)


def append(environment: Mapping[str, str], name: str, text: str) -> None:
    if environment.get(name):
        with open(environment[name], "a", encoding="utf-8") as file:
            file.write(text)


def main(environment: Mapping[str, str]) -> int:
    words = [word for word in (environment.get("INPUT_TARGET", ""), *environment.get("INPUT_ARGS", "").split()) if word]
    title = environment.get("INPUT_TITLE") or "GPU memory"
    folder = Path(environment["FOLDER"])
    folder.mkdir(parents=True, exist_ok=True)
    event = environment.get("GITHUB_EVENT_PATH", "")
    pull = json.loads(Path(event).read_text("utf-8")).get("pull_request") if event else None
    head = checked(words, Path.cwd())
    base = checked_base(words, pull["base"]["sha"], folder.parent / "staticmem-base") if pull else {}
    rows = with_changes(head, base)
    server, repository = environment.get("GITHUB_SERVER_URL", ""), environment.get("GITHUB_REPOSITORY", "")
    run = f"{server}/{repository}/actions/runs/{environment.get('GITHUB_RUN_ID', '')}"
    body = body_of(title, head, base, rows, run)
    (folder / "check.json").write_text(json.dumps({"head": head, "base": base}, indent=1), encoding="utf-8")
    (folder / "check.svg").write_text(picture_of(rows), encoding="utf-8")
    append(environment, "GITHUB_STEP_SUMMARY", body)
    worst = rows[0] if rows else {"bytes": None, "change": None}
    outputs = {"peak-bytes": worst["bytes"], "change-bytes": worst["change"], "verdict": verdict_of(rows)}
    lines = [f"{name}={'' if value is None else value}\n" for name, value in outputs.items()]
    append(environment, "GITHUB_OUTPUT", "".join(lines))
    if pull and environment.get("INPUT_TOKEN") and environment.get("INPUT_COMMENT", "true") == "true":
        try:
            put_comment(environment, pull["number"], title, body)
        except (OSError, ValueError, KeyError) as error:  # a fork's token may not write: the check still counts
            print(f"::warning::no comment was written: {type(error).__name__}: {str(error)[:200]}")
    sys.stdout.flush()
    return subprocess.run([*STATICMEM, "check", *words, "-f", "github"]).returncode


if __name__ == "__main__":
    sys.exit(main(os.environ))
