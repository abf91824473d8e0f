"""The action: what it declares, and its script in a repository with a pull request, against a GitHub of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from loading import load_module

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "action" / "pull_request.py"
CONFIG = """version: 1
model: {model}.pt2
train: {{optimizer: adam, batch: 4}}
budgets: [{{metric: live, limit: {limit}}}]
"""


class GitHub(ThreadingHTTPServer):
    """Comments of one issue, as the API has them."""

    comments: list[dict[str, Any]]
    refuses = False


class Handler(BaseHTTPRequestHandler):
    server: GitHub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> str:
        return str(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"])

    def do_GET(self) -> None:
        assert self.headers["Authorization"] == "Bearer secret"
        page = int(re.findall(r"[?&]page=(\d+)", self.path)[0])
        self.answer(200, self.server.comments[100 * (page - 1) : 100 * page])

    def do_POST(self) -> None:
        text = self.body()
        if self.server.refuses:
            self.answer(403, {"message": "Resource not accessible by integration"})
            return
        assert self.path == "/repos/a/b/issues/7/comments"
        self.server.comments.append({"id": len(self.server.comments), "body": text})
        self.answer(201, {})

    def do_PATCH(self) -> None:
        text = self.body()
        self.server.comments[int(self.path.rpartition("/")[2])]["body"] = text
        self.answer(200, {})


@pytest.fixture
def github() -> Iterator[GitHub]:
    server = GitHub(("127.0.0.1", 0), Handler)
    server.comments = [{"id": i, "body": "others speak"} for i in range(130)]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A pull request that puts ResNet-50 in place of ResNet-18 for a budget that does not allow it."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in ("resnet18", "resnet50"):
        (folder / f"{name}.pt2").write_bytes((ROOT / "models" / f"{name}.pt2").read_bytes())
    (folder / "staticmem.yaml").write_text(CONFIG.format(model="resnet18", limit="300 MiB"))
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "base")
    return folder


def run(folder: Path, github: GitHub, **more: str) -> tuple[int, dict[str, str], str]:
    """The exit code, the outputs and what is printed."""
    event = folder.parent / "event.json"
    event.write_text(json.dumps({"pull_request": {"number": 7, "base": {"sha": git(folder, "rev-parse", "HEAD")}}}))
    written = folder.parent / "outputs"
    written.write_text("")
    environment = {
        "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "FOLDER": str(folder.parent / "temp" / "staticmem"),
        "GITHUB_API_URL": f"http://127.0.0.1:{github.server_address[1]}", "GITHUB_REPOSITORY": "a/b",
        "GITHUB_EVENT_PATH": str(event), "GITHUB_OUTPUT": str(written), "INPUT_TOKEN": "secret",
        "GITHUB_STEP_SUMMARY": str(folder.parent / "summary"), **more,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, dict(line.split("=") for line in written.read_text().splitlines()), done.stdout


def test_one_comment_is_written_and_updated(repository: Path, github: GitHub) -> None:
    """And the outputs, the summary and the picture say the same."""
    code, outputs, _ = run(repository, github)
    assert (code, outputs["verdict"], outputs["change-bytes"]) == (0, "kept", "0")
    (repository / "staticmem.yaml").write_text(CONFIG.format(model="resnet18", limit="200 MiB"))
    small = int(outputs["peak-bytes"])
    code, outputs, printed = run(repository, github)
    assert (code, outputs) == (1, {"peak-bytes": str(small), "change-bytes": "0", "verdict": "exceeded"})
    assert "::error title=GPU memory" in printed
    ours = [one["body"] for one in github.comments if "staticmem" in one["body"]]
    assert len(ours) == 1
    assert "### GPU memory: budgets exceeded" in ours[0]
    assert "no change" in ours[0]
    assert (repository.parent / "summary").read_text().endswith(ours[0])
    temp = repository.parent / "temp" / "staticmem"
    assert (temp / "check.svg").read_text().startswith("<svg")
    assert set(json.loads((temp / "check.json").read_text())) == {"head", "base"}


MODULES = ("staticmem", "pip", "json", "runpy", "argparse", "sitecustomize", "numpy")  # what Python could look for


def lay_traps(folder: Path) -> Path:
    """Modules of these names in a folder; the file that they write where one is run."""
    ran = folder / "ran"
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r})\n")
    return ran


def test_no_code_of_a_pull_request_runs(repository: Path, github: GitHub) -> None:
    """Nor where its files have the names of modules: `python -m` looks in the current folder first."""
    ran = lay_traps(repository)
    code, outputs, _ = run(repository, github)
    assert (code, outputs["verdict"]) == (0, "kept")
    assert not ran.exists()


def test_installing_runs_no_code_of_a_pull_request(tmp_path: Path) -> None:
    ran = lay_traps(tmp_path)
    install = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"][0]["run"]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "VERSION": "--help", "CHECKOUT": ""}
    words = ["bash", "-c", install]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "pip install [options]" in done.stdout
    assert not ran.exists()


def test_a_fork_gets_a_warning_and_its_verdict(repository: Path, github: GitHub) -> None:
    """Its token may not write. What cannot be checked is told too."""
    github.refuses = True
    (repository / "staticmem.yaml").write_text(CONFIG.format(model="nowhere", limit="300 MiB"))
    code, outputs, printed = run(repository, github)
    assert (code, outputs["verdict"], outputs["peak-bytes"]) == (2, "not checked", "")
    assert "::warning::no comment was written: HTTPError" in printed


def outcome(needs: int, configuration: str = "batch=4", passed: bool = True) -> dict[str, Any]:
    return {
        "model": "m.pt2", "configuration": configuration, "metric": "live", "gpu": None, "level": "error",
        "limit_bytes": 1000, "bytes": needs, "margin_bytes": 1000 - needs, "passed": passed, "error": None,
    }  # fmt: skip


def test_rows_have_their_change_and_those_with_the_least_room_come_first() -> None:
    module = load_module(SCRIPT)
    head = {"outcomes": [outcome(10, "new"), outcome(1200, passed=False), outcome(20, "same")]}
    rows = module.with_changes(head, {"outcomes": [outcome(700), outcome(20, "same")]})
    assert [(row["configuration"], row["change"]) for row in rows] == [("batch=4", 500), ("same", 0), ("new", None)]
    assert module.verdict_of(rows) == "exceeded"
    assert "+500 B" in module.body_of("GPU memory", head, {}, rows, "")
    assert module.picture_of(rows).count("<rect") == 3


def test_names_of_files_are_text_in_the_comment() -> None:
    module = load_module(SCRIPT)
    rows = module.with_changes({"outcomes": [outcome(1, "`</code>|@all\n<img src=x>")]}, {})
    body = module.body_of("a --> <b>", {}, {}, rows, "")
    assert "<img" not in body
    assert "@" not in body
    assert body.splitlines()[-4].count("|") == 7
    assert body.startswith("<!-- staticmem: a  b -->\n")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1.00 KiB"),
        (-1 << 20, "-1.00 MiB"),
        (12 << 30, "12.0 GiB"),
        (1000, "0.98 KiB"),
    ],
)
def test_sizes(number: int, text: str) -> None:
    assert load_module(SCRIPT).size(number) == text


def test_what_the_action_declares_is_what_it_has() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps = action["runs"]["steps"]
    text = SCRIPT.read_text()
    (check,) = [step for step in steps if step.get("id") == "check"]
    for name in action["outputs"]:
        assert action["outputs"][name]["value"] == f"${{{{ steps.check.outputs.{name} }}}}"
        assert f'"{name}"' in text
    assert {name for name in check["env"] if name.startswith("INPUT_")} == set(re.findall(r"INPUT_[A-Z]+", text))
    used = set(re.findall(r"inputs\.([a-z]+)", json.dumps(steps)))
    assert used == set(action["inputs"])
    assert (ROOT / re.findall(r"\$CHECKOUT/(\S+\.py)", check["run"])[0]) == SCRIPT
