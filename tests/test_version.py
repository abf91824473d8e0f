"""One version, in both places that need it."""

from __future__ import annotations

from importlib import metadata

import staticmem


def test_version_is_that_of_the_package() -> None:
    assert staticmem.__version__ == metadata.version("staticmem")
