"""The prediction that a run of a graph is compared with: the same step, without what a graph does not have.

`analyze` predicts the model: its module calls keep their inputs alive, its variables keep values. A graph that is run
op by op has neither: each value goes after its last use. So the prediction is made for the graph without modules and
lines of code, by the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from staticmem.devices import gpus
from staticmem.devices.meters import DeviceMeters, on_device
from staticmem.engine.step import StepResult, run_step
from staticmem.errors import DimensionError, UsageError
from staticmem.ir.graph import Op
from staticmem.liveness import Lifetimes
from staticmem.scenario.losses import HEAD_LOSSES, OF_TRANSFORMERS
from staticmem.scenario.optimizers import TORCH_OPTIMIZERS
from staticmem.scenario.request import OPTIONS, Request, request_of
from staticmem.scenario.step import Scenario
from staticmem.studies import Study
from staticmem.studies.device import device_of
from staticmem.units import GIB

# levers of a model's code, which a graph does not have, or of other packages
_REFUSED = (
    "checkpoint", "checkpoint_segments", "parallel", "offload_optimizer", "grad_scaler", "compile", "compile_mode",
    "compile_optimizer", "offload_activations", "inplace_abn", "float32_outputs", "let_go",
)  # fmt: skip
CODE_OPTIONS = (
    *_REFUSED,
    "checkpoint_every",
    "checkpoint_save",
    "checkpoint_sequential",
    "devices",
)  # and what belongs to these


@dataclass(frozen=True)
class Predicted:
    """A step of a graph without frames."""

    study: Study
    scenario: Scenario
    result: StepResult
    lifetimes: Lifetimes


def predicted(path: str, options: Mapping[str, Any], device: str) -> Predicted:
    """The prediction for a run on `device`, "cpu" or "cuda".

    Args:
        path: an .onnx or a .pt2 file.
        words: fields of a `Request` that were given, as JSON has them.

    Raises:
        UsageError: a lever that a run of a graph cannot have (SM226).
        DimensionError: a size that the file fixes otherwise (SM236).
        ModelFileError: the file cannot be read.
    """
    request = request_from(options)
    _check(request)
    study = Study.open(path, request)
    if study.binding.rebound:
        raise DimensionError(
            f"the file fixes {', '.join(study.binding.rebound)}",
            "PyTorch runs the graph as it is, and shapes are written in it.",
            "Leave the size away, or export the model with this dimension dynamic.",
            code="SM236",
        )
    scenario = study.scenario
    graph = replace(study.graph, ops=tuple(replace(op, modules=(), stack=()) for op in study.graph.ops))
    if device == "cpu":
        scenario = replace(scenario, sdpa="math")
        graph = replace(graph, ops=tuple(_without_dropout(op) for op in graph.ops))
    result = run_step(graph, scenario, "last-use")
    return Predicted(study, scenario, result, Lifetimes(result.trace))


def options_of(request: Request) -> dict[str, Any]:
    """The fields of a request that are not the default, as JSON can have them; the inverse of `request_from`."""
    blank = Request()
    given = {name: getattr(request, name) for name in OPTIONS if getattr(request, name) != getattr(blank, name)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def request_from(options: Mapping[str, Any]) -> Request:
    """A request of words that went through JSON: lists are tuples again."""
    return request_of({k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})


def _without_dropout(op: Op) -> Op:
    """Attention without dropout of its weights: inside of the CPU's math kernel its mask is float, on CUDA bytes."""
    if op.base != "aten::scaled_dot_product_attention":
        return op
    args = (*op.args[:4], 0.0, *op.args[5:]) if len(op.args) > 4 else op.args
    kwargs = {**op.kwargs, "dropout_p": 0.0} if "dropout_p" in op.kwargs else op.kwargs
    return replace(op, args=args, kwargs=kwargs)


def _check(request: Request) -> None:
    for name in _REFUSED:
        if getattr(request, name) != OPTIONS[name].default:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} cannot be run",
                "A run has the model's graph, not its code and not several GPUs.",
                f"Leave {flag} away; 'staticmem analyze' predicts it.",
                code="SM226",
            )
    if request.loss in (*HEAD_LOSSES, OF_TRANSFORMERS):
        raise UsageError(
            f"--loss {request.loss} cannot be run",
            "It is an op that ends the graph, and a run has those of PyTorch alone.",
            "Use --loss cross-entropy; 'staticmem analyze' predicts the other.",
            code="SM226",
        )
    if request.optimizer is not None and request.optimizer not in TORCH_OPTIMIZERS:
        raise UsageError(
            f"{request.optimizer} cannot be run",
            "It is not an optimizer of PyTorch's own.",
            f"Choose one of {', '.join(TORCH_OPTIMIZERS)}.",
            code="SM226",
        )


# -- on the card that was used -----------------------------------------------------------------------------------------


def card_of(name: str, total: int) -> str | None:
    """The slug of the card that the driver calls `name` and that has about `total` bytes; None where none fits.

    `NVIDIA GeForce RTX 4090` is `rtx-4090`; of cards sold with several memories the closest counts.
    """
    parts = set(re.findall(r"[a-z0-9]+", gpus.named_by_driver(name)))
    fitting = []
    for slug, gpu in gpus.cards().items():
        model = {word for word in slug.split("-") if not re.fullmatch(r"\d+gb", word)}
        if model <= parts:
            fitting.append((-len(model), abs(gpu.usable - total) if total else 0, slug))
    if not fitting:
        return None
    _, away, slug = min(fitting)
    return slug if not total or away <= total // 10 else None


def gpu_word(name: str, total: int) -> str:
    """A word for `--gpu`: the card's, else its memory as it is."""
    card = card_of(name, total)
    return card if card is not None else f"{total / GIB:.3f}GiB"


def device_meters(prediction: Predicted, name: str, total: int, version: str) -> DeviceMeters:
    """The prediction for a card by the driver's name and with `total` bytes, and for a version of PyTorch.

    What the request says of the device counts more.
    """
    request = prediction.study.request
    if request.gpu is None:
        request = replace(request, gpu=gpu_word(name, total))
    if request.torch_version is None:
        request = replace(request, torch_version=version)
    return on_device(prediction.result, device_of(request))
