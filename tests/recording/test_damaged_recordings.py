"""Recordings that are damaged or mean harm: always an error of ours, soon."""

from __future__ import annotations

import copy
import json
import lzma
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from coded_models import Checkpointed, Custom, Kept, on_meta

from staticmem.errors import ModelFileError, StaticmemError
from staticmem.frontends import recording_format as written
from staticmem.frontends.recorded import RecordedModel
from staticmem.recording.record import record
from staticmem.scenario.request import request_of
from staticmem.studies.study import Study

pytestmark = pytest.mark.torch

INTEGERS: tuple[Any, ...] = (-1, -(10**6), 10**6, 2**40, 10**30, True)
TEXTS: tuple[Any, ...] = ("", "%", "%-3", "%99999", "=batch", "=Pow(batch,99)", ":x", "float32")
BAD = (*INTEGERS, *TEXTS, None, 0.5, [], [[]], {}, {"a": 1})
TRIES = 400


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    made = []
    for cls in (Custom, Checkpointed, Kept):
        module, inputs = on_meta(cls)
        document = record(module, inputs)
        document["programs"] = document["programs"][:2]
        made.append(json.loads(json.dumps(document)))
    return made


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(document: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    other = copy.deepcopy(document)
    at: Any = other
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return other


def analysed(document: Any) -> None:
    """Every mode; what is refused is refused by an error of ours."""
    for options in ({"optimizer": "adam"}, {}):
        Study(RecordedModel("<m>", document, "pt2"), request_of({"batch": 3, **options})).report  # noqa: B018


@pytest.mark.parametrize("seed", range(3))
def test_any_damage_is_refused_or_harmless(documents: list[dict[str, Any]], seed: int) -> None:
    draw, document = random.Random(seed), documents[seed]
    every = sorted(places(document), key=str)
    failures = []
    for _ in range(TRIES):
        path = draw.choice(every)
        value = draw.choice((*BAD, KeyError))
        start = time.process_time()
        try:
            analysed(changed(document, path, value))
        except StaticmemError:
            pass
        except Exception as error:
            failures.append((path, value, repr(error)[:200]))
        if time.process_time() - start > 5:
            failures.append((path, value, "slow"))
    assert not failures, failures


@pytest.mark.parametrize("data", [
    b"", b"\xfd7zXZ\x00", lzma.compress(b"{}")[:-4], lzma.compress(b"{}"), lzma.compress(b"[" * 10**6),
    lzma.compress(b'{"format": "other"}'), lzma.compress(b"\xff\xfe"), b"not packed",
])  # fmt: skip
def test_bytes_that_are_no_recording(data: bytes) -> None:
    with pytest.raises(ModelFileError) as error:
        written.unpack(data, "m")
    assert error.value.code == "SM108"


def test_what_unpacks_to_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "MAX_BYTES", 1 << 20)
    with pytest.raises(ModelFileError, match="unpacks to more"):
        written.unpack(written.pack({"format": "x" * (1 << 21)}), "m")
    monkeypatch.setattr(written, "MAX_PACKED", 10)
    with pytest.raises(ModelFileError, match="bytes"):
        written.unpack(bytes(11), "m")


def test_a_later_version_is_refused(documents: list[dict[str, Any]]) -> None:
    with pytest.raises(ModelFileError, match="version 99"):
        RecordedModel("m", {**documents[0], "version": 99}, "pt2")
