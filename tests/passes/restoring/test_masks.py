"""What an exporter wrote down and eager does not run: masks, repeated keys, second names of parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prepared import clean
from small_graphs import Builder, targets

from staticmem.ir import dtypes
from staticmem.ir.graph import Graph, Op, Ref, Value

ATTENTION = "h.0:transformers.models.llama.modeling_llama.LlamaAttention"
L = 6


def decoder(kind: str, where: str = ATTENTION, keys: int = L, repeat: bool = False) -> Graph:
    """Attention with a mask that is built from positions, as transformers/masking_utils.py does while exporting."""
    b = Builder(q=(2, 4, L, 8), k=(2, 4, keys, 8), v=(2, 4, keys, 8)).within(where, root="m.Net")
    if repeat:
        b.inputs[1:] = [Value(n, dtypes.float32, (2, 1, keys, 8)) for n in "kv"]
    i = b.call("arange", L, name="i")
    j = b.call("arange", keys, name="j")
    rows = b.call("unsqueeze", i, 1, name="rows")
    columns = b.call("unsqueeze", j, 0, name="columns")
    if kind == "causal":
        grid = b.call("le.Tensor", columns, rows, name="grid")
    elif kind == "true":
        grid = b.call("ge.Scalar", b.call("add.Tensor", columns, rows), 0, name="grid")
    else:  # a window of the last two positions, which eager has to be told
        grid = b.call("gt.Tensor", columns, b.call("sub.Tensor", rows, 2), name="grid")
    four = b.call("unsqueeze", b.call("unsqueeze", grid, 0), 0)
    mask = b.call("expand", four, (2, 1, L, keys), name="mask")
    key, value = Ref("k"), Ref("v")
    if repeat:  # transformers' repeat_kv
        made = []
        for source in (key, value):
            wide = b.call("expand", b.call("unsqueeze", source, 2), (2, 1, 4, keys, 8))
            made.append(b.call("reshape", wide, (2, 4, keys, 8)))
        key, value = made
    out = b.call("scaled_dot_product_attention", Ref("q"), key, value, mask, name="out")
    return b.graph(out)


def attention(graph: Graph) -> Op:
    (op,) = [o for o in graph.ops if o.base == "aten::scaled_dot_product_attention"]
    return op


def said(before: Graph, after: Graph) -> list[str]:
    return [note.code for note in after.notes[len(before.notes) :]]


def test_a_causal_mask_becomes_is_causal() -> None:
    before = decoder("causal")
    after = clean(before)
    assert targets(after) == ["scaled_dot_product_attention"]
    assert attention(after).args == (Ref("q"), Ref("k"), Ref("v"), None)
    assert attention(after).kwargs == {"is_causal": True}
    assert said(before, after) == ["SM322"]


def test_a_mask_that_is_true_everywhere_is_dropped() -> None:
    after = clean(decoder("true"))
    assert targets(after) == ["scaled_dot_product_attention"]
    assert attention(after).args[3] is None
    assert "is_causal" not in attention(after).kwargs


@pytest.mark.parametrize(("kind", "keys"), [("window", L), ("causal", L + 2)])
def test_other_masks_stay_with_what_makes_them(kind: str, keys: int) -> None:
    before = decoder(kind, keys=keys)
    assert clean(before) is before


def test_masks_that_are_not_of_transformers_stay() -> None:
    """Other code passes the mask that it builds, in eager too."""
    before = decoder("causal", "attn:my_project.layers.Attention")
    assert clean(before) is before


def test_masks_go_where_a_file_has_no_class_names() -> None:
    before = decoder("causal")
    nameless = replace(before, ops=tuple(replace(op, modules=()) for op in before.ops))
    assert targets(clean(nameless)) == ["scaled_dot_product_attention"]


def test_a_mask_that_the_caller_gets_too_is_still_made() -> None:
    before = decoder("causal")
    after = clean(replace(before, outputs=("out", "mask")))
    assert targets(after)[-2:] == ["expand", "scaled_dot_product_attention"]
    assert attention(after).args[3] is None


def test_repeated_keys_become_grouped_queries_only_without_a_mask() -> None:
    after = clean(decoder("causal", repeat=True))
    assert targets(after) == ["scaled_dot_product_attention"]
    assert attention(after).args[1:3] == (Ref("k"), Ref("v"))
    assert attention(after).kwargs == {"is_causal": True, "enable_gqa": True}
    windowed = decoder("window", repeat=True)
    assert clean(windowed) is windowed


def biased(kind: str) -> Graph:
    """T5: `where(mask, position_bias, -inf)`; the mask is expanded to the batch."""
    b = Builder(bias=(1, 4, L, L), q=(3, 4, L, 8)).within("t:transformers.models.t5.modeling_t5.T5Stack", root="m.N")
    i = b.call("arange", L, name="i")
    rows, columns = b.call("unsqueeze", i, 1), b.call("unsqueeze", i, 0)
    if kind == "causal":
        grid = b.call("le.Tensor", columns, rows)
    else:
        grid = b.call("ge.Scalar", b.call("add.Tensor", rows, columns), 0)
    four = b.call("unsqueeze", b.call("unsqueeze", grid, 0), 0)
    mask = b.call("expand", four, (3, 1, L, L), name="mask")
    low = b.call("full", (), float("-inf"), name="low")
    chosen = b.call("where.self", mask, Ref("bias"), low, name="chosen")
    out = b.call("scaled_dot_product_attention", Ref("q"), Ref("q"), Ref("q"), chosen, name="out")
    return b.graph(out)


def test_a_mask_that_is_the_same_for_every_row_keeps_batch_one() -> None:
    after = clean(biased("causal"))
    (expand,) = [op for op in after.ops if op.base == "aten::expand"]
    assert expand.args[1] == (1, 1, L, L)
    (where,) = [op for op in after.ops if op.base == "aten::where"]
    assert where.args[0] == Ref(expand.outputs[0])


@pytest.mark.parametrize("own", [True, False])
def test_a_causal_mask_of_a_bias_is_of_its_attention(own: bool) -> None:
    """transformers/integrations/sdpa_attention.py, `create_position_bias_mask`; two layers, of which the export has one
    mask."""
    b = Builder(bias=(1, 4, L, L), q=(3, 4, L, 8))
    b.within("t:transformers.models.t5.modeling_t5.T5Attention" if own else "t:project.Attention", root="m.N")
    i = b.call("arange", L, name="i")
    grid = b.call("le.Tensor", b.call("unsqueeze", i, 0), b.call("unsqueeze", i, 1))
    mask = b.call("expand", b.call("unsqueeze", b.call("unsqueeze", grid, 0), 0), (3, 1, L, L), name="mask")
    outputs = []
    for _ in range(2):
        chosen = b.call("where.ScalarOther", mask, Ref("bias"), -1e38)
        rows = b.call("contiguous", chosen)
        outputs.append(b.call("scaled_dot_product_attention", Ref("q"), Ref("q"), Ref("q"), rows))
    before = b.graph(b.call("add.Tensor", *outputs))
    after = clean(before)
    layer = [
        "arange", "unsqueeze", "arange", "unsqueeze", "ge.Tensor", "view", "where.ScalarOther", "contiguous",
        "scaled_dot_product_attention",
    ]  # fmt: skip
    assert targets(after) == ([*layer, *layer, "add.Tensor"] if own else targets(before))
    assert said(before, after) == (["SM322"] if own else [])
    if own:
        masks = [op.args[0] for op in after.ops if op.base == "aten::where"]
        assert masks == [Ref(op.outputs[0]) for op in after.ops if op.base == "aten::view"]
        assert {op.args[1] for op in after.ops if op.base == "aten::view"} == {(1, 1, L, L)}


def test_a_choice_by_a_true_mask_is_its_operand() -> None:
    after = clean(biased("true"))
    assert attention(after).args[3] == Ref("bias")
    assert "where.self" not in targets(after)


@pytest.mark.parametrize(("bias", "kept"), [((1, 4, L, L), False), ((1, 1, L, L), True), ((L,), True), ((), True)])
def test_a_choice_that_broadcasts_its_operand_stays(bias: tuple[int, ...], kept: bool) -> None:
    """But for the batch, which only the mask has: eager passes none, so the bias keeps batch 1."""
    before = biased("true")
    shapes = {"bias": bias, "chosen": (3, 4, L, L)}
    before = replace(before, values={n: Value(n, dtypes.float32, s) for n, s in shapes.items()})
    assert ("where.self" in targets(clean(before))) == kept


# -- parameters ----------------------------------------------------------------------------------------------------


def language_model(*, tied: bool, unread: tuple[str, tuple[int, ...]]) -> Graph:
    """An embedding, a head that reads the embedding's table or its own, and a parameter that nothing reads."""
    b = Builder()
    ids = b.input("ids", 2, 5, dtype=dtypes.int64)
    table = b.parameter("model.embed.weight", 50, 8)
    weight = table if tied else b.parameter("head.weight", 50, 8)
    b.parameter(*unread[:1], *unread[1])
    h = b.within("model.embed:Embedding").call("embedding", table, ids)
    out = b.within("head:Linear").call("linear", h, weight)
    return b.graph(out)


def aliases(graph: Graph) -> dict[str, str]:
    return {p.fqn: p.alias_of for p in graph.parameters if p.alias_of is not None}


def test_a_head_that_reads_the_embedding_is_tied() -> None:
    after = clean(language_model(tied=True, unread=("head.weight", (50, 8))))
    assert aliases(after) == {"head.weight": "model.embed.weight"}
    assert [p.fqn for p in after.parameters] == ["model.embed.weight", "head.weight"]
    assert after.notes[-1].code == "SM321"


def test_an_unread_table_of_the_embedding_s_shape_is_its_other_name() -> None:
    """T5: `shared.weight` is the tables of encoder and decoder."""
    after = clean(language_model(tied=False, unread=("shared.weight", (50, 8))))
    assert aliases(after)["shared.weight"] == "model.embed.weight"


@pytest.mark.parametrize("shape", [(50, 9), (8,), (8, 50)])
def test_an_unread_parameter_of_another_shape_is_its_own(shape: tuple[int, ...]) -> None:
    before = language_model(tied=False, unread=("spare.weight", shape))
    assert clean(before) is before


def test_an_unread_parameter_like_one_that_is_no_table_is_its_own() -> None:
    b = Builder(x=(4, 8))
    weight = b.parameter("a.weight", 8, 8)
    b.parameter("b.weight", 8, 8)
    before = b.graph(b.within("a:Linear").call("linear", Ref("x"), weight))
    assert clean(before) is before


def test_a_parent_that_registers_its_child_s_bias() -> None:
    """BERT: `predictions.bias` is `predictions.decoder.bias`."""
    b = Builder(x=(4, 8))
    weight, bias = b.parameter("p.decoder.weight", 50, 8), b.parameter("p.decoder.bias", 50)
    b.parameter("p.bias", 50)
    after = clean(b.graph(b.within("p:Head", "p.decoder:Linear").call("linear", Ref("x"), weight, bias)))
    assert aliases(after) == {"p.bias": "p.decoder.bias"}


# -- batch norm ----------------------------------------------------------------------------------------------------


def norms(*training: bool) -> Graph:
    b = Builder(x=(2, 3, 4, 4))
    x = Ref("x")
    for flag in training:
        x = b.call("batch_norm", x, None, None, None, None, flag, 0.1, 1e-5, True)
    return b.graph(x)


@pytest.mark.parametrize(("flags", "expected"), [
    ((False, False), (True, True)), ((True, False), (True, False)), ((True, True), (True, True)),
])  # fmt: skip
def test_norms_of_an_eval_export_train(flags: tuple[bool, ...], expected: tuple[bool, ...]) -> None:
    before = norms(*flags)
    assert tuple(op.args[5] for op in clean(before).ops) == expected
    assert clean(before, training=False) is before


def test_a_table_beside_one_that_is_read_is_a_layer_that_does_not_run() -> None:
    """Two layers of one size in one module: a benchmark of two implementations, a tower without a feature."""
    for name in ("model.twin.weight", "other.embed.weight"):
        assert name not in aliases(clean(language_model(tied=False, unread=(name, (50, 8)))))
