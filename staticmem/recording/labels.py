"""What the forward of a model of transformers computes its own loss from."""

from __future__ import annotations

import inspect
import re
from typing import Any

from staticmem.child import FailedError
from staticmem.recording.documented import Documented
from staticmem.recording.example_inputs import Sides
from staticmem.recording.model_inputs import ModelInputs

# inputs that are no labels by their names, and have a loss computed
_ALSO = re.compile(r"^(start_positions|end_positions|bool_masked_pos|future_values|return_loss)$|_labels?$")
_CLASSIFIES = re.compile(r"(Sequence|Image|Audio|Video)Classification$")
# heads that have a label for each token; the documentation of some is that of a classifier (T5)
_OF_TOKENS = re.compile(r"(LM|LMHeadModel|ConditionalGeneration|PreTraining|TokenClassification)$")
BOXES = 8  # of an example: those of an image of COCO are some seven (Lin et al. 2014, 7.7 instances)
_NOTHING = Documented("", None, True)
_RETURNS_LOSS = "return_loss"


def add_labels(inputs: ModelInputs, asked: str | None) -> None:
    """What the forward computes its loss from goes in, in training alone where nobody asks for it."""
    import torch

    built, name = inputs.built, type(inputs.model).__name__
    listed = _listed(inputs) if asked != "no" else {}
    labels = _labels(inputs) if asked != "no" and not listed else {}
    if asked == "yes" and not labels and not listed:
        raise FailedError("option", f"the forward of {name} takes no labels")
    if "decoder_input_ids" in inputs.taken and inputs.config.is_encoder_decoder and asked != "yes":
        if "decoder_input_ids" not in built.kwargs:
            built.add("decoder_input_ids", torch.int64, [inputs.batch, inputs.targets()])
        built.of_mode |= {"decoder_input_ids": False} if labels else {}  # from labels the code makes them itself
    for one, sides in labels.items():
        if sides is None:
            built.say(one, True)
        else:
            built.add(one, inputs.dtype(one), sides)
        built.of_mode |= {one: True} if asked is None else {}
    for one, (parts, axes) in listed.items():
        built.add_each(one, parts, axes)
        names = (one, *(f"{one}_{leaf}" for leaf in range(len(axes))))  # as a recording calls those in a list
        built.of_mode |= dict.fromkeys(names, True) if asked is None else {}
    if listed:
        built.module.register_forward_pre_hook(_check_batch, with_kwargs=True)
    built.loss = loss_of if labels or listed else None


def _labels(inputs: ModelInputs) -> dict[str, Sides | None]:
    """The labels of the forward by name, None for what is no tensor: nothing where it has no loss."""
    taken, built = inputs.taken, inputs.built
    if "labels" not in taken:
        also = [name for name in taken if _ALSO.search(name) and name not in built.kwargs]
        sized = {name: inputs.sides(name) for name in also if name != _RETURNS_LOSS}
        labels = {name: sides for name, sides in sized.items() if sides is not None}
        return {**labels, **({_RETURNS_LOSS: None} if _RETURNS_LOSS in also else {})}
    return {"labels": _sides_of_labels(inputs)}


def _sides_of_labels(inputs: ModelInputs) -> Sides:
    name, told = type(inputs.model).__name__, inputs.told.get("labels", _NOTHING)
    if _CLASSIFIES.search(name):
        return [inputs.batch]
    if name.endswith("SemanticSegmentation"):
        sides = inputs.built.kwargs["pixel_values"].shape[2:]
        return [inputs.batch, *zip(("height", "width"), sides, strict=True)]
    if not _OF_TOKENS.search(name) and told.kind != "list" and (sides := inputs.sides("labels")):
        return sides
    return [inputs.batch, inputs.targets()]


def _listed(inputs: ModelInputs) -> dict[str, tuple[list[Any], list[dict[int, str]]]]:
    """Labels of which each sample has its own: boxes with their classes, or masks. By name those of all samples, and
    the axes of the tensors in them.

    Source: transformers, documentation of the forwards of DetrForObjectDetection, MaskFormerForInstanceSegmentation.
    """
    import torch

    told, built = inputs.told, inputs.built
    batch, (title, count) = inputs.batch[1], inputs.example.of("boxes", BOXES)

    def of(dtype: Any, *more: int) -> Any:
        return torch.zeros((count, *more), dtype=dtype, device="meta")

    rows = {0: title}
    if "labels" in inputs.taken and told.get("labels", _NOTHING).kind == "list":
        each = {"class_labels": of(torch.int64), "boxes": of(inputs.model.dtype, 4)}
        return {"labels": ([dict(each) for _ in range(batch)], [rows for _ in range(batch) for _ in each])}
    if {"mask_labels", "class_labels"} <= set(inputs.taken) and "pixel_values" in built.kwargs:
        sides = built.kwargs["pixel_values"].shape[-2:]
        masks, classes = of(inputs.model.dtype, *sides), of(torch.int64)
        axes = [{**rows, 1: "height", 2: "width"} for _ in range(batch)]
        return {"mask_labels": ([masks] * batch, axes), "class_labels": ([classes] * batch, [rows] * batch)}
    return {}


def _check_batch(module: Any, args: Any, kwargs: Any) -> None:
    """Labels that are a list are as many as the batch has: it stays as it is. A hook of the module."""
    import torch

    if any(isinstance(value.shape[0], torch.SymInt) for value in kwargs.values() if isinstance(value, torch.Tensor)):
        raise ValueError("each sample has other labels, so that the size of the batch is fixed")


def loss_of(result: Any) -> Any:
    """The loss and the other outputs, which a loop with `outputs = model(**inputs)` holds."""
    if result.loss is None:
        raise ValueError("its forward has no loss of these labels")
    return {"loss": result.loss, **result}


def loss_function(module: Any) -> dict[str, str]:
    """The key of transformers' LOSS_MAPPING by which a forward with labels computes its loss; nothing where its code
    has a loss of its own (T5, BERT), or where it is a model of another package.

    Source: transformers 5.24, modeling_utils.py, `PreTrainedModel.loss_function`: classes whose names have no key
    (GPT2LMHeadModel) have None for a type, which means the loss of causal models.
    """
    forward = type(module).forward
    calls = "loss_function" in getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ())
    if not calls or not hasattr(module, "loss_type"):
        return {}
    return {"loss_function": "ForCausalLM" if module.loss_type is None else str(module.loss_type)}
