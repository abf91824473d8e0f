"""`diff` of memory snapshots: two of one program by source line, and those of all ranks of a run."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from staticmem.cli.main import main
from staticmem.errors import UsageError
from staticmem.report.json import to_json
from staticmem.validate.snapshot_diff import BEFORE, diff

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "schemas" / "snapshot-diff-1.schema.json").read_text())
MIB = 2**20
OWN = "/home/me/train.py"
Block = tuple[str, int, int]  # file, line, MiB


def frames(file: str, line: int) -> list[dict[str, Any]]:
    """As PyTorch has them, innermost first: C++, its own Python, then the user's."""
    inner = [("??", 0, "at::empty"), ("/opt/lib/python3.12/site-packages/torch/nn/functional.py", 9, "linear")]
    return [{"filename": f, "line": n, "name": name} for f, n, name in (*inner, (file, line, "forward"))]


def snapshot(path: Path, blocks: list[Block], before: int = 0) -> str:
    """Blocks are allocated one after another; the first one is freed behind the last."""
    events: list[dict[str, Any]] = []
    for address, (file, line, size) in enumerate(blocks):
        event = {"action": "alloc", "addr": address + 1, "size": size * MIB, "stream": 0, "frames": frames(file, line)}
        events.append(event)
    events.append({"action": "free_completed", "addr": 1, "size": blocks[0][2] * MIB, "stream": 0, "frames": []})
    left = [size for _, _, size in blocks[1:]] + ([before] if before else [])
    alive = [{"state": "active_allocated", "size": size * MIB, "requested_size": size * MIB} for size in left]
    segments = [{"device": 0, "total_size": sum(left) * MIB, "blocks": alive}]
    path.write_bytes(pickle.dumps({"device_traces": [events], "segments": segments}, 4))
    return str(path)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["diff", *words, "-f", "json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, SCHEMA)
    return document


def test_two_snapshots_differ_by_the_users_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The layer's line in PyTorch is the same for all: that of the user's code counts. Equal lines are not listed."""
    old = snapshot(tmp_path / "old.pickle", [(OWN, 10, 8), (OWN, 12, 4), (OWN, 12, 4), (OWN, 30, 1)])
    new = snapshot(tmp_path / "new.pickle", [(OWN, 10, 8), (OWN, 12, 4), (OWN, 20, 16), (OWN, 30, 1)])
    found = told(capsys, old, new)
    lines = [(one["line"], one["change_bytes"], one["before_count"], one["after_count"]) for one in found["lines"]]
    assert lines == [(f"{OWN}:20 forward", 16 * MIB, 0, 1), (f"{OWN}:12 forward", -4 * MIB, 2, 1)]
    assert found["change_bytes"] == 12 * MIB == sum(change for _, change, _, _ in lines)
    assert [file["allocated_bytes"] for file in found["files"]] == [17 * MIB, 29 * MIB]
    assert found["files"][0]["at"] == f"{OWN}:30 forward"
    assert main(["diff", old, new, "--top", "1"]) == 0
    out = capsys.readouterr().out
    assert "grows by 12.0 MiB, from 17.0 MiB to 29.0 MiB" in out
    assert "and 1 more" in out
    assert told(capsys, new, old)["change_bytes"] == -12 * MIB


def test_many_are_the_ranks_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The largest, how far above the smallest, and what it has more, whatever the order of the files is."""
    sizes = [8, 24, 4, 12]
    ranks = [snapshot(tmp_path / f"rank{i}.pickle", [(OWN, 1, 1), (OWN, 7, n)]) for i, n in enumerate(sizes)]
    found = told(capsys, *ranks)
    assert (found["before"], found["after"], found["skew_bytes"]) == (2, 1, 20 * MIB)
    assert [(one["line"], one["change_bytes"]) for one in found["lines"]] == [(f"{OWN}:7 forward", 20 * MIB)]
    assert main(["diff", *ranks, "-q"]) == 0
    assert "the largest is 20.0 MiB (400.0%) above the smallest" in capsys.readouterr().out


def test_what_was_there_before_is_a_line_without_a_place(tmp_path: Path) -> None:
    old = snapshot(tmp_path / "old.pickle", [(OWN, 1, 1), (OWN, 2, 4)])
    new = snapshot(tmp_path / "new.pickle", [(OWN, 1, 1), (OWN, 2, 4)], before=32)
    (line,) = diff([old, new]).lines
    assert (line.line, line.change_bytes, line.after_count) == (BEFORE, 32 * MIB, 0)
    assert to_json(diff([old, old]))["lines"] == []


def test_growth_is_a_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = snapshot(tmp_path / "old.pickle", [(OWN, 1, 1), (OWN, 2, 4)])
    new = snapshot(tmp_path / "new.pickle", [(OWN, 1, 1), (OWN, 2, 6)])
    assert main(["diff", old, new, "--max-increase", "1MiB"]) == 1
    assert main(["diff", old, new, "--max-increase", "50%"]) == 0
    assert main(["diff", new, old, "--max-increase", "0%"]) == 0
    capsys.readouterr()


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil-was-here",)


def test_what_does_not_go_with_snapshots_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags of a step, formats, models beside them, a pickle with code: each says what to do instead."""
    one = snapshot(tmp_path / "one.pickle", [(OWN, 1, 1), (OWN, 2, 4)])
    model = str(ROOT / "models" / "seed.pt2")
    evil = tmp_path / "evil.pickle"
    evil.write_bytes(pickle.dumps(_Evil(), 4))
    for words, code in (
        ([one, one, "--batch", "2"], "SM140"),
        ([one, one, "--config", "staticmem.yaml"], "SM140"),
        ([one, one, one, "--max-increase", "5%"], "SM140"),
        ([one, one, "-f", "md"], "SM141"),
        ([one, one, "-f", "html", "-o", str(tmp_path / "a.html")], "SM141"),
        ([one, model], "SM233"),
        ([model, model, model], "SM140"),
        ([one, str(evil)], "SM233"),
    ):
        assert main(["diff", *words]) == 2
        assert f"[{code}]" in capsys.readouterr().err
    assert not Path("evil-was-here").exists()
    with pytest.raises(UsageError, match="more than"):
        diff([one] * 1_025)
