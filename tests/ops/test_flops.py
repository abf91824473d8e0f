"""FLOPs against `torch.utils.flop_counter`, which counts the calls of a real run."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
from small_graphs import Builder

from staticmem.engine.shapes import value_infos
from staticmem.ops import flops
from staticmem.studies import Request, Study

MODELS = Path(__file__).resolve().parents[2] / "models"


def counted(name: str, *args: object, result: tuple[int, ...], **shapes: tuple[int, ...]) -> int:
    builder = Builder(**shapes)
    builder.call(name, *args, name="out")
    return flops(builder.ops[0], shapes | {"out": result})


def test_products_by_derivation() -> None:
    from staticmem.ir.graph import Ref

    a, b, c = Ref("a"), Ref("b"), Ref("c")
    assert counted("mm.default", a, b, result=(3, 5), a=(3, 4), b=(4, 5)) == 2 * 3 * 4 * 5
    assert counted("addmm.default", c, a, b, result=(3, 5), a=(3, 4), b=(4, 5), c=(5,)) == 2 * 3 * 4 * 5
    assert counted("linear.default", a, b, result=(2, 7, 5), a=(2, 7, 4), b=(5, 4)) == 2 * 2 * 7 * 4 * 5
    assert counted("add.Tensor", a, b, result=(3, 4), a=(3, 4), b=(3, 4)) == 0
    equation = counted("einsum.default", "bij,bjk->bik", (a, b), result=(2, 3, 5), a=(2, 3, 4), b=(2, 4, 5))
    assert equation == 2 * 2 * 3 * 4 * 5
    equation = counted("einsum.default", "...ij,...jk->...ik", (a, b), result=(2, 3, 5), a=(2, 3, 4), b=(2, 4, 5))
    assert equation == 2 * 2 * 3 * 4 * 5
    assert counted("matmul.default", a, Ref("unknown"), result=(3, 5)) == 0


def test_convolution_of_groups_by_derivation() -> None:
    from staticmem.ir.graph import Ref

    x, w = Ref("x"), Ref("w")
    found = counted(
        "conv2d.default", x, w, None, (1, 1), (1, 1), (1, 1), 4, result=(2, 16, 9, 9), x=(2, 8, 9, 9), w=(16, 2, 3, 3)
    )
    assert found == 2 * prod((2, 16, 9, 9)) * (2 * 3 * 3)


@pytest.mark.parametrize("name", ["resnet18.pt2", "resnet18.onnx", "mobilenet_v2.pt2", "vgg16.pt2"])
def test_published_multiply_adds(name: str) -> None:
    """torchvision's table of models gives them in units of 10**9 for an image of 224 x 224 (GFLOPS column, 2025)."""
    published = {"resnet18": 1.81, "mobilenet_v2": 0.30, "vgg16": 15.47}[name.split(".")[0]]
    graph = Study.open(MODELS / name, Request(batch=1)).result.graph
    shapes = {name: value.shape for name, value in value_infos(graph, training=False).items()}
    macs = sum(flops(op, shapes) for op in graph.ops) // 2
    assert round(macs / 1e9, 2) == published


def _modules() -> dict[str, Callable[[], tuple[object, tuple[object, ...]]]]:
    import torch
    from torch import nn

    class Attention(nn.Module):  # type: ignore[misc]
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v)

    class Product(nn.Module):  # type: ignore[misc]
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.matmul(a, b) + torch.bmm(a, b) + torch.baddbmm(a @ b, a, b)

    rand = torch.rand
    return {
        "mlp": lambda: (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False)), (rand(3, 5, 8),)),
        "conv": lambda: (nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1, groups=2), nn.Conv2d(8, 6, 1)), (rand(2, 4, 9, 7),)),
        "conv1d": lambda: (nn.Conv1d(4, 8, 5, dilation=2), (rand(2, 4, 30),)),
        "conv3d": lambda: (nn.Conv3d(2, 4, 3), (rand(1, 2, 5, 6, 7),)),
        "transposed": lambda: (nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2), (rand(2, 6, 5, 4),)),
        "attention": lambda: (Attention(), (rand(2, 3, 7, 8), rand(2, 3, 5, 8), rand(2, 3, 5, 8))),
        "products": lambda: (Product(), (rand(2, 3, 3), rand(2, 3, 3))),
    }


@pytest.mark.parametrize("name", ["mlp", "conv", "conv1d", "conv3d", "transposed", "attention", "products"])
def test_equal_to_torch(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    module, inputs = _modules()[name]()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # the CPU's own kernel is not counted
        module(*inputs)  # type: ignore[operator]
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(module, inputs), str(path))
    graph = Study.open(path, Request()).result.graph
    shapes = {name: value.shape for name, value in value_infos(graph, training=False).items()}
    assert sum(flops(op, shapes) for op in graph.ops) == counter.get_total_flops()
