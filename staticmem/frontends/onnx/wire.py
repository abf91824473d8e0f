"""A walk over the protobuf wire of an ONNX model that leaves tensor payloads out.

Only lengths are read, so the cost depends on the number of fields and not on the size of the weights. Whatever is
smaller than `KEEP` is copied without a look inside: it cannot hold a large payload, and small tensors (the sizes that
Reshape, Slice and Resize read) are needed.

Field numbers: `onnx/onnx.proto`; wire format: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from staticmem.errors import ModelFileError

KEEP = 4096  # bytes: messages up to this size are kept whole
MAX_KEPT = 256 << 20  # of graph structure; the largest public language models have a few MiB
COPIED = 1 << 20  # bytes that are copied at once, so that their pages are not asked for again
MAX_DEPTH = 64  # of nested messages; an If in an If is 4 deep

Buffer = memoryview | bytes

# A message type: field number -> message type of the field, or DROP for payloads.
Message = Mapping[int, "Message | None"]
DROP: Message = {}

_TENSOR: dict[int, Message | None] = dict.fromkeys((4, 5, 6, 7, 9, 10, 11), DROP)
_SPARSE: dict[int, Message | None] = {1: _TENSOR, 2: _TENSOR}
_GRAPH: dict[int, Message | None] = {}
_ATTRIBUTE: dict[int, Message | None] = {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE}
_NODE: dict[int, Message | None] = {5: _ATTRIBUTE}
_GRAPH.update({1: _NODE, 5: _TENSOR, 15: _SPARSE})
_FUNCTION: dict[int, Message | None] = {7: _NODE, 11: _ATTRIBUTE}
# training_info (20) describes another graph than the one that is analysed
MODEL: Message = {7: _GRAPH, 20: DROP, 25: _FUNCTION}


def strip(data: Buffer, passed: Callable[[int], None] = lambda end: None) -> bytes:
    """The bytes of a ModelProto without the payloads of large tensors. `passed` is told behind each payload how far the
    walk has come: what lies before is not looked at again, but for runs of more than `COPIED` bytes.

    Raises:
        ModelFileError: the bytes are not a protobuf message, or end too early.
    """
    view = data if isinstance(data, memoryview) else memoryview(data)
    chunks: list[Buffer] = []
    kept = _walk(view, 0, len(view), MODEL, chunks, 0, passed)
    if kept > MAX_KEPT:
        raise _too_large(kept)
    return b"".join(chunks)


GRAPH = b"\x3a"  # the tag of ModelProto.graph


def _too_large(kept: int) -> ModelFileError:
    return ModelFileError(
        f"the graph without its weights has {kept >> 20} MiB",
        f"At most {MAX_KEPT >> 20} MiB are read, because no real model has more.",
        "Store large tensors as initializers or as external data.",
        code="SM152",
    )


def damaged(why: str) -> ModelFileError:
    """The error for bytes that are not a complete ONNX model."""
    return ModelFileError(
        "the ONNX file is damaged or incomplete",
        why,
        "Copy or export the file again and check that its size is the same.",
        code="SM151",
    )


def _walk(
    view: memoryview,
    start: int,
    end: int,
    message: Message,
    out: list[Buffer],
    depth: int,
    passed: Callable[[int], None],
) -> int:
    """Appends what is kept of the message in view[start:end] to `out`; gives its length."""
    if depth > MAX_DEPTH:
        raise damaged(f"Messages are nested more than {MAX_DEPTH} deep.")
    total, position, run = 0, start, start  # run: start of the bytes that are copied as they are
    while position < end:
        field_start = position
        tag = view[position]
        position += 1
        if tag >= 0x80:
            tag, position = varint(view, field_start, end)
        wire = tag & 7
        if wire == 2:
            if position + 1 < end and view[position + 1] < 0x80 <= view[position]:  # most lengths: two bytes
                length = view[position] & 0x7F | view[position + 1] << 7
                position += 2
            else:
                length, position = varint(view, position, end)
            stop = position + length
        elif wire == 0:
            length = 0
            _, stop = varint(view, position, end)
        elif wire == 5:
            length, stop = 4, position + 4
        elif wire == 1:
            length, stop = 8, position + 8
        else:
            raise damaged(f"Byte {field_start} starts a field of an unknown kind.")
        if stop > end:
            raise damaged(f"The field at byte {field_start} needs {stop - end} more bytes than there are.")
        field = tag >> 3
        inner = message.get(field)
        if inner is DROP and inner is not None:
            # a tensor within KEEP never gets here: its whole message is copied
            total += _copy(view, run, field_start, out)
            run = stop
            passed(stop)
        elif inner and wire == 2 and length > KEEP:
            total += _copy(view, run, field_start, out)
            chunks: list[Buffer] = []
            size = _walk(view, position, stop, inner, chunks, depth + 1, passed)
            header = encode_varint(tag) + encode_varint(size)
            out.append(header)
            out.extend(chunks)
            total += len(header) + size
            run = stop
        position = stop
    return total + _copy(view, run, end, out)


def _copy(view: memoryview, start: int, end: int, out: list[Buffer]) -> int:
    if end > start:
        if end - start > MAX_KEPT:
            raise _too_large(end - start)
        part = view[start:end]
        out.append(part if end - start > COPIED else bytes(part))
    return end - start


def varint(view: Buffer, position: int, end: int) -> tuple[int, int]:
    """A base-128 number and the position after it."""
    value = shift = 0
    while position < end:
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise damaged(f"The number before byte {position} is longer than 64 bits.")
    raise damaged(f"The file ends within a number at byte {end}.")


def encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# ModelProto: field -> wire type
_TOP = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}


def looks_like_onnx(head: bytes) -> bool:
    """Whether these first bytes of a file can be a ModelProto: known fields, of the right kinds, up to the graph."""
    position, seen = 0, 0
    while position < len(head):
        try:
            tag, position = varint(head, position, len(head))
            if _TOP.get(tag >> 3) != tag & 7:
                return False
            value, position = varint(head, position, len(head))
        except ModelFileError:
            return seen > 0 and len(head) >= 16  # cut within a field: the ones before it decide
        if tag >> 3 == 1 and not 1 <= value <= 1000:  # ir_version, 14 in 2026
            return False
        seen += 1
        if tag & 7 == 2:
            if tag >> 3 == 7 and value > 0:
                return True
            if tag >> 3 in (2, 3, 4) and not _is_text(head[position : position + min(value, 64)]):
                return False
            position += value
    return seen > 1


def _is_text(data: bytes) -> bool:
    return all(32 <= byte < 127 or byte >= 0x80 or byte in (9, 10, 13) for byte in data)
