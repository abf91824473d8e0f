"""Steps that are kept for the next question: found by graph and scenario, bounded, and changed by nothing."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

import staticmem
from staticmem.frontends import recent
from staticmem.passes.pipeline import bind
from staticmem.report.json import dumps
from staticmem.studies import Request, Study, request_of
from staticmem.studies.device import replay_of
from staticmem.studies.page import page
from staticmem.studies.steps import STEPS, kept_steps

MODELS = Path(__file__).parents[2] / "models"
ADAM = Request(optimizer="adam", batch=2)
# what a replay or a report depends on, and a step does not
ALIKE: tuple[dict[str, Any], ...] = (
    {},
    {"gpu": "a100-sxm-40gb"},
    {"gpu": "24GB", "alloc_conf": "expandable_segments:True"},
    {"torch_version": "2.10", "module_loading": "eager"},
    {"channels_last": True, "tf32": False},
    {"cudnn_benchmark": True, "top": 3},
    {"method": "textbook"},
    {"parallel": "ddp", "devices": 4},
)


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    for kept in (recent.models, kept_steps):
        kept.clear()
    yield
    for kept in (recent.models, kept_steps):
        kept.clear()


@pytest.fixture(params=["resnet18.onnx", "resnet18.pt2"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(shutil.copy(MODELS / str(request.param), tmp_path))


def asked(**words: Any) -> Request:
    return request_of({"optimizer": "adam", "batch": 2, **words})


def test_one_step_serves_every_card(path: str) -> None:
    first = Study.open(path, asked())
    for words in ALIKE[1:-1]:
        study = Study.open(path, asked(**words))
        assert study.result is first.result
        assert study.lifetimes is first.lifetimes


@pytest.mark.parametrize(
    "words",
    [
        {"batch": 3}, {"optimizer": "sgd"}, {"amp": "bfloat16"}, {"mode": "infer", "optimizer": None},
        {"set_to_none": False}, {"freeze": "layer1"}, {"accumulate": 2}, {"torch_version": "1.10"},
    ],
)  # fmt: skip
def test_another_question_is_another_step(path: str, words: dict[str, Any]) -> None:
    assert Study.open(path, asked(**words)).result is not Study.open(path, asked()).result


def test_a_graph_with_norms_put_back_is_made_once() -> None:
    path = str(MODELS / "vgg16.onnx")
    plain, norms, again = (Study.open(path, asked(unfold_batchnorm=put)).result for put in (False, True, True))
    assert norms is again
    assert norms is not plain


def test_what_ran_in_place_is_part_of_the_question() -> None:
    path = str(MODELS / "resnet18.onnx")
    none, every = (Study.open(path, asked(inplace_activations=policy)).result for policy in ("none", "all"))
    assert none is not every
    assert none.trace.ticks > every.trace.ticks
    again = Study.open(path, asked(inplace_activations="none"))
    assert again.result is none


def test_reports_are_those_of_a_step_that_nobody_asked_for_before(path: str) -> None:
    fresh = []
    for words in ALIKE:
        kept_steps.clear()
        fresh.append(dumps(Study.open(path, asked(**words)).report))
    kept_steps.clear()
    assert [dumps(Study.open(path, asked(**words)).report) for words in ALIKE] == fresh
    study = Study.open(path, asked())
    assert study.result is Study.open(path, asked()).result
    page(study)
    replay_of(study.request, study.result)
    assert [dumps(Study.open(path, asked(**words)).report) for words in reversed(ALIKE)] == fresh[::-1]


def test_both_ends_of_a_band_are_kept() -> None:
    """A file without stack traces: an inference is worked out for what variables keep at most and at least."""
    path = str(MODELS / "resnet18.onnx")
    first, second = (Study.open(path, Request(mode="infer", batch=2)) for _ in range(2))
    assert first.live_band is not None
    before = len(steps_kept())
    assert second.live_band == first.live_band
    assert len(steps_kept()) == before == 3


def steps_kept() -> list[object]:
    return list(kept_steps._kept.values())


def test_few_are_kept(path: str) -> None:
    batches = range(1, STEPS + 2)
    ran = {batch: Study.open(path, Request(optimizer="sgd", batch=batch)).result for batch in batches}
    assert len(steps_kept()) == STEPS
    last = batches[-1]
    assert Study.open(path, Request(optimizer="sgd", batch=last)).result is ran[last]
    assert Study.open(path, Request(optimizer="sgd", batch=1)).result is not ran[1]


def test_large_ones_and_those_of_objects_are_not_kept(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    staticmem.analyze(onnx.load(MODELS / "resnet18.onnx", load_external_data=False), optimizer="adam")
    assert not steps_kept()
    monkeypatch.setattr("staticmem.studies.steps.MOST_OPS", 10)
    assert Study.open(path, asked()).result is not Study.open(path, asked()).result
    assert not steps_kept()


@pytest.mark.parametrize("policy", ["auto", "all", "none"])
def test_a_graph_that_is_not_kept_goes_with_its_last_user(policy: str) -> None:
    """Without a circle: a large graph would stay in memory until Python looks for circles."""
    proto = onnx.load(MODELS / "resnet18.onnx", load_external_data=False)
    gc.collect()
    gc.disable()
    try:
        study = Study.open(proto, asked(inplace_activations=policy))
        graph, bound = weakref.ref(study.graph), weakref.ref(bind(study.model, study.binding))
        assert study.report.peak.live_bytes
        del study
        assert graph() is None
        assert bound() is None
    finally:
        gc.enable()
