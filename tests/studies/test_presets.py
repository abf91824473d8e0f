"""Presets of training libraries: what they set, what wins over them, and what the report says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.errors import UsageError, closest
from staticmem.scenario import optimizers, presets
from staticmem.scenario.optimizers import LOW_RANK
from staticmem.scenario.request import OPTIONS, Request, request_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "levers.md"
GRAPHS = (ROOT / "tests" / "data" / "graphs", ROOT / "models")
MEASURED = json.loads((ROOT / "tests" / "data" / "measured" / "trainers.json").read_text())["steps"]


def test_every_default_is_an_option_with_a_value_that_it_takes() -> None:
    for name in presets.PRESETS:
        request_of({"preset": name}).scenario()
        assert set(presets.PRESETS[name].defaults) <= set(OPTIONS)


def test_the_page_has_every_name_of_transformers() -> None:
    page = DOCS.read_text()
    assert all(f"`{name}`" in page for name in optimizers.NAMES_OF_TRANSFORMERS)


def test_what_is_given_wins() -> None:
    request = request_of({"preset": "hf-trainer", "clip_grad_norm": False, "optimizer": None})
    assert (request.mode, request.optimizer, request.optimizer_impl) == ("train", "adamw", "fused")
    assert (request.clip_grad_norm, request.outputs) == (False, "dropped")
    assert request_of({"preset": "HF-Trainer", "optimizer": "sgd"}).optimizer_impl == "foreach"


def note_of(**options: Any) -> str:
    _, notes = request_of(options).scenario()
    return next(note.text for note in notes if note.code == "SM129")


def test_the_report_says_what_a_preset_set() -> None:
    text = note_of(preset="hf-trainer", outputs="held")
    assert text.startswith(
        "preset hf-trainer (transformers 5.23): optimizer adamw, optimizer-impl fused, clip-grad-norm on"
    )
    assert text.endswith("otherwise: outputs")


def test_an_inference_has_no_preset() -> None:
    scenario, notes = request_of({"preset": "torchtune", "mode": "infer"}).scenario()
    assert scenario.dtype is None
    assert [note.code for note in notes] == ["SM302"]


def test_an_unknown_preset_names_the_closest() -> None:
    with pytest.raises(UsageError, match="unknown preset 'hf-trainr'") as caught:
        Request(preset="hf-trainr")
    assert "hf-trainer" in caught.value.hint


@pytest.mark.parametrize(("name", "meant"), optimizers.NAMES_OF_TRANSFORMERS.items())
def test_names_of_transformers(name: str, meant: tuple[str, str | None]) -> None:
    targets = "all-linear" if meant[0] in LOW_RANK else ()
    scenario, _ = Request(optimizer=name.upper(), optim_target_modules=targets).scenario()
    assert (scenario.optimizer, scenario.optimizer_impl) == (meant[0], meant[1] or "foreach")
    given, _ = Request(optimizer="adamw_torch_fused", optimizer_impl="for-loop").scenario()
    assert given.optimizer_impl == "for-loop"


@pytest.mark.parametrize("name", ["muon", "torchao-adamw-4bit"])
def test_optimizers_that_are_refused_where_matrices_are_divided(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        Request(optimizer=name, parallel="zero2", devices=2).scenario()
    assert caught.value.code == "SM127"
    Request(optimizer=name, parallel="ddp", devices=2).scenario()


@pytest.mark.parametrize(("option", "value"), [("parallel", "tp"), ("compile", True)])
def test_losses_of_libraries_are_refused_in_divided_and_compiled_models(option: str, value: object) -> None:
    request = Request(**{"mode": "train", "loss": "causal-lm", "devices": 2, option: value})  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        request.scenario()
    assert caught.value.code == "SM282"


@pytest.mark.parametrize("measured", MEASURED, ids=lambda one: f"{one['graph']} {one['preset']} {one.get('amp')}")
def test_steps_in_the_loops_of_libraries(measured: dict[str, Any]) -> None:
    options = dict(measured)
    graph, peak = options.pop("graph"), options.pop("peak_bytes")
    file = next(path for folder in GRAPHS if (path := folder / f"{graph}.pt2").exists())
    report = staticmem.analyze(file, clip_grad_norm=False, **options)
    missing = 512 if graph == "bert-base" and "amp" in options else 0  # a scalar; which one is not known
    assert report.peak.live_bytes == peak - missing
    assert report.scenario.loss == ("cross-entropy" if graph == "resnet18" else "causal-lm")


def loss_and_notes(model: str, **options: Any) -> tuple[str | None, list[str]]:
    report = staticmem.analyze(GRAPHS[0] / f"{model}.pt2", **options)
    return report.scenario.loss, [note.text for note in report.assumptions if note.code == "SM330"]


def test_the_loss_of_transformers_follows_the_output() -> None:
    loss, notes = loss_and_notes("gpt2", loss="transformers", mode="train", dtype="bf16")
    assert loss == "causal-lm"
    assert [text.partition(", which its")[0] for text in notes] == [
        "loss: transformers, which is causal-lm: [1, 512, 50257] are scores of tokens"
    ]
    loss, notes = loss_and_notes("alexnet", loss="transformers", mode="train")
    assert loss == "cross-entropy"
    assert notes[0].startswith("loss: cross-entropy, chosen by the output's shape")


@pytest.mark.parametrize(
    ("options", "flag"), [({"compile": True}, "--compile"), ({"parallel": "tp", "devices": 2}, "--parallel tp")]
)
def test_where_the_loss_of_transformers_is_not_covered_the_report_says_so(options: dict[str, Any], flag: str) -> None:
    loss, notes = loss_and_notes("gpt2", preset="hf-trainer", **options)
    assert loss == "cross-entropy"
    assert any(text.endswith(f"not covered with {flag}") for text in notes)


def test_outputs_in_float32_need_autocast() -> None:
    plain, wide = (
        staticmem.analyze(GRAPHS[0] / "gpt2.pt2", optimizer="sgd", float32_outputs=on) for on in (False, True)
    )
    assert plain.peak.live_bytes == wide.peak.live_bytes
    (note,) = [note.text for note in wide.warnings if note.code == "SM302"]
    assert "--float32-outputs is not used" in note


@pytest.mark.parametrize(
    ("version", "optimizer", "impl", "set_to_none"),
    [
        ("1.13", "adamw", "for-loop", False), ("1.12+cu113", "sgd", "for-loop", False),
        ("1.13", None, "foreach", False), ("1.13", "adam-8bit", "foreach", False),
        ("2.0", "adamw", "foreach", True), (None, "adamw", "foreach", True),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_release(
    version: str | None, optimizer: str | None, impl: str, set_to_none: bool
) -> None:
    request = request_of({"torch_version": version, "optimizer": optimizer, "mode": "train"})
    assert (request.optimizer_impl, request.set_to_none) == (impl, set_to_none)
    given = request_of({"torch_version": version, "optimizer": "sgd", "optimizer_impl": "foreach", "set_to_none": True})
    assert (given.optimizer_impl, given.set_to_none) == ("foreach", True)


def test_later_steps_are_described_as_they_are() -> None:
    def text(**options: Any) -> str:
        _, notes = request_of({"optimizer": "adam", **options}).scenario()
        return next(note.text for note in notes if note.code == "SM300")

    assert text().endswith("zero_grad() has set gradients to None")
    assert "fills with zeros" in text(set_to_none=False)
    assert "when the forward has run" in text(zero_grad="after-forward")
    assert "before PyTorch 2.0" in text(torch_version="1.13")


def test_attention_before_pytorch_2_is_written_out() -> None:
    graph = GRAPHS[1] / "resnet18.pt2"
    assert request_of({"torch_version": "1.13"}).scenario()[0].sdpa == "math"
    assert request_of({"torch_version": "2.0"}).scenario()[0].sdpa == "auto"
    report = staticmem.analyze(graph, batch=1, torch_version="1.13")
    assert all(note.code != "SM361" for note in report.warnings)  # it has no attention


def test_two_letters_that_are_swapped() -> None:
    assert closest("adma", ["adam", "adamax"]) == "Did you mean 'adam'?"
