"""Recordings that are kept: what the package read decides if they hold, and what others may write is not believed."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import staticmem
from staticmem.child import environment
from staticmem.frontends import recording_format as written
from staticmem.recording import kept, surroundings
from staticmem.recording.kept import Kept

PACKAGE = '''
"""A package with the functions of timm that are called. It reads a variable at its import, and one as it builds."""
import os
import torch
import settings

WIDTH = int(os.environ.get("NET_WIDTH", "16"))

def is_model(name):
    return True

def create_model(name, pretrained, **more):
    if more:
        raise TypeError("img_size")
    layers = [torch.nn.Conv2d(3, WIDTH, 3), torch.nn.Flatten()]
    if "NET_RELU" in os.environ:
        layers.insert(1, torch.nn.ReLU())
    model = torch.nn.Sequential(*layers)
    model.default_cfg = {"input_size": (3, settings.SIDE, settings.SIDE)}
    return model
'''
posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows does not say who may write")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("torch")
    (tmp_path / "timm.py").write_text(textwrap.dedent(PACKAGE))
    (tmp_path / "settings.py").write_text("SIDE = 8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(kept, "cache_folder", lambda: str(tmp_path / "cache" / "staticmem"))
    for name in ("NET_WIDTH", "NET_RELU"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def peak() -> int:
    return staticmem.analyze("timm:net", batch=4).peak.live_bytes


def test_what_the_package_read_decides(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable, a file beside the package, and neither."""
    first = peak()
    monkeypatch.setenv("NET_WIDTH", "32")
    wide = peak()
    assert wide > 1.5 * first
    with mock.patch("staticmem.child.run", side_effect=AssertionError("it was kept")):
        assert peak() == wide
        monkeypatch.setenv("NOT_READ", "1")
        monkeypatch.delenv("NET_WIDTH")
        assert peak() == first
        for name, value in (("NET_RELU", "1"), ("NET_WIDTH", "16"), ("TORCH_OF_C", "1"), ("TIMM_OF_ALL", "1")):
            with monkeypatch.context() as changed:
                changed.setenv(name, value)
                with pytest.raises(AssertionError, match="it was kept"):
                    peak()
    (package / "settings.py").write_text("SIDE = 16\n")
    assert peak() > 2 * first
    assert len(list((package / "cache" / "staticmem" / "recordings").iterdir())) == 3


@posix
@pytest.mark.usefixtures("package")
def test_the_report_says_what_was_not_believed(package: Path) -> None:
    expected = peak()
    folder = package / "cache" / "staticmem" / "recordings"
    (file,) = folder.iterdir()
    before = file.read_bytes()
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(folder.with_name("moved"))
    report = staticmem.analyze("timm:net", batch=4)
    assert report.peak.live_bytes == expected
    (text,) = (note.text for note in report.warnings if note.code == "SM362")
    assert f"{folder}: it is no folder" in text
    assert list(folder.iterdir()) == [file]
    assert file.read_bytes() == before


# -- reads -------------------------------------------------------------------------------------------------------------

READS: list[Callable[[], Any]] = [
    lambda: os.environ["NAME_A"],
    lambda: os.environ.get("NAME_A"),
    lambda: os.getenv("NAME_A", "1"),
    lambda: "NAME_A" in os.environ,
    lambda: os.environ.setdefault("NAME_A", "2"),
    lambda: os.environb.get(b"NAME_A") if os.supports_bytes_environ else os.environ["NAME_A"],
]


@pytest.mark.parametrize("read", READS)
def test_reads_by_name_are_noted(read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME_A", "1")
    with surroundings.noted_reads() as names:
        read()
    assert names == {"NAME_A"}
    with surroundings.noted_reads() as names:
        os.environ.get("NAME_ABSENT")
    assert names == {"NAME_ABSENT"}


def test_other_reads_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all variables, and those of Python's own library."""
    monkeypatch.setenv("NAME_A", "1")
    with surroundings.noted_reads() as names:
        [name for name, value in os.environ.items() if name.startswith("NAME_") and value]
        list(os.environ.values())
        os.environ.copy()
        os.path.expanduser("~")
        subprocess.run([sys.executable, "-c", ""], check=True)
    assert names == set()


def test_no_value_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    found = surroundings.facts_of_process(
        "none", {"A_TOKEN", *surroundings.OFFLINE}, {"A_TOKEN": "of-the-user"}, 1 << 63
    )
    assert found is not None
    assert found["variables"] == ["A_TOKEN"]
    assert "of-the-user" not in json.dumps(found)


def test_files_that_change_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mock.Mock(__file__=str(tmp_path / "own_code.py"))
    (tmp_path / "own_code.py").write_text("")
    monkeypatch.setitem(sys.modules, "own_code", module)
    started = (tmp_path / "own_code.py").stat().st_mtime_ns
    assert surroundings.facts_of_process("none", set(), {}, started) is None
    found = surroundings.facts_of_process("none", set(), {}, 1 << 63)
    assert found is not None
    assert found["files"][str(tmp_path)] == ["own_code.py"]
    assert any(folder.endswith("staticmem") for folder in found["files"])
    assert os.path.dirname(pytest.__file__) not in found["files"]  # installed: its version tells


def test_what_is_installed_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    for name in ("some-1.0.dist-info", "some-1.1.dist-info"):
        seen.append(surroundings.known_before("timm", {}))
        (tmp_path / name).mkdir()
    seen.append(surroundings.known_before("timm", {}))
    assert seen[0] != seen[1] != seen[2]
    assert surroundings.known_before("timm", {"PYTHONPATH": "a"}) != seen[2]


# -- trust -------------------------------------------------------------------------------------------------------------

JOB = {"package": "timm", "name": "net", "config": None}
DOCUMENT = {"format": "staticmem.recording", "version": 1, "a": 1}


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an entry."""
    monkeypatch.setattr(kept, "cache_folder", lambda: str(tmp_path / "staticmem"))
    before = os.umask(0o002)  # many systems give each user a group, and let it write
    write(DOCUMENT)
    os.umask(before)
    (path,) = (tmp_path / "staticmem" / "recordings").iterdir()
    assert Kept(JOB).document() == DOCUMENT
    return path


def write(document: Any) -> None:
    found = {"variables": [], "files": {}, "digest": surroundings.digest([], {}, environment())}
    Kept(JOB).keep(written.pack(document), found)


@pytest.mark.usefixtures("entry")
def test_an_entry_is_of_one_job() -> None:
    assert Kept({**JOB, "name": "other"}).document() is None
    assert Kept({**JOB, "config": {"a": 1}}).document() is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data.partition(b"\n")[2],
        lambda data: b"[]\n" + data.partition(b"\n")[2],
        lambda data: data.replace(b'"files": {}', b'"files": 12'),
        lambda data: data.replace(b'"variables": []', b'"variables": ["HOME"]'),
        lambda data: data.replace(b'"job": "', b'"job": "0'),
    ],
)
def test_damaged_entries_are_made_again(entry: Path, damage: Callable[[bytes], bytes]) -> None:
    entry.write_bytes(damage(entry.read_bytes()))
    found = Kept(JOB)
    assert found.document() is None
    assert found.refusals == []
    write(DOCUMENT)
    assert Kept(JOB).document() == DOCUMENT


@posix
def test_files_that_others_may_write(entry: Path) -> None:
    assert entry.stat().st_mode & 0o777 == 0o600
    entry.chmod(0o620)
    found = Kept(JOB)
    assert found.document() is None
    assert found.refusals == [f"{entry}: others may write to it"]
    write(DOCUMENT)  # in its place
    assert entry.stat().st_mode & 0o777 == 0o600
    assert Kept(JOB).document() == DOCUMENT


@posix
def test_links(entry: Path, tmp_path: Path) -> None:
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    found = Kept(JOB)
    assert found.document() is None
    assert str(entry) in found.refusals[0]
    entry.unlink()
    os.mkfifo(entry)
    found = Kept(JOB)
    assert found.document() is None
    assert found.refusals == [f"{entry}: it is no ordinary file"]


@posix
@pytest.mark.parametrize("level", [0, 1])
def test_folders_of_others(entry: Path, monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    """Nothing is read or written there: links, and folders of another user."""
    folder = entry.parents[level]
    data = entry.read_bytes()

    def refused(why: str) -> None:
        found = Kept(JOB)
        assert found.document() is None
        assert f"{folder}: {why}" in found.refusals
        write({**DOCUMENT, "a": 2})
        assert entry.read_bytes() == data
        assert len(list(entry.parent.iterdir())) == 1

    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: entry.stat().st_uid + 1)
        refused("it belongs to another user")
    moved = folder.with_name("moved")
    folder.rename(moved)
    folder.symlink_to(moved)
    refused("it is no folder")
    folder.unlink()
    moved.rename(folder)
    assert Kept(JOB).document() == DOCUMENT


@posix
@pytest.mark.parametrize("level", [0, 1])
def test_own_folders_are_closed_to_others(entry: Path, level: int) -> None:
    """A folder of the user that a group may write to, as the umask 002 makes it; what others may write is refused."""
    folder = entry.parents[level]
    folder.chmod(0o775)
    assert Kept(JOB).document() == DOCUMENT
    assert folder.stat().st_mode & 0o777 == 0o755
    entry.chmod(0o660)
    assert Kept(JOB).document() is None


def test_the_oldest_go(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be written is done without."""
    monkeypatch.setattr(kept, "MOST_KEPT", 2)
    os.utime(entry, (1, 1))
    data = written.pack(copy.copy(DOCUMENT))
    for digest in ("a", "b"):
        Kept(JOB).keep(data, {"variables": [], "files": {}, "digest": digest})
    assert sorted(path.name[-1] for path in entry.parent.iterdir()) == ["a", "b"]
    blocked = entry.parent / sorted(os.listdir(entry.parent))[0]
    monkeypatch.setattr(kept, "cache_folder", lambda: str(blocked / "below"))
    write(DOCUMENT)
    assert Kept(JOB).document() is None
