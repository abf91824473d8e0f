"""Models that were read before: found by content, bounded, and never changed by what is made of them."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest
from pt2_files import write_without_recording

import staticmem
from staticmem import files
from staticmem.frontends import open_model, recent
from staticmem.frontends.export_program import read_archive
from staticmem.ir.graph import Graph
from staticmem.ir.model_file import resolve
from staticmem.passes.pipeline import bind
from staticmem.report.json import dumps
from staticmem.studies import Request, Study

MODELS = Path(__file__).parents[2] / "models"
SCENARIOS: tuple[dict[str, Any], ...] = (
    {"optimizer": "adam", "batch": 2},
    {"batch": 1},
    {"optimizer": "sgd", "momentum": 0.9, "batch": 2, "amp": "bfloat16", "inplace_activations": "none"},
    {"optimizer": "adamw", "batch": 2, "checkpoint": "BasicBlock", "unfold_batchnorm": True, "channels_last": True},
)
FRESH = """
import json, sys, staticmem
from staticmem.report.json import dumps
from staticmem.passes.pipeline import bind
sys.stdout.write(dumps(staticmem.analyze(sys.argv[1], **json.loads(sys.argv[2]))))
"""


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    recent.models.clear()
    yield
    recent.models.clear()


@pytest.fixture(params=["resnet18.onnx", "resnet18.pt2"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file with a graph alone: the ops of a recording are known when it is bound."""
    model = MODELS / str(request.param)
    if model.suffix == ".pt2":
        return str(write_without_recording(model, tmp_path / model.name))
    return str(shutil.copy(model, tmp_path))


def described(graph: Graph) -> str:
    """Everything in a graph but what it remembers of itself."""
    return "\n".join(map(repr, (graph, *graph.ops, *(sorted(graph.values.items())))))


def analyzed(path: str, words: dict[str, Any]) -> str:
    return dumps(staticmem.analyze(path, **words))


def test_a_file_is_read_once(path: str) -> None:
    first = open_model(path)
    assert open_model(path) is first
    binding = resolve(first, batch=3)
    assert bind(first, binding) is bind(first, resolve(first, batch=3))
    assert bind(first, resolve(first, batch=4)) is not bind(first, binding)


def test_another_path_is_another_model(path: str, tmp_path: Path) -> None:
    copy = str(shutil.copy(path, tmp_path / "copy"))
    assert open_model(copy) is not open_model(path)
    assert staticmem.analyze(copy).model.path == copy


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    shutil.copy(MODELS / "resnet18.onnx", path)
    small = analyzed(path, SCENARIOS[0])
    shutil.copy(MODELS / "resnet50.onnx", path)
    large = analyzed(path, SCENARIOS[0])
    shutil.copy(MODELS / "resnet18.pt2", path)  # even of another format
    assert json.loads(analyzed(path, SCENARIOS[0]))["model"]["format"] == "pt2"
    shutil.copy(MODELS / "resnet18.onnx", path)
    assert analyzed(path, SCENARIOS[0]) == small != large


def test_a_small_change_of_the_graph_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    proto = onnx.load(MODELS / "resnet18.onnx", load_external_data=False)
    path.write_bytes(proto.SerializeToString())
    before = open_model(str(path))
    proto.graph.output[0].name = "changed"
    proto.graph.node[-1].output[0] = "changed"
    path.write_bytes(proto.SerializeToString())
    assert (
        bind(before, resolve(before, batch=1)).outputs
        != bind(open_model(str(path)), resolve(before, batch=1)).outputs
        == ("changed",)
    )


def with_member(path: Path, name: str, data: bytes) -> str:
    """A copy of an archive with one more member, over the one of before."""
    write_without_recording(MODELS / "resnet18.pt2", path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"resnet18/{name}", data)
    return str(path)


def test_contents_of_weights_are_not_read_and_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    first = open_model(with_member(path, "data/weights/more", bytes(1000)))
    assert open_model(with_member(path, "data/weights/more", b"1" * 1000)) is first
    assert open_model(with_member(path, "data/weights/more", bytes(1001))) is not first


def test_whatever_else_is_read_of_an_archive_counts(tmp_path: Path) -> None:
    path, member = tmp_path / "model.pt2", "extra/staticmem_tied.json"
    names = ["layer1.0.conv1.weight", "layer1.0.conv2.weight"]
    apart = open_model(with_member(path, member, json.dumps({"-": "-" * 46}).encode()))
    tied = open_model(with_member(path, member, json.dumps({names[0]: names[1]}).encode()))
    assert bind(tied, resolve(tied, batch=1)).parameters != bind(apart, resolve(apart, batch=1)).parameters


def test_few_are_kept(tmp_path: Path) -> None:
    paths = [str(shutil.copy(MODELS / "seed.pt2", tmp_path / f"{i}.pt2")) for i in range(recent.MODELS + 1)]
    kept = [open_model(p) for p in paths]
    again = [open_model(p) is model for p, model in zip(reversed(paths), reversed(kept), strict=True)]
    assert again == [True] * recent.MODELS + [False]


def test_large_ones_are_not_kept(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MOST_OPS", "LARGEST"):
        with monkeypatch.context() as patch:
            patch.setattr(recent, limit, 10)
            model = open_model(path)
            assert open_model(path) is not model
            assert bind(model, resolve(model, batch=1)) is not bind(model, resolve(model, batch=1))


def test_who_reads_an_archive_itself_gets_one_of_his_own() -> None:
    path = str(MODELS / "seed.pt2")
    assert read_archive(path) is not read_archive(path)
    assert open_model(path) is not read_archive(path)


def test_reports_do_not_depend_on_what_was_asked_before(path: str) -> None:
    fresh = [
        subprocess.run(
            [sys.executable, "-c", FRESH, path, json.dumps(words)], capture_output=True, text=True, check=True
        ).stdout
        for words in SCENARIOS
    ]
    forwards = [analyzed(path, words) for words in SCENARIOS]
    backwards = [analyzed(path, words) for words in reversed(SCENARIOS)]
    assert len(set(fresh)) == len(SCENARIOS)
    assert forwards == fresh
    assert backwards == fresh[::-1]


def test_an_analysis_leaves_the_graph_as_it_was(path: str) -> None:
    study = Study.open(path, Request(optimizer="adam", batch=2))
    bound, graph = bind(study.model, study.binding), study.graph
    before = described(bound), described(graph)
    for words in SCENARIOS:
        staticmem.analyze(path, **words)
    again = Study.open(path, Request(optimizer="adam", batch=2))
    assert again.model is study.model
    assert (described(bound), described(graph)) == before


def test_threads_share_a_model(path: str) -> None:
    alone = [analyzed(path, words) for words in SCENARIOS]
    recent.models.clear()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda words: analyzed(path, words), [*SCENARIOS] * 3)) == alone * 3


# -- files that nobody wrote to --------------------------------------------------------------------------------------


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files written just now count as settled: here two writes never share a tick of the clock."""
    monkeypatch.setattr(files, "SETTLED", -(10**12))


def test_what_was_written_just_now_has_no_stamp(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    later = os.stat(path).st_ctime_ns
    for passed, known in ((-1, False), (0, False), (files.SETTLED, False), (files.SETTLED + 1, True)):
        monkeypatch.setattr("time.time_ns", functools.partial(int, later + passed))
        assert (files.stamp(path) is not None) is known
    assert files.stamp(path + ".missing") is None


@pytest.mark.usefixtures("settled")
def test_a_file_that_nobody_wrote_to_is_not_opened(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, report = open_model(path), analyzed(path, SCENARIOS[0])

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it is opened")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refuse)
        patch.setattr(files, "opened", refuse)
        assert open_model(path) is first
        assert analyzed(path, SCENARIOS[0]) == report
    os.utime(path, ns=(0, 0))  # whatever is said of a file: its contents are looked at
    with monkeypatch.context() as patch:
        patch.setattr(files, "opened", refuse)
        with pytest.raises(AssertionError):
            open_model(path)
    assert open_model(path) is first


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("how", ["in place", "put in its place"])
def test_other_contents_of_the_same_size_and_time_are_seen(how: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    data = (MODELS / "seed.onnx").read_bytes()
    changed = data.replace(b"pytorch", b"PYTORCH")
    assert changed != data
    path.write_bytes(data)
    before = os.stat(path)
    first = json.loads(analyzed(str(path), {}))["model"]
    if how == "in place":
        path.write_bytes(changed)
    else:
        (tmp_path / "new").write_bytes(changed)
        os.replace(tmp_path / "new", path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = json.loads(analyzed(str(path), {}))["model"]
    assert (first["producer"], second["producer"]) == ("pytorch 2.13.0+cpu", "PYTORCH 2.13.0+cpu")
    assert first["sha256"] != second["sha256"]
