"""`staticmem doctor`: what is installed, what it is used for, and what is wrong with it.

Packages are seen by their metadata; none is imported.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from staticmem.cli.flags import add_verb
from staticmem.cli.output import add_output, chosen_format, emit
from staticmem.report.formats import JSON, Format, Formats
from staticmem.report.text import PLAIN, Text, View
from staticmem.version import __version__

SCHEMA = "staticmem.doctor/1"

DOCTOR = """\
The versions of staticmem, Python and the packages that it uses or can use, what each is for, the age of the hardware
data, and what the terminal can show. Exit code 1 if something that is needed is missing or too old.
"""


def add_doctor(verbs: Any) -> None:
    parser = add_verb(verbs, "doctor", run, "what is installed and what is missing", DOCTOR)
    add_output(parser, DOCTOR_FORMATS)


def run(args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 where a required package is missing or too old."""
    chosen = chosen_format(args, DOCTOR_FORMATS)
    environment = inspect(encoding=sys.stdout.encoding or "ascii")
    emit(environment, chosen, args)
    return 1 if problems(environment) else 0


@dataclass(frozen=True, slots=True)
class Package:
    """A package that staticmem needs (`required`) or can use. `version` is None where it is not installed.

    `problem` says what is wrong with the installed version; it is empty where nothing is.
    """

    name: str
    version: str | None
    required: bool
    use: str
    problem: str


@dataclass(frozen=True, slots=True)
class Environment:
    """`hardware_data` is the date at which the catalog of cards was last checked; `encoding` that of the output."""

    schema: str
    staticmem: str
    python: str
    platform: str
    packages: tuple[Package, ...]
    hardware_data: str
    encoding: str


# name, what it is for; required ones and their least versions are read from staticmem's own metadata
_USES = {
    "numpy": "size, fit, levers, sweep, check, reading .onnx",
    "onnx": "reading .onnx",
    "networkx": "pages, graphs of owners, ties in .onnx",
    "pyyaml": "configs, explain",
    "shtab": "shell completion",
    "torch": "exporting models, --runtime torch",
    "onnxruntime": "validate on the CPU",
    "onnxruntime-gpu": "validate on a GPU",
    "nvidia-ml-py": "reading a GPU's memory",
    "nvidia-cudnn-cu13": "--cudnn library",
    "mcp": "tools for agents",
    "distributed": "sweeps on a cluster",
}


def inspect(encoding: str) -> Environment:
    """The environment of this process."""
    needed = _needed()
    packages = tuple(_package(name, use, needed.get(name)) for name, use in _USES.items())
    python, machine = platform.python_version(), f"{platform.system()} {platform.machine()}"
    return Environment(SCHEMA, __version__, python, machine, packages, _checked(), encoding)


def problems(environment: Environment) -> list[str]:
    """What keeps staticmem from working."""
    wrong = [f"{p.name} is missing" for p in environment.packages if p.required and p.version is None]
    wrong += [f"{p.name} {p.version} is {p.problem}" for p in environment.packages if p.required and p.problem]
    by_name = {p.name: p.version for p in environment.packages}
    if by_name["onnxruntime"] and by_name["onnxruntime-gpu"]:
        wrong.append("onnxruntime and onnxruntime-gpu are installed together: they overwrite each other, remove one")
    return wrong


def _checked() -> str:
    """The date in the profile of the package."""
    from staticmem.devices import profile  # late: --help needs no hardware
    from staticmem.devices.documents import read_yaml

    return str(read_yaml(profile.DEFAULT).get("checked", "an unknown date"))


def _needed() -> dict[str, str]:
    """Least versions of the required packages."""
    try:
        lines = metadata.requires("staticmem") or []
    except metadata.PackageNotFoundError:
        return {}
    matches = (re.fullmatch(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)", line.strip()) for line in lines)
    return {match[1].lower(): match[2] for match in matches if match}


def _package(name: str, use: str, least: str | None) -> Package:
    try:
        version: str | None = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    old = version is not None and least is not None and _numbers(version) < _numbers(least)
    return Package(name, version, least is not None, use, f"too old, {least} is needed" if old else "")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: `2.13.0+cpu` is (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def render(environment: Environment, view: View = PLAIN) -> str:
    """What is wrong, and a line for each package."""
    wrong = "; ".join(problems(environment)) or "Everything that is needed is installed."
    if view.quiet:
        return view.line(wrong)
    text, style = Text(view), view.style
    text.answer(wrong)
    text.heading(f"staticmem {environment.staticmem}, Python {environment.python}, {environment.platform}")
    text.lines.append("")
    wide = max(len(p.name) for p in environment.packages)
    for package in environment.packages:
        state = package.version or ("missing" if package.required else "not installed")
        colour = "red" if package.required else "dim"
        if package.version and not package.problem:
            colour = "green"
        line = f"  {package.name:<{wide}}  {style.paint(f'{state:<16}', colour)}  {package.use}"
        text.lines.append(line + (f" ({package.problem})" if package.problem else ""))
    text.heading(f"  hardware data of {environment.hardware_data}; output in {environment.encoding}", "")
    return text.end()


FORMATS = (Format("table", "txt", render), JSON)
DOCTOR_FORMATS = Formats("doctor", module="staticmem.cli.doctor")
