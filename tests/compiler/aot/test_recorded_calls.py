"""Calls whose graphs of PyTorch 2.15 on CUDA differ from those of 2.13 without it, which `test_calls` compares with.

Recorded with AOTAutograd of PyTorch 2.15.0 on fake CUDA tensors, `select_decomp_table()`, a gradient for each floating
tensor: the targets of the nodes that the results depend on, in order; `aten::` is left out.
"""

from __future__ import annotations

from typing import Any

import pytest

from staticmem.compiler.aot import joint
from staticmem.eager.strides import channels_last_strides, contiguous_strides, form_of
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Graph, Op, Ref
from staticmem.tracing.nodes import PLACEHOLDER, Node


class S(tuple[int, ...]):
    """Sizes of a tensor."""

    __slots__ = ()

    def __new__(cls, *sizes: int) -> S:
        return super().__new__(cls, sizes)


X = S(4, 8, 6, 6)
F, H = dtypes.float32, dtypes.bfloat16

# name -> call, dtype of the first tensor, arguments (sizes stand for tensors), autocast, targets
RECORDED: dict[str, tuple[str, DType, tuple[Any, ...], bool, str]] = {
    "gnorm": (
        "aten::group_norm", F, (X, 4, S(8), S(8), 1e-05, True), False,
        ("view var_mean.correction getitem getitem add.Tensor rsqrt sub.Tensor mul.Tensor view unsqueeze "
        "unsqueeze unsqueeze mul.Tensor unsqueeze unsqueeze unsqueeze add.Tensor squeeze.dims squeeze.dims "
        "mul.Tensor view sum.dim_IntList view sum.dim_IntList unsqueeze mul.Tensor view sum.dim_IntList "
        "unsqueeze mul.Tensor view sum.dim_IntList unsqueeze view mul.Tensor neg addcmul mul.Tensor "
        "mul.Tensor mul.Tensor mul.Tensor neg mul.Tensor mul.Tensor mul.Tensor sub.Tensor unsqueeze unsqueeze "
        "unsqueeze unsqueeze unsqueeze view mul.Tensor view mul.Tensor add.Tensor add.Tensor view view view "
        "unsqueeze mul.Tensor sub.Tensor unsqueeze mul.Tensor sum.dim_IntList view sum.dim_IntList"),
    ),
    "mish": (
        "aten::mish", F, (X,), False,
        ("exp log1p gt.Scalar where.self tanh mul.Tensor exp log1p gt.Scalar where.self tanh sigmoid "
        "mul.Tensor mul.Tensor sub.Tensor mul.Tensor add.Tensor mul.Tensor"),
    ),
    "log_sigmoid": (
        "aten::log_sigmoid", F, (X,), False,
        ("full minimum abs neg exp log1p sub.Tensor lt.Scalar full full where.self full full where.self abs "
        "neg exp add.Tensor div.Tensor mul.Tensor sub.Tensor mul.Tensor"),
    ),
    "prelu": (
        "aten::prelu", F, (X, S(8)), False,
        ("view gt.Scalar mul.Tensor where.self gt.Scalar mul.Tensor where.self gt.Scalar mul.Tensor full "
        "where.self sum.dim_IntList view"),
    ),
    "selu": (
        "aten::selu", F, (X,), False,
        ("gt.Scalar mul.Tensor mul.Tensor expm1 mul.Tensor where.self le.Scalar mul.Tensor mul.Tensor "
        "mul.Tensor exp mul.Tensor mul.Tensor where.self"),
    ),
    "hardshrink": (
        "aten::hardshrink", F, (X,), False,
        "abs le.Scalar full where.self full where.self",
    ),
    "relu6": (
        "aten::relu6", F, (X,), False,
        "clamp_min clamp_max le.Scalar ge.Scalar bitwise_or.Tensor full where.self",
    ),
    "convb_amp": (
        "aten::conv2d", F, (X, S(16, 8, 3, 3), S(16), (1, 1), (1, 1)), True,
        "cast cast cast convolution sum.dim_IntList convolution_backward getitem getitem cast cast cast",
    ),
    "ub_bf": (
        "aten::upsample_bilinear2d.vec", H, (X, (12, 12), False, None), False,
        ("cast prims::iota cast add.Tensor mul.Tensor sub.Tensor clamp_min view cast add.Tensor clamp_max "
        "prims::iota cast add.Tensor mul.Tensor sub.Tensor clamp_min view cast add.Tensor clamp_max "
        "_unsafe_index.Tensor _unsafe_index.Tensor _unsafe_index.Tensor _unsafe_index.Tensor sub.Tensor "
        "clamp_min clamp_max sub.Tensor mul.Tensor add.Tensor sub.Tensor mul.Tensor add.Tensor sub.Tensor "
        "clamp_min clamp_max sub.Tensor mul.Tensor add.Tensor cast cast mul.Tensor neg add.Tensor mul.Tensor "
        "neg add.Tensor mul.Tensor neg add.Tensor full index_put full index_put add.Tensor full index_put "
        "add.Tensor full index_put add.Tensor cast"),
    ),
}  # fmt: skip


def _trace(target: str, dtype: DType, args: tuple[Any, ...], amp: bool, last: bool = False) -> list[Node]:
    forms: dict[str, Any] = {}

    def ref(sizes: S) -> Ref:
        name = f"t{len(forms)}"
        strides = channels_last_strides(sizes) if last and len(sizes) == 4 else contiguous_strides(tuple(sizes))
        forms[name] = form_of(tuple(sizes), strides, dtype if not forms else F)
        return Ref(name)

    given = tuple([ref(a) if isinstance(a, S) else a for a in args])
    graph = Graph("case", "pt2", "", (), (), (), (Op("call", target, given, {}, ("out",)),), ("out",))
    made = joint.trace(graph, 0, 1, forms, set(forms), ("out",), True, H if amp else None)
    keep: set[Node] = set()
    stack = [node for node in made.outputs if node is not None]
    while stack:
        node = stack.pop()
        if node not in keep:
            keep.add(node)
            stack += node.inputs
    return [node for node in made.nodes if node in keep and node.target != PLACEHOLDER]


@pytest.mark.parametrize("name", RECORDED)
def test_nodes_are_those_of_the_recording(name: str) -> None:
    target, dtype, args, amp, expected = RECORDED[name]
    found = [
        node.target.replace("prims::convert_element_type", "cast").removeprefix("aten::").removeprefix("operator::")
        for node in _trace(target, dtype, args, amp)
    ]
    assert found == expected.split()


def test_convolutions_are_channels_last_where_an_operand_is() -> None:
    """cuDNN's layout; results of the backward have it too (recorded)."""
    nodes = _trace("aten::conv2d", F, (X, S(16, 8, 3, 3), S(16), (1, 1), (1, 1)), False, last=True)
    strides = {node.shape: node.strides for node in nodes if not isinstance(node.form, tuple)}
    assert strides == {
        (4, 16, 6, 6): (576, 1, 96, 16), (16,): (1,), X: (288, 1, 48, 8), (16, 8, 3, 3): (72, 1, 24, 8),
    }  # fmt: skip


def test_a_write_in_another_dtype_has_gradients() -> None:
    """`x.add_(y)` of bfloat16 and float32: each operand's gradient has its dtype."""
    forms = {"x": form_of((4,), (1,), H), "y": form_of((4,), (1,), F)}
    ops = (
        Op("relu", "aten::relu", (Ref("x"),), {}, ("r",)),
        Op("add_", "aten::add_.Tensor", (Ref("r"), Ref("y")), {}, ("out",)),
    )
    made = joint.trace(Graph("case", "pt2", "", (), (), (), ops, ("out",)), 0, 2, forms, {"x", "y"}, ("out",), True)
    gradients = made.outputs[made.forward_outputs :]
    assert [node.dtype for node in gradients if node is not None] == [H, F]
