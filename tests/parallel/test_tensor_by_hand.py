"""What tensor parallelism splits, in graphs small enough to foresee it: found missing by scripts/faults/mutants.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from staticmem.eager.trace import Buffer, Trace
from staticmem.ir.dtypes import float32
from staticmem.ir.graph import Frame, Graph, Op, Parameter, Ref, Value
from staticmem.parallel.rewrite import Piece, Rewrite
from staticmem.parallel.strategies.tensor import Plan, _divide, apply, plan

WIDTH, HIDDEN, WORDS = 8, 16, 40
BLOCK = "layers.0"


class Model:
    """A graph that grows by calls; what is in `BLOCK` says so."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.parameters: list[Parameter] = []
        self.shapes: dict[str, tuple[int, ...]] = {}

    def parameter(self, name: str, *shape: int) -> Ref:
        self.parameters.append(Parameter(Value(name, float32, shape), name))
        return Ref(name)

    def call(self, target: str, *args: Ref | float, shape: tuple[int, ...], path: str = BLOCK) -> Ref:
        name = f"v{len(self.ops)}"
        frames = (Frame(path, "Block"),) if path else ()
        self.ops.append(Op(name, target, args, {}, (name,), frames))
        self.shapes[name] = shape
        return Ref(name)

    def linear(self, x: Ref, name: str, out: int, *, path: str = BLOCK, bias: bool = True) -> Ref:
        *rows, into = self.shapes[x.name]
        rest = [self.parameter(f"{name}.bias", out)] if bias else []
        weight = self.parameter(f"{name}.weight", out, into)
        return self.call("aten::linear", x, weight, *rest, shape=(*rows, out), path=path)

    def table(self, name: str, rows: int) -> Ref:
        weight = self.parameter(name, rows, WIDTH)
        return self.call("aten::embedding", weight, Ref("ids"), shape=(2, 3, WIDTH), path="")

    def plan(self, ranks: int = 2) -> Plan:
        graph = Graph("g", "pt2", "", (), tuple(self.parameters), (), tuple(self.ops), (f"v{len(self.ops) - 1}",))
        return plan(graph, [BLOCK], ranks, self.shapes)


def feed_forward(model: Model, x: Ref) -> Ref:
    """Ops 1, 2 and 3 behind an embedding that is op 0."""
    up = model.linear(x, "up", HIDDEN)
    return model.linear(model.call("aten::relu", up, shape=model.shapes[up.name]), "down", WIDTH)


def test_columns_parts_and_rows_of_a_block() -> None:
    model = Model()
    x = model.table("words", WORDS)
    out = feed_forward(model, x)
    model.call("aten::add.Tensor", x, out, shape=(2, 3, WIDTH))
    made = model.plan()
    assert (made.columns, made.parts, made.rows) == ({1}, {2}, {3})
    assert made.split == {"up.weight", "up.bias", "down.weight", "words"}
    assert made.whole_blocks == []


@pytest.mark.parametrize("shape", [(6, WIDTH), (2, 3, WIDTH)])
@pytest.mark.parametrize("whole_first", [True, False])
def test_a_residual_that_is_added_to_a_part_keeps_the_block_whole(shape: tuple[int, ...], whole_first: bool) -> None:
    model = Model()
    x = model.call("aten::relu", Ref("input"), shape=shape, path="")
    part = model.linear(x, "up", WIDTH)
    pair = (x, part) if whole_first else (part, x)
    model.linear(model.call("aten::add.Tensor", *pair, shape=shape), "down", WIDTH)
    made = model.plan()
    assert made.whole_blocks == [f"{BLOCK}: a residual is added to a part"]
    assert (made.columns, made.split) == (set(), set())


def test_parts_are_added_to_each_other_and_to_what_is_broadcast() -> None:
    model = Model()
    x = model.table("words", WORDS)
    one, two = model.linear(x, "one", HIDDEN), model.linear(x, "two", HIDDEN)
    both = model.call("aten::add.Tensor", one, two, shape=(2, 3, HIDDEN))
    row = model.call("aten::sum", x, shape=(2, 3, 1))
    shifted = model.call("aten::add.Tensor", both, row, shape=(2, 3, HIDDEN))
    model.linear(model.call("aten::add.Tensor", shifted, 1.0, shape=(2, 3, HIDDEN)), "down", WIDTH)
    made = model.plan()
    assert made.whole_blocks == []
    assert (made.columns, made.rows) == ({1, 2}, {7})


def test_the_largest_table_and_the_head_over_it_are_split_along_the_vocabulary() -> None:
    """Word embeddings and head; positions and a linear outside of the blocks are whole."""
    model = Model()
    x = model.table("words", WORDS)
    places = model.table("positions", 12)
    out = feed_forward(model, model.call("aten::add.Tensor", x, places, shape=(2, 3, WIDTH), path=""))
    pooled = model.linear(out, "pooler", WIDTH, path="")
    model.linear(pooled, "head", WORDS, path="")
    made = model.plan()
    assert made.split == {"words", "head.weight", "head.bias", "up.weight", "up.bias", "down.weight"}
    assert (made.vocabulary, made.logits) == ({0, 7}, WORDS)


def test_without_a_table_nothing_is_split_along_a_vocabulary() -> None:
    """Nor with one that is computed: its rows are no parameter's."""
    model = Model()
    computed = model.call("aten::relu", Ref("input"), shape=(WORDS, WIDTH), path="")
    x = model.call("aten::embedding", computed, Ref("ids"), shape=(2, 3, WIDTH), path="")
    model.linear(feed_forward(model, x), "head", WORDS, path="")
    made = model.plan()
    assert (made.vocabulary, made.logits) == (set(), 0)
    assert "head.weight" not in made.split


def test_a_table_without_a_head() -> None:
    model = Model()
    feed_forward(model, model.table("words", WORDS))
    made = model.plan()
    assert (made.vocabulary, made.logits) == ({0}, 0)
    assert "words" in made.split


# -- sizes of buffers ----------------------------------------------------------------------------------------------

OTHER, HEAD, COLUMNS, PARTS, ROWS, LOSS = 0, 1, 2, 3, 4, -1
SPLIT = Plan(columns={COLUMNS}, rows={ROWS}, parts={PARTS}, vocabulary={HEAD}, logits=WORDS)


def divided(*calls: tuple[str, int, tuple[int, ...]], made: Plan = SPLIT) -> list[tuple[int, ...]]:
    """The shapes on one of two ranks of buffers that ops (by number) make in phases."""
    trace = Trace()
    for phase, op, shape in calls:
        if trace.phase != phase or not trace.phases:
            trace.begin(phase)
        trace.op = op
        kernel, number = trace.kernel("k"), len(trace.buffers)
        trace.buffers.append(Buffer(number, 4 * 64, shape, float32, "activation", "", kernel, trace.ticks))
        trace.ticks += 1
    rewrite = Rewrite(trace)
    apply(rewrite, [], made, 2)
    return [piece.shape for piece in rewrite.pieces]


def test_who_divides_in_which_phase() -> None:
    """By columns the result is a part and the gradient of the input whole; by rows the other way round."""
    shape, half = (4, 16), (4, 8)
    ops = (OTHER, COLUMNS, PARTS, ROWS)
    assert divided(*(("forward", op, shape) for op in ops)) == [shape, half, half, shape]
    assert divided(*(("backward", op, shape) for op in ops)) == [shape, shape, half, half]
    for phase in ("setup", "optimizer"):
        assert divided(*((phase, op, shape) for op in ops)) == [shape] * 4


def test_logits_are_divided_where_the_head_and_the_loss_make_them() -> None:
    logits, half = (2, 3, WORDS), (2, 3, WORDS // 2)
    other, scalar = (2, 3, WIDTH), ()
    found = divided(
        ("forward", OTHER, logits), ("forward", HEAD, logits), ("forward", LOSS, logits), ("forward", LOSS, other),
        ("forward", LOSS, scalar), ("backward", LOSS, logits), ("backward", HEAD, logits), ("backward", HEAD, other),
    )  # fmt: skip
    assert found == [logits, half, half, other, scalar, half, half, other]
    whole = Plan(columns={COLUMNS}, rows={ROWS}, parts={PARTS}, vocabulary={HEAD})
    assert divided(("forward", HEAD, logits), ("forward", LOSS, logits), made=whole) == [logits, logits]


@pytest.mark.parametrize(
    ("shape", "heads", "part", "nbytes"),
    [
        ((6, 8), (), (6, 4), 24),  # the last dimension that divides
        ((6, 9), (), (3, 9), 27),
        ((4, 6, 9), (), (4, 3, 9), 108),
        ((3, 5), (), (3, 5), 8),  # none divides: half of the bytes all the same
        ((1,), (), (1,), 1),  # less than one for each rank
        ((2,), (), (1,), 1),
        ((2, 12, 4, 4), (12,), (2, 6, 4, 4), 192),
        ((2, 10, 4, 4), (12,), (2, 10, 4, 2), 160),  # no heads
        ((2, 12, 4), (12,), (2, 12, 2), 48),
        ((12, 2, 4, 4), (12,), (12, 2, 4, 2), 192),
    ],
)
def test_a_part_of_a_buffer(shape: tuple[int, ...], heads: Sequence[int], part: tuple[int, ...], nbytes: int) -> None:
    whole = 1
    for size in shape:
        whole *= size
    piece = Piece(whole, shape, float32, "activation", "", (0, 0, 0), None, None)
    _divide(piece, 2, set(heads))
    assert (piece.shape, piece.nbytes) == (part, nbytes)
