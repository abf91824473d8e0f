"""The step of a model whose layers are recorded with the packed weights of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from staticmem.errors import UsageError
from staticmem.ir.graph import Note
from staticmem.scenario.request import Request
from staticmem.scenario.step import Scenario
from staticmem.scenario.strategies import facts_of

# `is_trainable` of its quantizer in transformers 5.24 is False, or gptqmodel has no kernel that trains
NOT_TRAINED = {"mxfp4": "transformers does not train beside weights that mxfp4 has packed (`is_trainable`)."}


def scenario_of(request: Request, layers: Mapping[str, Any]) -> tuple[Scenario, list[Note]]:
    """The scenario, in which the model has the type that it was recorded in.

    Raises:
        UsageError: what is asked does not go with such weights (SM188).
    """
    scenario, notes = request.scenario()
    method = str(layers["quant_method"])
    what = f"the weights of the checkpoint are packed by {method}"
    whole = "Add dequantize=yes to the name, for the model as it is loaded whole."
    if request.quantize is not None:
        raise UsageError(f"--quantize {request.quantize}: {what}", "The name says dequantize=no.", whole, "SM188")
    strategy = facts_of(request.parallel)
    if strategy is not None and not strategy.keeps_whole:
        why = "How the strategy divides packed weights and their scales is not covered."
        raise UsageError(f"--parallel {request.parallel}: {what}", why, "Use --parallel ddp, or one device.", "SM188")
    if request.compile:
        raise UsageError(f"--compile: {what}", "What compiled code makes of them is not covered.", whole, "SM188")
    if scenario.training and method in NOT_TRAINED:
        raise UsageError(f"training: {what}", NOT_TRAINED[method], whole, "SM188")
    if scenario.training and scenario.lora is None and method != "compressed-tensors":
        why = "Packed weights have no gradient."
        raise UsageError(f"training: {what}", why, "Add --lora r=16,alpha=32,targets=all-linear.", "SM188")
    if scenario.lora is not None and scenario.lora.dora:
        why = "DoRA is predicted beside weights that are not packed."
        raise UsageError(f"--lora dora=true: {what}", why, "Leave dora out.", "SM188")
    return replace(scenario, dtype=None), notes
