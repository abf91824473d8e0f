"""Variables of functions of torch.nn.functional, which no stack trace shows."""

from __future__ import annotations

from dataclasses import replace

from small_graphs import Builder

from staticmem.ir.graph import Frame, Graph, Op, Ref, SourceLine
from staticmem.passes.variables.unseen_code import held_in_functions


def gumbel(text: str) -> Graph:
    """The calls of `gumbel_softmax(hard=True)`: its `gumbels`, `y_soft`, `index` and `y_hard` stay until it returns."""
    b = Builder(x=(4, 8))
    b.stack = (SourceLine("m.py", 7, "forward", text),)
    noise = b.call("exponential_", b.call("empty_like", Ref("x")))
    gumbels = b.call("div.Tensor", b.call("add.Tensor", Ref("x"), noise, name="sum"), 0.7, name="gumbels")
    soft = b.call("softmax.int", gumbels, -1, name="soft")
    b.call("max.dim", soft, -1, True, outputs=("values", "index"))
    hard = b.call("scatter_.value", b.call("zeros_like", Ref("x")), -1, Ref("index"), 1.0, name="hard")
    result = b.call("add.Tensor", b.call("sub.Tensor", hard, b.call("detach", soft)), soft, name="result")
    b.stack = (SourceLine("m.py", 8, "forward", "return z.exp()"),)
    return b.graph(b.call("exp", result))


def test_all_names_of_gumbel_softmax_last_until_it_returns() -> None:
    graph = gumbel("z = F.gumbel_softmax(x, tau=0.7, hard=True)")
    end = next(index for index, op in enumerate(graph.ops) if op.outputs == ("result",))
    assert held_in_functions(graph) == dict.fromkeys(("gumbels", "soft", "index", "hard"), end)


def test_other_lines_say_nothing() -> None:
    assert held_in_functions(gumbel("z = self.choose(x)")) == {}


def test_a_local_response_norm_lets_go_of_the_pool_after_the_power() -> None:
    b = Builder(x=(2, 6, 8, 8))
    b.stack = (SourceLine("m.py", 7, "forward", "return F.local_response_norm(input, self.size)"),)
    pooled = b.call("avg_pool3d", b.call("pad", b.call("mul.Tensor", Ref("x"), Ref("x"))), name="pooled")
    b.call("pow.Tensor_Scalar", b.call("add.Scalar", b.call("mul.Tensor", pooled, 1e-4), 1.0), 0.75, name="power")
    graph = b.graph(b.call("div.Tensor", Ref("x"), Ref("power")))
    power = next(index for index, op in enumerate(graph.ops) if op.outputs == ("power",))
    assert held_in_functions(graph) == {"pooled": power}


def test_a_converted_target_lasts_until_the_loss_is_divided() -> None:
    """`target` of `multilabel_soft_margin_loss` is the only name of what the line converts."""
    b = Builder(x=(4, 8), s=(4, 8))
    text = "loss = F.multilabel_soft_margin_loss(x, (s > 0).float())"
    b.stack = (SourceLine("m.py", 7, "forward", text),)
    target = b.call("to.dtype", b.call("gt.Scalar", Ref("s"), 0), name="target")
    ones = b.call("mul.Tensor", target, b.call("log_sigmoid", Ref("x")))
    zeros = b.call("rsub.Scalar", target, 1)
    zeros = b.call("mul.Tensor", zeros, b.call("log_sigmoid", b.call("neg", Ref("x"))))
    loss = b.call("sum.dim_IntList", b.call("neg", b.call("add.Tensor", ones, zeros)), (1,))
    b.call("div.Tensor", loss, 8, name="quotient")
    graph = b.graph(b.call("mean", Ref("quotient")))
    divided = next(index for index, op in enumerate(graph.ops) if op.outputs == ("quotient",))
    assert held_in_functions(graph) == {"target": divided}


def test_experts_hold_the_weights_that_they_gathered() -> None:
    """transformers, integrations/moe.py: `selected_weights` is assigned twice, `selected_hidden_states` once."""
    caller = SourceLine("modeling_qwen3_moe.py", 1, "forward", "x = self.experts(x, indices, weights)")
    inside = SourceLine("moe.py", 2, "forward", "return experts_forward(self, *args, **kwargs)")
    activation = SourceLine("activations.py", 3, "forward", "return nn.functional.silu(input)")
    experts = (Frame("", "my.Model"), Frame("experts", "transformers.Qwen3MoeExperts"))
    silu = (*experts, Frame("experts.act_fn", "transformers.activations.SiLUActivation"))

    def op(target: str, *args: str) -> Op:
        within = target == "silu"
        refs = tuple(map(Ref, args[:-1]))
        stack = (caller, inside, activation) if within else (caller, inside)
        return Op(args[-1], f"aten::{target}", refs, {}, args[-1:], silu if within else experts, stack=stack)

    before = Op("first", "aten::relu", (Ref("x"),), {}, ("first",), experts[:1], stack=(caller,))
    batched = (
        before, op("repeat_interleave", "first", "rows"), op("index", "up", "ids", "of_up"),
        op("bmm", "of_up", "rows", "u"), op("silu", "u", "a"), op("index", "down", "ids", "of_down"),
        op("bmm", "of_down", "a", "d"), op("sum", "d", "out"),
    )  # fmt: skip
    graph = Graph("m", "pt2", "test", (), (), (), batched, ("out",))
    assert held_in_functions(graph) == {"rows": 7, "of_up": 5, "of_down": 7}
    product = "transformers::grouped_mm_fallback"
    grouped = tuple(replace(o, target=product) if o.base == "aten::bmm" else o for o in batched)
    assert held_in_functions(replace(graph, ops=grouped)) == {}
