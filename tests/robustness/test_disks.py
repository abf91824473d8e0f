"""Real disks that are full or read-only: a tmpfs in a mount namespace where the system allows one, else limits."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from staticmem import StaticmemError
from staticmem.cli.main import main
from staticmem.files import temporary_folder

ROOT = Path(__file__).resolve().parents[2]
SEED = str(ROOT / "models" / "seed.pt2")
RECORD = str(ROOT / "records" / "torch-cpu-resnet18.json")
posix = pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")

# every verb that writes a file, to OUT; each writes more than LEAST bytes
LEAST = 150
WRITES: dict[str, list[str]] = {
    "analyze": ["analyze", SEED, "--optimizer", "adam", "-f", "json"],
    "page": ["analyze", SEED, "--optimizer", "adam", "-f", "html"],
    "snapshot": ["analyze", SEED, "-f", "snapshot"],
    "perfetto": ["analyze", SEED, "-f", "perfetto"],
    "session": ["analyze", str(ROOT / "models" / "seed.onnx"), "--runtime", "onnxruntime", "-f", "json"],
    "layers": ["layers", SEED, "-f", "csv"],
    "trace": ["trace", SEED, "-f", "json"],
    "diff": ["diff", SEED, str(ROOT / "models" / "resnet18.pt2"), "-f", "json"],
    "sweep": ["sweep", SEED, "--what-if", "batch=1,2", "-f", "json"],
    "size": ["size", SEED, "--gpu", "l4", "-f", "html"],
    "levers": ["levers", SEED, "--optimizer", "adam", "-f", "json"],
    "check": ["check", SEED, "--budget", "live=100GiB", "--optimizer", "adam", "-f", "json"],
    "gpus": ["gpus", "-f", "csv"],
    "reconcile": ["reconcile", RECORD, "-f", "json"],
}

_LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
from staticmem.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


@posix
@pytest.mark.parametrize(("verb", "old"), [*((verb, "mine") for verb in WRITES), ("analyze", None)])
def test_a_file_may_not_become_as_large(verb: str, old: str | None, tmp_path: Path) -> None:
    """The kernel stops the write in its middle: nothing of it stays, and what was there is there still."""
    target = tmp_path / "out"
    if old is not None:
        target.write_text(old)
    words = [*WRITES[verb], "-o", str(target), "--force"]
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(LEAST), *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert "[SM142]" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ([] if old is None else ["out"])
    assert old is None or target.read_text() == old


@cache
def namespaces() -> bool:
    """Whether this user may mount in a namespace of its own."""
    if sys.platform != "linux" or shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        words = [*_UNSHARE, "sh", "-c", 'mount -t tmpfs -o size=16k tmpfs "$0"', folder]
        return subprocess.run(words, capture_output=True, timeout=60).returncode == 0


_UNSHARE = (
    ["unshare", "--mount"] if os.name == "posix" and os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
)
_DISK = """
mount -t tmpfs -o size="$1" tmpfs "$0" || exit 99
echo mine >"$0/out"
[ "$2" = ro ] && mount -o remount,ro "$0"
shift 2
"$@"
code=$?
echo "left: $(ls -A "$DISK" | tr '\\n' ' ')"
echo "old: $(cat "$DISK/out")"
exit $code
"""


def on_disk(tmp_path: Path, size: str, kind: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs staticmem with `tmp_path` a disk of its own that has the file `out`."""
    if not namespaces():
        pytest.skip("this user may not mount")
    command = [*_UNSHARE, "sh", "-c", _DISK, str(tmp_path), size, kind, sys.executable, "-m", "staticmem", *words]
    env = {**os.environ, "DISK": str(tmp_path), **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=ROOT)


@pytest.mark.parametrize("verb", ["analyze", "page", "trace", "size"])
def test_a_disk_that_is_full(verb: str, tmp_path: Path) -> None:
    done = on_disk(tmp_path, "8k", "rw", *WRITES[verb], "-o", str(tmp_path / "out"), "--force")
    assert done.returncode == 2, done.stderr
    assert "No space left on device" in done.stderr
    assert "left: out \nold: mine\n" in done.stdout


@pytest.mark.parametrize("name", ["out", "new"])
def test_a_disk_that_is_read_only(name: str, tmp_path: Path) -> None:
    """Also for root, whom the rights of a folder do not stop."""
    done = on_disk(tmp_path, "64k", "ro", *WRITES["analyze"], "-o", str(tmp_path / name), "--force")
    assert done.returncode == 2, done.stderr
    assert "Read-only file system" in done.stderr
    assert "left: out \nold: mine\n" in done.stdout


# -- temporary files ---------------------------------------------------------------------------------------------


def test_stdin_on_a_full_disk(tmp_path: Path) -> None:
    """A model from stdin is kept in TMPDIR."""
    if not namespaces():
        pytest.skip("this user may not mount")
    script = _DISK.replace('"$@"', f'head -c 100000 /dev/zero | cat "{SEED}" - | "$@"')
    command = [
        *_UNSHARE,
        "sh",
        "-c",
        script,
        str(tmp_path),
        "16k",
        "rw",
        sys.executable,
        "-m",
        "staticmem",
        "analyze",
        "-",
    ]
    env = {**os.environ, "DISK": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=ROOT)
    assert done.returncode == 2
    assert "[SM101]" in done.stderr
    assert "TMPDIR" in done.stderr
    assert "left: out \n" in done.stdout


@pytest.mark.parametrize("words", [["analyze", "-"], ["calibrate", RECORD]])
def test_no_place_for_temporary_files(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Containers with nothing that may be written to."""

    def none(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    if words[0] == "calibrate":
        document = json.loads(Path(RECORD).read_text())
        document["device"] = {"kind": "cuda", "name": "NVIDIA L4"}
        document["meters"] += [
            {"name": name, "predicted": None, "measured": 300 << 20, "note": ""} for name in ("context", "libraries")
        ]
        made = tmp_path / "r.json"
        made.write_text(json.dumps(document))
        words = ["calibrate", *[str(made)] * 3]
    monkeypatch.setattr(tempfile, "mkdtemp", none)
    with open(SEED, encoding="latin-1") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(words) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: no room for temporary files [SM142]\n")
    assert "TMPDIR" in text


@pytest.mark.parametrize(("number", "work", "caught"), [
    (errno.ENOSPC, True, True), (errno.EDQUOT, True, True), (errno.ENOSPC, False, False), (errno.EIO, True, False),
])  # fmt: skip
def test_a_temporary_folder_fills_up(number: int, work: bool, caught: bool) -> None:
    def fill(note: Callable[[str], Any]) -> None:
        with temporary_folder(work) as folder:
            note(folder)
            raise OSError(number, os.strerror(number))

    seen: list[str] = []
    with pytest.raises(StaticmemError if caught else OSError) as raised:
        fill(seen.append)
    assert not os.path.exists(seen[0])
    assert not caught or "TMPDIR" in str(raised.value)


_FILLED = 'mount -t tmpfs -o size=8k tmpfs "$0" || exit 99; out="$0/out"; shift 0; "$@" > "$out"'


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_stdout_on_a_disk_with_too_little_room(unbuffered: str, tmp_path: Path) -> None:
    """A write of which the disk takes a part is no success, whether Python buffers stdout or not."""
    if not namespaces():
        pytest.skip("this user may not mount")
    words = [sys.executable, "-m", "staticmem", *WRITES["analyze"]]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    run = [*_UNSHARE, "sh", "-c", _FILLED, str(tmp_path), *words]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env=env, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert "stdout cannot be written [SM142]" in done.stderr
