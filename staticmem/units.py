"""The one place where bytes become text. GiB = 2**30 bytes; GB = 10**9 bytes."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30

_BINARY = ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_DECIMAL = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def format_bytes(n: int, units: str = "binary", digits: int = 2) -> str:
    """`n` bytes as text, e.g. `2.88 GiB` (binary) or `3.09 GB` (decimal); `bytes` gives the plain integer."""
    if units == "bytes":
        return f"{n:,} B"
    sign, n = ("-", -n) if n < 0 else ("", n)
    for factor, name in _DECIMAL if units == "decimal" else _BINARY:
        if n >= factor:
            return f"{sign}{n / factor:.{digits}f} {name}"
    return f"{sign}{n} B"


def format_count(n: int) -> str:
    """A count in the way people name model sizes: 25.56 M, 1.24 B."""
    for factor, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= factor:
            return f"{n / factor:.2f} {name}"
    return str(n)
