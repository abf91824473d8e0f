"""Changes of structure for `fuzz_coverage.py`: a node of a JSON or YAML document, a field of a protobuf message, an
opcode of a pickle becomes another one, moves, repeats or goes. What cannot be parsed is changed as bytes.
"""

from __future__ import annotations

import ast
import json
import pickle
import pickletools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Blind = Callable[[bytes], bytes]  # changes bytes, as the fuzzer does by itself
NUMBERS = (
    0, -1, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64, 10**30, 10**400,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    *NUMBERS, -0.5, 1e308, float("nan"), float("inf"), None, True, False, "", "a" * 5000, "\x00\x1b[31m",
    "\ud800", "9" * 5000, "2**9**9", "s0", [], {}, [[]], [None], {"": {}}, [0] * 300,
)  # fmt: skip
TAGS = (
    "!!int", "!!float ''", "!!bool x", "!!timestamp x", "!!binary '='", "!!set", "!!python/name:os", "&a [*a]", "*a",
    "<<: {a: 1}", "? [1]", "0o8", "1_000", "1:2:3", ".inf", "2001-99-99", "0x", "|", "%TAG", "---", "- - -",
)  # fmt: skip
DEEP = "\x01deep\x01"  # becomes ten thousand brackets, which json could not write


def words_of(sources: Iterable[Path]) -> list[str]:
    """The texts in the code of readers: keys and values that they look for."""
    found: dict[str, None] = {}
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) <= 60:
                found[node.value] = None
    return list(found)


# -- documents ---------------------------------------------------------------------------------------------------------


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a document."""
    todo = [value]
    while todo:
        container = todo.pop()
        for key, item in container.items() if isinstance(container, dict) else enumerate(container):
            yield container, key
            if isinstance(item, dict | list):
                todo.append(item)


def document(data: bytes, rng: random.Random, words: Sequence[str], blind: Blind, other: bytes | None = None) -> bytes:
    """One to four changes of a JSON text. `other`: another text, parts of which may come in."""
    made = parsed(data)
    if not isinstance(made, dict | list) or rng.random() < 0.08:
        return blind(data)
    root = [made]
    donors = [pair for pair in places([parsed(other)]) if pair is not None] if other is not None else []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        change(root, list(places(root)), rng, words, blind, donors)
    return written(root[0])


def change(
    root: Any, found: list[tuple[Any, Any]], rng: random.Random, words: Sequence[str], blind: Blind,
    donors: Sequence[tuple[Any, Any]],
) -> None:  # fmt: skip
    """Changes one place of those that were found below `root`."""
    container, key = rng.choice(found)
    if container is not root and (key not in container if isinstance(container, dict) else key >= len(container)):
        return  # an earlier change took it away
    value = container[key]
    kind = rng.randrange(12)
    if kind == 0:
        container[key] = rng.choice(VALUES)
    elif kind == 1:
        container[key] = rng.choice(words) if words else ""
    elif kind == 2 and isinstance(container, dict):
        name = rng.choice(words) if words and rng.random() < 0.7 else str(key) + "x"
        container[name] = container.pop(key)
    elif kind == 3 and container is not root:
        del container[key]
    elif kind == 4 and isinstance(container, list) and container is not root:
        container.insert(key, copied(value))
    elif kind == 5 or (kind == 6 and not donors):
        at, name = rng.choice(found)
        container[key] = copied(at[name]) if isinstance(at, list) or name in at else None
    elif kind == 6:
        at, name = rng.choice(donors)
        container[key] = copied(at[name])
    elif kind == 7:
        container[key] = rng.choice(([value], {rng.choice(words or ["a"]): value}, DEEP))
    elif kind == 8 and isinstance(container, list):
        rng.shuffle(container)
    elif isinstance(value, bool):
        container[key] = not value
    elif isinstance(value, int | float):
        near = (value + 1, value - 1, -value, value * 2)
        container[key] = rng.choice((*near, rng.choice(NUMBERS), float(rng.randrange(9))))
    elif isinstance(value, str):
        changed = blind(value.encode("utf-8", "surrogatepass"))
        container[key] = changed.decode("utf-8", "replace")
    elif isinstance(value, dict) and words:
        value[rng.choice(words)] = rng.choice(VALUES)
    elif isinstance(value, list):
        value.append(rng.choice(VALUES))


def parsed(data: bytes | None) -> Any:
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError):
        return None


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def written(made: Any) -> bytes:
    try:
        text = json.dumps(made)
    except (ValueError, RecursionError):  # a part was moved into itself; a number has too many digits to be written
        return b"{}"
    return text.replace(json.dumps(DEEP), "[" * 10_000 + "]" * 10_000).encode()


def yaml_text(data: bytes, rng: random.Random, words: Sequence[str], blind: Blind, other: bytes | None = None) -> bytes:
    """A YAML text changed as text, by lines, or as the document that it is."""
    import yaml

    kind = rng.randrange(4)
    if kind == 0:
        return blind(data)
    if kind == 1:
        lines = data.split(b"\n")
        at = rng.randrange(len(lines))
        if rng.random() < 0.5:
            lines.insert(at, rng.choice(lines))
        else:
            head = lines[at].split(b":")[0]
            lines[at] = head + b": " + rng.choice(TAGS).encode()
        return b"\n".join(lines)
    try:
        made = yaml.load(data, Loader=yaml.CBaseLoader if kind == 3 else yaml.CSafeLoader)
        made = json.loads(json.dumps(made, default=str))
    except Exception:
        return blind(data)
    return document(written(made), rng, words, blind, other)


# -- pickles -----------------------------------------------------------------------------------------------------------


def pickled(data: bytes, rng: random.Random, words: Sequence[str], blind: Blind, other: bytes | None = None) -> bytes:
    """A pickle with another opcode, an end, or the values changed."""
    from staticmem.validate import plain_pickle  # the pickle is not sound any more: Python's own would run it

    kind = rng.randrange(4)
    if kind == 0:
        return blind(data)
    if kind == 1:
        try:
            value = json.loads(json.dumps(plain_pickle.loads(data)))
        except (ValueError, TypeError, RecursionError):
            return blind(data)
        made = parsed(document(json.dumps(value).encode(), rng, words, lambda text: text[:-1] or b"a", None))
        try:
            return pickle.dumps(made, protocol=rng.choice((2, 4, 5)))
        except RecursionError:
            return data
    at = list(_opcodes(data)) or [0]
    if kind == 2:
        return data[: rng.choice(at)] + rng.choice((b"", b".", b"(", b"a", b"s", b"u", b"\x85", b"\x94h\x00"))
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 5))):
        changed[rng.choice(at)] = rng.choice([ord(opcode.code) for opcode in pickletools.opcodes])
    return bytes(changed)


def _opcodes(data: bytes) -> Iterator[int]:
    try:
        for _, _, at in pickletools.genops(data):
            if at is not None:
                yield at
    except Exception:
        return


# -- protobuf messages -------------------------------------------------------------------------------------------------


def proto(data: bytes, rng: random.Random, words: Sequence[str], blind: Blind, other: bytes | None = None) -> bytes:
    """One to four fields of an ONNX model, at any depth, changed as their types allow."""
    import onnx

    if rng.random() < 0.05:
        return blind(data)
    model, donor = onnx.ModelProto(), onnx.ModelProto()
    try:
        model.ParseFromString(data)
        donor.ParseFromString(other or b"")
    except Exception:
        return blind(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        field_of(rng.choice(list(messages(model))), list(messages(donor)) if other else [], model, rng, words, blind)
    try:
        return bytes(model.SerializeToString())
    except Exception:
        return data


def messages(message: Any) -> Iterator[Any]:
    """The message and all within it."""
    todo = [message]
    while todo:
        message = todo.pop()
        yield message
        for field, value in message.ListFields():
            if field.message_type is not None:
                todo.extend(value if repeated(field) else [value])


def repeated(field: Any) -> bool:
    """`label` of older protobufs, `is_repeated` of newer ones."""
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def field_of(
    message: Any, donors: Sequence[Any], root: Any, rng: random.Random, words: Sequence[str], blind: Blind
) -> None:
    """Changes one field of a message."""
    used = [field for field, _ in message.ListFields()]
    field = rng.choice(used) if used and rng.random() < 0.8 else rng.choice(list(message.DESCRIPTOR.fields))
    if field.message_type is not None:
        fitting = [m for m in (*messages(root), *donors) if m.DESCRIPTOR is field.message_type]
        if repeated(field):
            rows = getattr(message, field.name)
            kind = rng.randrange(4)
            if kind == 0 and len(rows):
                del rows[rng.randrange(len(rows))]
            elif kind == 1 and len(rows) > 1:
                a, b = rng.sample(range(len(rows)), 2)
                kept = type(rows[a])()
                kept.CopyFrom(rows[a])
                rows[a].CopyFrom(rows[b])
                rows[b].CopyFrom(kept)
            elif fitting and len(rows) < 200:
                rows.add().CopyFrom(_copy(rng.choice(fitting)))
            else:
                rows.add()
        elif fitting and rng.random() < 0.7:
            getattr(message, field.name).CopyFrom(_copy(rng.choice(fitting)))
        else:
            message.ClearField(field.name)
        return
    try:
        if repeated(field):
            rows = getattr(message, field.name)
            if len(rows) and rng.random() < 0.3:
                del rows[rng.randrange(len(rows))]
            elif len(rows) and rng.random() < 0.6:
                at = rng.randrange(len(rows))
                rows[at] = _scalar(field, rows[at], root, rng, words, blind)
            else:
                rows.append(_scalar(field, rows[0] if len(rows) else None, root, rng, words, blind))
        elif rng.random() < 0.2:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, _scalar(field, getattr(message, field.name), root, rng, words, blind))
    except (ValueError, TypeError):  # a number that the field cannot hold
        return


def _copy(message: Any) -> Any:
    made = type(message)()
    made.CopyFrom(message)
    return made


def _scalar(field: Any, value: Any, root: Any, rng: random.Random, words: Sequence[str], blind: Blind) -> Any:
    if field.cpp_type == field.CPPTYPE_STRING:
        names = [name for node in root.graph.node for name in (*node.input, *node.output, node.op_type)]
        text = rng.choice((*names, "")) if rng.random() < 0.5 else rng.choice(words or [""])
        if field.type == field.TYPE_BYTES:
            return blind(value or b"") if rng.random() < 0.5 else text.encode()
        if not value or rng.random() >= 0.2:
            return text
        data = value if isinstance(value, bytes) else value.encode()  # bytes: a text of the file that is not UTF-8
        return blind(data).decode("utf-8", "replace")
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice((0.0, 1.0, -1.0, 1e30, float("nan"), float("inf")))
    if field.cpp_type == field.CPPTYPE_ENUM:
        return rng.randrange(24)
    if field.cpp_type == field.CPPTYPE_BOOL:
        return not value
    return rng.choice((*NUMBERS[:13], rng.randrange(24), (value or 0) + 1, (value or 0) - 1))


SHAPES: dict[str, Callable[..., bytes]] = {"json": document, "yaml": yaml_text, "pickle": pickled, "proto": proto}
