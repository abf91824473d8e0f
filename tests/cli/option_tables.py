"""The tables of options on reference pages, made from their declarations.

A page has them between `<!-- options: NAME -->` and `<!-- end of options -->`;
`pytest tests/cli/test_reference.py --overwrite-golden` writes them again.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping

from staticmem.cli.session import OPTIMIZED
from staticmem.ort.options import SESSION_OPTIONS
from staticmem.scenario.options import DEVICE, HOST, LEVERS, SERVING, SESSION, SIZES, STEP, Option
from staticmem.scenario.presets import PRESETS, word_of
from staticmem.scenario.request import OPTIONS

BAR = "\\|"  # a bar in a cell of a table
MARKED = re.compile(r"(<!-- options: (?P<name>[^>]*) -->\n)(?:(?!<!--).*\n)*(<!-- end of options -->)")
MODEL = (
    "a path of an ONNX file or an archive of torch.export; or an `onnx.ModelProto`, an `ExportedProgram`, an "
    "`nn.Module`, an FX `GraphModule`. The code of a module is recorded, under fake tensors"
)
INPUTS = "example inputs for a module: tensors, also on the meta device. Their batch is the default of `batch`"
EXPLAIN = "`owners` and `modules` of the report say who holds what is alive at the peak"


def refreshed(page: str) -> str:
    """A page with its tables as the declarations are now."""
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match['name']]()}{match[3]}", page)


def flags(options: Iterable[Option]) -> str:
    """Flags with everything that is known of them."""
    rows = []
    for one in options:
        details = f". {one.details}" if one.details else ""
        rows.append((f"{_flag(one)}", f"{one.about}{one.choices_text}{details}"))
    return _table(("flag", ""), rows)


def keywords() -> str:
    """The keywords of `staticmem.analyze` with their defaults; docs/usage.md says what each does and takes."""
    own = [("`model`", "", MODEL), ("`inputs`", "`None`", INPUTS), ("`explain_peak`", "`False`", EXPLAIN)]
    options = ", ".join(f"{name}={one.default!r}" for name, one in OPTIONS.items())
    lines = textwrap.wrap(options, 116, break_long_words=False)
    return f"{_table(('parameter', 'default', ''), own)}\n```\n{chr(10).join(lines)}\n```\n"


def presets() -> str:
    """What each preset sets; docs/generated/presets.md has the sources."""
    rows = []
    for name, preset in PRESETS.items():
        words = [f"{k.replace('_', '-')} {word_of(default.value)}" for k, default in preset.defaults.items()]
        rows.append((f"`{name}`", preset.library, ", ".join(words)))
    return _table(("preset", "of", "sets"), rows)


def _flag(one: Option) -> str:
    taken = f"[{one.metavar}]" if one.kind == "modules" else one.metavar  # its flag alone is a value too
    spelled = f"`{one.flag} {taken}`" if taken else f"`{one.flag}`"
    if one.letter:
        spelled = f"`{one.letter}`, {spelled}"
    return f"{spelled}, `--no-{one.flag[2:]}`" if one.kind == "switch" and one.default else spelled


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', BAR) for cell in row)} |\n" for row in (heads, *rows)]
    return "".join([lines[0], "|---" * len(heads) + "|\n", *lines[1:]]).replace("|  |", "| |")


def _group(name: str) -> Callable[[], str]:
    return lambda: flags(one for one in OPTIONS.values() if one.group == name)


TABLES: Mapping[str, Callable[[], str]] = {
    **{name: _group(name) for name in (SIZES, STEP, LEVERS, SERVING, DEVICE, HOST)},
    SESSION: lambda: flags([*SESSION_OPTIONS.values(), OPTIMIZED]),
    "keywords": keywords,
    "presets": presets,
}
