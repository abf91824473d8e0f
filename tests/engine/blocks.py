"""A chain of blocks, linear and relu each, for tests of levers: `net.blocks.K` of class Block in a Sequential."""

from __future__ import annotations

from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Op, Parameter, Ref, Value

F32 = dtypes.float32
BATCH, WIDTH = 64, 16
ACTIVATION = BATCH * WIDTH * 4  # bytes of one value


def value(name: str, *shape: int) -> Value:
    return Value(name, F32, shape)


def block(index: int, source: str) -> list[Op]:
    """`relu(linear(x))`: the linear saves its input, the relu its result, which the next block reads."""
    path = f"net.blocks.{index}"
    frames = (Frame("", "Net"), Frame("net.blocks", "torch.nn.modules.container.Sequential"), Frame(path, "my.Block"))
    linear = (*frames, Frame(f"{path}.linear", "torch.nn.modules.linear.Linear"))
    return [
        Op(f"l{index}", "aten::linear", (Ref(source), Ref(f"w{index}")), {}, (f"h{index}",), linear),
        Op(f"r{index}", "aten::relu", (Ref(f"h{index}"),), {}, (f"a{index}",), frames),
    ]


def chain(blocks: int) -> Graph:
    """`blocks` blocks and a linear head with 8 classes; the input is (64, 16)."""
    ops: list[Op] = []
    source = "x"
    for index in range(blocks):
        ops += block(index, source)
        source = f"a{index}"
    head = (Frame("", "Net"), Frame("net.head", "torch.nn.modules.linear.Linear"))
    ops.append(Op("head", "aten::linear", (Ref(source), Ref("wh")), {}, ("y",), head))
    weights = [Parameter(value(f"w{k}", WIDTH, WIDTH), f"net.blocks.{k}.linear.weight") for k in range(blocks)]
    return Graph(
        name="net", format="pt2", producer="test", inputs=(value("x", BATCH, WIDTH),),
        parameters=(*weights, Parameter(value("wh", 8, WIDTH), "net.head.weight")), buffers=(), ops=tuple(ops),
        outputs=("y",), values={"y": value("y", BATCH, 8)},
    )  # fmt: skip
