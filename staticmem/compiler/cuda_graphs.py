"""What keeps Inductor from recording a graph as a CUDA graph, where the graph shows it.

Tensors on the CPU and several devices do so too; an export does not show on which device its code runs.

Source: torch/_inductor/cudagraph_utils.py (`check_for_mutation`), torch/_inductor/utils.py (`FORBIDDEN_CUDAGRAPH_OPS`,
`_fx_node_is_input_dependent_cudagraph_unsafe`) and torch/_inductor/scheduler.py (`should_partition`: the graph is
cut there; without config.graph_partition it would not be recorded at all) of PyTorch 2.15.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from staticmem.ir import dtypes
from staticmem.tracing.nodes import PLACEHOLDER, Node

UNSAFE = (
    "aten::_fused_moving_avg_obs_fq_helper", "aten::_fused_moving_avg_obs_fq_helper_functional",
    "aten::_local_scalar_dense", "aten::_linalg_eigh",
)  # fmt: skip
WRITES_AT_INDICES = ("aten::index_put", "aten::index_put_", "aten::_unsafe_index_put")
MASKS = (dtypes.bool_, dtypes.uint8)  # as an index they are made numbers of, which waits for the GPU


def written_inputs(nodes: Iterable[Node], static: Collection[str]) -> tuple[str, ...]:
    """Names of inputs that the graph writes to and that are not `static`, as parameters and buffers are."""
    written = (node.inputs[0] for node in nodes if node.target == "aten::copy_")
    return tuple([node.name for node in written if node.target == PLACEHOLDER and node.name not in static])


def unsafe_ops(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Ops that a CUDA graph cannot record."""
    return tuple(dict.fromkeys(node.base for node in nodes if node.base in UNSAFE or _writes_at_a_mask(node)))


def _writes_at_a_mask(node: Node) -> bool:
    if node.base not in WRITES_AT_INDICES:
        return False
    return any(type(index) is Node and index.dtype in MASKS for index in node.args[1])
