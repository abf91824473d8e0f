"""Values of a model's config, which is hostile input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticmem.errors import ModelFileError


class Config:
    """Values of a config, which is hostile input."""

    def __init__(self, content: Mapping[str, Any], path: str) -> None:
        self.content, self.path = content, path

    def whole(self, names: str, otherwise: int | None = None) -> int:
        """The first of some keys that is a whole number of at least 1.

        Raises:
            ModelFileError: none is, and nothing stands for it.
        """
        for name in names.split():
            value = self.content.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if otherwise is not None:
            return otherwise
        what, name = f"{self.path}: a config that does not say its sizes", names.split()[0]
        why = f"Its {name} is no whole number from 1." if name in self.content else f"It has no {name}."
        raise ModelFileError(what, why, "Give the config.json of a decoder.", "SM145")

    def switch(self, name: str, otherwise: bool = False) -> bool:
        value = self.content.get(name)
        return value if isinstance(value, bool) else otherwise
