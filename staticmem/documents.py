"""A YAML or TOML file as nodes that know their place. It is read as hostile input: bounded in size, depth and count.

Only plain data is read: mappings with text keys, lists, text, numbers, true, false and null. No tag makes an object, no
alias can multiply what is read, merge keys (`<<`) are not followed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from staticmem import files
from staticmem.errors import StaticmemError

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 20
MAX_NODES = 20_000

UNREADABLE, MALFORMED = "SM192", "SM193"


class DocumentError(StaticmemError):
    """A config that cannot be read, or that says what is not known. `what` begins with file:line:column."""


@dataclass(frozen=True)
class Node:
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
        text = str(self.value)
        return f"'{text[:60]}{'...' if len(text) > 60 else ''}'"


def read_yaml(path: str) -> Node:
    """The root of a YAML file; an empty file is an empty mapping.

    Raises:
        DocumentError: it cannot be read, is not YAML, or is larger than a config can be.
    """
    return parse_yaml(read_text(path), path)


def read_text(path: str) -> str:
    """The text of a config file, at most 1 MiB of it."""
    try:
        if os.path.isdir(path):
            raise DocumentError(f"{path} is a directory", "A config is one file.", "Name the file in it.", UNREADABLE)
        with files.opened(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DocumentError(
            f"{path} cannot be read", f"{error.strerror or error}.", "'staticmem init' writes a config.", UNREADABLE
        ) from error
    if len(data) > MAX_BYTES:
        raise DocumentError(
            f"{path} is too large for a config", "It has more than 1 MiB.", "Is it another file?", MALFORMED
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{path} is not text", f"Byte {error.start} is not UTF-8.", "A config is YAML in UTF-8.", MALFORMED
        ) from error


def parse_yaml(text: str, file: str) -> Node:
    """The root of a YAML text."""
    import yaml

    loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_depth(text, file, loader)
        made = loader(text)
        try:
            root = made.get_single_node()
            return Node({}, file, 1, 1) if root is None else _Builder(made, file).node(root, "", 0)
        finally:
            made.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark is not None else file
        raise DocumentError(
            f"{where}: not YAML", f"{(error.problem or error.context or 'It cannot be parsed').capitalize()}.",
            "Check indentation, colons and quotes there.", MALFORMED,
        ) from error  # fmt: skip
    except (yaml.YAMLError, ValueError) as error:
        raise DocumentError(f"{file}: not YAML", " ".join(str(error).split()), "Is it a config?", MALFORMED) from error


def _check_depth(text: str, file: str, loader: type[Any]) -> None:
    """Nesting is bounded before anything recursive reads it."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            mark: Any = event.start_mark
            raise DocumentError(
                f"{file}:{mark.line + 1}:{mark.column + 1}: nested too deeply",
                f"A config has at most {MAX_DEPTH} levels.", "Is it another file?", MALFORMED,
            )  # fmt: skip


class _Builder:
    def __init__(self, loader: Any, file: str) -> None:
        self.loader, self.file, self.count = loader, file, 0

    def node(self, found: yaml.Node, path: str, depth: int) -> Node:
        import yaml

        mark: Any = found.start_mark
        line, column = mark.line + 1, mark.column + 1
        place = Node(None, self.file, line, column, path)
        self.count += 1
        if self.count > MAX_NODES or depth > MAX_DEPTH:  # aliases lead to the same place again and again
            raise DocumentError(
                f"{place.place}: too much in a config", f"Aliases make it more than {MAX_NODES} values.",
                "Write it without aliases.", MALFORMED,
            )  # fmt: skip
        value: Any
        if isinstance(found, yaml.SequenceNode):
            value = [self.node(child, f"{path}[{i}]", depth + 1) for i, child in enumerate(found.value)]
        elif isinstance(found, yaml.MappingNode):
            value = self._mapping(found, path, depth)
        else:
            value = self._scalar(found, place)
        return Node(value, self.file, line, column, path)

    def _mapping(self, found: yaml.MappingNode, path: str, depth: int) -> dict[str, tuple[Node, Node]]:
        members: dict[str, tuple[Node, Node]] = {}
        for key, value in found.value:
            name = self.node(key, path, depth + 1)
            if isinstance(name.value, list | dict):
                raise DocumentError(f"{name.place}: a key is not text", "", "Keys are words.", MALFORMED)
            text = str(key.value)
            if text in members:
                raise DocumentError(
                    f"{name.place}: '{text[:60]}' is given twice", f"First at {members[text][0].place}.",
                    "Keep one of them.", MALFORMED,
                )  # fmt: skip
            below = f"{path}.{text}" if path else text
            members[text] = (Node(text, self.file, name.line, name.column, below), self.node(value, below, depth + 1))
        return members

    def _scalar(self, found: Any, place: Node) -> Any:
        tag = str(found.tag).removeprefix("tag:yaml.org,2002:")
        text = str(found.value)
        if tag in ("bool", "float", "null") or (tag == "int" and len(text) <= 40):
            try:
                return self.loader.construct_object(found)
            except (LookupError, AttributeError) as error:  # PyYAML's own: `!!int ''`, `!!bool x`
                raise DocumentError(
                    f"{place.place}: the value is not what its tag says", f"{text[:60]!r} is no {tag}.",
                    "Leave the tag out.", MALFORMED,
                ) from error  # fmt: skip
        if tag in ("str", "timestamp", "int", "value", "merge"):
            return text  # a number of hundreds of digits, or a date, is no value of a config: the reader will say so
        raise DocumentError(
            f"{place.place}: the tag {str(found.tag)[:60]} is not read", "A config has plain values only.",
            "Leave the tag out.", MALFORMED,
        )  # fmt: skip


def of_plain(value: Any, file: str, path: str, depth: int = 0) -> Node:
    """Nodes of plain data, such as a table of a TOML file.

    Raises:
        DocumentError: it is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise DocumentError(
            f"{file}: nested too deeply", f"A config has at most {MAX_DEPTH} levels.", "Is it another file?", MALFORMED
        )
    below = depth + 1
    if isinstance(value, dict):
        made = {
            str(k): (Node(str(k), file, path=f"{path}.{k}"), of_plain(v, file, f"{path}.{k}", below))
            for k, v in value.items()
        }
        return Node(made, file, path=path)
    if isinstance(value, list):
        return Node([of_plain(v, file, f"{path}[{i}]", below) for i, v in enumerate(value)], file, path=path)
    plain = value if isinstance(value, bool | int | float | str) or value is None else str(value)
    return Node(plain, file, path=path)
