"""Convolutions of compiled code ask for workspaces as eager ones do, in the layout that Inductor gives them."""

from __future__ import annotations

from pathlib import Path

from staticmem.eager.strides import channels_last_strides
from staticmem.eager.trace import Convolution
from staticmem.scenario.request import Request
from staticmem.studies import Study

MODEL = str(Path(__file__).parents[2] / "models" / "resnet18.pt2")


def convolutions(compiled: bool) -> list[Convolution]:
    study = Study.open(MODEL, Request(batch=4, mode="train", compile=compiled))
    every = [read for reads in study.result.trace.reads.values() for read in reads]
    return [read for read in every if isinstance(read, Convolution)]


def test_compiled_convolutions_are_those_of_the_model_in_channels_last() -> None:
    eager, compiled = convolutions(False), convolutions(True)
    assert len(eager) == len(compiled) == 2 * 20

    def sizes(c: Convolution) -> str:
        numbers = (c.stride, c.padding, c.dilation, c.groups, c.transposed, c.gradients)
        return f"{c.input.shape} {c.weight.shape} {c.result.shape} {numbers}"

    assert sorted(map(sizes, eager)) == sorted(map(sizes, compiled))
    for each in compiled:
        for form in (each.input, each.weight, each.result):
            assert form.strides == channels_last_strides(form.shape)
