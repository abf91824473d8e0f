"""Where the model comes from: a path, or stdin in a temporary file."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from staticmem.errors import StaticmemError, UsageError
from staticmem.files import temporary_folder


@contextmanager
def model_path(name: str) -> Iterator[str]:
    """The path to read. Stdin becomes a file called `stdin`, because archives are read from their end."""
    if name != "-":
        yield name
        return
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            "nothing to read",
            "'-' reads the model from stdin.",
            "Example: staticmem analyze - < model.onnx",
            code="SM101",
        )
    with temporary_folder(work=False) as folder:
        path = os.path.join(folder, "stdin")
        try:
            with open(path, "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        except OSError as error:
            raise UsageError(
                "the model from stdin cannot be kept",
                f"It goes to a temporary file in {os.path.dirname(folder)}: {error.strerror or error}.",
                "Write it to a file where there is room (TMPDIR), and give its name.",
                code="SM101",
            ) from error
        try:
            yield path
        except StaticmemError as error:
            error.what, error.why, error.hint = (
                text.replace(path, "stdin") for text in (error.what, error.why, error.hint)
            )
            raise
