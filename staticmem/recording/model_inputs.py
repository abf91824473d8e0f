"""Example inputs of a model of transformers: what its forward takes, with the types and sizes that its code says
(`documented`) and its config has (`config_facts`).

What a forward needs is not in its signature, where most is optional. So the inputs are the main one, what has no
default, and images or sound beside text; where the code then asks for another one, it gets that too
(`ModelInputs.repair`).
"""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from staticmem.child import FailedError
from staticmem.recording.config_facts import IMAGES as PICTURES
from staticmem.recording.config_facts import SOUND, VIDEO, Facts
from staticmem.recording.documented import Documented, documented
from staticmem.recording.example_inputs import Built, Example, Sides

SEQUENCE = 512  # tokens of an example
TOKENS = "seq"
SIDE = 224  # of an image, where the config has none
FRAMES = 512  # of sound, where the config has none
SAMPLES = 16_000  # of sound: one second
COUNT = 8  # of what a user decides, as of boxes: where neither the config nor the code has a number
IMAGES = "pixel_values"
_INPUTS = (IMAGES, "hidden_states", "input_features", "input_values", "input_ids", "pixel_values_videos")
_SOUNDS = ("input_features", "input_values", "audio_input_features", "audio_input_ids", "audio_values")
_MASKS_OF_SOUND = ("input_features_mask", "feature_attention_mask", "input_values_mask")
# words of the documentation for a size, by what it is
_WORDS = {
    "batch": "batch_size batch bs num_images num_videos num_clips num_audios num_images_or_videos images",
    TOKENS: "sequence_length seq_length seq_len seqlen sequence_len text_sequence_length token_sequence_length "
    "input_ids_length text_seq_len encoder_sequence_length",
    f"target_{TOKENS}": "target_sequence_length decoder_sequence_length target_length",
    "channels": "num_channels channels",
    "height": "height image_size frame_size",
    "width": "width",
    "bins": "feature_dim num_mel_bins mel_bins feature_size n_mel_bins",
    "frames": "feature_sequence_length time_steps padded_feature_length max_num_frames frames",
    "samples": "num_samples audio_length",
    "clip": "num_frames",
}
_MEANS = {word: meaning for meaning, listed in _WORDS.items() for word in listed.split()}
_NOT_GIVEN = re.compile(r"embeds$|embeddings$|_outputs$|^(cache|past_key_values|labels|position_ids)$")
_INTEGERS = re.compile(r"(_ids|ids|mask|_pos|label|labels|_positions|_grid|grid_thw|codes)$")
_POSITIONS_OF_TARGETS = ("max_target_positions",)  # Whisper's 448: transformers, configuration_whisper.py
_TOO_SMALL = re.compile(r"image size .*too small", re.IGNORECASE)
_LARGEST_IMAGE = 4096  # to which the side of an image is doubled that the code calls too small
_PLACES = 2  # numbers that may stand before those of a patch: its row and its column
# in errors of PyTorch: the numbers that a layer was given, and those that it takes
_WIDTHS = tuple(
    re.compile(text)
    for text in (
        r"same reduction dim, but got \[\d+, (?P<given>\d+)\] X \[(?P<wanted>\d+),",
        r"cannot be multiplied \(\d+x(?P<given>\d+) and (?P<wanted>\d+)x",
        r"to have (?P<wanted>\d+) channels, but got (?P<given>\d+) channels",
        r"length (?P<wanted>\d+) at -1! .* broadcastable to \[.*\b(?P<given>\d+)\]",
        r"\*, (?P<wanted>\d+)\], but got input of size ?\[.*\b(?P<given>\d+)\]",
    )
)
_OF_FORMS = re.compile(r"unpack|[Dd]imension|\b\dD\b|indices|shape|size|channels")  # in errors about the axes of inputs
_MISSING = re.compile(r"missing \d+ required positional arguments?")


class ModelInputs:
    """Makes the inputs of one model."""

    def __init__(self, model: Any, config: Any, example: Example, options: Mapping[str, str]) -> None:
        self.model, self.config, self.example, self.options = model, config, example, options
        self.taken = dict(inspect.signature(model.forward).parameters)
        self.told, self.facts = documented(model.forward), Facts(config)
        self.built = Built(model, repair=self.repair)
        self.widened: set[tuple[str, int]] = set()  # axes whose size the code has said
        self.forms: list[tuple[str, Sides]] = []  # other sizes of inputs, to be tried where the code takes none
        self.main = main_input(model, self.taken)
        self.batch = example.of("batch", 2)
        text = config.get_text_config()
        most = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or SEQUENCE
        most = self.facts.number(("max_position_embeddings",), ("text",)) if most == SEQUENCE else most
        usual = min(SEQUENCE, int(most)) if isinstance(most, int) and most > 0 else SEQUENCE
        self.most_tokens = usual
        self.tokens = example.of(TOKENS, usual)

    def make(self) -> Built:
        """The inputs but for labels."""
        has_images = not self.facts.lacks(PICTURES)
        if {"input_ids", IMAGES} <= set(self.taken) and has_images:
            self._add_images_and_text()
        elif self.main in (IMAGES, "hidden_states") and {"grid_thw", "image_grid_thw"} & set(self.taken):
            self._add_vision()
        elif self.main in self.taken:
            self._add_needed(self.main)
        sounds = () if self.facts.lacks(SOUND) else _SOUNDS
        sound = next((name for name in sounds if name in self.taken), None)
        beside_text = "input_ids" in self.built.kwargs and sound is not None and IMAGES not in self.built.kwargs
        if beside_text:
            self._add_needed(str(sound))
        for name in self._required():
            self._add_needed(name)
        if beside_text:
            self._add_sound(str(sound))
        if self.options.get("mask") == "yes":
            self.add("attention_mask")
        return self.built

    def targets(self) -> tuple[str, int]:
        """The tokens that come out: of a decoder behind an encoder those of its own."""
        if not self.config.is_encoder_decoder:
            return self.tokens
        most = self.facts.number(_POSITIONS_OF_TARGETS, ("decoder",)) or self.tokens[1]
        return self.example.of(f"target_{TOKENS}", min(self.tokens[1], most))

    def repair(self, error: BaseException) -> bool:
        """Adds the inputs that the code asked for with an error; whether there are any."""
        added = [name for name in _asked_for(error, self.taken, self.built.kwargs) if self.add(name)]
        if added or self._widened(error) or self._enlarged(error):
            return True
        if not self.forms or not _OF_FORMS.search(str(_first(error))):
            return False
        name, sides = self.forms.pop(0)
        self.built.replace(name, sides)
        return True

    def _widened(self, error: BaseException) -> bool:
        """Gives an input as many numbers as the layer takes that refused them. It may have had a few more before, as
        the place of a patch in front of its numbers."""
        widths = next((match for form in _WIDTHS if (match := form.search(str(_first(error))))), None)
        if widths is None:
            return False
        given, wanted = int(widths["given"]), int(widths["wanted"])
        for more in range(_PLACES + 1):
            for name, tensor in self.built.kwargs.items():
                axes = self.built.axes[len(self.built.args) + list(self.built.kwargs).index(name)]
                fixed = [axis for axis, n in enumerate(tensor.shape) if n == given + more and axis not in axes]
                if tensor.is_floating_point() and fixed and (name, fixed[-1]) not in self.widened:
                    self.widened.add((name, fixed[-1]))
                    sides = [(axes.get(axis, ""), int(n)) for axis, n in enumerate(tensor.shape)]
                    sides[fixed[-1]] = "", wanted + more
                    self.built.replace(name, sides)
                    return True
        return False

    def _enlarged(self, error: BaseException) -> bool:
        """Doubles the sides of the images that the code calls too small: some take larger ones than their parts do."""
        pixels = self.built.kwargs.get(IMAGES)
        if pixels is None or not _TOO_SMALL.search(str(_first(error))) or 2 * max(pixels.shape) > _LARGEST_IMAGE:
            return False
        axes = self.built.axes[len(self.built.args) + list(self.built.kwargs).index(IMAGES)]
        sides = [(axes.get(axis, ""), int(n)) for axis, n in enumerate(pixels.shape)]
        self.built.replace(IMAGES, [(title, 2 * n if title in ("height", "width") else n) for title, n in sides])
        return "height" in axes.values()

    def add(self, name: str) -> bool:
        """An input by its name; whether it is known how to make it."""
        if name in self.built.kwargs or name not in self.taken:
            return False
        make = _RULES.get(name)
        sides = make(self) if make is not None else None
        sides = self.sides(name) if sides is None else sides
        if sides is None:
            return False
        self.built.add(name, self.dtype(name), sides)
        if "mask" in name and all(n for _, n in sides):  # code counts what is not padding
            self.built.input_values[name] = _ones
        return True

    def sides(self, name: str) -> Sides | None:
        """The sizes of an input by its documentation; None where it says none."""
        said = self.told.get(name, Documented("", None, True))
        if said.sizes is None:
            return None
        sides: Sides = []
        for word in said.sizes:
            side = self._side(word, name)
            if side is None:
                return None
            seen = [title for title, _ in sides]
            if side[0] == "height" and "height" in seen:  # image_size, image_size
                side = self._of_image("width", name)
            sides.append(side)
        return sides

    def dtype(self, name: str) -> Any:
        import torch

        kind = self.told.get(name, Documented("", None, True)).kind
        if kind in ("Long", "Int", "Bool"):
            return {"Long": torch.int64, "Int": torch.int32, "Bool": torch.bool}[kind]
        if not kind and _INTEGERS.search(name):
            return torch.int64
        return torch.float32 if name.startswith(("past_", "future_")) else self.model.dtype

    def _required(self) -> list[str]:
        """What the signature or its documentation has without a default."""
        by_position = [
            name
            for name, parameter in self.taken.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        said = [name for name, one in self.told.items() if not one.optional and one.sizes and name in self.taken]
        return [*by_position, *(name for name in said if not _NOT_GIVEN.search(name))]

    def _add_needed(self, name: str) -> None:
        if name not in self.built.kwargs and not self.add(name):
            raise FailedError("refused", f"its input '{name}' is not one of those that staticmem knows how to make")

    def _side(self, word: str, of: str) -> tuple[str, int] | None:
        """What a word for a size stands for."""
        word = word.removeprefix("config.").removeprefix("self.config.").strip()
        if word.isdigit():
            return "", int(word)
        if "*" in word or "+" in word:
            return self._product(word, of)
        meaning = _MEANS.get(word.lower())
        if meaning == "batch":
            return self.batch
        if meaning == TOKENS:
            return self._length(of)
        if meaning in ("height", "width"):
            return self._of_image(meaning, of)
        if meaning is not None and meaning != f"target_{TOKENS}":
            return self._of_signal(meaning)
        if meaning is not None:
            return self.targets()
        names = (f"encoder_{word}", word) if of.startswith("encoder_") else (word,)
        number = self.facts.number(names) if word.isidentifier() else None
        if number is not None:
            return "", number
        return self.example.of(word, COUNT) if word.isidentifier() else None

    def _product(self, word: str, of: str) -> tuple[str, int] | None:
        total = 0
        for term in word.split("+"):
            product = 1
            for factor in term.split("*"):
                side = self._side(factor.strip(), of)
                if side is None:
                    return None
                product *= side[1]
            total += product
        return "", total

    def _length(self, of: str) -> tuple[str, int]:
        """What the documentation calls the length of a sequence: of tokens, of sound, of a series."""
        if of.startswith("decoder_") or (of == "labels" and self.config.is_encoder_decoder):
            return self.targets()
        if of.startswith("past_"):
            length = getattr(self.model, "_past_length", None) or self.facts.number(("context_length",))
            return ("", int(length)) if length else self.example.of("steps", COUNT)
        if of == "input_values":
            return self._of_signal("samples")
        return self._of_signal("frames") if of == "input_features" else self.tokens

    def _of_image(self, axis: str, of: str = IMAGES) -> tuple[str, int]:
        """`high_res_pixel_values` are of the part `high_res_vision_config`, and have sizes beside those of the rest."""
        part = of.removesuffix(IMAGES).strip("_") if of.endswith(IMAGES) else ""
        if part:
            sides = self.facts.sides((part,)) or (SIDE, SIDE)
            return "", sides[axis == "width"]
        sides = self.facts.sides() or (SIDE, SIDE)
        return self.example.of(axis, sides[axis == "width"])

    def _of_signal(self, meaning: str) -> tuple[str, int]:
        facts = self.facts
        if meaning == "channels":
            return "", facts.number(("audio_channels",), SOUND) or facts.channels() or (channels(self.model))
        if meaning == "bins":
            return "", facts.bins() or _width(self.model)
        if meaning == "clip":
            return "", facts.number(("num_frames", "frames_per_clip", "video_frames", "tubelet_frames"), VIDEO) or COUNT
        usual = {"frames": FRAMES, "samples": SAMPLES}[meaning]
        positions = facts.number(("max_source_positions",), SOUND)
        if meaning == "frames" and positions and facts.number(("num_mel_bins",), SOUND):
            usual = 2 * positions  # its first layers halve them: transformers, modeling_whisper.py, `WhisperEncoder`
        return self.example.of(meaning, usual)

    # -- rules of inputs whose sizes the documentation does not have, or has wrong ------------------------------------

    def _ids(self) -> Sides:
        """The tokens; what is said of them is taken where it has their length (of some classes it is another's)."""
        said = self.told.get("input_ids", _NOTHING).sizes or ()
        sides = self.sides("input_ids") if any(_MEANS.get(word.lower()) == TOKENS for word in said[-1:]) else None
        return sides or [self.batch, self.tokens]

    def _pixels(self) -> Sides:
        """A batch of images."""
        own = self.facts.channels() if self.facts.channels() is not None else channels(self.model)
        return [self.batch, ("", int(own or 3)), self._of_image("height"), self._of_image("width")]

    def _mask_of_sound(self) -> Sides:
        return [self.batch, self._of_signal("frames" if "input_features" in self.taken else "samples")]

    def _sound(self) -> Sides | None:
        """Samples, or a spectrogram, whose patches have positions."""
        samples = self._of_signal("samples")
        self.forms += [("input_values", [self.batch, samples]), ("input_values", [self.batch, ("", 1), samples])]
        bins, length = self.facts.number(("num_mel_bins",)), self.facts.number(("max_length",))
        if bins and length and hasattr(self.config, "max_length"):
            return [self.batch, ("", length), ("", bins)]
        return None if self.told.get("input_values", _NOTHING).sizes else [self.batch, samples]

    def _features(self) -> Sides | None:
        """Frames of sound, each with its numbers; encoders as Whisper's, which have a number of positions, take the
        numbers first."""
        bins, frames = self._of_signal("bins"), self._of_signal("frames")
        positions = self.facts.number(("max_source_positions",), SOUND)
        forms: list[Sides] = [[self.batch, frames, bins], [self.batch, bins, frames]]
        if positions and self.facts.number(("num_mel_bins",), SOUND):
            forms.reverse()
        self.forms += [("input_features", form) for form in (*forms[1:], [self.batch, ("", 1), frames, bins])]
        return forms[0] if bins[1] else None

    def _boxes(self) -> Sides:
        """Of words in an image: one a token."""
        return [self.batch, self.tokens, ("", 4)]

    def _series(self) -> Sides | None:
        length = self._length("past_values")
        count = self.facts.number(("num_input_channels",))
        return [self.batch, length, *([("", count)] if count else [])]

    def _video(self) -> Sides:
        picture = self._pixels()
        side = [("", n) for _, n in picture[2:]]
        return [self.batch, self._of_signal("clip"), picture[1], *side]

    # -- images beside text -------------------------------------------------------------------------------------------

    def _images(self) -> Any:
        each, side = int(self.options.get("images") or 1), self.options.get("size")
        from staticmem.recording.image_inputs import Images

        return Images(self.model, self.config, self.batch[1], each, int(side) if side else None)

    def _add_images_and_text(self) -> None:
        import torch

        from staticmem.recording.image_inputs import TEXT

        images, built = self._images(), self.built
        images.add_pixels(self.taken, self.model.dtype)
        self.forms += [(IMAGES, self._of_pixels(form)) for form in images.forms]
        count = images.tokens()
        self.tokens = self.example.of(TOKENS, count + min(TEXT, self.most_tokens))
        if self.tokens[1] < count:
            why = f"its images are {count} tokens of each example, and {self.tokens[1]} are given"
            raise FailedError("option", f"{why}: give at least {count + 1}, fewer images, or a smaller size")
        built.add("input_ids", torch.int64, [self.batch, self.tokens])
        built.input_values = {"input_ids": images.ids(count), **images.contents}
        self._add_pixels(images)
        for name in images.named_kinds(self.taken):
            built.add(name, torch.int64, [self.batch, self.tokens])
            built.input_values[name] = images.kinds(count)

    def _add_sound(self, name: str) -> None:
        """The tokens that stand for sound, and which of its frames are no padding."""
        from staticmem.recording.image_inputs import TEXT
        from staticmem.recording.sound_inputs import TOKENS as NAMES
        from staticmem.recording.sound_inputs import tokens_of_sound

        token, built = self.facts.number(NAMES), self.built
        for mask in _MASKS_OF_SOUND:
            self.add(mask)
        if token is None:
            return
        length = max(int(n) for n in built.kwargs[name].shape[1:])
        count = tokens_of_sound(self.model, built.kwargs, self.batch[1], length)
        if count is None:
            return
        self.tokens = self.example.of(TOKENS, count + TEXT)
        if self.tokens[1] < count:
            why = f"its sound is {count} tokens of each example, and {self.tokens[1]} are given"
            raise FailedError("option", f"{why}: give at least {count + 1}, or fewer frames")
        built.replace("input_ids", [self.batch, self.tokens])
        built.input_values["input_ids"] = _tokens_of(token, count)

    def _add_vision(self) -> None:
        """The images alone, as the vision part of a model takes them."""
        images = self._images()
        images.add_pixels(self.taken, self.model.dtype)
        images.inputs = {self.main if name == IMAGES else name: value for name, value in images.inputs.items()}
        self.built.input_values = dict(images.contents)
        self._add_pixels(images)
        self.forms += [(self.main, self._of_pixels(form)) for form in images.forms]

    def _add_pixels(self, images: Any) -> None:
        for name, (dtype, shape) in images.inputs.items():
            self.built.add(name, dtype, self._of_pixels(shape))

    def _of_pixels(self, shape: tuple[int, ...]) -> Sides:
        first = self.batch if shape[0] == self.batch[1] else ("", shape[0])
        return [first, *(("", n) for n in shape[1:])]


_NOTHING = Documented("", None, True)
_RULES: dict[str, Callable[[ModelInputs], Sides | None]] = {
    "input_ids": ModelInputs._ids,
    IMAGES: ModelInputs._pixels,
    "input_values": ModelInputs._sound,
    "input_features": ModelInputs._features,
    "past_values": ModelInputs._series,
    "bbox": ModelInputs._boxes,
    "input_features_mask": ModelInputs._mask_of_sound,
    "feature_attention_mask": ModelInputs._mask_of_sound,
    "pixel_values_videos": ModelInputs._video,
}


def main_input(model: Any, taken: Mapping[str, Any]) -> str:
    """The input that the forward needs; classes of parts have the name of the whole's, which they do not take."""
    named = model.main_input_name
    for main in (named,) if isinstance(named, str) else tuple(named):
        if main in taken:
            return str(main)
    return next((name for name in _INPUTS if name in taken), str(named))


def channels(model: Any) -> int:
    """Of the images of a model whose config does not say it: what its first convolution takes."""
    import torch

    return next((int(m.in_channels) for m in model.modules() if isinstance(m, torch.nn.Conv2d)), 3)


def _width(model: Any) -> int:
    """What the first layer of a model takes, where its config does not say it."""
    import torch

    kinds = {torch.nn.Conv1d: "in_channels", torch.nn.Linear: "in_features"}
    return next((int(getattr(m, name)) for m in model.modules() for kind, name in kinds.items() if type(m) is kind), 0)


def _ones(shape: tuple[int, ...]) -> Any:
    import torch

    return torch.ones(shape, dtype=torch.int64)


def _tokens_of(token: int, count: int) -> Callable[[tuple[int, ...]], Any]:
    """The contents of a text: as many tokens of one kind behind the first."""

    def fill(shape: tuple[int, ...]) -> Any:
        import torch

        ids = torch.zeros(shape, dtype=torch.int64)
        ids[:, 1 : 1 + count] = token
        return ids

    return fill


def _asked_for(error: BaseException, taken: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """The inputs that an error is about and that are not given: those that its text names, else those that are None in
    the lines that led to it."""
    error = _first(error)
    named = [word for word in re.findall(r"\w+", str(error)) if word in taken]
    said = [word for word in named if not _NOT_GIVEN.search(word)]
    if said:
        missing = [word for word in said if word not in given]
        return missing if _MISSING.search(str(error)) else missing[:1]
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = linecache.getline(frame.f_code.co_filename, line)
        names = [word for word in re.findall(r"\w+", code) if frame.f_locals.get(word, 0) is None and word in taken]
        if names := [name for name in names if name not in given and not _NOT_GIVEN.search(name)]:
            return names
    return [name for name in named if name not in given]


def _first(error: BaseException) -> BaseException:
    """What an error is about."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
