"""Output is written whole or not at all, wherever it goes; streams may be closed, full, or leave; signals clean up."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from staticmem.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SEED = str(ROOT / "models" / "seed.pt2")
posix = pytest.mark.skipif(os.name != "posix", reason="pipes, links and signals of POSIX")
FULL = Path("/dev/full")


def staticmem(*words: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    given = {"capture_output": True, "stdin": subprocess.DEVNULL, **kwargs}
    return subprocess.run([sys.executable, "-m", "staticmem", *words], text=True, timeout=120, **given)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Runs a command that has to fail; what it says."""
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "SM190" not in captured.err
    assert captured.err.count("\n") == 3
    return captured.err


# -- targets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["write", "chmod", "replace", "mkstemp"])
@pytest.mark.parametrize("old", [None, "mine"])
def test_a_write_that_fails_leaves_what_was_there(
    fails: str, old: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "a.json"
    if old is not None:
        target.write_text(old)

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if fails == "write":

        class Full:
            def __init__(self, descriptor: int, *_: object) -> None:
                self.descriptor = descriptor

            def __enter__(self) -> Full:
                return self

            def __exit__(self, *_: object) -> None:
                os.close(self.descriptor)

            def write(self, data: bytes) -> None:
                os.write(self.descriptor, data[:100])
                broken()

        real = os.fdopen
        monkeypatch.setattr(
            "staticmem.cli.output.os.fdopen",
            lambda descriptor, mode: Full(descriptor) if mode == "wb" else real(descriptor, mode),
        )
    else:
        module = "tempfile" if fails == "mkstemp" else "os"
        monkeypatch.setattr(f"{module}.{fails}", broken)
    text = refused(capsys, "analyze", SEED, "-o", str(target), "--force")
    assert "No space left on device" in text
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ([] if old is None else ["a.json"])
    assert old is None or target.read_text() == old


@posix
@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="root may write into every folder")
def test_a_folder_without_rights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert "Permission denied" in refused(capsys, "analyze", SEED, "-o", str(tmp_path / "a.json"))


@posix
def test_a_link_is_written_through(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "a.json"
    link.symlink_to(tmp_path / "there" / "b.json")
    assert main(["analyze", SEED, "-o", str(link)]) == 0
    assert link.is_symlink()
    assert json.loads((tmp_path / "there" / "b.json").read_text())["schema"]
    capsys.readouterr()
    assert "--force" in refused(capsys, "analyze", SEED, "-o", str(link))


@posix
def test_a_device_stays_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also for root, who could put a file in its place."""
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    assert main(["analyze", SEED, "-f", "json", "-o", str(link), "--force"]) == 0
    assert link.is_symlink()
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert capsys.readouterr().out == ""


@posix
def test_a_socket_is_not_replaced(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import socket
    import tempfile

    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:  # a short path: 108 bytes
        server.bind(f"{folder}/s")
        assert "not an ordinary file" in refused(capsys, "analyze", SEED, "-f", "json", "-o", f"{folder}/s", "--force")
        assert stat.S_ISSOCK(os.stat(f"{folder}/s").st_mode)
        assert os.listdir(folder) == ["s"]


@posix
def test_pipes_as_targets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe.json")
    os.mkfifo(pipe)
    refused(capsys, "analyze", SEED, "-o", pipe)  # nobody reads: an error at once
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert main(["analyze", SEED, "-o", pipe]) == 0
        assert json.loads(os.read(reader, 1 << 20))["schema"]
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


def test_two_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    """Whoever is last wins; no moment has a mixture."""
    target = tmp_path / "a.json"
    words = [sys.executable, "-m", "staticmem", "analyze", SEED, "--force", "-o", str(target), "--batch"]
    running = [subprocess.Popen([*words, str(batch)], stderr=subprocess.DEVNULL) for batch in (1, 2, 3)]
    seen: set[int] = set()
    while any(process.poll() is None for process in running):
        if target.exists():
            seen.add(json.loads(target.read_text())["scenario"]["batch"])
        time.sleep(0.001)
    assert [process.returncode for process in running] == [0, 0, 0]
    assert seen <= {1, 2, 3}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert json.loads(target.read_text())["scenario"]["batch"] in (1, 2, 3)


@posix
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_what_replaces_a_file_has_its_rights(mode: int, tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("mine")
    target.chmod(mode)
    assert main(["analyze", SEED, "-q", "-f", "json", "-o", str(target), "--force"]) == 0
    assert stat.S_IMODE(target.stat().st_mode) == mode


@posix
def test_the_name_of_an_output_does_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["analyze", SEED, "-q", "-o", str(tmp_path / "a\x1b[31m.json")]) == 0
    assert main(["init", SEED, "-o", str(tmp_path / "a\x1b[31m.yaml")]) == 0
    said = capsys.readouterr().err
    assert said.count("a?[31m") == 2
    assert "\x1b" not in said


# -- signals -----------------------------------------------------------------------------------------------------

# A process that stops in the middle of a write: the data is in the temporary file, the name is not there yet.
_STOPS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a shell without a terminal starts without it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # so does one of nohup
import staticmem.cli.output as output
def replace(*_):
    print("now", flush=True)
    time.sleep(100)
output.os.replace = replace
from staticmem.cli.main import main
sys.exit(main(["analyze", sys.argv[1], "-q", "-f", "json", "-o", sys.argv[2], "--force"]))
"""


@posix
@pytest.mark.parametrize(
    ("name", "code", "left"),
    [("SIGINT", 130, 0), ("SIGTERM", 143, 0), ("SIGHUP", 129, 0), ("SIGKILL", -signal.SIGKILL, 1)],
)
def test_a_signal_within_a_write(name: str, code: int, left: int, tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("mine")
    process = subprocess.Popen(
        [sys.executable, "-c", _STOPS, SEED, str(target)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert target.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1 + left  # after SIGKILL nobody can clean up; the name is not taken


# A sweep in processes that is interrupted while they start, as by Ctrl-C in a terminal: all of the group get it. It
# comes where a process runs and has not been told yet what to do, and to any thread here that does not block it.
_STARTS = """
import os, signal, sys, threading, time
from multiprocessing import util
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
started, spawn = [], util.spawnv_passfds
def spawn_and_interrupt(*words):
    process = spawn(*words)
    started.append(process)
    if len(started) == int(sys.argv[2]):
        os.killpg(0, signal.SIGINT)
        time.sleep(0.05)
    return process
util.spawnv_passfds = spawn_and_interrupt
from staticmem.cli.main import main
from staticmem.studies.sweep import CHUNK
batches = ",".join(map(str, range(1, 2 * CHUNK)))
words = ["--what-if", f"batch={batches}", "--gpu", "l4", "-j", "2"]
if __name__ == "__main__":
    sys.exit(main(["sweep", sys.argv[1], *words]))
"""


@posix
@pytest.mark.parametrize("after", [2, 3])  # 1 is the tracker of shared resources, which Python starts first
def test_an_interrupt_while_processes_start(after: int, tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(_STARTS)
    process = subprocess.run(
        [sys.executable, str(script), str(ROOT / "models" / "resnet50.pt2"), str(after)],
        capture_output=True, text=True, timeout=120, start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    assert "Traceback" not in process.stderr
    assert (process.returncode, process.stderr) == (130, "interrupted\n")


@posix
def test_a_folder_that_was_removed(tmp_path: Path) -> None:
    """Paths from the root work there; others are refused with the reason."""
    gone = tmp_path / "gone"
    for words, code, said in (
        ([SEED], 0, " tensors at the peak, "),
        (["seed.pt2"], 2, "seed.pt2"),
        ([SEED, "-o", "a.json"], 2, "the current folder does not exist [SM101]"),
        ([SEED, "-o", str(tmp_path / "a.json")], 0, "Wrote"),
    ):
        gone.mkdir()
        line = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m staticmem analyze {' '.join(words)} -q"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120, env=environment)
        assert run.returncode == code, run.stderr
        assert said in run.stdout + run.stderr
        assert "SM190" not in run.stderr


@posix
def test_the_signal_of_a_caller_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """In a program that calls main(), SIGTERM means what that program says."""
    before = signal.getsignal(signal.SIGTERM)
    assert main(["analyze", SEED, "-q"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


# -- streams -----------------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("format_", ["table", "json", "md"])
def test_a_reader_that_leaves(format_: str) -> None:
    """`staticmem ... | head -0`: no complaint, exit code 0."""
    read, write = os.pipe()
    os.close(read)
    done = staticmem("analyze", SEED, "-f", format_, capture_output=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@posix
@pytest.mark.skipif(not FULL.is_char_device(), reason="no /dev/full")
@pytest.mark.parametrize("words", [["analyze", SEED], ["analyze", SEED, "-f", "html"], ["explain", "SM101"]])
def test_a_full_stdout(words: list[str]) -> None:
    with FULL.open("w") as full:
        done = staticmem(*words, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert lines[0] == "error: stdout cannot be written [SM142]"


@posix
@pytest.mark.parametrize("closed", [0, 1, 2])
def test_closed_streams(closed: int, tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    script = f"exec {closed}>&-; exec {sys.executable} -m staticmem analyze {SEED} -o {target}"
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "rror" not in done.stderr
    assert json.loads(target.read_text())["schema"]


@posix
def test_a_closed_stdin_has_no_model() -> None:
    script = f"exec {sys.executable} -m staticmem analyze - <&-"
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: nothing to read [SM101]")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("format_", ["table", "json", "md", "html"])
def test_names_that_the_terminal_cannot_say(encoding: str, format_: str, tmp_path: Path) -> None:
    """A file name that is not UTF-8 is half a surrogate pair to Python; accents and boxes are not ASCII."""
    name = os.fsdecode(b"caf\xe9.pt2") if sys.platform == "linux" else "caf\u00e9.pt2"
    path = tmp_path / name
    path.write_bytes(Path(SEED).read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "staticmem", "analyze", str(path), "-f", format_],
        capture_output=True, timeout=120, env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    done.stdout.decode(encoding)
