"""Blocks of convolutional networks against AOTAutograd: the joint graphs node by node, in order."""

from __future__ import annotations

import difflib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import pytest
from observe import Case, Spec, f, h

marks: list[pytest.MarkDecorator] = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
if importlib.util.find_spec("torch") is not None:
    import joint_case
pytestmark = marks


class Layers:
    """Calls of a network; parameters are taken from the inputs of the case in the order of use."""

    def __init__(self, op: Callable[..., Any], parameters: tuple[Any, ...]) -> None:
        self.op, self._given = op, iter(parameters)

    def __call__(self, target: str, *args: Any, **kwargs: Any) -> Any:
        return self.op(f"aten::{target}", *args, **kwargs)

    def conv(self, x: Any, *places: Any, bias: bool = False) -> Any:
        weight = next(self._given)
        return self("conv2d", x, weight, next(self._given) if bias else None, *places)

    def norm(self, x: Any) -> Any:
        weight, bias, mean, var = (next(self._given) for _ in range(4))
        return self("batch_norm", x, weight, bias, mean, var, True, 0.1, 1e-5, True)

    def linear(self, x: Any) -> Any:
        return self("linear", x, next(self._given), next(self._given))

    def next(self) -> Any:
        return next(self._given)


def _bn(channels: int) -> list[Spec]:
    return [f(channels), f(channels), f(channels).fixed, f(channels).fixed]


def _residual(n: Layers, x: Any) -> Any:
    x = n("max_pool2d", n("relu_", n.norm(n.conv(x, [2, 2], [1, 1]))), [3, 3], [2, 2], [1, 1])
    y = n("relu_", n.norm(n.conv(x, [1, 1], [1, 1])))
    y = n.norm(n.conv(y, [1, 1], [1, 1]))
    y = n("relu_", n("add_.Tensor", y, x))
    return n.linear(n("flatten.using_ints", n("adaptive_avg_pool2d", y, [1, 1]), 1))


def _inverted(n: Layers, x: Any) -> Any:
    """Depthwise, squeeze and excitation, hardswish."""
    y = n("hardswish_", n.norm(n.conv(x, [1, 1], [0, 0])))
    y = n("silu_", n.norm(n.conv(y, [1, 1], [1, 1], [1, 1], 12)))
    scale = n("adaptive_avg_pool2d", y, [1, 1])
    scale = n("hardsigmoid", n.conv(n("relu_", n.conv(scale, bias=True)), bias=True))
    return n("add.Tensor", n.norm(n.conv(n("mul.Tensor", scale, y))), x)


def _dense(n: Layers, x: Any) -> Any:
    features = [x]
    for _ in range(2):
        joined = n("cat", features, 1)
        features.append(n.conv(n("relu_", n.norm(joined)), [1, 1], [1, 1]))
    return n("avg_pool2d", n("relu", n("cat", features, 1)), [2, 2], [2, 2])


def _shuffle(n: Layers, x: Any) -> Any:
    kept, changed = n("chunk", x, 2, 1)
    changed = n("relu_", n.norm(n.conv(changed, [1, 1], [1, 1], [1, 1], 2)))
    joined = n("cat", [kept, changed], 1)
    return n("channel_shuffle", joined, 2)


def _up_and_down(n: Layers, x: Any) -> Any:
    """A small U-Net, up by a transposed convolution."""
    left = n("gelu", n.norm(n.conv(x, [1, 1], [1, 1], bias=True)))
    low = n("leaky_relu", n.norm(n.conv(n("max_pool2d", left, [2, 2]), [1, 1], [1, 1])), 0.1)
    low = n("conv_transpose2d.input", low, n.next(), None, [2, 2])
    return n.conv(n("cat", [low, left], 1), [1, 1], [0, 0], bias=True)


def _generator(n: Layers, x: Any) -> Any:
    y = n("pad", x, [1, 1, 1, 1], "reflect")
    y = n("instance_norm", n.conv(y), n.next(), n.next(), None, None, True, 0.1, 1e-5, True)
    y = n("pixel_shuffle", n("elu", y), 2)
    return n("tanh", n.conv(n("div.Tensor", n("sub.Tensor", y, 0.5), 2.0)))


def _case(name: str, run: Callable[[Layers, Any], Any], x: Spec, *parameters: Spec) -> Case:
    def program(op: Any, x: Any, *given: Any) -> Any:
        return run(Layers(op, given), x)

    return Case(name, program, (x, *parameters), ())


def _networks(image: Callable[..., Spec]) -> list[Case]:
    w = v = image
    return [
        _case("residual", _residual, image(2, 3, 16, 16).fixed, w(8, 3, 3, 3), *_bn(8), w(8, 8, 3, 3), *_bn(8),
              w(8, 8, 3, 3), *_bn(8), w(5, 8), v(5)),
        _case("inverted residual", _inverted, image(2, 6, 8, 8), w(12, 6, 1, 1), *_bn(12), w(12, 1, 3, 3),
              *_bn(12), w(3, 12, 1, 1), v(3), w(12, 3, 1, 1), v(12), w(6, 12, 1, 1), *_bn(6)),
        _case("dense", _dense, image(2, 4, 8, 8), *_bn(4), w(2, 4, 3, 3), *_bn(6), w(2, 6, 3, 3)),
        _case("shuffle", _shuffle, image(2, 8, 6, 6), w(4, 2, 3, 3), *_bn(4)),
        _case("up and down", _up_and_down, image(2, 3, 8, 8).fixed, w(4, 3, 3, 3), v(4), *_bn(4), w(8, 4, 3, 3),
              *_bn(8), w(8, 4, 2, 2), w(2, 8, 1, 1), v(2)),
        _case("generator", _generator, image(2, 3, 8, 8).fixed, w(8, 3, 3, 3), v(8), v(8), w(3, 2, 1, 1)),
    ]  # fmt: skip


CASES = [*_networks(f), *_networks(h)]
IDS = [f"{case.name}, {dtype}" for dtype in ("float32", "bfloat16") for case in CASES[: len(CASES) // 2]]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """PyTorch logs its graphs for tools that nobody has asked for."""
    logging.getLogger("torch.__trace").setLevel(logging.ERROR)


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "no gradients"])
def test_joint_graph_is_that_of_aotautograd(case: Case, training: bool) -> None:
    pattern = tuple([training and spec.grad is not False for spec in case.flat])
    nodes, outputs, program, counts = joint_case.real(case, pattern)
    expected = joint_case.text(nodes, outputs)
    found = joint_case.text(*joint_case.ours(program, counts))
    difference = "\n".join(difflib.unified_diff(expected, found, "PyTorch", "ours", n=99, lineterm=""))
    assert not difference, f"\n{difference}"
