"""Example inputs of models of transformers that read images beside text, by the names that their forward takes.

The tokens that stand for images in the text are as many as the processor would write: the code tells, whose vision part
is run on tensors without data (`get_image_features`), or the grid of patches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from staticmem.recording import asks_for_contents
from staticmem.recording.config_facts import IMAGES, Facts

TEXT = 64  # tokens of the example beside those of images
_TILES = (3, 5, 2, 4, 7)  # of an image in parts, the whole one among them
_SIDE = 448  # of an image, where the config has none
# in errors of PyTorch of the meta device
_NO_DATA = re.compile(r"\b(on|out of|a|with) meta tensors?\b|register_meta", re.IGNORECASE)
_TOKENS = ("image_token_id", "image_token_index", "image_token", "img_context_token_id")
_GRIDS = ("image_grid_thw", "grid_thw", "image_grid_hws")
_MERGES = ("spatial_merge_size", "merge_size", "merge_kernel_size")
_KINDS = ("mm_token_type_ids", "token_type_ids")  # 1 where the token is one of an image


class Images:
    """The images of an example: `each` of a sample, with square sides."""

    def __init__(self, model: Any, config: Any, batch: int, each: int, side: int | None) -> None:
        self.model, self.config, self.batch, self.each = model, config, batch, each
        self.facts = Facts(config)
        self.is_asked = side is not None
        self.side = side or (self.facts.sides() or (_SIDE, _SIDE))[0]
        self.contents: dict[str, Callable[[tuple[int, ...]], torch.Tensor]] = {}
        self.inputs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.features: list[torch.Tensor] | None = None
        self.forms: list[
            tuple[int, ...]
        ] = []  # other sizes of the pixels, where the code did not say that it takes them
        self.token = self.facts.number(_TOKENS)

    @property
    def count(self) -> int:
        return self.batch * self.each

    def add_pixels(self, taken: Mapping[str, Any], dtype: torch.dtype) -> None:
        """The images as the forward takes them: patches with their grid, or pictures."""
        channels = int(self.facts.channels() or 3)
        grid = next((name for name in _GRIDS if name in taken), None)
        if grid is not None:
            patch, merge = self._patch(), self._merge()
            self.side = max(self.side // (patch * merge), 1) * patch * merge
            rows = self.side // patch
            depth = int(self.facts.number(("temporal_patch_size",), IMAGES) or 1)
            numbers = self._numbers(channels * patch * patch) or channels * depth * patch * patch
            self.inputs["pixel_values"] = dtype, (self.count * rows * rows, numbers)
            self.forms = [(self.count * rows * rows, channels, patch, patch)]
            ends = [1, rows, rows] if grid != "image_grid_hws" else [rows, rows]
            self._add(grid, torch.tensor([ends] * self.count))
            return
        merge, patch = self._merge_in_pictures(), self._patch()
        if not self.is_asked and merge > 1 and (self.side // patch) % merge:  # its code cannot merge such patches
            self.side = max(self.side // (patch * merge), 1) * patch * merge
        picture = (channels, self.side, self.side)
        forms = [(self.count, *picture), (self.batch, self.each, *picture)]
        tiled = [(self.count, tiles, *picture) for tiles in _TILES]
        tries = [(shape, False) for shape in forms]
        if "image_sizes" in taken:
            tries += [(shape, True) for shape in (*forms, *tiled)]
        for shape, sized in tries:
            self.inputs, self.contents = {"pixel_values": (dtype, shape)}, {}
            if len(shape) == 5:  # which of them are only padding is read of the data: none
                self.contents["pixel_values"] = lambda shape: torch.ones((), dtype=dtype).expand(shape)
            if sized:
                self._add("image_sizes", torch.tensor([[self.side, self.side]] * self.count, device="cpu"))
            if self._takes_them():
                return
        self.inputs, self.contents = {"pixel_values": (dtype, forms[0])}, {}
        self.forms = forms[1:]

    def _takes_them(self) -> bool:
        """Whether the code takes images of this form, which it is given without data; what it makes of them."""
        owners = [self.model, *self.model.modules()]
        compute = next((m.get_image_features for m in owners if hasattr(m, "get_image_features")), None)
        if compute is None:
            return False
        with torch.no_grad(), torch.device("meta"):
            try:
                given = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in self.inputs.items()}
                given |= {n: make(self.inputs[n][1]) for n, make in self.contents.items() if n != "pixel_values"}
                features = tree_flatten(_embeddings(compute(**given)))[0]
            except Exception as error:  # it may read data, which a recording knows
                return asks_for_contents(str(error)) or _NO_DATA.search(str(error)) is not None
        self.features = [t for t in features if isinstance(t, torch.Tensor)]
        return True

    def _add(self, name: str, contents: torch.Tensor) -> None:
        self.inputs[name] = contents.dtype, tuple(contents.shape)
        self.contents[name] = lambda shape: contents.expand(shape) if contents.dim() == len(shape) else contents

    def _numbers(self, of_patch: int) -> int | None:
        """Of each patch, as the first layer takes them: those of several frames where it is over them too."""
        for layer in self.model.modules():
            if isinstance(layer, torch.nn.Conv2d | torch.nn.Conv3d | torch.nn.Linear):
                numbers = int(layer.weight[0].numel())
                if numbers in (of_patch, 2 * of_patch):
                    return numbers
        return None

    def _patch(self) -> int:
        size = self.facts.of(("patch_size", "spatial_patch_size"), IMAGES) or 14
        return int(size[0] if isinstance(size, (list, tuple)) else size)

    def _merge(self) -> int:
        size = self.facts.of(_MERGES, IMAGES) or 1
        return int(size[0] if isinstance(size, (list, tuple)) else size)

    def _merge_in_pictures(self) -> int:
        """Of rows of patches that become one token: Idefics3 has a word of its own for it."""
        return int(self.facts.number(("scale_factor",)) or self._merge())

    def tokens(self) -> int:
        """Tokens that stand for the images of one sample; 0 where none do (the text is embedded beside them)."""
        if self.token is None:
            return 0
        names = [name for name in _GRIDS if name in self.inputs]
        if names:
            rows, columns = self.contents[names[0]](self.inputs[names[0]][1])[0].tolist()[-2:]
            return int(self.each * rows * columns // self._merge() ** 2)
        if self.features is not None:
            return int(sum(t.numel() // t.shape[-1] for t in self.features) // self.batch)
        said = self.facts.number(("mm_tokens_per_image", "image_seq_length", "image_seq_len", "num_image_tokens"))
        merge = self._merge_in_pictures()
        if not said and merge > 1:
            said = (self.side // self._patch() // merge) ** 2
        return self.each * int(said) if said else 0

    def ids(self, tokens: int) -> Callable[[tuple[int, ...]], torch.Tensor]:
        """The contents of the text: the tokens of images behind the first."""

        def fill(shape: tuple[int, ...]) -> torch.Tensor:
            ids = torch.zeros(shape, dtype=torch.int64)
            if self.token is not None:
                ids[:, 1 : 1 + tokens] = self.token
            return ids

        return fill

    def kinds(self, tokens: int) -> Callable[[tuple[int, ...]], torch.Tensor]:
        """Which tokens are of images."""

        def fill(shape: tuple[int, ...]) -> torch.Tensor:
            kinds = torch.zeros(shape, dtype=torch.int64)
            kinds[:, 1 : 1 + tokens] = 1
            return kinds

        return fill

    def named_kinds(self, taken: Mapping[str, Any]) -> list[str]:
        """The inputs that say which tokens are of images."""
        return [name for name in _KINDS if name in taken and (self.token is not None or name == _KINDS[0])]


def _embeddings(result: Any) -> Any:
    """What is put into the text, of the results of `get_image_features`."""
    pooled = getattr(result, "pooler_output", None)
    return result if pooled is None else pooled
