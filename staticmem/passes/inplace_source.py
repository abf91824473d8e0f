"""What ran in place, by the source line that called it: `F.relu(x)` made a new tensor, `x += y` did not.

An ONNX file of the dynamo exporter keeps the source lines of every op, but not whether it wrote to its input. A line of
the model says so itself, unless it leaves that to a module (`self.relu(x)`, whose `inplace` no line shows).
"""

from __future__ import annotations

import re
from functools import lru_cache

from staticmem.ir.graph import Op

# ops that nothing but a source line makes in place: methods with an underscore, and augmented assignments
BY_LINE_ONLY = frozenset((
    "aten::mul", "aten::sub", "aten::div", "aten::sigmoid", "aten::tanh", "aten::clamp", "aten::exp",
    "aten::masked_fill", "aten::clamp_min", "aten::clamp_max", "aten::abs", "aten::neg", "aten::sqrt", "aten::rsqrt",
    "aten::pow", "aten::log", "aten::floor", "aten::round", "aten::reciprocal", "aten::index_add", "aten::scatter_add",
    "aten::scatter",
    "aten::tril", "aten::triu",
))  # fmt: skip
_AUGMENTED = {"aten::add": "+", "aten::sub": "-", "aten::mul": "*", "aten::div": "/"}
# activations by the class of torch.nn that takes `inplace=True`
MODULES = {
    "aten::relu": "ReLU", "aten::hardtanh": "Hardtanh", "aten::silu": "SiLU", "aten::hardswish": "Hardswish",
    "aten::leaky_relu": "LeakyReLU", "aten::elu": "ELU", "aten::hardsigmoid": "Hardsigmoid", "aten::relu6": "ReLU6",
    "aten::selu": "SELU", "aten::celu": "CELU", "aten::mish": "Mish",
}  # fmt: skip
INPLACE_OPS = (*MODULES, *BY_LINE_ONLY, "aten::add")
_TRUE = re.compile(r"inplace\s*=\s*True|,\s*True\s*\)|\(\s*True\s*\)")


def written(op: Op) -> bool | None:
    """Whether the line says that the op ran in place; None where it leaves that open."""
    if not op.stack:
        return None
    said = _said(op.base, op.stack[-1].text)
    if said is None and len(op.stack) > 1 and "self.inplace" in op.stack[-1].text:
        made = MODULES.get(op.base, "")  # a module that the caller's line makes: `nn.ReLU(True)(x)`
        found = re.findall(rf"\b{made}\(([^()]*)\)\(", op.stack[-2].text) if made else []
        return _TRUE.search(f"({found[0]})") is not None if len(found) == 1 else None
    return said


@lru_cache(4096)
def _said(base: str, text: str) -> bool | None:
    name = base.removeprefix("aten::")
    if re.search(rf"\.{name}_\(", text) or re.search(rf"\b(?:torch|F)\.{name}_\(", text):
        return True
    if name == "scatter" and "gumbel_softmax(" in text:
        return True  # torch/nn/functional.py, `gumbel_softmax`: zeros_like(logits).scatter_(dim, index, 1.0)
    sign = _AUGMENTED.get(base)
    if sign is not None:
        sign = re.escape(sign)
        augmented = re.match(rf"\s*[A-Za-z_][\w.]*(?:\[[^]]*\])?\s*{sign}=(?!=)(.*)", text)
        if augmented is not None:
            # the statement's own op, unless its right side has one of the kind too
            return None if re.search(rf"[\w)\]]\s*{sign}\s*[\w(]", augmented[1]) else True
        return False if re.search(rf"[\w)\]]\s*{sign}\s*[\w(]", text) else None
    calls = re.findall(rf"\b{name}\(", text)
    if not calls or "inplace=self." in text or "self.inplace" in text:
        return None
    if _TRUE.search(text) is None:
        return False
    return True if len(calls) == 1 else None


__all__ = ["BY_LINE_ONLY", "INPLACE_OPS", "MODULES", "written"]
