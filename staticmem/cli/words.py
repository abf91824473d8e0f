"""Command lines as lists of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# What the sliders of a page set, and where its own output went; True: a value follows.
SLIDERS: Mapping[str, bool] = {
    "--batch": True, "-b": True, "--resolution": True, "--optimizer": True, "--momentum": True, "--dtype": True,
    "--amp": True, "--output": True, "-o": True, "--format": True, "-f": True, "--force": False, "--max-batch": False,
}  # fmt: skip


def without(words: Sequence[str], flags: Mapping[str, bool]) -> list[str]:
    """The words but for some flags and their values, in every way of writing them: `-b 8`, `-b8`, `--batch=8`."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in flags:
            skip = flags[word]
        elif word.startswith("--"):
            if word.split("=", 1)[0] not in flags:
                kept.append(word)
        elif not (word.startswith("-") and flags.get(word[:2], False)):
            kept.append(word)
    return kept
