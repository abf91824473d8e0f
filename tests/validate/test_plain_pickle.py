"""Pickles of plain values are read, all others are refused, and nothing in them runs."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticmem.validate import plain_pickle

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**100), 2**100)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner, inner, inner)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=5)
    ),
    max_leaves=30,
)


@given(VALUES, st.sampled_from([2, 3, 4, 5]))
def test_what_pickle_writes_is_read(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    if protocol == 2 and (b"_codecs" in data or b"__builtin__" in data):
        return  # bytes of protocol 2 are a call
    assert plain_pickle.loads(data) == value


def test_shared_values_and_long_strings() -> None:
    frame = {"filename": "x" * 70_000, "line": 3}
    found = plain_pickle.loads(pickle.dumps([frame] * 2000, 4))
    assert found[0] is found[-1]
    assert found[5] == frame


class _Call:
    def __init__(self, what: Any, *args: Any) -> None:
        self.what = what, args

    def __reduce__(self) -> Any:
        return self.what


class _Plain:
    pass


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_code_does_not_run(protocol: int, tmp_path: Path) -> None:
    target = tmp_path / "made"
    data = pickle.dumps({"segments": [_Call(os.mkdir, str(target))]}, protocol)
    with pytest.raises(plain_pickle.PickleError, match="code"):
        plain_pickle.loads(data)
    assert not target.exists()


@pytest.mark.parametrize("value", [_Plain(), {1, 2}, complex(1, 2), bytearray(b"x"), len, range(3)])
def test_objects_are_refused(value: Any) -> None:
    with pytest.raises(plain_pickle.PickleError):
        plain_pickle.loads(pickle.dumps(value, 5))


HOSTILE = {
    "empty": b"",
    "text": b"hello world",
    "old protocol": pickle.dumps([1], 0),
    "cut off": pickle.dumps(list(range(300)), 4)[:-20],
    "a string longer than the file": b"\x80\x04X" + struct.pack("<I", 2**31) + b"abc.",
    "bytes longer than the file": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",
    "a huge number": b"\x80\x04\x8b" + struct.pack("<i", 2**30) + b"x.",
    "a negative length": b"\x80\x04\x8b" + struct.pack("<i", -5) + b".",
    "marks without end": b"\x80\x04" + b"(" * 5000 + b".",
    "a memo that nobody wrote": b"\x80\x04h\x05.",
    "an empty stack": b"\x80\x04a.",
    "append to a number": b"\x80\x04K\x01K\x02a.",
    "a list as a key": b"\x80\x04}]K\x01s.",
    "half of a pair": b"\x80\x04}(K\x01u.",
    "two values": b"\x80\x04K\x01K\x02.",
    "more values than there may be": b"\x80\x04" + b"N" * (plain_pickle.STACK + 2) + b".",
    "an extension": b"\x80\x04\x82\x01.",
    "a persistent id": b"\x80\x04K\x01Q.",
    "out of band": b"\x80\x05\x97.",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_damaged_and_hostile_files(data: bytes) -> None:
    with pytest.raises(plain_pickle.PickleError):
        plain_pickle.loads(data)


@given(st.binary(max_size=60))
def test_noise_is_an_error_or_a_value(data: bytes) -> None:
    with contextlib.suppress(plain_pickle.PickleError):
        plain_pickle.loads(b"\x80\x04" + data)


def test_a_memo_of_a_huge_index_costs_nothing() -> None:
    """CPython's own unpickler would make room for all indices below."""
    assert plain_pickle.loads(b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b".") is None


def test_deep_nesting_is_only_data() -> None:
    """A list in a list in a list: it is read, and its end is not a crash."""
    depth = 50_000
    deep = plain_pickle.loads(b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b".")
    assert len(deep) == 1


def test_files_have_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "large.pickle"
    path.write_bytes(pickle.dumps("x" * 5000, 4))
    assert len(plain_pickle.load(str(path))) == 5000
    with pytest.raises(OSError, match="more than"):
        plain_pickle.load(str(path), limit=4096)
