"""A reader of pickles that have plain values only: dicts, lists, tuples, strings, bytes, numbers, booleans, None.

It is a machine of its own, not an `Unpickler` with a filter: there is no opcode in it that imports, calls or builds an
object, so nothing in a file can run. What it makes is bounded by the file's size; marks and the stack have bounds.

Opcodes: pickletools.py of CPython, protocols 2 to 5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from staticmem import files

LIMIT = 512 << 20  # bytes of a file
MARKS = 100  # open collections: a snapshot has 6
STACK = 1_000_000  # values that wait for their collection
_PROTOCOLS = range(2, 6)


class PickleError(ValueError):
    """The file is no pickle of plain values; the message says why."""


def load(path: str, limit: int = LIMIT) -> Any:
    """The value in a file.

    Raises:
        PickleError: it is damaged, or has more than plain values.
        OSError: it cannot be read, or is too large.
    """
    return loads(files.read(path, limit))


def loads(data: bytes) -> Any:
    """The value of a pickle.

    Raises:
        PickleError: it is damaged, or has more than plain values.
    """
    if len(data) < 2 or data[0] != 0x80 or data[1] not in _PROTOCOLS:
        raise PickleError("it does not begin as a pickle of protocol 2 to 5")
    try:
        return _Machine(data).run()
    except (struct.error, IndexError) as error:
        raise PickleError("it is cut off or damaged") from error
    except (TypeError, KeyError, UnicodeDecodeError, AttributeError) as error:
        raise PickleError("its values do not fit together") from error


class _Machine:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 2
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, table, stack = self.data, _OPCODES, self.stack
        while True:
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                if len(stack) != 1:
                    raise PickleError("it ends in the middle")
                return stack[0]
            step = table.get(code)
            if step is None:
                raise PickleError(_REFUSED.get(code, f"it has the opcode 0x{code:02x}, which plain values do not need"))
            step(self)
            if len(stack) > STACK:
                raise PickleError("it keeps too many values open")

    def unpack(self, form: str, size: int) -> Any:
        value = struct.unpack_from(form, self.data, self.at)[0]
        self.at += size
        return value

    def take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise PickleError("it is cut off")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def text(self, form: str, size: int) -> None:
        self.stack.append(self.take(self.unpack(form, size)).decode("utf-8", "surrogatepass"))

    def raw(self, form: str, size: int) -> None:
        self.stack.append(self.take(self.unpack(form, size)))

    def long(self, form: str, size: int) -> None:
        count = self.unpack(form, size)
        if count > 64:
            raise PickleError("it has a number of more than 64 bytes")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def mark(self) -> None:
        if len(self.marks) >= MARKS:
            raise PickleError("it is nested too deeply")
        self.marks.append(len(self.stack))

    def marked(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def tuple_of(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) != count:
            raise IndexError
        self.stack[-count:] = [items]

    def append(self) -> None:
        value = self.stack.pop()
        _list(self.stack[-1]).append(value)

    def appends(self) -> None:
        items = self.marked()
        _list(self.stack[-1]).extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _dict(self.stack[-1])[_key(key)] = value

    def set_items(self) -> None:
        items = self.marked()
        if len(items) % 2:
            raise PickleError("it is damaged")
        _dict(self.stack[-1]).update(zip(map(_key, items[::2]), items[1::2], strict=True))

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise TypeError
    return value


def _key(value: Any) -> Any:
    """Text or a number. Of nested tuples the hash may take forever (shared ones), or all of the C stack (deep ones)."""
    if type(value) not in (str, int):
        raise PickleError("it has a key that is neither text nor a number")
    return value


def _new(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(make())


_OPCODES: dict[int, Callable[[_Machine], Any]] = {
    0x95: lambda m: m.unpack("<Q", 8),  # FRAME: only a hint for readers of streams
    0x4E: _new(lambda: None),
    0x88: _new(lambda: True),
    0x89: _new(lambda: False),
    0x7D: _new(dict),
    0x5D: _new(list),
    0x29: _new(tuple),
    0x4A: lambda m: m.stack.append(m.unpack("<i", 4)),  # BININT
    0x4B: lambda m: m.stack.append(m.unpack("<B", 1)),  # BININT1
    0x4D: lambda m: m.stack.append(m.unpack("<H", 2)),  # BININT2
    0x47: lambda m: m.stack.append(m.unpack(">d", 8)),  # BINFLOAT
    0x8A: lambda m: m.long("<B", 1),  # LONG1
    0x8B: lambda m: m.long("<i", 4),  # LONG4
    0x8C: lambda m: m.text("<B", 1),  # SHORT_BINUNICODE
    0x58: lambda m: m.text("<I", 4),  # BINUNICODE
    0x8D: lambda m: m.text("<Q", 8),  # BINUNICODE8
    0x43: lambda m: m.raw("<B", 1),  # SHORT_BINBYTES
    0x42: lambda m: m.raw("<I", 4),  # BINBYTES
    0x8E: lambda m: m.raw("<Q", 8),  # BINBYTES8
    0x28: _Machine.mark,
    0x74: lambda m: m.stack.append(tuple(m.marked())),  # TUPLE
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    0x61: _Machine.append,
    0x65: _Machine.appends,
    0x73: _Machine.set_item,
    0x75: _Machine.set_items,
    0x94: lambda m: m.put(len(m.memo)),  # MEMOIZE
    0x71: lambda m: m.put(m.unpack("<B", 1)),  # BINPUT
    0x72: lambda m: m.put(m.unpack("<I", 4)),  # LONG_BINPUT
    0x68: lambda m: m.stack.append(m.memo[m.unpack("<B", 1)]),  # BINGET
    0x6A: lambda m: m.stack.append(m.memo[m.unpack("<I", 4)]),  # LONG_BINGET
}
_CALLS = "it has an object whose reading runs code"
_REFUSED = dict.fromkeys((0x52, 0x81, 0x92, 0x62, 0x69, 0x6F), _CALLS) | dict.fromkeys(
    (0x63, 0x93, 0x50, 0x51, 0x82, 0x83, 0x84), "it names code outside of the file"
)
