"""The encoder of images of a model that an engine serves: its weights, and how much of it one step of the profile run
works on.

Source: vllm/model_executor/models/: gemma3_mm.py and siglip.py, mistral3.py and pixtral.py, qwen2_5_vl.py, qwen3_vl.py,
mllama4.py; vllm/multimodal/encoder_budget.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any

from staticmem.errors import ModelFileError
from staticmem.ir.record import record
from staticmem.serving.config import Config

CHANNELS = 3
OF_A_PROMPT = 999  # images of a prompt, vllm/config/multimodal.py, get_limit_per_prompt


@record(frozen=True)
class Encoder:
    """An encoder of images.

    Attributes:
        width, inner, layers: of its layers, whose feed-forward is `gated` or not; `biased`: their linears and norms.
        patches, tokens: of the largest image, before it and after it; `pixels` numbers of each patch go in.
        pairs: of frames of the longest video, each of which is like an image.
        masked: its attention has a mask of all patches by all patches.
        output: numbers of a token that comes out.
        projections: inputs and outputs of linears behind the layers; `beside`: other parameters.
    """

    width: int
    inner: int
    layers: int
    gated: bool
    biased: bool
    patches: int
    tokens: int
    pixels: int
    pairs: int
    masked: bool
    output: int
    projections: tuple[tuple[int, int], ...]
    beside: int

    def images(self, batched: int, sequences: int, length: int) -> int:
        """Of a step of the profile run, pairs of frames among them: `MultiModalBudget._get_max_items`."""
        pairs = max(1, min(self.pairs, length // self.tokens))
        tokens = pairs * self.tokens
        of_a_prompt = max(1, min(OF_A_PROMPT, length // tokens))
        return pairs * max(1, min(max(batched, tokens) // tokens, sequences * of_a_prompt))

    def tensors(self, ranks: int) -> Iterator[int]:
        """Numbers of each tensor of a rank."""
        yield self.beside
        matrices = [(3 * self.width, self.width), (self.width, self.width)]
        matrices += [((1 + self.gated) * self.inner, self.width), (self.width, self.inner)]
        for _ in range(self.layers):
            for outputs, inputs in matrices:
                yield outputs * inputs // ranks
                if self.biased:
                    yield outputs
            yield 2 * self.width * (1 + self.biased)
        for inputs, outputs in self.projections:
            yield inputs * outputs // ranks


def encoder_of(content: Mapping[str, Any], path: str, rules: Mapping[str, Any], text: Config) -> Encoder:
    """The encoder that a config describes.

    Args:
        content: the config of the whole model.
        rules: what the engine's class has (`encoders` of the engine's rules).
        text: the config of its decoder.

    Raises:
        ModelFileError: the config lacks a size (SM145), or the text model stands alone (SM601).
    """
    described = content.get("vision_config")
    if not isinstance(described, Mapping):
        what = f"{path}: a config without vision_config"
        why = "The engine's class has an encoder of images, whose sizes are not said."
        raise ModelFileError(what, why, "Give the whole config.json of the model.", "SM601")
    config = Config({**rules.get("defaults", {}), **described}, path)
    width, inner = config.whole("hidden_size"), config.whole("intermediate_size")
    patch = config.whole("patch_size")
    merged = Config({**content, **described}, path).whole("spatial_merge_size", int(rules.get("merged", 1)))
    side = config.whole("image_size", 0) // patch
    patches = int(rules.get("tiles", 1)) * (side * side or int(rules["most_pixels"]) // patch**2)
    tokens = patches // merged**2
    if rules.get("rows_end"):  # a token ends each row
        tokens += isqrt(tokens)
    hidden = text.whole("hidden_size")
    sizes = {"width": width, "merged": width * merged**2, "text": hidden, "inner": inner}
    deep = described.get("deepstack_visual_indexes")
    levels = 1 + (len(deep) if isinstance(deep, list) else 0)
    projections = tuple((sizes.get(one, one), sizes.get(other, other)) for one, other in rules["projections"]) * levels
    pixels = CHANNELS * patch**2 * config.whole("temporal_patch_size", 1)
    learned = config.whole("num_position_embeddings", side * side if rules.get("learned") else 0)
    return Encoder(
        width,
        inner,
        config.whole("depth num_hidden_layers"),
        bool(rules.get("gated")),
        bool(rules.get("biased")),
        patches,
        max(tokens, 1),
        pixels,
        int(rules.get("pairs", 1)),
        bool(rules.get("masked")),
        hidden * levels,
        projections,
        width * (pixels + learned),
    )
