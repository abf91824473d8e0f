"""YAML and other plain data as nodes that know their place. A file is hostile input: bounded in size, depth and count.

Only plain data is read: mappings with text keys, lists, text, numbers, true, false and null. No tag makes an object, no
alias can multiply what is read, merge keys (`<<`) are not followed.
"""

from __future__ import annotations

import errno
import os
from typing import Any, NamedTuple

from staticmem import files
from staticmem.errors import StaticmemError

MAX_BYTES = 1 << 20
MAX_DEPTH = 20
MAX_NODES = 20_000
TOO_DEEP = f"It may have {MAX_DEPTH} levels."

UNREADABLE, MALFORMED = "SM192", "SM193"


class DocumentError(StaticmemError):
    """A document that cannot be read, or that says what is not known. `what` begins with file:line:column."""


class Node(NamedTuple):
    """A value and where it stands. `value` is None, bool, int, float, str, a list of nodes, or a dict of (key, value)
    nodes by name. `line` and `column` count from 1; None: the format does not tell. `path`: `train.loss`."""

    value: Any
    file: str
    line: int | None = None
    column: int | None = None
    path: str = ""

    @property
    def place(self) -> str:
        """`staticmem.yaml:4:14`, or `pyproject.toml: tool.staticmem.train.loss`."""
        if self.line is not None:
            return f"{self.file}:{self.line}:{self.column}"
        return f"{self.file}: {self.path}" if self.path else self.file

    def shown(self) -> str:
        """The value in an error: short, on one line."""
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return "a list"
        if self.value is None:
            return "nothing"
        if isinstance(self.value, bool):
            return "true" if self.value else "false"
        if not isinstance(self.value, str | int | float):  # a call in Python can give anything
            return f"of type {type(self.value).__name__}"
        text = str(self.value)
        shortened = f"{text[:60]}..." if len(text) > 60 else text
        return f"'{shortened}'" if isinstance(self.value, str) else shortened

    def plain(self) -> Any:
        """The value as dicts, lists, texts and numbers."""
        if isinstance(self.value, dict):
            return {name: value.plain() for name, (_, value) in self.value.items()}
        return [value.plain() for value in self.value] if isinstance(self.value, list) else self.value


def malformed(what: str, why: str, hint: str = "Is it another file?") -> DocumentError:
    return DocumentError(what, why, hint, MALFORMED)


def read_yaml(path: str) -> Node:
    """The root of a YAML file; an empty file is an empty mapping.

    Raises:
        DocumentError: it cannot be read, is not YAML, or is too large.
    """
    return parse_yaml(read_text(path), path)


def read_text(path: str) -> str:
    """The text of a file in UTF-8, at most 1 MiB of it."""
    try:
        if os.path.isdir(path):
            raise DocumentError(f"{path} is a directory", "One file is read.", "Name the file in it.", UNREADABLE)
        data = files.read(path, MAX_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise malformed(f"{path} is too large", "It has more than 1 MiB.") from error
        why = f"{error.strerror or error}."
        raise DocumentError(f"{path} cannot be read", why, "'staticmem init' writes a config.", UNREADABLE) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise malformed(f"{path} is not text", f"Byte {error.start} is not UTF-8.") from error


def parse_yaml(text: str, file: str) -> Node:
    """The root of a YAML text."""
    import yaml  # most starts read no YAML

    loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_depth(text, file, loader)
        composer = loader(text)
        try:
            root = composer.get_single_node()
            return Node({}, file, 1, 1) if root is None else _Builder(composer, file).node(root, "", 0)
        finally:
            composer.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark is not None else file
        if "nesting depth" in (error.problem or ""):  # PyYAML 6.0.4 looks at most 1,000 levels ahead
            raise malformed(f"{where}: nested too deeply", TOO_DEEP) from error
        if mark is not None and _begins_with_tab(text, mark.line):
            why, hint = "The line begins with a tab.", "YAML indents with spaces: replace the tab."
            raise malformed(f"{where}: not YAML", why, hint) from error
        why = f"{(error.problem or error.context or 'It cannot be parsed').capitalize()}."
        raise malformed(f"{where}: not YAML", why, "Check indentation, colons and quotes there.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise malformed(f"{file}: not YAML", " ".join(str(error).split())) from error


def _begins_with_tab(text: str, number: int) -> bool:
    """Whether a line, counted from 0, has a tab in its indentation."""
    lines = text.splitlines()
    line = lines[number] if number < len(lines) else ""
    return "\t" in line[: len(line) - len(line.lstrip())]


def _check_depth(text: str, file: str, loader: type[Any]) -> None:
    """Nesting is bounded before anything recursive reads it."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            mark: Any = event.start_mark
            raise malformed(f"{file}:{mark.line + 1}:{mark.column + 1}: nested too deeply", TOO_DEEP)


class _Builder:
    def __init__(self, loader: Any, file: str) -> None:
        self.loader, self.file, self.count = loader, file, 0

    def node(self, source: Any, path: str, depth: int) -> Node:
        mark = source.start_mark
        place = Node(None, self.file, mark.line + 1, mark.column + 1, path)
        self.count += 1
        if self.count > MAX_NODES or depth > MAX_DEPTH:  # aliases lead to the same place again and again
            why = f"Aliases make it more than {MAX_NODES} values."
            raise malformed(f"{place.place}: too many values", why, "Write it without aliases.")
        if not str(source.tag).startswith("tag:yaml.org,2002:") or ":python/" in str(source.tag):
            why = "A config is plain data: nothing in it makes an object or runs."
            raise malformed(f"{place.place}: the tag {str(source.tag)[:60]} is not read", why, "Leave the tag out.")
        if source.id == "sequence":
            value: Any = [self.node(child, f"{path}[{i}]", depth + 1) for i, child in enumerate(source.value)]
        elif source.id == "mapping":
            value = self._mapping(source, path, depth)
        else:
            value = self._scalar(source, place)
        return place._replace(value=value)

    def _mapping(self, source: Any, path: str, depth: int) -> dict[str, tuple[Node, Node]]:
        members: dict[str, tuple[Node, Node]] = {}
        for key, value in source.value:
            name = self.node(key, path, depth + 1)
            if isinstance(name.value, list | dict):
                raise malformed(f"{name.place}: a key is not text", "", "Keys are words.")
            text = str(key.value)
            if text in members:
                why = f"First at {members[text][0].place}."
                raise malformed(f"{name.place}: '{text[:60]}' is given twice", why, "Keep one of them.")
            below = f"{path}.{text}" if path else text
            members[text] = (name._replace(value=text, path=below), self.node(value, below, depth + 1))
        return members

    def _scalar(self, source: Any, place: Node) -> Any:
        tag = str(source.tag).removeprefix("tag:yaml.org,2002:")
        text = str(source.value)
        if tag in ("bool", "float", "null") or (tag == "int" and len(text) <= 40):
            try:
                return self.loader.construct_object(source)
            except (LookupError, AttributeError) as error:  # PyYAML's own: `!!int ''`, `!!bool x`
                what, why = f"{place.place}: the value is not what its tag says", f"{text[:60]!r} is no {tag}."
                raise malformed(what, why, "Leave the tag out.") from error
        if tag in ("str", "timestamp", "int", "value", "merge"):
            return text  # the reader refuses a number of hundreds of digits, and a date where it is none
        what = f"{place.place}: the tag {str(source.tag)[:60]} is not read"
        raise malformed(what, "Values are plain.", "Leave the tag out.")


def of_plain(value: Any, file: str, path: str, depth: int = 0) -> Node:
    """Nodes of plain data, such as a table of a TOML file.

    Raises:
        DocumentError: it is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise malformed(f"{file}: nested too deeply", TOO_DEEP)
    if isinstance(value, dict):
        places = {str(k): (f"{path}.{k}", v) for k, v in value.items()}
        value = {
            k: (Node(k, file, path=place), of_plain(v, file, place, depth + 1)) for k, (place, v) in places.items()
        }
    elif isinstance(value, list):
        value = [of_plain(v, file, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
    elif not isinstance(value, bool | int | float | str) and value is not None:
        value = str(value)
    return Node(value, file, path=path)
