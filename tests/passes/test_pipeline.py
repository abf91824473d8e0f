"""The pipeline: what has no work does not run, versions are kept, and edits are written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
from small_graphs import Builder

import staticmem
from staticmem.ir.graph import Graph, Note, Ref
from staticmem.passes.pipeline import STEP, Pass, Preparation, edit_lines, for_step, run
from staticmem.passes.requested import training_code
from staticmem.scenario.step import Scenario
from staticmem.studies import Study, request_of


def graph(*, training: bool = False) -> Graph:
    b = Builder(x=(2, 3, 4, 4))
    weight, bias, mean, var = (b.parameter(name, 3) for name in ("weight", "bias", "mean", "var"))
    return b.graph(b.call("batch_norm", Ref("x"), weight, bias, mean, var, training, 0.1, 1e-5, True))


@pytest.mark.parametrize("one", STEP, ids=lambda one: one.name)
def test_every_pass_has_its_function_and_says_why(one: Pass) -> None:
    module, _, name = one.function.partition(":")
    assert callable(getattr(import_module(f"staticmem.passes.{module}"), name))
    assert one.restores
    assert one.source


def test_names_are_different() -> None:
    assert len({one.name for one in STEP}) == len(STEP)


def test_a_pass_without_work_is_not_imported() -> None:
    absent = Pass("absent", "-", "-", "no_such_module:function", "aten::lstm")
    off = Pass("off", "-", "-", "no_such_module:function", option=attrgetter("scenario.training"))
    before = graph()
    assert run([absent, off], before, Preparation(Scenario())) is before


def test_edits_are_recorded_with_their_notes() -> None:
    after = for_step(graph(), Scenario(mode="train", optimizer="sgd"))
    (edit,) = after.edits
    assert (edit.name, edit.before, edit.after, edit.changed) == ("batch norms in training", 1, 1, 1)
    assert [note.code for note in edit.notes] == ["SM323"]
    assert after.notes == edit.notes
    first, second = edit_lines(after)
    assert first == "pass 'batch norms in training': 1 ops, 1 of them new or changed"
    assert second.endswith("[SM323] x1")


def test_a_pass_is_given_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else it read would not be in the name of the version, which the next study would take."""
    given: list[object] = []

    def function(graph: Graph, asked: object) -> tuple[Graph, Sequence[Note]]:
        given.append(asked)
        return graph, ()

    monkeypatch.setattr(training_code, "drop_training_code", function)
    one = Pass(
        "one",
        "-",
        "-",
        "requested.training_code:drop_training_code",
        option=attrgetter("scenario.freeze", "scenario.mode"),
    )
    for scenario in (Scenario(mode="train", freeze="conv", accumulate=2), Scenario(freeze="conv")):
        run([one], graph(), Preparation(scenario))
    assert given == [("conv", "train"), ("conv", "infer")]


def test_a_study_of_inference_after_one_of_training() -> None:
    """They share the graph of the file: a version that both took would have the notes of the first."""
    path, packed = Path(__file__).parents[1] / "data" / "graphs" / "mlp_blocks.pt2", {"quantize": "nf4"}
    study = Study.open(path, request_of({**packed, "optimizer": "adam", "lora": "r=4,targets=all-linear"}))
    trained, inferred = study.report, study.ask(request_of({**packed, "mode": "infer"})).report
    assert inferred == replace(staticmem.analyze(path, quantize="nf4", mode="infer"), verdict_on=None)
    told = [" ".join(note.text for note in report.assumptions) for report in (trained, inferred)]
    assert ["0.43.2" in text for text in told] == [True, False]


def test_versions_are_kept_and_shared() -> None:
    bound = graph()
    adam = for_step(bound, Scenario(mode="train", optimizer="adam"))
    assert for_step(bound, Scenario(mode="train", optimizer="sgd")) is adam
    assert for_step(bound, Scenario()) is bound
