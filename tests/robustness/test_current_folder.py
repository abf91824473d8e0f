"""Models lie in the current folder, and what lies beside them does not run: no process looks for modules there."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import staticmem
from staticmem import child

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "staticmem"
torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
runtime = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="needs the ONNX Runtime")

HOSTILE = """\
open({seen!r}, "a").write({name!r} + chr(10))
raise ImportError({name!r})
"""
# Modules that Python, multiprocessing, the package or what it runs import at their start, and those that it looks for
NAMES = (
    "argparse ast concurrent contextlib dataclasses functools gpuhunt hashlib importlib inspect json lzma "
    "multiprocessing networkx numpy nvidia onnx onnxruntime onnxscript pickle pynvml random resource runpy selectors "
    "shtab signal sitecustomize socket staticmem struct subprocess tempfile threading torch transformers typing "
    "usercustomize yaml"
).split()
# The functions of timm that are called, and what the started process may import beside its folder on PYTHONPATH
TIMM = """\
import torch

def is_model(name):
    return name == "net"

def create_model(name, pretrained, **more):
    if more:
        raise TypeError
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten())
    model.default_cfg = {"input_size": (3, 8, 8)}
    return model
"""
FACTORY = """\
import neighbour

build = neighbour.build
"""
NEIGHBOUR = """\
import torch

def build():
    return torch.nn.Linear(8, 8), (torch.zeros(2, 8),)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a model, with modules of many names; `packages` beside it has a package that builds a model."""
    for part in ("model", "packages", "command", "cache"):
        (tmp_path / part).mkdir()
    for name in NAMES:
        (tmp_path / "model" / f"{name}.py").write_text(HOSTILE.format(seen=str(tmp_path / "seen"), name=name))
    for name in ("seed.pt2", "seed.onnx"):
        (tmp_path / "model" / name).write_bytes((ROOT / "models" / name).read_bytes())
    (tmp_path / "model" / "factory.py").write_text(FACTORY)
    (tmp_path / "model" / "neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "packages" / "timm.py").write_text(TIMM)
    script = "import sys\nfrom staticmem.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    (tmp_path / "command" / "staticmem.command").write_text(script)
    return tmp_path / "model"


def run(folder: Path, *words: str, start: tuple[str, ...] = (), path: str = "") -> subprocess.CompletedProcess[str]:
    """The command, as an installed script starts it: its folder is first on the path. `path`: before PYTHONPATH."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder.parent / "cache")}
    environment.pop("PYTHONSAFEPATH", None)
    environment["PYTHONPATH"] = os.pathsep.join((path + str(ROOT), str(folder.parent / "packages")))
    start = start or (str(folder.parent / "command" / "staticmem.command"),)
    command = [sys.executable, *start, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def seen(folder: Path) -> list[str]:
    file = folder.parent / "seen"
    return sorted(set(file.read_text().split())) if file.exists() else []


NAMED = ["timm:net", "--batch", "2"]
TRAINED = [*NAMED, "--optimizer", "adam"]


def once(*words: str) -> object:
    """A verb that starts its process as another that is always tested."""
    return pytest.param(words, marks=[torch, pytest.mark.exhaustive])


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("analyze", *NAMED), marks=torch),
        pytest.param(("validate", "seed.pt2", "--runtime", "torch"), marks=torch),
        pytest.param(("validate", "seed.onnx", "--batch", "2"), marks=runtime),
        ("sweep", "seed.onnx", "--what-if", "batch=1,2", "--what-if", "optimizer=sgd,adam", "--jobs", "2"),
        pytest.param(("export", "factory.py:build", "-o", "made.pt2"), marks=torch),
        pytest.param(("annotate", "seed.pt2", "--from", "factory:build", "-o", "made.pt2"), marks=torch),
        once("size", *NAMED),
        once("fit", *TRAINED, "--gpu", "24GB"),
        once("levers", *TRAINED, "--gpu", "24GB"),
        once("layers", *NAMED),
        once("trace", *NAMED),
        once("export", "timm:net", "-o", "made.pt2"),
        once("export", "factory:build", "-o", "made.onnx"),
        once("check", "timm:net", "--budget", "live=1GiB"),
        once("sweep", *NAMED, "--what-if", "optimizer=sgd,adam", "--jobs", "2"),
        ("analyze", "seed.onnx", "--runtime", "onnxruntime"),
        ("doctor",),
    ],
    ids=lambda words: "-".join(words[:2]) if isinstance(words, tuple) else None,
)
def test_nothing_in_the_folder_runs(folder: Path, words: tuple[str, ...]) -> None:
    done = run(folder, *words)
    assert seen(folder) == []
    if words[0] == "annotate":
        assert "SM174" in done.stderr  # the code ran, and was compared with a file that is not of it
    elif words[0] == "doctor":
        assert done.returncode in (0, 1), done.stderr
    else:
        assert done.returncode == 0, done.stderr


@torch
def test_nothing_runs_by_another_start(folder: Path) -> None:
    """`python -m` and an empty entry of PYTHONPATH put the folder on the path of the first process, before any code of
    the package: that process is Python's. None that it starts has it."""
    for name in NAMES:
        if name not in ("torch", "socket", "yaml", "onnx", "networkx", "numpy", "lzma"):  # `runpy` has loaded the rest
            (folder / f"{name}.py").unlink()
    done = run(folder, "analyze", *NAMED, start=("-m", "staticmem"))
    assert done.returncode == 0, done.stderr
    assert seen(folder) == []


def paths_of(folder: Path) -> list[str]:
    """The path of a child that is started in a folder."""
    (folder / "probe.py").write_text("import sys\ndef main():\n    print(sys.path)\n    return 0\n")
    command = child.command("probe")
    done = subprocess.run(command, cwd=folder, env=child.environment(), capture_output=True, text=True, check=False)
    return done.stdout.splitlines() or [done.stderr]


@pytest.mark.parametrize("given", [None, "", os.pathsep, os.pathsep + "sub", "sub" + os.pathsep, "."])
@pytest.mark.parametrize("safe", [True, False])
def test_the_path_of_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, safe: bool) -> None:
    """Without -P as in Python 3.10. Only an entry that names the folder leads to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(child, "_HAS_SAFE_PATH", safe and sys.version_info >= (3, 11))
    if given is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", given)
    found = paths_of(tmp_path)
    if given == ".":
        assert str(tmp_path) in found[0]
    else:
        assert "No module named 'probe'" in found[0]
    if "sub" in (given or ""):
        assert child.environment()["PYTHONPATH"] == str(tmp_path / "sub")


def test_the_child_has_the_package_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where PYTHONPATH has another package of its name."""
    (tmp_path / "staticmem.py").write_text("raise SystemExit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = child.command("staticmem.errors", "x")
    done = subprocess.run(command, env=child.environment(), capture_output=True, text=True, check=False)
    assert "has no attribute 'main'" in done.stderr


@pytest.mark.parametrize("safe", [True, False])
def test_workers_start_outside_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: bool) -> None:
    from staticmem.studies.workers import in_processes

    for name in ("multiprocessing", "struct", "pickle"):
        (tmp_path / f"{name}.py").write_text(HOSTILE.format(seen=str(tmp_path / "seen"), name=name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(child, "_HAS_SAFE_PATH", safe and sys.version_info >= (3, 11))
    results = dict(in_processes([2, 3], lambda task: (abs, -task), 2, lambda task: [task]))
    assert results == {2: 2, 3: 3}
    assert not (tmp_path / "seen").exists()
    assert "PYTHONSAFEPATH" not in os.environ


STARTS = {
    ("subprocess", "child.py"), ("multiprocessing", "child.py"), ("multiprocessing", "studies/workers.py"),
    ("fork", "frontends/onnx/isolation.py"),  # the process that asks, again: it starts no Python
    ("executable", "child.py"),
}  # fmt: skip
CALLS = ("fork", "forkpty", "system", "popen", "posix_spawn", "posix_spawnp", "startfile", "executable")


def test_one_room_starts_processes() -> None:
    found = set()
    for file in PACKAGE.rglob("*.py"):
        place = file.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                known = node.attr in CALLS or node.attr.startswith(("exec", "spawn"))
                names = [node.attr] if node.value.id in ("os", "sys") and known and node.attr != "exec_prefix" else []
            parts = {name.partition(".")[0] for name in names}
            found |= {(name, place) for name in parts & {"subprocess", "multiprocessing", *CALLS}}
    assert found == STARTS


def test_a_folder_without_the_package_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from staticmem.__main__ import leave_current_folder

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "elsewhere"])
    leave_current_folder()
    root = str(Path(staticmem.__file__).parents[1])
    assert sys.path == ["elsewhere", root]
    leave_current_folder()
    assert sys.path == ["elsewhere", root]


def test_no_dependency_is_taken_from_beside_a_factory() -> None:
    """The modules that a factory's neighbours cannot replace have every dependency of the package."""
    import re

    from staticmem.cli.factory import _OWN

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    modules = {"pyyaml": "yaml"}  # by distribution, where the names differ
    needed = {modules.get(name, name) for name in re.findall(r'"([\w-]+)>=', listed[1])}
    assert needed
    assert needed <= _OWN
