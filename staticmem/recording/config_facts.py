"""Numbers that a config of transformers has, in itself or in the configs of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

IMAGES = ("vision", "image", "visual", "vit", "backbone")  # words in the names of the parts of a config
SOUND = ("audio", "speech", "sound")
VIDEO = ("video", *IMAGES)
_CHANNELS = ("num_channels", "in_channels", "in_chans", "num_input_channels")
_SIDES = ("image_size", "img_size", "input_size", "crop_size", "frame_size", "input_image_size")
# numbers of each frame of sound
_BINS = (
    "num_mel_bins", "feature_projection_input_dim", "input_dim", "feature_size", "input_feat_size", "n_mels",
    "num_mels", "mel_bins", "feat_in", "model_in_dim",
)  # fmt: skip


class Facts:
    """The numbers of a config by their names: those of parts whose name has one of some words first, then its own."""

    def __init__(self, config: Any) -> None:
        self.parts = list(_parts(config, ""))

    def of(self, names: Sequence[str], parts: Sequence[str] = ()) -> Any:
        """The first value that is not None."""
        for name in names:
            for _, part in self._ordered(parts):
                value = getattr(part, name, None)
                if value is not None and not isinstance(value, str):
                    return value
        return None

    def number(self, names: Sequence[str], parts: Sequence[str] = ()) -> int | None:
        """The same where it is an integer."""
        for name in names:
            value = self.of((name,), parts)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    def channels(self) -> int | None:
        return self.number(_CHANNELS, IMAGES)

    def lacks(self, parts: Sequence[str]) -> bool:
        """Whether the config has none of the parts that its class has a place for (`vision_config = None`)."""
        named = {name: part for name, part in vars(self.parts[0][1]).items() if name.endswith("_config")}
        places = [part for name, part in named.items() if any(word in name for word in parts)]
        return bool(places) and all(part is None for part in places)

    def sides(self, parts: Sequence[str] = IMAGES) -> tuple[int, int] | None:
        """Of an image: height and width."""
        for name in _SIDES:
            value = self.of((name,), parts)
            if isinstance(value, dict):
                value = [value.get("height") or value.get("shortest_edge"), value.get("width")]
            if isinstance(value, int):
                value = [value]
            if isinstance(value, (list, tuple)) and value and all(isinstance(n, int) for n in value[:1]):
                return int(value[0]), int(value[1] if len(value) > 1 and value[1] else value[0])
        return None

    def bins(self) -> int | None:
        return self.number(_BINS, (*SOUND, "encoder"))

    def _ordered(self, parts: Sequence[str]) -> list[tuple[str, Any]]:
        return sorted(self.parts, key=lambda part: not any(word in part[0] for word in parts))


def _parts(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A config and those within it, with the way to each."""
    yield path, config
    for name, part in list(getattr(config, "__dict__", {}).items()):
        if hasattr(part, "model_type") and hasattr(part, "to_dict") and len(path) < 200:
            yield from _parts(part, f"{path}.{name}")
