"""The card of the catalog that a driver's name means."""

from __future__ import annotations

import re

from staticmem.devices import gpus
from staticmem.units import GIB

_SXM = re.compile(r"sxm\d*|hbm3")  # an H100 whose name has its memory's is an SXM module


def card_of(name: str, total: int) -> str | None:
    """The slug of the card that the driver calls `name` and that has about `total` bytes; None where none fits.

    `NVIDIA GeForce RTX 4090` is `rtx-4090`; of cards sold with several memories the closest counts.
    """
    words = set(re.findall(r"[a-z0-9]+", _SXM.sub("sxm", name.lower())))
    fitting = []
    for slug, gpu in gpus.cards().items():
        model = {word for word in slug.split("-") if not re.fullmatch(r"\d+gb", word)}
        if model <= words:
            fitting.append((-len(model), abs(gpu.usable - total) if total else 0, slug))
    if not fitting:
        return None
    _, away, slug = min(fitting)
    return slug if not total or away <= total // 10 else None


def gpu_word(name: str, total: int) -> str:
    """A word for `--gpu`: the card's, else its memory as it is."""
    found = card_of(name, total)
    return found if found is not None else f"{total / GIB:.3f}GiB"
