"""docs/api.md has every public name, parameter and default, in the order of the code.

The guide to rules, docs/internals/writing-rules.md, quotes them as they are.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest

import staticmem
from staticmem import errors
from staticmem.cli.main import main
from staticmem.report import json as report_json
from staticmem.scenario.request import OPTIONS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
FUNCTIONS = ("analyze", "export", "fit", "levers", "max_batch", "sweep")


def section(name: str) -> str:
    found = re.search(rf"^## `staticmem\.{name}`\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert found is not None, name
    return found[1]


def test_public_names_are_documented() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8").split("\n## ")[0], re.M)
    assert sorted(rows) == sorted(staticmem.__all__)
    for name in staticmem.__all__:
        assert name == "__version__" or section(name)


def _defaults(text: str) -> list[tuple[str, str]]:
    """The parameters of a block such as `batch=None, cache='dynamic'`, with their defaults as they are written."""
    blocks = re.findall(r"^```\n(\w+=.*?)^```", text, re.M | re.S)
    calls = [node for block in blocks for node in ast.walk(ast.parse(f"f({block})")) if isinstance(node, ast.Call)]
    return [(str(one.arg), ast.unparse(one.value)) for call in calls for one in call.keywords]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_are_documented(name: str) -> None:
    if name == "export":
        pytest.importorskip("torch")
    documented = re.findall(r"^\| `([*\w]+)` \| (?:`(.*?)` )?\|", section(name), re.M)
    documented += _defaults(section(name))
    expected = []
    parameters = dict(inspect.signature(getattr(staticmem, name)).parameters)
    if name in ("fit", "levers", "max_batch"):  # one row for the options of `analyze`
        options = {key for key, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
        assert options == set(OPTIONS) - (set(parameters) - options)
        parameters = {key: one for key, one in parameters.items() if key not in options}
        parameters["options"] = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters.values():
        star = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else repr(parameter.default)
        expected.append((star + parameter.name, default))
    assert documented == expected


def test_errors_are_documented() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", section("StaticmemError"), re.M))
    classes = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
    assert listed == {name for name, value in classes.items() if issubclass(value, Exception)}


def test_python_gives_the_report_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split("models/resnet18.pt2 --batch 4 --optimizer adam --amp bf16 --gpu l4 -f json")
    assert main(["analyze", *words]) == 0
    report = staticmem.analyze("models/resnet18.pt2", batch=4, optimizer="adam", amp="bf16", gpu="l4")
    assert report_json.dumps(report) == capsys.readouterr().out


def test_rules_that_the_guide_quotes_are_those_of_the_source() -> None:
    """A block after `<!-- source: module:function -->` is the function's source."""
    page = (ROOT / "docs" / "internals" / "writing-rules.md").read_text(encoding="utf-8")
    quoted = re.findall(r"<!-- source: ([\w.]+):(\w+) -->\n```python\n(.*?)```", page, re.S)
    assert quoted
    for module, name, text in quoted:
        assert inspect.getsource(getattr(importlib.import_module(module), name)) == text
