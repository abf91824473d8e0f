"""What mixes tokens beside the attention: a decoder that has it keeps more from step to step than keys and values.

State-space layers and short convolutions run a convolution over tokens (transformers 5.24: mamba, lfm2, qwen3_next,
kimi_linear), linear attention multiplies queries, keys and values without a softmax between (minimax). Layers may also
read the keys and values of others, which are cached once (gemma3n, gemma4).
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.ir.graph import Graph, Op
from staticmem.ops.registry import FREE_PRODUCTS, kinds_of
from staticmem.passes.requested.generation.attention import Attention
from staticmem.passes.requested.generation.reading import not_recognised, ref_name


def refuse_other_mixing(graph: Graph, calls: Sequence[Attention]) -> None:
    """Raises where tokens meet outside of the attention calls.

    Raises:
        ModelFileError: the cache of the model has more, or less, than keys and values of these calls.
    """
    keys = [call.key for call in calls]
    if len(set(keys)) < len(keys):
        raise not_recognised("several attentions read the same keys", "Layers that share their cache are not covered.")
    products = {name for call in calls for name in (call.op, call.last)}
    hidden: set[str] = set()
    ids = graph.inputs[0].name
    for op in graph.ops:
        kinds = kinds_of(op.base)
        if "lookup" in kinds and ref_name(op.args[0]) not in hidden:
            first = op.base == "aten::embedding" and ids in op.refs()
            hidden.update(op.outputs if first else ())
            continue
        read = [name for name in op.refs() if name in hidden]
        if not read:
            continue
        hidden.update(op.outputs)
        mixes = not kinds.isdisjoint(("convolution", "recurrent"))
        if mixes or (op.base in FREE_PRODUCTS and len(read) > 1 and op.name not in products):
            raise _mixed(op)


def _mixed(op: Op) -> Exception:
    return not_recognised(
        f"{op.name} ({op.base}) mixes tokens beside the attention",
        "State-space layers, convolutions over tokens and linear attention keep states, which are not covered.",
    )
