"""Example inputs of torchvision's detectors: a batch of images, and in training the boxes that are in each.

How many boxes there are at each step is in the data. What the network finds is drawn at random, so that it finds
something everywhere, and the code of the package runs on it: as many boxes remain as its own limits let through (those
behind suppression, detections of an image, anchors and boxes that are sampled for the loss). One such limit is a size
of the recording: the `detections` of an image in inference, of which there is one at least.

Source: torchvision 0.29, models/detection: generalized_rcnn.py, roi_heads.py (`select_training_samples`,
`postprocess_detections`), _utils.py (`Matcher`, `BalancedPositiveNegativeSampler`), transform.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from staticmem.recording.example_inputs import Built, Example
from staticmem.recording.labels import BOXES

SPREAD = 1.0  # of what is found: of 91 classes some pass the threshold of most boxes (0.05), as those of sigmoids do
DETECTIONS = "detections"
_TARGETS = "targets"
_LEAST_SIDE, _MOST_SIDE = 1 / 16, 1 / 2  # of a box, to that of the image


def as_by_default(build: Callable[[], Any]) -> Any:
    """The model of a function of torchvision as it builds it where nobody says more, and without loading: it has the
    frozen norms and layers of a backbone that was trained before.

    Source: torchvision, models/detection/backbone_utils.py, `_validate_trainable_layers`; faster_rcnn.py.
    """
    from torchvision.models import WeightsEnum

    with (
        mock.patch.object(WeightsEnum, "get_state_dict", return_value={}),
        mock.patch.object(torch.nn.Module, "load_state_dict"),
    ):
        return build()


def detector(model: Any, example: Example, dtype: Any) -> Built:
    """The model with its example inputs.

    Images have the sides that the model resizes them to, which it then leaves as they are.
    """
    high, wide = _sides(model)
    batch, height, width = example.of("batch", 2), example.of("height", high), example.of("width", wide)
    built = Built(model, loss=_total, spread=SPREAD)
    built.add("images", dtype, [batch, ("", 3), height, width])
    _add_targets(built, example, (batch[1], height[1], width[1]))
    for module in model.modules():
        if hasattr(module, "detections_per_img"):
            count = example.of(DETECTIONS, module.detections_per_img)[1]
            module.detections_per_img = count
            built.limits[DETECTIONS] = count, 1
    model.register_forward_pre_hook(_check_sizes, with_kwargs=True)
    return built


def _sides(model: Any) -> tuple[int, int]:
    """Height and width of an image that the model does not resize."""
    transform = model.transform
    if transform.fixed_size is not None:
        return int(transform.fixed_size[1]), int(transform.fixed_size[0])
    side = int(transform.min_size[-1])
    return side, side


def _add_targets(built: Built, example: Example, image: tuple[int, int, int]) -> None:
    """The boxes of each image, with their classes."""
    batch, height, width = image
    title, count = example.of("boxes", BOXES)
    make: dict[str, tuple[Any, tuple[int, ...], Callable[..., Any]]] = {
        "boxes": (torch.float32, (4,), partial(_boxes, height=height, width=width)),
        "labels": (torch.int64, (), partial(torch.ones, dtype=torch.int64)),
    }
    parts = [
        {name: torch.zeros((count, *more), dtype=dtype, device="meta") for name, (dtype, more, _) in make.items()}
        for _ in range(batch)
    ]
    names = [f"{_TARGETS}_{leaf}" for leaf in range(batch * len(make))]
    built.add_each(_TARGETS, parts, [{0: title}] * len(names))
    built.input_values = dict(zip(names, [value for _, _, value in make.values()] * batch, strict=True))
    built.of_mode |= dict.fromkeys((_TARGETS, *names), True)


def _boxes(shape: tuple[int, ...], height: int, width: int) -> torch.Tensor:
    """Boxes of many sizes all over an image: left, top, right, bottom."""
    random = torch.Generator().manual_seed(shape[0])
    least, most = _LEAST_SIDE, _MOST_SIDE
    sides = least + (most - least) * torch.rand(shape[0], 2, generator=random)
    starts = (1 - sides) * torch.rand(shape[0], 2, generator=random)
    return torch.cat([starts, starts + sides], 1) * torch.tensor([width, height, width, height])


def _total(losses: Any) -> Any:
    """The loss as torchvision's own training adds it up, whose dictionary of parts stays alive.

    Source: torchvision, references/detection/engine.py, `train_one_epoch`.
    """
    return {"loss": sum(losses.values()), **losses}


def _check_sizes(module: Any, args: Any, kwargs: Any) -> None:
    """Each image is resized and searched by itself, so that all sizes stay as they are. A hook of the module."""
    heads = getattr(module, "roi_heads", None)
    if module.training and heads is not None and (heads.has_mask() or heads.has_keypoint()):
        raise ValueError("training of masks and key points is not covered; --mode infer is")
    if any(isinstance(size, torch.SymInt) for size in kwargs["images"].shape):
        raise ValueError("each image is searched by itself, so that its sizes are fixed")
