"""Steps of a run that are repeated give the process in which every step is worked out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_lengths import attention

from staticmem.allocators import run
from staticmem.allocators.process import Process
from staticmem.allocators.repeated_step import RepeatedStep
from staticmem.config.config import of_node
from staticmem.documents import of_plain
from staticmem.studies.plan import study_of_config

ROOT = Path(__file__).parents[2]
RESNET = str(ROOT / "models" / "resnet18.pt2")
LENGTHS = {"dim": "seq", "source": "uniform(20, 400)", "seed": 1}
SHORT = {"times": 5}
RUNS: dict[str, tuple[list[Any], bool]] = {
    "lengths": ([{"step": {"times": 30, "lengths": LENGTHS, "batch": 4, "optimizer": "adam"}}], True),
    "gathered": (
        [{"step": SHORT}, {"evaluate": {"times": 6, "gather": "list", "lengths": LENGTHS}}, {"step": SHORT}],
        True,
    ),
    "two lengths": ([{"step": {"times": 12, "lengths": {**LENGTHS, "source": "uniform(64, 65)"}}}], True),
    "image": ([{"step": {"times": 6}}, "evaluate", {"step": {"times": 5}}, "save", {"step": {"times": 4}}], False),
    "gradients that stay": ([{"step": {"times": 8, "set_to_none": False, "momentum": 0.9}}], False),
    "asleep": (
        [{"step": {"times": 5}}, "sleep", {"step": {"times": 5}}, "sleep", "wake", {"step": {"times": 5}}],
        False,
    ),
    "accumulated": ([{"step": {"times": 6, "accumulate": 2, "amp": "bf16", "zero_grad": "after-forward"}}], False),
}


def process_of(instants: list[Any], model: str, dims: dict[str, int]) -> Process:
    infer = {"batch": 2, **({"dims": dims} if dims else {})}
    train = {**infer, "optimizer": "sgd"}
    node = {"version": 1, "model": model, "train": train, "infer": infer, "plan": {"instants": instants}}
    study = study_of_config(of_node(of_plain(node, "test", ""), ""), "l4")
    return study.play(study.plan.instants).process


@pytest.mark.parametrize("name", RUNS)
def test_repeated_steps_have_the_calls_and_sizes_of_those_that_are_worked_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instants, of_text = RUNS[name]
    model, dims = (attention(tmp_path / "attention.onnx"), {"seq": 100}) if of_text else (RESNET, {})
    repeats = []
    repeat = RepeatedStep.repeat

    def counted(step: RepeatedStep, *args: Any) -> Any:
        repeats.append(step)
        return repeat(step, *args)

    monkeypatch.setattr(RepeatedStep, "repeat", counted)
    repeated = process_of(instants, model, dims)
    assert len(repeats) > 1
    monkeypatch.setattr(run, "TRIES", 0)
    count = len(repeats)
    worked_out = process_of(instants, model, dims)
    assert len(repeats) == count
    for found, expected in ((repeated, worked_out), (repeated.origins, worked_out.origins)):
        for name, value in vars(expected).items():
            assert name == "origins" or getattr(found, name) == value, name
