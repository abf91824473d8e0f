"""The pipeline: what has no work does not run, versions are kept, and edits are written down."""

from __future__ import annotations

from importlib import import_module

import pytest
from small_graphs import Builder

from staticmem.ir.graph import Graph, Ref
from staticmem.passes.pipeline import STEP, Asked, Pass, edit_lines, for_step, run
from staticmem.scenario.step import Scenario


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
    assert not one.option or one.option in Asked.__slots__


def test_names_are_different() -> None:
    assert len({one.name for one in STEP}) == len(STEP)


def test_a_pass_without_work_is_not_imported() -> None:
    absent = Pass("absent", "-", "-", "no_such_module:function", "aten::lstm")
    off = Pass("off", "-", "-", "no_such_module:function", option="training")
    before = graph()
    assert run([absent, off], before, Asked()) is before


def test_edits_are_recorded_with_their_notes() -> None:
    after = for_step(graph(), Scenario("train", "sgd"))
    (edit,) = after.edits
    assert (edit.name, edit.before, edit.after, edit.changed) == ("batch norms in training", 1, 1, 1)
    assert [note.code for note in edit.notes] == ["SM323"]
    assert after.notes == edit.notes
    first, second = edit_lines(after)
    assert first == "pass 'batch norms in training': 1 ops, 1 of them new or changed"
    assert second.endswith("[SM323] x1")


def test_versions_are_kept_and_shared() -> None:
    bound = graph()
    adam = for_step(bound, Scenario("train", "adam"))
    assert for_step(bound, Scenario("train", "sgd")) is adam
    assert for_step(bound, Scenario()) is bound
