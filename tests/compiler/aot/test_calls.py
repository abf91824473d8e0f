"""Each traced call against AOTAutograd: nodes in order, with arguments, sizes, strides and dtypes."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import re

import pytest
from observe import Case
from sampling import sampled
from suite import CASES

from staticmem.compiler.aot.joint import NotTracedError
from staticmem.ops.registry import in_place
from staticmem.ops.traces.registry import lookup

marks: list[pytest.MarkDecorator] = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
if importlib.util.find_spec("torch") is not None:
    import joint_case
pytestmark = marks

# What ours does differently, by a pattern of the names of cases, each with its reason. A case that agrees is an error.
DIFFERENT: dict[str, str] = {
    r"^(square|selu)_\(": "on the meta device, PyTorch's graph has no gradients here",
    r"^(mish|log_sigmoid)_?\(": "2.13 decomposes it otherwise; CUDA keeps no buffer of a log_sigmoid",
    r"^group_norm\(": "the backward of 2.13 has mul and sub for addcmul",
    r"^batch_norm\(.*False, 0.1": "2.13 has sqrt and reciprocal for rsqrt",
    r"^dropout\(f32\[(2x4x5x6/120x1x24x4|4x5/1x4)\], 1.0": "a constant in the layout of the input",
    r"^bernoulli_.float\(b16": "a constant in the layout of the input",
    r"^_convolution\(": "what torch.jit traced; PyTorch's graph keeps its flags",
    r"^pixel_shuffle\(f32\[2x4x6x6/144x1x24x4\]": "the tangent has the layout of the kernel's result",
    r"^conv.*168x1x28x4": "cuDNN's layout, which the meta device does not have",
    r"circular": "a circular padding has no trace",
    r"pad.*60x1x15x3.*\((1,1,1,1|.*re(flect|plicate))\)": "on CUDA, such a padding is contiguous",
    r"^addmm\(.*f32\[4x1\], f32\[1x3\]\)": "PyTorch 2.13 multiplies by 1; 2.15 does not",
    r"^index_select\(b16": "2.13 falls back; 2.15 adds bfloat16 on sm_90 (_inductor/decomposition.py, index_add)",
    r"^roll\(f32\[2x3x4x6/72x1x18x3\], .*, ": "the tangent has the layout of the meta device's roll",
    r"^(as_strided|unfold)\(": "its backward is not traced",
    r"^(unsqueeze|squeeze|transpose|t)_[.(]": "an in-place view is traced as a write",
    r"^cross_entropy_loss\(f32\[4x7\], i64\[4\], .*, 0.1\)": "`torch.ops` loses the gradient of its nll_loss",
    r"^special_round": "a product with 1 before and after, which a joint-graph pass of 2.15 takes away",
    r"^linalg_vector_norm\(.*, 3, ": "a norm of another order than 1 or 2 falls back where it needs a gradient",
    r"^scatter_reduce_?\.two\(.*(mean|amax|amin|prod)": "the gradient of a reduction that is no sum is one extern call",
    r"^in-place product with a (slice|view)": "autograd saves a copy of what is written to, which has another layout",
    r"^relu_ on a slice": "autograd reads the result from the tensor that was written to",
}


def _traced(target: str) -> bool:
    base, _, overload = target.partition(".")
    if lookup(target) is not None:
        return True
    return in_place(base) and lookup(f"{base[:-1]}.{overload}" if overload else base[:-1]) is not None


COMPLEX = ("complex64", "complex128")  # Inductor leaves complex numbers to eager kernels
# `torch.autocast` of the meta device is not CUDA's; the table may lack calls.
TRACED = [
    case
    for case in CASES
    if not case.autocast and all(map(_traced, case.targets)) and not any(s.dtype.name in COMPLEX for s in case.flat)
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """PyTorch logs its graphs for tools that nobody has asked for."""
    logging.getLogger("torch.__trace").setLevel(logging.ERROR)


@pytest.mark.parametrize("case", sampled(TRACED, 8), ids=[case.name for case in TRACED])
def test_nodes_are_those_of_aotautograd(case: Case) -> None:
    reason = next((why for pattern, why in DIFFERENT.items() if re.search(pattern, case.name)), None)
    equal = True
    patterns = case.patterns()
    for pattern in dict.fromkeys([*patterns[:2], patterns[-1]]):  # all gradients, all but the last, none
        nodes, outputs, program, counts = joint_case.real(case, pattern)
        if joint_case.lost_gradients(outputs, pattern):
            continue
        expected = joint_case.text(nodes, outputs)
        try:
            found = joint_case.text(*joint_case.ours(program, counts))
        except NotTracedError as error:
            found = [f"not traced: {error}"]
        if reason is None:
            difference = "\n".join(difflib.unified_diff(expected, found, "PyTorch", "ours", n=99, lineterm=""))
            assert not difference, f"with gradients for {pattern}:\n{difference}"
        equal = equal and found == expected
    assert reason is None or not equal, f"agrees now: {reason}"
