"""How a result shows itself in Python: `print` has the text of the terminal, each format a method or a suffix."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from staticmem.errors import UsageError

if TYPE_CHECKING:
    from staticmem.report.formats import Formats


class Shown:
    """A result of `analyze`, `sweep` or `levers`. `kind` is the module of `report.formats` that shows it."""

    __slots__ = ()
    kind: ClassVar[str]

    def __str__(self) -> str:
        """What the terminal shows."""
        return str(self._rendered("table")).rstrip("\n")

    def __repr__(self) -> str:
        """One line: the class, and the first paragraph of the text, shortened to 160 characters."""
        from textwrap import shorten

        paragraph = str(self).partition("\n\n")[0]
        return f"<{type(self).__name__}: {shorten(paragraph, 160, placeholder=' ...')}>"

    def to_json(self) -> str:
        """The result as JSON text; docs/report.md has its fields."""
        return str(self._rendered("json"))

    def to_markdown(self) -> str:
        """The result as Markdown, as GitHub renders it."""
        return str(self._rendered("md"))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes the result to a file, in the format of its suffix.

        Raises:
            UsageError: the suffix is no format (SM141), or the file cannot be written or exists (SM142).
        """
        name, formats = os.fspath(path), self._formats()
        chosen = formats.of_file(name)
        if chosen is None:
            suffixes = ", ".join(f".{suffix}" for suffix in formats.suffixes)
            raise UsageError(f"no format for '{name}'", f"Its suffix gives the format: {suffixes}.", code="SM141")
        data = self._rendered(chosen.name)
        content = data if isinstance(data, bytes) else data.encode()
        try:
            with open(name, "wb" if overwrite else "xb") as file:
                file.write(content)
        except FileExistsError as error:
            hint = "Use overwrite=True, or choose another name."
            raise UsageError(f"{name} exists", "It would be overwritten.", hint, code="SM142") from error
        except OSError as error:
            raise UsageError(f"cannot write {name}", f"{error.strerror or error}.", code="SM142") from error

    def _rendered(self, name: str) -> Any:
        from staticmem.report.text import PLAIN

        return self._formats()[name].render(self, PLAIN)

    def _formats(self) -> Formats:
        from staticmem.report.formats import Formats  # late: what a result is does not depend on how it is shown

        return Formats(self.kind, saved=True)
