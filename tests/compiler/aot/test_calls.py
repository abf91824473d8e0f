"""Each traced call against AOTAutograd: nodes in order, with arguments, sizes, strides and dtypes."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import re

import pytest
from observe import Case
from suite import CASES

from staticmem.compiler.aot.registry import lookup
from staticmem.ops.registry import in_place

marks: list[pytest.MarkDecorator] = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
if importlib.util.find_spec("torch") is not None:
    import joint_case
pytestmark = marks

# What ours does differently, by a pattern of the names of cases, each with its reason. A case that agrees is an error.
DIFFERENT: dict[str, str] = {}


def _traced(target: str) -> bool:
    base, _, overload = target.partition(".")
    if lookup(target) is not None:
        return True
    return in_place(base) and lookup(f"{base[:-1]}.{overload}" if overload else base[:-1]) is not None


# `torch.autocast` of the meta device is not CUDA's; the table may lack calls.
TRACED = [case for case in CASES if not case.autocast and all(map(_traced, case.targets))]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """PyTorch logs its graphs for tools that nobody has asked for."""
    logging.getLogger("torch.__trace").setLevel(logging.ERROR)


@pytest.mark.parametrize("case", TRACED, ids=[case.name for case in TRACED])
def test_nodes_are_those_of_aotautograd(case: Case) -> None:
    reason = next((why for pattern, why in DIFFERENT.items() if re.search(pattern, case.name)), None)
    equal = True
    for pattern in case.patterns():
        nodes, outputs, program, counts = joint_case.real(case, pattern)
        expected = joint_case.text(nodes, outputs)
        found = joint_case.text(*joint_case.ours(program, counts))
        if reason is None:
            difference = "\n".join(difflib.unified_diff(expected, found, "PyTorch", "ours", n=99, lineterm=""))
            assert not difference, f"with gradients for {pattern}:\n{difference}"
        equal = equal and found == expected
    assert reason is None or not equal, f"agrees now: {reason}"
