"""How long code that no file shows can hold a value: the upper end of the band."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from small_graphs import Builder

from staticmem.ir.graph import Graph, Ref
from staticmem.passes.variables.policy import Held
from staticmem.passes.variables.unseen_bounds import ends_of_frames, keys_and_values, longest_holds

X = Ref("x")
NET = ":user.Net"


def chain(*calls: Sequence[str]) -> Graph:
    """A graph of calls that each read the result before: the frames, and the name of the result."""
    b = Builder(x=(4, 4))
    value = X
    for *frames, name in calls:
        value = b.within(*frames).call("relu", value, name=name)
    return b.graph(b.within().call("sin", value))


def until(graph: Graph) -> dict[str, int]:
    return dict(longest_holds(graph, Held()).until)


def test_a_frame_may_hold_all_its_values_until_it_returns() -> None:
    graph = chain((NET, "c:torch.nn.Conv", "p"), (NET, "q"), (NET, "d:torch.nn.Conv", "r"), ("s",))
    held = until(graph)
    assert held["p"] == held["q"] == 2


def test_the_parts_of_a_join_may_be_in_a_list_of_the_caller() -> None:
    """`self.layers(x, outputs)`, which joins `outputs`: they live as long as what the caller calls it with."""
    b = Builder(x=(4, 4))
    first = b.within(NET).call("relu", X, name="first")
    parts = [first]
    for number in range(2):
        parts.append(b.within(NET, "layers:user.Layers").call("relu", parts[-1], name=f"part{number}"))
    joined = b.call("cat", tuple(parts), name="joined")
    graph = b.graph(b.within(NET).call("sin", joined, name="end"))
    assert until(graph)["part0"] == until(graph)["part1"] == 4
    assert ends_of_frames(graph, ["part0"]) == {"part0": 4}


def test_modules_of_torch_and_sequentials_hold_nothing_of_their_own() -> None:
    torch = chain((NET, "m:torch.nn.GELU", "p"), (NET, "m:torch.nn.GELU", "q"), (NET, "r"))
    assert "p" not in until(torch)
    numbered = chain((NET, "m:", "m.0:", "p"), (NET, "m:", "m.1:", "q"), (NET, "r"))
    assert "p" not in until(numbered)
    named = chain((NET, "m:", "m.a:", "p"), (NET, "m:", "m.1:", "q"), (NET, "r"))
    assert until(named)["p"] == 1


def test_a_loop_over_a_list_assigns_its_names_again() -> None:
    """`for block in self.blocks: y = block(x); x = f(y)`: an earlier turn ends with the next one's assignment.
    What a module of the list returns may be held for one turn more, as `checkpoint_sequential` does."""
    turns = [(NET, f"bs.{i}:user.Block", f"y{i}") for i in range(3)]
    body = [(NET, f"x{i}") for i in range(3)]
    held = until(chain(*(call for pair in zip(turns, body, strict=True) for call in pair), (NET, "end:", "e")))
    assert {name: held[name] for name in held if name[0] in "xy"} == {
        "y0": 4,
        "x0": 3,
        "y1": 6,
        "x1": 5,
        "y2": 6,
        "x2": 6,
    }


def test_a_module_that_is_called_in_several_lines_is_no_loop() -> None:
    calls = [("a", "p"), ("act", "q"), ("b", "r"), ("act", "s"), ("c", "t")]
    graph = chain(*((NET, f"{child}:torch.nn.Any", name) for child, name in calls), (NET, "u"))
    assert until(graph)["q"] == until(graph)["s"] == 5


def test_a_cell_that_runs_again_assigns_its_names_again() -> None:
    b = Builder(x=(4, 4))
    value = X
    for turn in range(4):
        for child, name in (("cell", "h"), ("out", "o")):
            value = b.within(NET, f"{child}:user.Cell:{turn}").call("relu", value, name=f"{name}{turn}")
    graph = b.graph(b.within(NET).call("sin", value, name="end"))
    held = until(graph)
    assert held["h1"] == 4
    assert held["o1"] == 5
    assert held["h3"] == 8


def test_the_weights_of_attention_may_be_returned() -> None:
    b = Builder(x=(4, 4)).within(NET, "a:user.Attention")
    weights = b.call("softmax.int", X, -1, name="w")
    y = b.call("matmul", weights, X, name="y")
    z = b.within(NET).call("exp", y, name="z")
    graph = b.graph(b.call("sin", z, name="end"))
    assert until(graph)["w"] == 3


def attention(*, masked: bool, cls: str = "my.Attention") -> Graph:
    b = Builder(q=(2, 8, 4), k=(2, 8, 4), v=(2, 8, 4), mask=(8, 8)).within(f"attn:{cls}")
    keys, values = b.call("sin", Ref("k"), name="keys"), b.call("sin", Ref("v"), name="values")
    scores = b.call("matmul", Ref("q"), b.call("transpose.int", keys, 1, 2, name="turned"))
    if masked:
        scores = b.call("masked_fill.Scalar", scores, Ref("mask"), 0.0)
    weights = b.call("dropout", b.call("softmax.int", scores, -1), 0.1, False)
    return b.graph(b.call("matmul", weights, values, name="out"))


def test_keys_and_values_of_masked_attention_may_be_cached() -> None:
    assert keys_and_values(attention(masked=True)) == {"turned", "values"}
    assert not keys_and_values(attention(masked=False))
    assert not keys_and_values(attention(masked=True, cls="torch.nn.modules.activation.MultiheadAttention"))
    assert not keys_and_values(attention(masked=True, cls="transformers.models.gpt2.Attention"))


def test_fused_attention_is_masked_by_a_mask_or_where_it_is_causal() -> None:
    def cached(*more: object, **options: Any) -> bool:
        b = Builder(q=(2, 8, 4), m=(8, 8)).within("attn:my.Attention")
        keys, values = b.call("sin", Ref("q"), name="keys"), b.call("cos", Ref("q"), name="values")
        out = b.call("scaled_dot_product_attention", Ref("q"), keys, values, *more, **options)
        return keys_and_values(b.graph(out)) == {"keys", "values"}

    assert cached(Ref("m"))
    assert cached(None, 0.0, True)
    assert cached(is_causal=True)
    assert not cached(None, 0.1, False)
