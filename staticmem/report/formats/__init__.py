"""Output formats: one table for `-f`, the suffixes of `-o`, help, completion and the tests of formats.

A module of this folder is named after the kind of result that it shows: `sweep.py`, or `sweep_xml.py` for a format that
fills a file of its own. Its tuple `FORMATS` says which formats it has. So a format is added by a file here, or by a row
in one, and by its test. JSON is a format of every kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from staticmem.report.text import View, csv_text


@dataclass(frozen=True)
class Format:
    """`name` is for `-f`, `suffix` for `-o` (without its first dot; several with spaces between); `render` makes text,
    or bytes, of a result.

    `shows` says what `render` takes where that is not the result itself: "replay" is a `Replayed` process, "host" a
    result with the memory of the host.
    """

    name: str
    suffix: str
    render: Callable[[Any, View], str | bytes]
    shows: str = "result"


def _json(result: object, view: View) -> str:
    from staticmem.report.json import dumps

    return dumps(result)


JSON = Format("json", "json", _json)


def csv_format(rows: Callable[[Any], Iterable[Iterable[object]]]) -> Format:
    """CSV of the rows of a result, the first of which is the header; bytes are integers."""
    return Format("csv", "csv", lambda result, view: csv_text(rows(result)))


class Formats:
    """The formats of a kind of result, the default first. A format is imported at its first use."""

    def __init__(self, kind: str, *, module: str = "", saved: bool = False) -> None:
        """`module` has the formats of a kind that is shown elsewhere; `saved`: those that need a saved report alone."""
        self.kind, self.module, self.saved = kind, module, saved

    @cached_property
    def default(self) -> Format:
        """The default format: the first of the kind's own module."""
        first: Format = import_module(self.module or f"{__name__}.{self.kind}").FORMATS[0]
        return first

    @cached_property
    def all(self) -> tuple[Format, ...]:
        """Every format: those of `<kind>.py`, then those of `<kind>_*.py` in the order of their names."""
        from pkgutil import iter_modules  # late: most commands take the default

        if self.module:
            return tuple(import_module(self.module).FORMATS)
        names = [m.name for m in iter_modules(__path__) if m.name == self.kind or m.name.startswith(f"{self.kind}_")]
        formats = [f for name in sorted(names) for f in import_module(f"{__name__}.{name}").FORMATS]
        if not any(f.name == "json" for f in formats):
            formats.append(JSON)
        return tuple(f for f in formats if not self.saved or f.shows != "replay")

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[str]:
        return iter([f.name for f in self.all])

    def __contains__(self, name: object) -> bool:
        return any(f.name == name for f in self.all)

    def __getitem__(self, name: str) -> Format:
        if name == self.default.name:
            return self.default
        return next(f for f in self.all if f.name == name)

    def notebook(self, result: object) -> str:
        """The result as HTML for a notebook, of a kind that has such a form."""
        text: str = import_module(f"{__name__}.{self.kind}_html").fragment(result)
        return text

    @property
    def suffixes(self) -> dict[str, Format]:
        """The formats by suffix, without its first dot."""
        return {suffix: f for f in self.all for suffix in f.suffix.split()}

    def of_file(self, path: str) -> Format | None:
        """The format that a file's suffix names; of several that fit, the one with the longest."""
        fitting = [suffix for suffix in self.suffixes if path.lower().endswith(f".{suffix}")]
        return self.suffixes[max(fitting, key=len)] if fitting else None
