"""Recordings that are damaged or mean harm: always an error of ours, soon."""

from __future__ import annotations

import copy
import json
import lzma
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from coded_models import COUNTED, Checkpointed, Coded, Custom, Kept, UnreadInCheckpoints, on_meta

from staticmem.errors import ModelFileError, StaticmemError
from staticmem.frontends import recording_format as written
from staticmem.frontends.recorded import RecordedModel
from staticmem.recording.record import record
from staticmem.report.model import Report
from staticmem.scenario.request import request_of
from staticmem.studies.study import Study

pytestmark = pytest.mark.torch

SCHEMA = json.loads((Path(__file__).parents[2] / "schemas" / "recording-1.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
INTEGERS: tuple[Any, ...] = (-1, 0, 1, 2, -(10**6), 10**6, 2**40, 2**62, 10**30, True)
TEXTS: tuple[Any, ...] = (
    "", "%", "%1", "%-3", "%99999", "@1", "#-1", "@999999999999", "~inf", "~1e999", ":x", "float32",
    "staticmem::function", "=batch", "=Pow(batch,64)", "=Mul(batch,-3)", "=FloorDiv(1,Add(batch,-3))",
    "=Mul(" * 300, "Pow(Pow(batch,64),64)",
)  # fmt: skip
VALUES = (*INTEGERS, *TEXTS, None, 0.5, [], [[]], [1] * 40, {}, {"a": 1})
MODES: tuple[dict[str, Any], ...] = (
    {"optimizer": "adam"}, {"optimizer": "sgd", "amp": "bf16"}, {"amp": "fp16"}, {},
    {"optimizer": "adam", "dtype": "bf16"}, {"optimizer": "sgd", "dtype": "bf16", "amp": "bf16"},
    {"dtype": "fp16", "amp": "fp16"}, {"dtype": "bf16"},
)  # fmt: skip
ABSURD = 1 << 80  # bytes: sizes of up to 2**40 multiply
SECONDS = 5  # on a slow and busy machine
DAMAGE = st.lists(
    st.tuples(
        st.sampled_from(("set", "delete", "copy", "repeat")), st.integers(0, 1 << 30), st.integers(0, 1 << 30),
        st.sampled_from(VALUES),
    ),
    min_size=1,
    max_size=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    made = []
    for cls in (Custom, Checkpointed, Kept, UnreadInCheckpoints):
        module, inputs = on_meta(cls)
        made.append(json.loads(json.dumps(record(module, inputs))))
    return made


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        yield (*path, key)
        yield from places(item, (*path, key))


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def damage(document: Any, kind: str, where: int, other: int, value: Any) -> None:
    every = sorted(places(document), key=str)
    *above, key = every[where % len(every)]
    parent = at(document, tuple(above))
    if kind == "delete":
        del parent[key]
    elif kind == "repeat" and isinstance(parent, list):
        parent[key:key] = copy.deepcopy([parent[key]] * (other % 100))
    else:  # the value, or another part of the document
        parent[key] = copy.deepcopy(at(document, every[other % len(every)]) if kind == "copy" else value)


def analysed(document: Any, options: dict[str, Any]) -> Report:
    return Study(RecordedModel("<m>", document, "pt2"), request_of({"batch": 3, **options})).report


@given(st.integers(0, 3), DAMAGE)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_damage_is_refused_or_harmless(
    documents: list[dict[str, Any]], number: int, damages: list[tuple[str, int, int, Any]]
) -> None:
    """An error of ours or figures, both soon; what the schema refuses is refused."""
    document = copy.deepcopy(documents[number])
    for entry in damages:
        damage(document, *entry)
    refused = 0 if isinstance(document, dict) and document.get("format") == written.FORMAT else 1
    for options in MODES:
        start = time.process_time()
        try:
            report = analysed(document, options)
        except StaticmemError:
            refused += 1
        else:
            categories = report.peak.by_category.values()
            assert all(0 <= size <= ABSURD for size in (report.peak.live_bytes, *categories))
        assert time.process_time() - start < SECONDS
    if not refused:
        unread = number != 0 or len(damages) > 1  # functions that no op calls
        errors = [
            e.message[:200] for e in VALIDATOR.iter_errors(document) if [*e.path][:1] != ["functions"] or not unread
        ]
        assert not errors


@pytest.mark.parametrize("cls", COUNTED)
def test_documents_follow_the_schema(cls: type[Coded]) -> None:
    module, inputs = on_meta(cls)
    document = written.unpack(written.pack(record(module, inputs)), "m")
    VALIDATOR.validate(document)


def test_functions_that_call_functions_end(documents: list[dict[str, Any]]) -> None:
    """A few rows could stand for any number of ops."""
    document = copy.deepcopy(documents[0])
    call = [document["targets"].index(written.FUNCTION), 0, [0]]
    document["functions"][0]["backward"] = [call, call]
    with pytest.raises(ModelFileError) as error:
        analysed(document, MODES[0])
    assert error.value.code == "SM108"


@pytest.mark.parametrize(
    ("key", "rows"),
    [
        ("stacks", [[1 if i else 0, ".m", "C"] for i in range(5000)]),
        ("parameters", [[i, "p.q", [1]] for i in range(5000)]),
    ],
)
def test_rows_that_grow(documents: list[dict[str, Any]], key: str, rows: list[Any]) -> None:
    """Each row is longer than the one before: all together grow with the square of their number."""
    with pytest.raises(ModelFileError) as error:
        analysed({**documents[0], key: rows}, MODES[0])
    assert error.value.code == "SM108"


@pytest.mark.parametrize("key", ["unread_of_calls", "unread_of_regions"])
@pytest.mark.parametrize(
    "rows", [[[-1, 18]], [[10**6, 18]], [[1, -1]], [[1, 10**6]], [[1, 18], [0, 18]], [[0, True]], [[]], {"1": 18}]
)
def test_calls_are_given_values_that_there_are(documents: list[dict[str, Any]], key: str, rows: Any) -> None:
    """Calls that there are, each once, in order."""
    document = copy.deepcopy(documents[3])
    for program in document["programs"]:
        program[key] = rows
    with pytest.raises(ModelFileError) as error:
        analysed(document, MODES[0])
    assert error.value.code == "SM108"


@pytest.mark.parametrize("shapes", [[["batch", 7]], [["batch"]], [[]], [[3, 4], [3, 4]], [[-1]], [3], {"0": []}])
def test_outputs_have_the_shapes_that_their_ops_give(documents: list[dict[str, Any]], shapes: Any) -> None:
    document = copy.deepcopy(documents[3])
    expected = analysed(document, MODES[0]).peak.live_bytes
    for program in document["programs"]:
        assert len(program.pop("output_shapes")) == len(program["outputs"]) == 1
    assert analysed(document, MODES[0]).peak.live_bytes == expected  # as in recordings of earlier versions
    for program in document["programs"]:
        program["output_shapes"] = shapes
    with pytest.raises(ModelFileError) as error:
        analysed(document, MODES[0])
    assert error.value.code == "SM108"


def test_a_checkpoint_keeps_no_value_that_has_gone(documents: list[dict[str, Any]]) -> None:
    """Nor one that is made later, nor one of the model: these lists change no figure."""
    document = copy.deepcopy(documents[3])
    for program in document["programs"]:
        program.pop("unread_of_regions", None)
    expected = analysed(document, {**MODES[0], "batch": 700}).peak.live_bytes
    for program in document["programs"]:
        if program.get("regions"):
            (last,) = program["outputs"]  # of the head; the first are of the model; 18 and 20: sine, exponential
            program["unread_of_regions"] = [[step, 0, 1, 18, 20, last] for step in (0, 1, 1, 1)]
    assert analysed(document, {**MODES[0], "batch": 700}).peak.live_bytes == expected


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
