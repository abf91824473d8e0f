"""What `max-autotune` may make of matrix products and convolutions, which it times on the card: the ends of a band.

A Triton template computes what stands in front of a product and behind it in the same kernel, so that the operand, or
the result, is never in memory. A product with a long inner dimension may be divided along it, into partial results.

Sources, PyTorch 2.15: torch/_inductor/config.py (`epilogue_fusion`, `prologue_fusion`,
`triton.decompose_k_threshold`), torch/_inductor/utils.py (`use_decompose_k_choice`, `get_k_splits`),
torch/_inductor/kernel/mm.py (`decomposeK`: partial results are float32).

Matrix products whose operands Inductor may pad: it measures on the card whether that is faster.

Source: `torch/_inductor/fx_passes/pad_mm.py` of PyTorch 2.15 (`can_pad`, `get_padded_length`, `pad_addmm`,
`is_mm_compute_bound`).
"""

from __future__ import annotations

from dataclasses import replace

from staticmem.compiler.graphs import NodeGraph
from staticmem.compiler.plan import Plan
from staticmem.eager.strides import numel
from staticmem.ir import dtypes
from staticmem.ops.linear import FACTORS
from staticmem.tracing.nodes import Node
from staticmem.units import format_bytes

THRESHOLD = 32  # decompose_k_threshold: the inner dimension is at least that many times each of the others
PARTIAL = 4  # bytes of an element of a partial result
_EXTERN = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.convolution.")  # kernels that have templates


def partial_bytes(node: Node) -> int:
    """The most that partial results of a product take: there are at most k / max(m, n) of m x n. 0: none are made."""
    if node.base != "aten::mm":
        return 0
    first, second = (node.args[at].shape for at in FACTORS[node.base])
    m: int = first[0]
    k: int = first[1]
    n: int = second[1]
    wide = max(m, n)
    return k // wide * m * n * PARTIAL if wide and k >= THRESHOLD * wide else 0


def in_templates(plan: Plan) -> Plan:
    """The plan where every product has what is in front of it and behind it in its own kernel: values that one makes
    and the other reads last, and that are not returned, have no buffer. The least that autotuned code needs."""
    kept = {output.storage for output in plan.outputs if output is not None}
    made_by = {number: step.kernel.startswith(_EXTERN) for step in plan.steps for number in step.allocates}
    gone = {
        number
        for step in plan.steps
        for number in step.frees
        if number in made_by and number not in kept and made_by[number] != step.kernel.startswith(_EXTERN)
    }
    steps = [
        replace(
            step,
            allocates=tuple([number for number in step.allocates if number not in gone]),
            frees=tuple([number for number in step.frees if number not in gone]),
        )
        for step in plan.steps
    ]
    return replace(plan, steps=tuple(steps))


ALIGNMENT = {dtypes.float16: 8, dtypes.bfloat16: 8, dtypes.float32: 4}  # get_alignment_size_dtype, in elements
# is_mm_compute_bound: half of what a card computes for each byte that it reads; for float32 about 10 on an H100 and on
# an A100 (1000 * 67 / 3350 and 1000 * 19.5 / 1555). Half types need more of either, so that this counts too many.
INTENSITY = 10
CODE = "pad_mm"


def notes(graph: NodeGraph) -> tuple[tuple[str, str], ...]:
    """What is said where a product may be padded; it is assumed not to be."""
    padded = [(extra_bytes(node), node) for node in graph.nodes if node.base in FACTORS]
    padded = [(extra, node) for extra, node in padded if extra]
    if not padded:
        return ()
    extra, largest = max(padded, key=lambda pair: pair[0])
    one, other = (largest.args[at].shape for at in FACTORS[largest.base])
    text = (
        "Inductor measures on the GPU whether a product is faster with operands that are padded to multiples of 4 "
        "elements (8 in half types), and it was assumed that none is. Here that may be the product of "
        f"{list(one)} and {list(other)}, whose padded copies would take {format_bytes(extra)} while it runs"
    )
    return ((CODE, text),)


def extra_bytes(node: Node) -> int:
    """Bytes of the padded copies of the operands, and of the result beyond its size; 0 where nothing is padded."""
    first, second = (node.args[at].tensor for at in FACTORS[node.base])
    itemsize: int = first.dtype.itemsize
    align = ALIGNMENT.get(first.dtype, 0)
    *batch, m, k = first.shape
    n = second.shape[-1]
    if not align or not m * n * k or m * n * k < INTENSITY * (m * k + n * k + m * n):
        return 0
    wide_m, wide_k, wide_n = (size if size == 1 else -(-size // align) * align for size in (m, k, n))
    count = numel(batch)
    elements: int = count * (wide_m * wide_n - m * n)
    if (wide_m, wide_k) != (m, k):
        elements += count * wide_m * wide_k
    if (wide_k, wide_n) != (k, n):
        elements += count * wide_k * wide_n
    return elements * itemsize
