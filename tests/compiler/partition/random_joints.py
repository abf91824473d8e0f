"""Random joint graphs, made of the kinds of ops that the partitioner tells apart."""

from __future__ import annotations

import operator
from random import Random
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

aten, prims = torch.ops.aten, torch.ops.prims

MATRIX, SQUARE, ROW, COLUMN, NARROW, STACK = (8, 16), (16, 16), (16,), (8, 1), (8, 8), (16, 8)
# Each op with the sizes that it takes, and arguments behind them.
OPS: list[tuple[Any, tuple[tuple[int, ...], ...], tuple[Any, ...], dict[str, Any]]] = [
    (aten.relu.default, (MATRIX,), (), {}),
    (aten.exp.default, (NARROW,), (), {}),
    (aten.neg.default, (SQUARE,), (), {}),
    (aten.add.Tensor, (MATRIX, MATRIX), (), {}),
    (aten.mul.Tensor, (MATRIX, MATRIX), (), {}),
    (aten.mul.Tensor, (MATRIX, ROW), (), {}),
    (aten.sub.Tensor, (MATRIX, COLUMN), (), {}),
    (aten.add.Tensor, (STACK, STACK), (), {}),
    (aten.mm.default, (MATRIX, SQUARE), (), {}),
    (aten.addmm.default, (ROW, MATRIX, SQUARE), (), {}),
    (aten.addmm.default, (MATRIX, MATRIX, SQUARE), (), {}),
    (aten.mm.default, (STACK, MATRIX), (), {}),
    (aten.mm.default, (NARROW, MATRIX), (), {}),
    (aten.cumsum.default, (MATRIX, ), (1,), {}),
    (aten.sum.dim_IntList, (MATRIX,), ([1], True), {}),
    (aten.sum.dim_IntList, (MATRIX,), ([0],), {}),
    (aten.amax.default, (MATRIX,), ([1], True), {}),
    (aten.permute.default, (MATRIX,), ([1, 0],), {}),
    (aten.permute.default, (STACK,), ([1, 0],), {}),
    (aten.permute.default, (SQUARE,), ([1, 0],), {}),
    (aten.view.default, (NARROW,), ([8, 8],), {}),
    (aten.expand.default, (COLUMN,), ([8, 16],), {}),
    (aten.expand.default, (ROW,), ([16, 16],), {}),
    (aten.slice.Tensor, (SQUARE,), (0, 0, 8), {}),
    (aten.clone.default, (MATRIX,), (), {}),
    (prims.convert_element_type.default, (MATRIX,), (torch.bfloat16,), {}),
    (prims.convert_element_type.default, (MATRIX,), (torch.float32,), {}),
    (aten.full.default, (), ([8, 16], 1.0), {"dtype": torch.float32, "device": "meta"}),
    (aten.full.default, (), ([16], 0.5), {"dtype": torch.float32, "device": "meta"}),
]  # fmt: skip
SEVERAL = [
    (aten.split.Tensor, MATRIX, (8, 1)),
    (aten.var_mean.correction, MATRIX, ([1],)),
    (aten.topk.default, MATRIX, (8,)),
    (aten.sort.default, NARROW, ()),
]


class Maker:
    """Makes a joint graph, node by node; `values` are the nodes that are tensors."""

    def __init__(self, random: Random) -> None:
        self.random, self.graph = random, torch.fx.Graph()
        self.values: list[Any] = []

    def placeholder(self, name: str, shape: tuple[int, ...]) -> Any:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta")
        self.values.append(node)
        return node

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        node = self.graph.call_function(target, args, kwargs or {})
        values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*values, **(kwargs or {}))
        if isinstance(node.meta["val"], torch.Tensor):
            self.values.append(node)
        return node

    def pick(self, shape: tuple[int, ...], among: list[Any]) -> Any:
        """One of a shape, a late one more often than an early one; None where there is none."""
        fitting = [node for node in among if tuple(node.meta["val"].shape) == shape]
        if not fitting:
            return None
        return self.random.choice(fitting[-4:] if self.random.random() < 0.6 else fitting)

    def random_call(self, among: list[Any], tags: dict[str, Any]) -> None:
        made = len(self.graph.nodes)
        kind = self.random.randrange(len(OPS) + len(SEVERAL) + 1)
        if kind == len(OPS) + len(SEVERAL):
            parts = [self.pick(NARROW, among), self.pick(NARROW, among)]
            if None not in parts:
                self.call(aten.cat.default, (parts, 1))
        elif kind >= len(OPS):
            target, shape, rest = SEVERAL[kind - len(OPS)]
            read = self.pick(shape, among)
            if read is not None:
                node = self.call(target, (read, *rest), {"keepdim": True} if target is aten.var_mean.correction else {})
                for k in range(2):
                    item = self.call(operator.getitem, (node, k))
                    if not item.meta["val"].is_floating_point():
                        self.values.remove(item)
        else:
            target, shapes, rest, kwargs = OPS[kind]
            reads = [self.pick(shape, among) for shape in shapes]
            if None not in reads:
                self.call(target, (*reads, *rest), kwargs)
        for node in list(self.graph.nodes)[made:]:
            node.meta.update(tags)


def joint_module(seed: int, checkpoints: bool = False) -> tuple[Any, int, list[int]]:
    """A joint graph, how many outputs are of the forward, and which primals are static."""
    random = Random(seed)
    maker = Maker(random)
    shapes = [MATRIX, ROW, SQUARE, *random.choices([MATRIX, ROW, SQUARE, COLUMN, NARROW], k=random.randrange(4))]
    primals = [maker.placeholder(f"primals_{k + 1}", shape) for k, shape in enumerate(shapes)]
    tangent = maker.placeholder("tangents_1", MATRIX)
    maker.values.remove(tangent)
    region = 0
    for _ in range(random.randrange(2, 40)):
        tags: dict[str, Any] = {}
        if checkpoints and random.random() < 0.5:
            region += random.random() < 0.3
            tags = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": region}
        maker.random_call(maker.values, tags)
    computed = [node for node in maker.values if node not in primals] or primals
    outputs = random.sample(computed[-8:], k=min(len(computed), random.randrange(1, 3)))
    of_forward = list(maker.values)
    of_backward = [tangent]
    for _ in range(random.randrange(1, 40)):
        before = len(maker.values)
        maker.random_call([*of_forward, *of_backward], {})
        of_backward += maker.values[before:]
    gradients: list[Any] = [random.choice(of_backward[-6:]) if random.random() < 0.8 else None for _ in primals]
    if all(gradient is None for gradient in gradients):
        gradients[0] = of_backward[-1]
    maker.graph.output((*outputs, *gradients))
    static = [k for k in range(len(primals)) if random.random() < 0.5]
    return torch.fx.GraphModule(torch.nn.Module(), maker.graph), len(outputs), static
