"""Example inputs of models of transformers: from the documentation of their forward and the numbers of their config."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from staticmem.child import FailedError
from staticmem.recording import architecture_child
from staticmem.recording.config_facts import IMAGES, SOUND, Facts
from staticmem.recording.documented import Documented, documented
from staticmem.recording.example_inputs import Built, Example
from staticmem.recording.labels import add_labels
from staticmem.recording.model_inputs import ModelInputs

torch = pytest.importorskip("torch")

# as transformers 5.24 has it, the last one as of BROS
TEXT = """
    Args:
        input_ids (`torch.LongTensor` of shape `(batch_size, num_choices, sequence_length)`):
            Indices of tokens.
        attention_mask (`torch.Tensor` of shape `(batch_size, sequence_length)`, *optional*):
        labels (`list[Dict]` of len `(batch_size,)`, *optional*):
        past_values (`torch.FloatTensor` of shape `(bs, context) or (bs, context, input_size)`, *optional*):
        use_cache (`bool`, *optional*):
        cache (`~cache_utils.Cache`, *optional*):
        bbox ('torch.Tensor' of shape '({0}, 4)'):
        patches (`torch.FloatTensor` of shape `(batch_size, 2 + config.side * side)`, *optional*):
    Returns:
        logits (`torch.FloatTensor` of shape `(batch_size,)`):
"""


class Parts:
    """A config with parts."""

    model_type = "parts"

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def documentation() -> Any:
    def forward() -> None:
        """"""

    forward.__doc__ = TEXT
    return forward


def test_what_a_forward_says_of_its_inputs() -> None:
    assert documented(documentation()) == {
        "input_ids": Documented("Long", ("batch_size", "num_choices", "sequence_length"), False),
        "attention_mask": Documented("", ("batch_size", "sequence_length"), True),
        "labels": Documented("list", None, True),
        "past_values": Documented("Float", ("bs", "context"), True),
        "use_cache": Documented("bool", None, True),
        "bbox": Documented("", ("batch_size", "sequence_length", "4"), False),
        "patches": Documented("Float", ("batch_size", "2 + config.side * side"), True),
    }


def test_numbers_of_the_parts_of_a_config() -> None:
    """Those of the part that a word names come first, however deep it is."""
    vision = Parts(image_size=[224, 448], num_channels=4)
    config = Parts(image_size=32, num_channels=3, inner=Parts(vision_config=vision), text_config=Parts(num_channels=1))
    assert (Facts(config).sides(), Facts(config).channels()) == ((224, 448), 4)
    assert Facts(Parts(image_size={"height": 20, "width": 30})).sides() == (20, 30)
    assert Facts(Parts(image_size={"shortest_edge": 20})).sides() == (20, 20)
    assert Facts(config).number(("absent", "num_channels")) == 3
    assert (Facts(Parts()).sides(), Facts(Parts(num_channels=True)).channels()) == (None, None)
    assert Facts(config).of(("image_size",), IMAGES) == [224, 448]


def test_parts_that_a_config_has_a_place_for_and_lacks() -> None:
    config = Parts(vision_config=None, audio_config=Parts())
    assert (Facts(config).lacks(IMAGES), Facts(config).lacks(SOUND), Facts(Parts()).lacks(IMAGES)) == (
        True,
        False,
        False,
    )


class Base(torch.nn.Module):  # type: ignore[misc, name-defined]
    main_input_name, dtype = "input_ids", torch.bfloat16


class Model(Base):
    """What takes the inputs above."""

    def forward(self, input_ids: Any, attention_mask: Any = None, patches: Any = None, labels: Any = None) -> Any:
        return input_ids

    forward.__doc__ = TEXT


def inputs_of(cls: type[Base], options: dict[str, str] | None = None, **config: Any) -> ModelInputs:
    whole = SimpleNamespace(is_encoder_decoder=False, side=3, **config)
    whole.get_text_config = lambda: whole
    example = Example({"sizes": None, "options": options or {}})
    inputs = ModelInputs(cls(), whole, example, options or {})
    inputs.make()
    return inputs


def shape(built: Built, name: str) -> tuple[Any, ...]:
    """The sizes of an input, those that are open by their names."""
    axes = built.axes[list(built.kwargs).index(name)]
    return tuple(axes.get(axis, int(n)) for axis, n in enumerate(built.kwargs[name].shape))


def test_sizes_have_the_names_of_what_they_are() -> None:
    inputs = inputs_of(Model, {"mask": "yes", "seq": "24"})
    assert inputs.add("patches")
    assert not inputs.add("absent")
    built = inputs.built
    assert shape(built, "input_ids") == ("batch", "num_choices", "seq")
    assert shape(built, "attention_mask") == ("batch", "seq")
    assert shape(built, "patches") == ("batch", 11)  # 2 + 3 x 3
    assert built.kwargs["input_ids"].shape[2] == 24
    assert (built.kwargs["input_ids"].dtype, built.kwargs["patches"].dtype) == (torch.int64, torch.bfloat16)


class ForTokens(Base):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        """
        Args:
            labels (`torch.LongTensor` of shape `(batch_size, target_length)`, *optional*):
        """
        return input_ids


class ForSequenceClassification(ForTokens):
    pass


class ForMaskedLM(Base):
    """Its documentation is that of another head, as of DistilBERT and T5."""

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, num_choices)`):
            labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
        """
        return input_ids


class ForMultipleChoice(ForMaskedLM):
    pass


class ForAnswers(Base):
    def forward(self, input_ids: Any, start_positions: Any = None, end_positions: Any = None) -> Any:
        """
        Args:
            start_positions (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            end_positions (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
        """
        return input_ids


class ForPairs(Base):
    def forward(self, input_ids: Any, return_loss: Any = None) -> Any:
        return input_ids


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (ForTokens, {"labels": ("batch", "seq")}),
        (ForSequenceClassification, {"labels": ("batch",)}),
        (ForMaskedLM, {"labels": ("batch", "seq")}),
        (ForMultipleChoice, {"labels": ("batch",)}),
        (ForAnswers, {"start_positions": ("batch",), "end_positions": ("batch",)}),
        (ForPairs, {"return_loss": True}),
    ],
)
def test_labels_are_those_of_the_head(cls: type[Base], expected: dict[str, Any]) -> None:
    inputs = inputs_of(cls)
    add_labels(inputs, None)
    built = inputs.built
    assert shape(built, "input_ids") == ("batch", "seq")
    got = {n: v if v is True else shape(built, n) for n, v in built.kwargs.items() if n != "input_ids"}
    assert got == expected
    assert built.of_mode == dict.fromkeys(expected, True)


class Heard(Base):
    main_input_name = "input_features"

    def forward(self, input_features: Any) -> Any:
        if input_features.dim() != 4:
            raise ValueError("not enough values to unpack")
        return input_features


def test_other_forms_are_tried_where_the_code_takes_none() -> None:
    inputs = inputs_of(Heard, num_mel_bins=80)
    forms = [shape(inputs.built, "input_features")]
    while inputs.repair(ValueError("not enough values to unpack")):
        forms.append(shape(inputs.built, "input_features"))
    assert forms == [("batch", "frames", 80), ("batch", 80, "frames"), ("batch", 1, "frames", 80)]


class Seen(Base):
    def forward(self, input_ids: Any, pixel_values: Any = None) -> Any:
        return input_ids

    def get_image_features(self, pixel_values: Any) -> Any:
        return pixel_values.new_empty(len(pixel_values), 196, 8)  # of each image


def test_a_text_shorter_than_its_images_is_an_error() -> None:
    words: dict[str, Any] = {"image_token_id": 7, "image_size": 28}
    assert shape(inputs_of(Seen, **words).built, "input_ids") == ("batch", "seq")
    assert inputs_of(Seen, {"seq": "200"}, **words).tokens == ("seq", 200)
    with pytest.raises(
        FailedError, match="its images are 196 tokens of each example, and 100 are given: give at least"
    ):
        inputs_of(Seen, {"seq": "100"}, **words)


def test_a_config_without_a_part_for_images_gets_none() -> None:
    assert list(inputs_of(Seen, vision_config=None, image_token_id=7).built.kwargs) == ["input_ids"]
    assert "pixel_values" in inputs_of(Seen, vision_config=Parts(image_size=28), image_token_id=7).built.kwargs


class Fine(Base):
    main_input_name = "pixel_values"

    def forward(self, pixel_values: Any, high_res_pixel_values: Any = None) -> Any:
        """
        Args:
            high_res_pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, image_size, image_size)`):
        """
        return pixel_values


def test_images_of_another_part_have_its_sizes() -> None:
    """Those of the part that the input is named for; an error that names both asks for the one that is not there."""
    parts: dict[str, Any] = {"vision_config": Parts(image_size=28), "high_res_vision_config": Parts(image_size=56)}
    inputs = inputs_of(Fine, num_channels=3, **parts)
    del inputs.built.kwargs["high_res_pixel_values"]  # as if the documentation had it as optional
    assert inputs.repair(ValueError("Both pixel_values and high_res_pixel_values should be specified"))
    assert shape(inputs.built, "pixel_values") == ("batch", 3, "height", "width")
    assert inputs.built.kwargs["pixel_values"].shape[2:] == (28, 28)
    assert inputs.built.kwargs["high_res_pixel_values"].shape == (2, 3, 56, 56)
    assert not inputs.repair(ValueError("Both pixel_values and high_res_pixel_values should be specified"))


def test_images_that_the_code_calls_too_small_are_doubled() -> None:
    """As DepthPro does, whose patches have the side that its config calls that of the image."""
    inputs = inputs_of(Fine, num_channels=3, image_size=384)
    sides = []
    while inputs.repair(ValueError("Image size 384x384 is too small to be scaled")):
        sides.append(tuple(inputs.built.kwargs["pixel_values"].shape[2:]))
    assert sides == [(768, 768), (1536, 1536), (3072, 3072)]
    assert shape(inputs.built, "pixel_values") == ("batch", 3, "height", "width")


def test_targets_are_no_more_than_a_decoder_has_positions() -> None:
    """Whisper refuses labels that are longer than its 448 positions."""
    inputs = inputs_of(Told, num_mel_bins=80)
    inputs.config.is_encoder_decoder = True
    assert inputs.targets()[1] == inputs.tokens[1] == 512
    short = inputs_of(Told, num_mel_bins=80, max_target_positions=448)
    short.config.is_encoder_decoder = True
    assert short.targets() == ("target_seq", 448)


class Told(Base):
    """Sound beside text: three of its frames are a token, and a mask says which are no padding."""

    def forward(self, input_ids: Any, input_features: Any, input_features_mask: Any = None) -> Any:
        return input_ids

    def _get_feat_extract_output_lengths(self, lengths: Any) -> Any:
        return lengths // 2, lengths // 3


class Computed(Told):
    def get_audio_features(self, input_features: Any) -> Any:
        return input_features.new_empty(len(input_features), input_features.shape[1] // 4, 8)


@pytest.mark.parametrize(("cls", "count"), [(Told, 100), (Computed, 75)])
def test_tokens_stand_for_sound(cls: type[Base], count: int) -> None:
    """As many as the code calculates, or makes of it; what is read of the inputs is known."""
    words: dict[str, Any] = {"num_mel_bins": 80, "audio_token_id": 9}
    inputs = inputs_of(cls, {"frames": "300"}, **words)
    built = inputs.built
    assert shape(built, "input_features_mask") == ("batch", "frames")
    assert built.kwargs["input_ids"].shape[1] == count + 64
    ids = built.input_values["input_ids"]((2, count + 64))
    assert (ids == 9).sum(1).tolist() == [count, count]
    with pytest.raises(FailedError, match=f"its sound is {count} tokens of each example, and 50 are given"):
        inputs_of(cls, {"frames": "300", "seq": "50"}, **words)


class Wide(Base):
    main_input_name = "flattened_patches"

    def forward(self, flattened_patches: Any) -> Any:
        """
        Args:
            flattened_patches (`torch.Tensor` of shape `(batch_size, max_patches, 514)`):
        """
        return flattened_patches


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("a and b must have same reduction dim, but got [16, 512] X [768, 1536].", 770),  # two places go before
        ("mat1 and mat2 shapes cannot be multiplied (16x514 and 768x1536)", 768),
        ("expected input[2, 514, 8] to have 768 channels, but got 514 channels instead", 768),
    ],
)
def test_an_input_is_as_wide_as_the_layer_says(text: str, last: int) -> None:
    inputs = inputs_of(Wide)
    assert inputs.repair(RuntimeError(text))
    assert shape(inputs.built, "flattened_patches") == ("batch", "max_patches", last)
    assert not inputs.repair(RuntimeError(text.replace("512", "768").replace("514", "768")))  # once


class Detector(Base):
    """Boxes are matched with those of each image, as in DETR."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.queries = torch.nn.Linear(3, 5 * 4)

    def forward(self, pixel_values: Any, labels: Any = None) -> Any:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, image_size, image_size)`):
            labels (`list[Dict]` of len `(batch_size,)`, *optional*):
        """
        boxes = self.queries(pixel_values.mean((2, 3)).float()).view(-1, 5, 4)
        if not torch.isfinite(boxes).all():
            raise ValueError("infinite")
        loss = None
        if labels is not None:
            loss = sys.modules["transformers.of_detectors"].loss_of_boxes(boxes, labels)
        return SimpleNamespace(loss=loss, values=[boxes]) if loss is None else Found(loss=loss, boxes=boxes)


class Found(dict):  # type: ignore[type-arg]
    @property
    def loss(self) -> Any:
        return self["loss"]


LOSS = """
def generalized_box_iou(first, second):
    if not (first >= second).all():
        raise ValueError("no boxes")
    return first - second

def linear_sum_assignment(costs):
    raise TypeError("it needs numbers")

def loss_of_boxes(boxes, labels):
    total = 0
    for one, each in zip(boxes, labels):
        rows, columns = linear_sum_assignment((one[:, None] - each["boxes"]).sum(-1))
        total = total + generalized_box_iou(one[rows], each["boxes"][columns]).abs().sum()
    return total
"""


def test_detectors_train_with_boxes_for_each_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many are matched follows from sizes; the batch stays as it is, and inference has no boxes."""
    module = ModuleType("transformers.of_detectors")
    exec(LOSS, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with torch.device("meta"):
        inputs = inputs_of(Detector, {"boxes": "3"}, image_size=32, num_channels=3)
    add_labels(inputs, None)
    built = inputs.built
    document = architecture_child._recorded(built, {})
    assert "unlabelled" not in document
    shapes = {name: sizes for name, _, sizes in document["inputs"]}
    boxes = {f"labels_{at}": [3, 4] if at % 2 else [3] for at in range(4)}
    assert shapes == {"pixel_values": [2, 3, 32, 32], **boxes}
    assert document["inputs_of_mode"] == {"labels": True, **dict.fromkeys(boxes, True)}
    assert document["fixed_axes"]["pixel_values[0]"] == "batch"
    assert (document["own_loss"], len(built.of_all_modes()[1])) == (True, 1)
