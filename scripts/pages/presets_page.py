"""Prints docs/generated/presets.md: what each preset sets, with the file of the library that has the default.

python scripts/pages/presets_page.py > docs/generated/presets.md
"""

from __future__ import annotations

from staticmem.scenario.presets import PRESETS, word_of

HEAD = """# Sources of presets

This page has what `--preset` sets, and where the library has that default ([presets](../levers.md#presets)).

| preset | option | value | source |
|---|---|---|---|
"""


def page() -> str:
    """The page, a row for each option of a preset."""
    rows = []
    for name, preset in PRESETS.items():
        for number, (option, default) in enumerate(preset.defaults.items()):
            first = f"`{name}`: {preset.library}" if number == 0 else ""
            rows.append(f"| {first} | `{option}` | {word_of(default.value)} | {default.source} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    print(page(), end="")
