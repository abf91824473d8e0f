"""Graphs that break the rules of ONNX must end in a message, wherever in the reading that shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from staticmem.errors import ModelFileError

# what damaged strings, missing fields and absurd sizes raise in code that relies on the rules
BROKEN = (
    TypeError,
    AttributeError,
    LookupError,
    ValueError,
    ArithmeticError,
    RecursionError,
    RuntimeError,
    MemoryError,
)


@contextmanager
def guarded(path: str) -> Iterator[None]:
    """Turns what a malformed graph raises into a `ModelFileError`; the cause stays chained for whoever debugs it."""
    try:
        yield
    except Exception as error:
        of_onnx = type(error).__module__.startswith(("onnx.", "google.protobuf."))  # their own kinds, of C++ too
        if not isinstance(error, BROKEN) and not of_onnx:
            raise
        text = str(error).splitlines()[0][:160] if str(error) else "no further message"
        raise ModelFileError(
            f"the graph of {path} cannot be understood",
            f"Something in it breaks the rules of ONNX ({type(error).__name__}: {text}).",
            "Check it with onnx.checker.check_model, and report it if the checker accepts it.",
            code="SM157",
        ) from error
