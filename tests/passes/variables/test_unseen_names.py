"""What code without traces is likely to give names to, one graph for each habit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_graphs import Builder

from staticmem.ir.graph import Graph, Ref, SourceLine
from staticmem.passes.variables.policy import Held
from staticmem.passes.variables.releases import held_values
from staticmem.passes.variables.unseen_bounds import with_likely_names

NET = ":my.Net"
X = Ref("x")


def in_child(b: Builder, path: str, *args: object, name: str) -> Ref:
    """A child of the network that runs one op."""
    return b.within(NET, f"{path}:my.Child").call("exp", *args, name=name)


def skip(cls: str = NET) -> Graph:
    """`s = stem(x); y = deep(body(s)); return head(add(y, s))`."""
    b = Builder(x=(4, 4))
    s = b.within(cls, "stem:my.Child").call("exp", X, name="s")
    y = b.within(cls, "body:my.Child").call("exp", s, name="y")
    z = b.within(cls, "deep:my.Child").call("exp", y, name="z")
    sum_ = b.within(cls).call("add.Tensor", z, s, name="sum")
    return b.graph(b.within(cls, "head:my.Child").call("exp", sum_, name="out"))


def step() -> Graph:
    """`x = x + body(x)`."""
    b = Builder(x=(4, 4))
    s = in_child(b, "stem", X, name="s")
    y = in_child(b, "body", s, name="y")
    sum_ = b.within(NET).call("add.Tensor", s, y, name="sum")
    return b.graph(in_child(b, "head", sum_, name="out"))


def branches() -> Graph:
    """`a = left(s); b = right(s); s = cat(a, b); return head(s)`."""
    b = Builder(x=(4, 4))
    s = in_child(b, "stem", X, name="s")
    left, right = in_child(b, "left", s, name="a"), in_child(b, "right", s, name="b")
    joined = b.within(NET).call("cat", (left, right), name="joined")
    return b.graph(in_child(b, "head", joined, name="out"))


def padded() -> Graph:
    """`x1 = pad(up(x1)); x = cat([x2, x1]); return head(x)`."""
    b = Builder(x=(4, 4))
    older = in_child(b, "stem", X, name="older")
    up = in_child(b, "up", older, name="up")
    pad = b.within(NET).call("pad", up, (0, 0), name="padded")
    joined = b.call("cat", (older, pad), name="joined")
    return b.graph(in_child(b, "head", joined, name="out"))


def added_to_an_older_one() -> Graph:
    """`y = s * gate(s); x = x + out(y)`: the sum takes the name of `x`, `y` stays."""
    b = Builder(x=(4, 4))
    s = in_child(b, "stem", X, name="s")
    gate = in_child(b, "gate", s, name="gate")
    y = b.within(NET).call("mul.Tensor", s, gate, name="y")
    z = in_child(b, "out", y, name="z")
    sum_ = b.within(NET).call("add.Tensor", s, z, name="sum")
    return b.graph(in_child(b, "head", sum_, name="out"))


def joined_behind_an_older_one() -> Graph:
    """`y = down(s); return cat([s, up(y)])`: both have names until it is done."""
    b = Builder(x=(4, 4))
    s = in_child(b, "stem", X, name="s")
    z = in_child(b, "up", in_child(b, "down", s, name="y"), name="z")
    return b.graph(b.within(NET).call("cat", (s, z), name="joined"))


def view_within_a_step() -> Graph:
    """`y = mul(s, gate(s)); x = x + out(y.reshape(...))`: `y` stays, as a view of it does."""
    b = Builder(x=(4, 4))
    s = in_child(b, "stem", X, name="s")
    gate = in_child(b, "gate", s, name="gate")
    y = b.within(NET).call("mul.Tensor", s, gate, name="y")
    z = in_child(b, "out", b.call("view", y, (2, 8), name="view"), name="z")
    sum_ = b.within(NET).call("add.Tensor", s, z, name="sum")
    return b.graph(in_child(b, "head", sum_, name="out"))


def activation_within_a_step() -> Graph:
    """`x = x + fc2(exp(fc1(x)))`: neither the activation nor what it read has a name."""
    b = Builder(x=(4, 4))
    s = in_child(b, "stem", X, name="s")
    y = b.within(NET).call("exp", in_child(b, "fc1", s, name="hidden"), name="y")
    sum_ = b.within(NET).call("add.Tensor", s, in_child(b, "fc2", y, name="z"), name="sum")
    return b.graph(in_child(b, "head", sum_, name="out"))


def unet(joined: str = "cat", enlarged: str = "upsample_nearest2d") -> Graph:
    """`s = stem(x); y = body(s); return head(joined(up(y), s))`."""
    b = Builder(x=(2, 4, 8, 8))
    s = in_child(b, "stem", X, name="s")
    y = in_child(b, "body", s, name="y")
    up = b.within(NET, "up:my.Up").call("relu", b.call(enlarged, y, (8, 8), None), name="up")
    b.within(NET)
    value = b.call("cat", (up, s), 1, name="joined") if joined == "cat" else b.call(joined, up, s, name="joined")
    return b.graph(in_child(b, "head", value, name="out"))


def activation() -> Graph:
    """`h = relu(norm(conv(h)))`, of what the statement before made."""
    b = Builder(x=(4, 4))
    s = b.within(NET).call("neg", X, name="s")
    y = in_child(b, "norm", in_child(b, "conv", s, name="conv"), name="norm")
    relu = b.within(NET).call("relu", y, name="relu")
    return b.graph(in_child(b, "head", relu, name="out"))


def straight_through() -> Graph:
    """`q = s.round(); return s + (q - s).detach()`."""
    b = Builder(x=(4, 4)).within(NET)
    s = b.call("neg", X, name="s")
    q = b.call("round", s, name="q")
    difference = b.call("detach", b.call("sub.Tensor", q, s, name="difference"), name="detached")
    return b.graph(b.call("exp", b.call("add.Tensor", s, difference, name="sum"), name="out"))


def index(graph: Graph, name: str) -> int:
    return next(i for i, op in enumerate(graph.ops) if name in op.outputs)


@pytest.mark.parametrize(
    ("graph", "value", "until"),
    [
        (skip(), "s", "out"),
        (unet(), "s", "out"),
        (unet("add.Tensor"), "s", "out"),
        (branches(), "s", "joined"),
        (padded(), "padded", "out"),
        (added_to_an_older_one(), "y", "out"),
        (view_within_a_step(), "view", "out"),
        (joined_behind_an_older_one(), "y", "joined"),
        (activation(), "s", "relu"),
        (straight_through(), "q", "sum"),
    ],
    ids=[
        "skip",
        "joined skip",
        "added skip",
        "branches",
        "padded",
        "added to an older one",
        "a view of it",
        "joined behind an older one",
        "activation",
        "straight through",
    ],
)
def test_a_habit_holds_a_value(graph: Graph, value: str, until: str) -> None:
    assert held_values(graph).until[value] == index(graph, until)


def test_a_step_takes_the_name_of_what_it_adds_to() -> None:
    assert "s" not in held_values(step()).until


def test_an_activation_of_what_a_call_returned_has_no_name() -> None:
    assert held_values(activation_within_a_step()).until.keys().isdisjoint(("hidden", "y"))


def test_what_a_line_pops_off_a_list_has_no_name() -> None:
    """`up(x2) + skips.pop()`, on a line that does not tell the rest."""
    graph = unet("add.Tensor")
    lines = (SourceLine("m.py", 3, "forward", "x = up(x); x = x + skips.pop()"),)
    popped = replace(graph, ops=tuple(replace(op, stack=lines) for op in graph.ops))
    assert "s" not in with_likely_names(popped, Held()).until


def test_the_first_turn_of_a_loop_comes_after_other_children() -> None:
    """`for b in blocks: q, k = split(b["qkv"](b["norm"](x)))`, of which paths do not tell that it is a list."""
    b = Builder(x=(4, 4))
    x = in_child(b, "stem", X, name="s")
    for turn in range(3):
        for child in ("norm", "qkv"):
            x = b.within(NET, f"{child}:my.Child:{turn}").call("exp", x, name=f"{child}{turn}")
        b.within(NET).call("chunk", x, 2, outputs=(f"q{turn}", f"k{turn}"))
        x = in_child(b, "out", b.call("matmul", Ref(f"q{turn}"), Ref(f"k{turn}")), name=f"y{turn}")
    graph = b.graph(in_child(b, "head", x, name="out"))
    assert held_values(graph).until["q0"] == index(graph, "q1")


def test_published_code_is_known() -> None:
    assert "s" not in held_values(skip(":torchvision.models.Net")).until


def loop() -> Graph:
    """`for f, g in zip(fs, gs): a = f(x); b = g(x); x = a + b`."""
    b = Builder(x=(4, 4))
    x = in_child(b, "stem", X, name="s")
    for turn in range(3):
        left = in_child(b, f"fs.{turn}", x, name=f"a{turn}")
        right = in_child(b, f"gs.{turn}", x, name=f"b{turn}")
        x = b.within(NET).call("add.Tensor", left, right, name=f"sum{turn}")
    return b.graph(in_child(b, "head", x, name="out"))


def test_a_turn_of_a_loop_assigns_the_names_of_the_turn_before() -> None:
    graph = loop()
    held = held_values(graph)
    assert held.until["a0"] == index(graph, "a1")
    assert held.until["b0"] == index(graph, "b1")
    assert "a2" in held.frames  # the last turn's stay until the function returns


def test_what_is_read_after_its_turn_is_in_a_list() -> None:
    b = Builder(x=(4, 4))
    x, skips = in_child(b, "stem", X, name="s"), []
    for turn in range(3):
        x = in_child(b, f"downs.{turn}", x, name=f"down{turn}")
        skips.append(x)
    for turn in range(2):
        x = b.within(NET).call("add.Tensor", x, skips[1 - turn], name=f"sum{turn}")
        x = in_child(b, f"ups.{turn}", x, name=f"up{turn}")
    graph = b.graph(in_child(b, "head", x, name="out"))
    held = with_likely_names(graph, Held())
    assert held.until["down0"] == held.until["down1"] == index(graph, "out")


def test_detached_views_of_what_comes_later_lead_nowhere() -> None:
    """A damaged file may have them."""
    b = Builder(x=(4, 4))
    later = b.within(NET).call("detach", Ref("again"), name="later")
    again = b.call("detach", later, name="again")
    graph = b.graph(b.call("add.Tensor", X, again, name="out"))
    with_likely_names(graph, Held({}, {}))
