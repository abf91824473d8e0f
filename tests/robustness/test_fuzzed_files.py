"""Damaged files, a few of each kind: the same for every run, and others where hypothesis looks for them.

`scripts/faults/fuzz.py` makes thousands; what it does is in docs/internals/faults.md.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading import load_module

from staticmem import StaticmemError
from staticmem.validate import plain_pickle

ROOT = Path(__file__).resolve().parents[2]
SMALL = {  # kinds whose originals are read in milliseconds
    "pt2": 25, "pt2-bytes": 25, "pt2-cut": 25, "onnx-bytes": 10, "onnx-cut": 15, "onnx-graphs": 15, "onnx-verbs": 8,
    "pt2-verbs": 8, "snapshot": 40, "config": 40, "report": 10, "record": 15, "profile": 25, "gpus": 15, "prices": 25,
    "toml": 25, "session": 10,
}  # fmt: skip


def script(name: str) -> ModuleType:
    return load_module(ROOT / "scripts" / "faults" / f"{name}.py", registered=True)


@pytest.fixture(scope="module")
def fuzz() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))  # the script puts its folder there
        yield script("fuzz")


@pytest.fixture(scope="module")
def coverage(fuzz: ModuleType) -> ModuleType:
    """The other script: it needs atheris to run, not to be imported."""
    return script("fuzz_coverage")


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
    # the damage is real; command lines have caught it themselves
    assert refused > 0 or kind.endswith("verbs") or kind in ("record", "gpus", "session")


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


TARGETS = (
    "pt2", "pt2-zip", "onnx", "onnx-wire", "session", "snapshot", "config", "toml", "profile", "gpus", "prices",
    "report", "diff", "record",
)  # fmt: skip


def test_every_target_is_here(coverage: ModuleType) -> None:
    assert set(coverage.TARGETS) == set(TARGETS)
    assert all(coverage.sources(target) for target in coverage.TARGETS.values())


OLD_ONNX = tuple(map(int, version("onnx").split(".")[:2])) < (1, 21)


@pytest.mark.parametrize("name", TARGETS)
def test_changes_of_structure(
    name: str, fuzz: ModuleType, coverage: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the coverage-guided fuzzer begins with, and a few of its changes, without its guidance."""
    monkeypatch.chdir(ROOT)
    target = coverage.TARGETS[name]
    if target.suffix == "onnx" and OLD_ONNX:
        pytest.skip("onnx before 1.21 crashes on some malformed nodes (docs/internals/faults.md)")
    seeds = sorted(target.seeds(), key=len)[:4]
    words = coverage.mutators.words_of(coverage.sources(target))
    path = tmp_path / f"a.{target.suffix}"
    made = set()
    for number in range(12):
        rng = random.Random(f"{name} {number}")
        data, other = rng.choice(seeds), rng.choice(seeds)
        if target.shape == "bytes":
            data = fuzz.bytes_of(data, rng)
        else:
            for _ in range(3):
                data = coverage.changed(target, data, other, rng, words, lambda text, rng=rng: fuzz.bytes_of(text, rng))
        made.add(data)
        assert coverage.feed(target, data, path, 60, None) is None
    assert len(made) > 6


def test_it_notices_what_no_reader_may_do(coverage: ModuleType, tmp_path: Path) -> None:
    target = coverage.TARGETS["prices"]
    path, secret = tmp_path / "in" / "a.yaml", tmp_path / "secret"
    path.parent.mkdir()
    secret.write_text("x")
    watch = coverage.Watch(str(path))

    def reads(name: str, _: object) -> None:
        Path(name).read_text()
        secret.read_text()

    def fails(name: str, _: object) -> None:
        raise KeyError(name)

    from dataclasses import replace

    assert coverage.feed(replace(target, run=lambda *_: None), b"{}", path, 5, watch) is None
    found = coverage.feed(replace(target, run=reads), b"{}", path, 5, watch)
    assert found is not None
    assert "secret" in found
    found = coverage.feed(replace(target, run=fails), b"{}", path, 5, watch)
    assert found is not None
    assert "KeyError" in found
    assert coverage.feed(target, b"[", path, 5, watch) is None


def test_findings_of_one_place_are_one(coverage: ModuleType) -> None:
    text = 'File "/a/staticmem/b.py", line 3, in f\n    x\nKeyError: {}'
    assert coverage.place_of(text.format("'a'")) == coverage.place_of(text.format("'b'"))
    assert coverage.place_of(text.format(1)) != coverage.place_of(text.replace("line 3", "line 4").format(1))


def test_pieces_of_exports_are_sound(coverage: ModuleType, tmp_path: Path) -> None:
    """A fuzzer that begins with files that are refused at the door finds nothing."""
    target, sound = coverage.TARGETS["pt2"], 0
    for number, data in enumerate(seeds := target.seeds()):
        path = tmp_path / f"{number}.pt2"
        path.write_bytes(target.pack(data))
        try:
            target.run(str(path), random.Random(1))
            sound += 1
        except StaticmemError:
            continue
    assert sound > 0.7 * len(seeds) > 20
