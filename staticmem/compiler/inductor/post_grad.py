"""The passes between AOTAutograd's graph and its lowering that decide memory.

Source: `torch/_inductor/fx_passes/post_grad.py` of PyTorch 2.15: `unfuse_bias_add_to_pointwise`, `addmm`,
`prepare_softmax_replacement`, and `reorder_for_locality` for inference. Left out is what makes another spelling of the
same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from staticmem.compiler.graphs import NodeGraph
from staticmem.eager.strides import Form
from staticmem.ir import dtypes
from staticmem.ops.tags import LOWERED_VIEWS, inductor_pointwise
from staticmem.tracing.nodes import GETITEM, PLACEHOLDER, Argument, Node, users_of

POINTWISE = inductor_pointwise()


def is_pointwise_use(
    user: Node, users: Mapping[Node, Sequence[Node]], returned: Collection[Node], also: Collection[str] = ()
) -> bool:
    """All that reads `user`'s result, through views, computes element by element (`is_pointwise_use`)."""
    stack = [user]
    while stack:
        node = stack.pop()
        if node.target == GETITEM or node.base in LOWERED_VIEWS:
            if node in returned:
                return False
            stack.extend(users[node])
        elif node.base not in POINTWISE and node.base not in also:
            return False
    return True


def rewrite(graph: NodeGraph, *, inference: bool = False) -> NodeGraph:
    """The graph as Inductor lowers it. Placeholders stay the same nodes."""
    if inference:
        graph = near_their_readers(graph)
    users = users_of(graph.nodes)
    returned = {node for node in graph.outputs if node is not None}
    absorbed: set[Node] = set()
    additions: dict[Node, tuple[Node, Argument]] = {}
    for node in reversed(graph.nodes):
        if node.target == "aten::add.Tensor" and len(node.args) == 2 and not node.kwargs:
            addition = _product_and_bias(node, users, returned)
            if addition is not None and addition[0] not in absorbed:
                additions[node] = addition
                absorbed.add(addition[0])
    softmax = {node: total for node in graph.nodes if (total := _online_softmax(node, users)) is not None}
    totals = set(softmax.values())
    if not additions and not softmax and not any(node.target == "aten::addmm" for node in graph.nodes):
        return graph
    new: dict[Node, Node] = {}
    nodes: list[Node] = []

    def put(target: str, args: tuple[Argument, ...], form: Form | tuple[Form | None, ...], like: Node) -> Node:
        node = Node(target, args, form, op=like.op, must_recompute=like.must_recompute, recomputed=like.recomputed)
        nodes.append(node)
        return node

    def now(arg: Argument) -> Argument:
        if type(arg) is Node:
            return new.get(arg, arg)
        return tuple(now(part) for part in arg) if type(arg) is tuple else arg

    for node in graph.nodes:
        if node in absorbed:
            continue
        if node in additions:
            product, bias = additions[node]
            new[node] = put("aten::addmm", (now(bias), *now(product.args)), node.tensor, node)
        elif node in softmax:
            total = softmax[node]
            both = put(
                "prims::prepare_softmax_online", (now(node.args[0]), _dim(node)), (node.tensor, total.tensor), node
            )
            new[node] = put(GETITEM, (both, 0), node.tensor, node)
            new[total] = put(GETITEM, (both, 1), total.tensor, total)
        elif node in totals:
            continue
        elif node.target == "aten::addmm" and not node.kwargs and _unfused(node, node.args[0], users, returned):
            product = put("aten::mm", now(node.args[1:3]), node.tensor, node)
            new[node] = put("aten::add.Tensor", (now(node.args[0]), product), node.tensor, node)
        elif any(read in new for read in node.inputs):
            kwargs = {key: now(value) for key, value in node.kwargs.items()}
            new[node] = Node(
                node.target, now(node.args), node.form, kwargs, node.op, node.name, node.must_recompute, node.recomputed
            )
            nodes.append(new[node])
        else:
            nodes.append(node)
    return NodeGraph(tuple(nodes), tuple(None if node is None else new.get(node, node) for node in graph.outputs))


def near_their_readers(graph: NodeGraph) -> NodeGraph:
    """Each call right before its first reader, unless there is a `copy_` behind it (`reorder_for_locality`)."""
    count = len(graph.nodes)
    place = {node: at for at, node in enumerate(graph.nodes)}
    waiting = [0] * count  # readers that are not passed yet
    for users in users_of(graph.nodes).items():
        waiting[place[users[0]]] = len(set(users[1]))
    for node in {node for node in graph.outputs if node is not None}:
        waiting[place[node]] += 1
    # a list with links, as `torch.fx.Graph` is; its last entry is the node "output"
    before, after = [at - 1 for at in range(count + 1)], [at + 1 for at in range(count + 1)]
    copies = [at for at, node in enumerate(graph.nodes) if node.target == "aten::copy_"]
    moving = not copies

    def visit(reader: int, reads: Iterable[Node]) -> None:
        for node in reads:
            at = place[node]
            waiting[at] -= 1
            if not moving or waiting[at] or node.target in (PLACEHOLDER, GETITEM) or before[reader] == at:
                continue
            before[after[at]] = before[at]
            if before[at] >= 0:
                after[before[at]] = after[at]
            before[at], after[at] = before[reader], reader
            if before[reader] >= 0:
                after[before[reader]] = at
            before[reader] = at

    visit(count, dict.fromkeys(node for node in graph.outputs if node is not None))
    order = []
    at = before[count]
    while at >= 0:
        node = graph.nodes[at]
        visit(at, node.inputs)
        order.append(node)
        moving = moving or (bool(copies) and at == copies[0])
        at = before[at]
    order.reverse()
    return NodeGraph(tuple(order), graph.outputs)


def _unfused(
    node: Node, bias: Node, users: Mapping[Node, Sequence[Node]], returned: Collection[Node], *, half: bool = False
) -> bool:
    """`should_prefer_unfused_addmm`; products in half types stay fused (config.keep_addmm_fused_for_half_dtypes)."""
    if node.tensor.dtype in dtypes.HALVES and not half:
        return False
    if node in returned or not _like_a_bias(bias, node):
        return False
    return all(is_pointwise_use(user, users, returned) for user in users[node])


def _like_a_bias(bias: Node, node: Node) -> bool:
    """`_is_bias_like_addmm_input`."""
    if bias.target == PLACEHOLDER:
        return True
    one, other = bias.tensor, node.tensor
    if len(one.shape) != len(other.shape):
        return True
    if one.shape != other.shape:
        return any(a == 1 and b != 1 for a, b in zip(one.shape, other.shape, strict=True))
    return 0 in one.strides


def _product_and_bias(
    node: Node, users: Mapping[Node, Sequence[Node]], returned: Collection[Node]
) -> tuple[Node, Node] | None:
    """The product and the other operand of a sum that becomes `addmm` (`is_valid_addmm_fusion`). Of two products the
    second is it: of two decorators of `addmm` (post_grad.py) the lower registers its pattern first."""
    for product, bias in (node.args[::-1], node.args):
        if type(product) is not Node or type(bias) is not Node or product.target != "aten::mm":
            continue
        if len(users[product]) != 1 or product in returned or bias is product:
            continue
        if bias.tensor.dtype is not product.tensor.dtype or not _expands(bias.shape, product.shape):
            continue
        if not _unfused(node, bias, users, returned, half=True):
            return product, bias
    return None


def _expands(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return len(shape) <= len(target) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(target), strict=False)
    )


def _dim(node: Node) -> int:
    dim: int = node.args[1][0]
    return dim


def _online_softmax(node: Node, users: Mapping[Node, Sequence[Node]]) -> Node | None:
    """The sum that belongs to a maximum in a softmax: both are made in one pass (`prepare_softmax_pattern`)."""
    if node.target != "aten::amax" or len(node.args) != 3 or not node.args[2] or len(node.args[1]) != 1:
        return None
    for sub in users[node]:
        if sub.target != "aten::sub.Tensor" or sub.args[0] is not node.args[0] or sub.args[1] is not node:
            continue
        for exp in users[sub]:
            if exp.target != "aten::exp":
                continue
            for total in users[exp]:
                if total.target == "aten::sum.dim_IntList" and total.args[1:] == (node.args[1], True):
                    return total
    return None
