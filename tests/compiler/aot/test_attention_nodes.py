"""Attention: fused kernels against AOTAutograd (which traces them on the meta device when they are called by name),
the products of `math`, and which of them scaled dot-product attention becomes."""

from __future__ import annotations

import difflib
import importlib.util
from typing import Any

import pytest
from observe import Case, Spec, f, h

from staticmem.compiler.aot import joint
from staticmem.eager.strides import contiguous_strides, form_of
from staticmem.ir.dtypes import DType, bfloat16, bool_, float32
from staticmem.ir.graph import Graph, Op, Ref, Value

if importlib.util.find_spec("torch") is not None:
    import joint_case
    import our_joint


def _heads(of: Spec, heads: int) -> Spec:
    """(batch, length, heads * size) as (batch, heads, length, size)."""
    batch, length, width = of.shape
    return Spec((batch, length, heads, width // heads), of.dtype).permute(0, 2, 1, 3)


def _fused(name: str, q: Spec, k: Spec, *more: Any, **words: Any) -> Case:
    inputs = (q, k, k, *[m for m in more if isinstance(m, Spec)])

    def program(op: Any, *given: Any) -> Any:
        left = iter(given[3:])
        args = [next(left) if isinstance(m, Spec) else m for m in more]
        return op(f"aten::_scaled_dot_product_{name}_attention", *given[:3], *args, **words)[0]

    return Case(f"{name} {len(inputs)} inputs {[m for m in more if m not in inputs]} {words}", program, inputs, ())


LONG, SHORT = _heads(f(2, 40, 32), 4), _heads(f(2, 24, 32), 4)
FUSED = [
    _fused("efficient", LONG, SHORT, None, True),
    _fused("efficient", LONG, LONG, None, True, 0.0, True, scale=0.5),
    _fused("efficient", LONG, SHORT, f(2, 4, 40, 24), True),
    _fused("efficient", LONG, SHORT, f(2, 4, 40, 24).fixed, True, 0.1),
    _fused("flash", _heads(h(2, 40, 32), 4), _heads(h(2, 24, 32), 4)),
    _fused("flash", _heads(h(2, 40, 32), 4), _heads(h(2, 40, 32), 4), 0.1, True, scale=0.25),
    _fused("cudnn", _heads(h(2, 40, 32), 4), _heads(h(2, 24, 32), 4), None, True),
    _fused("cudnn", _heads(h(2, 40, 32), 4), _heads(h(2, 40, 32), 4), None, True, 0.0, True),
]


def _by_name(inputs: tuple[Spec, ...], *more: Any, **words: Any) -> Case:
    def program(op: Any, *given: Any) -> Any:
        return op("aten::scaled_dot_product_attention", *given, *more, **words)

    return Case(f"math {[spec.shape for spec in inputs]} {more} {words}", program, inputs, ())


# The meta device has no fused kernel; neither has CUDA for heads of three.
MATH = [
    _by_name((f(2, 4, 5, 3), f(2, 4, 7, 3), f(2, 4, 7, 3))),
    _by_name((f(2, 4, 5, 3), f(2, 4, 5, 3), f(2, 4, 5, 3)), None, 0.0, True, scale=0.5),
    _by_name((f(2, 4, 5, 3), f(2, 4, 7, 3), f(2, 4, 7, 3), f(5, 7).fixed)),
    _by_name((f(4, 5, 3), f(4, 7, 3), f(4, 7, 3))),
]


@pytest.mark.torch
@pytest.mark.parametrize("case", [*FUSED, *MATH], ids=lambda case: case.name)
def test_nodes_are_those_of_aotautograd(case: Case) -> None:
    for pattern in case.patterns():
        if sum(pattern[:3]) not in (0, 3):
            continue  # some but not all of the three: no attention is like this
        nodes, outputs, program, counts = joint_case.real(case, pattern)
        expected, found = joint_case.text(nodes, outputs), joint_case.text(*our_joint.ours(program, counts))
        difference = "\n".join(difflib.unified_diff(expected, found, "PyTorch", "ours", n=99, lineterm=""))
        assert not difference, f"with gradients for {pattern}:\n{difference}"


def _targets(dtype: DType, head: int, mask: DType | None = None, p: float = 0.0, training: bool = True) -> list[str]:
    """The calls of one attention over 4 heads of 40 queries and keys."""
    shape, names = (2, 4, 40, head), ["q", "k", "v"]
    values = [Value(name, dtype, shape) for name in names]
    if mask is not None:
        values.append(Value("mask", mask, (40, 40)))
    shapes = dict.fromkeys(names, shape) | {"mask": (40, 40)}
    forms = {v.name: form_of(shapes[v.name], contiguous_strides(shapes[v.name]), v.dtype) for v in values}
    args = (*[Ref(v.name) for v in values], *([None] if mask is None else []), p)
    op = Op("sdpa", "aten::scaled_dot_product_attention", args, {}, ("out",))
    graph = Graph("case", "pt2", "", tuple(values), (), (), (op,), ("out",))
    made = joint.trace(graph, 0, 1, forms, set(names) if training else (), ("out",), training)
    return [node.base for node in made.nodes if node.target not in ("placeholder", "operator::getitem")]


def test_a_kernel_and_its_backward() -> None:
    name = "aten::_scaled_dot_product_{}_attention"
    for dtype, p, kernel in ((float32, 0.1, "efficient"), (bfloat16, 0.1, "flash"), (bfloat16, 0.0, "cudnn")):
        assert _targets(dtype, 16, p=p) == [name.format(kernel), name.format(kernel) + "_backward"]
        assert _targets(dtype, 16, p=p, training=False) == [
            name.format(kernel if p != 0.1 or dtype is float32 else "cudnn")
        ]


def test_masks_are_made_numbers_and_long_enough_rows() -> None:
    assert _targets(float32, 16, bool_, training=False) == [
        "aten::full", "aten::full", "aten::where", "aten::expand", "aten::_scaled_dot_product_efficient_attention",
    ]  # fmt: skip


def test_no_kernel_for_such_heads() -> None:
    assert "aten::bmm" in _targets(float32, 3)
