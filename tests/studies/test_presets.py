"""Presets of training libraries: what they set, what wins over them, and what the report says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from staticmem.errors import UsageError
from staticmem.scenario import presets
from staticmem.scenario.low_rank import LOW_RANK
from staticmem.scenario.request import OPTIONS, Request, request_of

DOCS = Path(__file__).parents[2] / "docs" / "levers.md"


def test_every_default_is_an_option_with_a_value_that_it_takes() -> None:
    for name in presets.PRESETS:
        request_of({"preset": name}).scenario()
        assert set(presets.PRESETS[name].defaults) <= set(OPTIONS)


def test_the_page_has_every_default_and_every_name() -> None:
    page = DOCS.read_text()
    assert "\n".join(presets.table()) in page
    assert all(
        f"| `{name}` | `--optimizer {other}" in page for name, (other, _) in presets.NAMES_OF_TRANSFORMERS.items()
    )


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


@pytest.mark.parametrize(("name", "meant"), presets.NAMES_OF_TRANSFORMERS.items())
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
