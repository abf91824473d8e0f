"""Damaged files, a few of each kind: the same for every run, and others where hypothesis looks for them.

`scripts/fuzz.py` makes thousands; what it does is in docs/robustness.md.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from staticmem import StaticmemError
from staticmem.validate import plain_pickle

ROOT = Path(__file__).resolve().parents[2]
SMALL = {  # kinds whose originals are read in milliseconds
    "pt2": 25, "pt2-bytes": 25, "pt2-cut": 25, "onnx-bytes": 10, "onnx-cut": 15, "onnx-graphs": 15, "onnx-verbs": 8,
    "pt2-verbs": 8, "snapshot": 40, "config": 40, "report": 10,
}  # fmt: skip


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "scripts" / "fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def originals(fuzz: ModuleType) -> dict[str, list[bytes]]:
    """The smallest original of each kind."""
    return {kind: [min(fuzz.KINDS[kind][3](), key=len)] for kind in SMALL}


@pytest.mark.parametrize("kind", SMALL)
def test_damaged_files(
    kind: str, fuzz: ModuleType, originals: dict[str, list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    suffix, mutate, run, _ = fuzz.KINDS[kind]
    refused = 0
    for number in range(SMALL[kind]):
        rng = random.Random(f"test {kind} {number}")
        path = tmp_path / f"{number}.{suffix}"
        path.write_bytes(mutate(originals[kind][0], rng))
        try:
            run(str(path), random.Random(number))
        except StaticmemError as error:
            refused += error.code.startswith("SM") and len(error.what) > 0
    # the damage is real; verbs that print have caught it themselves
    assert refused > 0 or kind.endswith("verbs")


@pytest.mark.parametrize("kind", ["pt2", "onnx-graphs", "snapshot", "report"])
def test_the_originals_are_sound(
    kind: str, fuzz: ModuleType, originals: dict[str, list[bytes]], tmp_path: Path
) -> None:
    suffix, _, run, _ = fuzz.KINDS[kind]
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(originals[kind][0])
    run(str(path), random.Random(0))


@pytest.mark.parametrize("kind", ["onnx-bytes", "pt2-bytes", "snapshot"])
def test_cut_at_every_kind_of_place(
    kind: str, fuzz: ModuleType, originals: dict[str, list[bytes]], tmp_path: Path
) -> None:
    """The first 64 ends, and some of the others: never analysed by half, never another exception."""
    suffix, _, run, _ = fuzz.KINDS[kind]
    data = originals[kind][0]
    path = tmp_path / f"a.{suffix}"
    step = max(len(data) // 40, 1)
    for end in (*range(64), *range(64, len(data), step), len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(StaticmemError):
            run(str(path), random.Random(0))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_no_bytes_make_the_pickle_reader_fail(data: bytes) -> None:
    for head in (b"\x80\x02", b"\x80\x04"):
        try:
            found = plain_pickle.loads(head + data)
        except plain_pickle.PickleError:
            continue
        assert type(found) in (dict, list, tuple, str, bytes, int, float, bool, type(None))
