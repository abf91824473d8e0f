"""Small files that say much: parts that are named again and again, so that bounds of each part do not bound the sum."""

from __future__ import annotations

import json
import lzma
import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from staticmem.errors import StaticmemError
from staticmem.frontends import recorded
from staticmem.frontends import recording_format as written
from staticmem.validate import snapshots

MOST = 300 << 20  # bytes that a reader may take for a file of 100 KB


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


def snapshot(tmp_path: Path, events: list[Any], segments: list[Any]) -> str:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [events], "segments": segments}, protocol=4))
    assert path.stat().st_size < 200_000
    return str(path)


ALLOC = {"action": "alloc", "addr": 1, "size": 512, "frames": [], "stream": 0}
BLOCK = {"state": "active_allocated", "size": 512, "requested_size": 512, "address": 0}


def test_segments_that_share_their_blocks(tmp_path: Path) -> None:
    segment = {"device": 0, "total_size": 512, "blocks": [BLOCK] * 20_000, "address": 0}
    with pytest.raises(StaticmemError, match="more than 5,000,000 blocks"):
        snapshots.read(snapshot(tmp_path, [ALLOC], [segment] * 20_000))


def test_events_that_share_their_frames(tmp_path: Path) -> None:
    frame = {"filename": "f" * 300, "line": 1, "name": "g" * 300}
    events = [{**ALLOC, "addr": 7, "frames": [frame] * 64}] * 20_000
    read = snapshots.read(snapshot(tmp_path, events, []))
    assert len({id(one.frames) for one in read.allocations}) == 1


def test_a_frame_whose_name_is_lists_within_lists(tmp_path: Path) -> None:
    """Two references on each of 60 levels: its text would have 2^60 parts."""
    name: list[Any] = []
    for _ in range(60):
        name = [name, name]
    events = [{**ALLOC, "frames": [{"filename": "f", "line": 1, "name": name}]}]
    with pytest.raises(StaticmemError) as caught:
        snapshots.read(snapshot(tmp_path, events, []))
    assert caught.value.code in ("SM233", "SM234")


def test_module_calls_within_each_other() -> None:
    """Each row names one of a thousand calls deep, which is the most; their sum is 400 million."""
    deep = [[1 if at else 0, ".a" if at else "a", "M"] for at in range(900)]
    rows = [*deep, *[[at + 1, ".b", "M"] for at in range(100_000)]]
    with pytest.raises(ValueError, match="in sum"):
        recorded._stacks(rows)


@pytest.mark.parametrize("text", ["[" + "[]," * 6_000_000 + "0]", '["' + "a" * 20_000_000 + '"]'])
def test_a_recording_that_repeats_itself(text: str) -> None:
    packed = lzma.compress(text.encode(), format=lzma.FORMAT_XZ, preset=1)
    assert len(packed) < 100_000
    with pytest.raises(StaticmemError, match="more than a recording has"):
        written.unpack(packed, "bomb.pt2")


def test_a_recording_of_usual_form_is_read() -> None:
    document = {"format": written.FORMAT, "rows": [[i, f"layer{i}"] for i in range(2000)]}
    packed = lzma.compress(json.dumps(document).encode(), format=lzma.FORMAT_XZ)
    assert written.unpack(packed, "model.pt2") == document


def test_a_recording_of_blocks_that_are_alike_is_read() -> None:
    """Swin-B's has 2.4 MB of text in 5.5 KB."""
    document = {"format": written.FORMAT, "rows": [[0, "layer"]] * 200_000}
    packed = lzma.compress(json.dumps(document).encode(), format=lzma.FORMAT_XZ)
    assert len(json.dumps(document)) > 400 * len(packed)
    assert written.unpack(packed, "model.pt2") == document
