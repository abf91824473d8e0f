"""The onnx package's backend test collection: every model ends in a report or a message, with the right shapes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

import staticmem
from staticmem.errors import StaticmemError
from staticmem.frontends import open_model

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"


def _models(folder: Path) -> Iterator[Path]:
    """The collection's models: generated ones for every operator, and those that the package has as files."""
    from onnx.backend.test.case.node import collect_testcases

    for index, case in enumerate(collect_testcases(None)):
        if case.model is not None:
            path = folder / f"{index}_{case.name}.onnx"
            path.write_bytes(case.model.SerializeToString())
            yield path
    yield from sorted(path for kind in ("simple", "pytorch-operator", "pytorch-converted", "light")
                      for path in (DATA / kind).rglob("*.onnx"))  # fmt: skip


def _analyze(path: Path) -> staticmem.Report:
    dims = {d: 2 for spec in open_model(str(path)).inputs for d in spec.shape or () if isinstance(d, str)}
    return staticmem.analyze(str(path), mode="infer", dims=dims)


def _declared(path: Path) -> list[tuple[int, ...] | None]:
    """Output shapes that the file states in full."""
    shapes: list[tuple[int, ...] | None] = []
    for output in onnx.load(path, load_external_data=False).graph.output:
        kind = output.type.tensor_type
        sizes = tuple(d.dim_value for d in kind.shape.dim)
        known = kind.HasField("shape") and all(d.HasField("dim_value") for d in kind.shape.dim)
        shapes.append(sizes if known else None)
    return shapes


def _by_data(report: staticmem.Report) -> bool:
    """Sizes that only data tell (axes, shapes, windows as inputs), or an op that is reported as unknown."""
    given = any(i.dtype.startswith(("int", "uint", "str")) and len(i.shape) < 2 for i in report.model.inputs)
    bounded = any(note.code in ("SM266", "SM267") for note in (*report.assumptions, *report.warnings))
    return given or bounded or bool(report.coverage.unknown)


@pytest.mark.exhaustive
def test_every_model_of_the_collection(tmp_path: Path) -> None:
    messages: Counter[str] = Counter()
    wrong: list[str] = []
    count = compared = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the generators of the cases divide by zero on purpose
        paths = list(_models(tmp_path))
    for path in paths:
        count += 1
        try:
            report = _analyze(path)
        except StaticmemError as error:
            messages[error.code] += 1
            continue
        declared = _declared(path)
        if _by_data(report):
            continue
        compared += 1
        if len(report.model.outputs) == len(declared):
            for found, sizes in zip(report.model.outputs, declared, strict=True):
                if sizes is not None and found.shape is not None and tuple(found.shape) != sizes:
                    wrong.append(f"{path.stem}: {found.shape} is not {sizes}")
    assert count > 1400  # 1,437 come with onnx 1.17
    assert compared > 700  # 776 with onnx 1.17, which says fewer shapes
    assert wrong == []
    assert sum(messages.values()) <= count // 20, messages
