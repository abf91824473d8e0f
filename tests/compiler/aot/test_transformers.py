"""Small transformers as a whole: every node, in order, against AOTAutograd."""

from __future__ import annotations

import difflib
import importlib.util
from typing import Any

import pytest
from observe import Case, Spec, f, i

if importlib.util.find_spec("torch") is not None:
    import joint_case
    import our_joint

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
B, L, HEADS, HEAD = 2, 6, 2, 3  # no fused kernel takes heads of three: what PyTorch traces on any device is `math`
D = HEADS * HEAD


def _attention(op: Any, x: Any, qkv: Any, out: Any) -> Any:
    parts = op("aten::split.Tensor", op("aten::linear", x, qkv), D, -1)
    q, k, v = (op("aten::transpose.int", op("aten::view", part, [B, L, HEADS, HEAD]), 1, 2) for part in parts)
    mixed = op("aten::scaled_dot_product_attention", q, k, v, None, 0.0, True)
    merged = op("aten::reshape", op("aten::transpose.int", mixed, 1, 2), [B, L, D])
    return op("aten::linear", merged, out)


def _encoder(
    op: Any, tokens: Any, table: Any, g: Any, b: Any, qkv: Any, out: Any, up: Any, up_bias: Any, down: Any
) -> Any:
    """Embedding, attention and a wide layer after norms, and the embedding again as the last layer."""
    x = op("aten::embedding", table, tokens)
    x = op("aten::add.Tensor", x, _attention(op, op("aten::layer_norm", x, [D], g, b), qkv, out))
    wide = op("aten::gelu", op("aten::linear", op("aten::layer_norm", x, [D], g, b), up, up_bias))
    x = op("aten::add.Tensor", x, op("aten::linear", wide, down))
    return op("aten::linear", op("aten::select.int", x, 1, 0), table)


def _rotated(op: Any, x: Any, cos: Any, sin: Any) -> Any:
    left = op("aten::slice.Tensor", x, -1, 0, 2)
    right = op("aten::slice.Tensor", x, -1, 2, 9223372036854775807)
    turned = op("aten::cat", [op("aten::neg", right), left], -1)
    return op("aten::add.Tensor", op("aten::mul.Tensor", x, cos), op("aten::mul.Tensor", turned, sin))


def _decoder(op: Any, x: Any, scale: Any, q: Any, kv: Any, cos: Any, sin: Any, gate: Any) -> Any:
    """RMS norm as models write it, rotary embeddings, one key head for all queries, written-out attention, a gate."""
    mean = op("aten::mean.dim", op("aten::pow.Tensor_Scalar", x, 2), [-1], True)
    normal = op("aten::mul.Tensor", x, op("aten::rsqrt", op("aten::add.Tensor", mean, 1e-6)))
    normal = op("aten::mul.Tensor", scale, normal)
    queries = op("aten::transpose.int", op("aten::view", op("aten::linear", normal, q), [B, L, 2, 4]), 1, 2)
    keys = op("aten::unsqueeze", op("aten::linear", normal, kv), 1)
    queries, keys = _rotated(op, queries, cos, sin), _rotated(op, keys, cos, sin)
    scores = op("aten::matmul", queries, op("aten::transpose.int", op("aten::expand", keys, [B, 2, L, 4]), -2, -1))
    weights = op("aten::softmax.int", op("aten::div.Tensor", scores, 2.0), -1)
    mixed = op("aten::flatten.using_ints", op("aten::transpose.int", op("aten::matmul", weights, keys), 1, 2), 2)
    return op("aten::mul.Tensor", op("aten::silu", op("aten::linear", mixed, gate)), mixed)


def _case(name: str, program: Any, *inputs: Spec) -> Case:
    return Case(name, program, inputs, ())


CASES = [
    _case("encoder", _encoder, i(B, L), f(11, D).trained, f(D).trained, f(D).trained, f(3 * D, D).trained,
          f(D, D).trained, f(4 * D, D).trained, f(4 * D).trained, f(D, 4 * D).trained),
    _case("decoder", _decoder, f(B, L, 8).trained, f(8).trained, f(8, 8).trained, f(4, 8).trained, f(L, 4).fixed,
          f(L, 4).fixed, f(8, 8).trained),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("training", [True, False])
def test_nodes_are_those_of_aotautograd(case: Case, training: bool) -> None:
    (pattern,) = case.patterns()
    nodes, outputs, program, counts = joint_case.real(case, pattern if training else (False,) * len(pattern))
    expected, found = joint_case.text(nodes, outputs), joint_case.text(*our_joint.ours(program, counts))
    difference = "\n".join(difflib.unified_diff(expected, found, "PyTorch", "ours", n=2, lineterm=""))
    assert not difference, difference
