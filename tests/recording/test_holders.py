"""Recordings have the lines of ops, the names of variables, and the values that outlive their use."""

from __future__ import annotations

import dis
import inspect
import json
import os
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import named_models  # noqa: E402
from test_damaged_recordings import VALIDATOR  # noqa: E402

from staticmem.errors import ModelFileError  # noqa: E402
from staticmem.frontends.recorded import RecordedModel  # noqa: E402
from staticmem.ir.graph import Graph  # noqa: E402
from staticmem.recording.holders import is_mentioned  # noqa: E402
from staticmem.recording.record import record  # noqa: E402
from staticmem.scenario.request import request_of  # noqa: E402
from staticmem.studies.study import Study  # noqa: E402

pytestmark = pytest.mark.torch
SHAPES = {"Attention": (2, 128, 32), "Residual": (4, 64)}


def document_of(name: str) -> Any:
    cls = getattr(named_models, name)
    shape = SHAPES.get(name.removesuffix("Freed"), (2, 3, 64, 64))
    with torch.device("meta"):
        module = cls()
        return record(module, (torch.empty(shape),))


def graph_of(document: Any, **options: Any) -> Graph:
    return Study(RecordedModel("<m>", document, "pt2"), request_of(options)).graph


def line_of(name: str, text: str) -> int:
    lines, start = inspect.getsourcelines(getattr(named_models, name))
    return start + next(index for index, line in enumerate(lines) if text in line)


def unused(name: str, **options: Any) -> dict[str, tuple[str, int]]:
    recorded = graph_of(document_of(name), **options).recorded
    assert recorded is not None
    return {name: (how, line.line) for _, holders in recorded.unused.values() for name, how, line in holders}


def test_values_that_outlive_their_use_name_what_holds_them() -> None:
    at = line_of("UNet", "up = F.interpolate(conv3")
    assert unused("UNet") == {"conv3": ("del", at), "conv2": ("del", at + 1), "conv1": ("del", at + 2)}
    found = unused("Listed", optimizer="sgd")
    assert found == {"skips": ("item", line_of("Listed", "skips[1 - index]"))}
    found = unused("Attention")
    assert found["self.kept"] == ("attribute", line_of("Attention", "self.kept = weights"))
    assert found["weights"] == ("del", line_of("Attention", "x = x + weights"))
    assert unused("Residual")["hidden"] == ("None", line_of("Residual", "x = x + self.second"))


@pytest.mark.parametrize("name", ["UNetFreed", "AttentionFreed", "ListedFreed"])
def test_code_that_lets_go_is_told_nothing(name: str) -> None:
    assert unused(name) == {}


def test_what_other_references_hold_is_not_named() -> None:
    """A closure, a tuple, an argument; and a function that has a copy of its variables is left alone."""
    assert "conv1" not in unused("Held")
    assert unused("Copied") == {}


def test_documents_have_no_folders_of_the_machine_and_follow_the_schema() -> None:
    document = document_of("Listed")
    VALIDATOR.validate(document)
    assert document["files"] == ["named_models.py"]
    assert os.path.dirname(named_models.__file__) not in json.dumps(document)


def test_recordings_without_lines_are_read() -> None:
    document = document_of("UNet")
    expected = graph_of(document)
    for key in ("files", "lines", "names"):
        del document[key]
    for program in document["programs"]:
        program.pop("unused", None)
    older = graph_of(document)
    assert older.ops == expected.ops
    assert older.recorded is not None
    assert not older.recorded.unused


@pytest.mark.parametrize(
    "rows", [[[3, 10**6, [[0, 0, 0]]]], [[3, 1, [[0, 9, 0]]]], [[3, 1, [[0, 0, 10**6]]]], [[10**6, 1, []]]]
)
def test_damaged_holders_are_refused(rows: Any) -> None:
    document = document_of("UNet")
    for program in document["programs"]:
        program["unused"] = rows
    with pytest.raises(ModelFileError, match="damaged"):
        graph_of(document)


def repeats(items: Any) -> Any:
    before = 0
    for item in items:
        after = before + item
        before = item
    del items
    return after


@pytest.mark.parametrize(("name", "text", "mentioned"), [
    ("before", "before = item", False), ("before", "after = before", True), ("after", "before = item", True),
    ("item", "before = item", True), ("item", "del items", False), ("items", "after = before", True),
])  # fmt: skip
def test_mentions_follow_the_code(name: str, text: str, mentioned: bool) -> None:
    lines, start = inspect.getsourcelines(repeats)
    line = start + next(index for index, each in enumerate(lines) if text in each)
    first = next(i for i, each in enumerate(dis.get_instructions(repeats)) if each.starts_line == line)
    assert is_mentioned(repeats.__code__, first, name) is mentioned
