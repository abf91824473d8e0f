"""Words of a request as flags of the command line, to be copied from a table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from staticmem.scenario.request import Request


def as_flags(words: Mapping[str, Any]) -> str:
    """`--checkpoint Bottleneck --amp bf16`: the flags that say what differs from the defaults."""
    blank, parts = Request(), []
    for name, value in words.items():
        flag = f"--{name.replace('_', '-')}"
        if value == getattr(blank, name):
            continue
        if name == "set_to_none":
            parts.append("--no-set-to-none")
        elif value is True:
            parts.append(flag)
        elif name == "dims":
            parts += [f"--dim {shlex.quote(f'{key}={size}')}" for key, size in value.items()]
        elif name == "resolution":
            parts.append(f"{flag} {value[0]}x{value[1]}")
        elif isinstance(value, tuple):
            parts += [f"{flag} {shlex.quote(str(one))}" for one in value]
        else:
            parts.append(f"{flag} {shlex.quote(str(value))}")
    return " ".join(parts)
