"""Tables of learned positions bound the length of a sequence (wpe of GPT-2, embed_positions of OPT)."""

from __future__ import annotations

from typing import Any

import pytest

import staticmem
from staticmem.errors import DimensionError
from staticmem.ir import dtypes
from staticmem.ir.graph import Graph, Op, Parameter, Ref, Value
from staticmem.studies.position_tables import PositionError, check_positions

ROWS, TOKENS, WIDTH = 16, 12, 8
END = 2**63 - 1


def op(name: str, target: str, *args: Any) -> Op:
    return Op(name, f"aten::{target}", args, {}, (name,))


def looked_up(*ops: Op) -> Graph:
    """A table of `ROWS` positions that is read at the last of these values."""
    ops = (*ops, op("y", "embedding", Ref("w"), Ref(ops[-1].name)))
    table = Parameter(Value("w", dtypes.float32, (ROWS, WIDTH)), "positions.weight")
    ids = Value("ids", dtypes.int64, (2, TOKENS))
    return Graph(
        name="m", format="pt2", producer="test", inputs=(ids,), parameters=(table,), buffers=(), ops=ops,
        outputs=("y",), values={},
    )  # fmt: skip


def gpt2(tokens: int) -> Graph:
    """`torch.arange(tokens) + past`, with a dimension for the batch."""
    return looked_up(op("a", "arange", tokens), op("b", "add.Tensor", Ref("a"), 0), op("c", "unsqueeze", Ref("b"), 0))


def opt(tokens: int) -> Graph:
    """`(mask.cumsum(1) * mask - 1).long()[:, 0:] + 2`: two rows stand before the first position."""
    return looked_up(
        op("m", "ones", (2, tokens)), op("a", "cumsum", Ref("m"), 1), op("b", "mul.Tensor", Ref("a"), Ref("m")),
        op("c", "sub.Tensor", Ref("b"), 1), op("d", "slice.Tensor", Ref("c"), 1, 0, END),
        op("e", "add.Tensor", Ref("d"), 2),
    )  # fmt: skip


@pytest.mark.parametrize(("graph", "most"), [(gpt2, ROWS), (opt, ROWS - 2)])
def test_a_sequence_has_at_most_the_rows_of_a_table(graph: Any, most: int) -> None:
    check_positions(graph(most))
    with pytest.raises(PositionError, match=r"positions\.weight") as error:
        check_positions(graph(most + 3))
    assert (error.value.excess, error.value.code) == (3, "SM137")
    with pytest.raises(PositionError):
        check_positions(graph(most - 3), more=4)  # tokens that are generated
    check_positions(graph(most - 3), more=3)


@pytest.mark.parametrize(
    "last",
    [
        op("b", "clamp", Ref("a"), 0, ROWS - 1),  # distances beyond the table share a row
        op("b", "slice.Tensor", Ref("a"), 0, 0, ROWS),
        op("b", "mul.Tensor", Ref("a"), Ref("ids")),
        op("b", "remainder.Scalar", Ref("a"), ROWS),
    ],
)
def test_other_indices_are_data(last: Op) -> None:
    check_positions(looked_up(op("a", "arange", 10 * ROWS), last))
    check_positions(looked_up(op("a", "arange", 0, 10 * ROWS, 10)))
    check_positions(looked_up(op("a", "view", Ref("ids"), (-1,))))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_the_longest_sequence_ends_with_the_table() -> None:
    torch: Any = pytest.importorskip("torch")

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = torch.nn.Embedding(50, WIDTH), torch.nn.Embedding(100, WIDTH)
            self.head = torch.nn.Linear(WIDTH, 50)

        def forward(self, ids: Any) -> Any:
            positions = torch.arange(ids.shape[1], device=ids.device)
            return self.head(self.tokens(ids) + self.positions(positions))

    open_axes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("seq", min=2)},)
    with torch.device("meta"):
        ids = torch.zeros(2, 16, dtype=torch.int64)
        exported = torch.export.export(Model(), (ids,), dynamic_shapes=open_axes, strict=False)
    seq = next(str(node.meta["val"].shape[1]) for node in exported.graph.nodes if node.name == "ids")
    largest = staticmem.max_dim(exported, "l4", seq, batch=2, optimizer="sgd")
    assert (largest.size, largest.next_device_bytes) == (100, None)
    with pytest.raises(DimensionError, match="longer than"):
        staticmem.analyze(exported, batch=2, dims={seq: 101}, optimizer="sgd")
