"""The lists of ops, against an installed PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest

from staticmem.compiler.partition import cse
from staticmem.ops import tags
from staticmem.tracing.nodes import GETITEM


def names(packets: Any) -> set[str]:
    """ATen and prims ops, spelt as `Node.base`, without those in place."""
    found = {str(packet).replace(".", "::", 1) for packet in packets if "OpOverloadPacket" in type(packet).__name__}
    return {name for name in found if not name.endswith("_") or name.endswith("__")}


@pytest.mark.torch
def test_lists_are_those_of_pytorch() -> None:
    partitioners: Any = pytest.importorskip("torch._functorch.partitioners")
    # PyTorch keeps these lists, and has of private ops in them those that something had asked for before
    private = {"aten::_conj_physical"}
    types = partitioners.get_default_op_list()
    assert private | names(types.recomputable_ops) == cse.RECOMPUTABLE - {GETITEM}
    assert private | names(types.fusible_ops) == cse.FUSIBLE - {GETITEM}
    assert names(types.view_ops) == cse.VIEWS
    assert names(types.random_ops) == cse.RANDOM
    assert names(types.compute_intensive_ops) == cse.COMPUTE_INTENSIVE
    assert private | names(partitioners.pointwise_ops()) == tags.partitioner_pointwise()


@pytest.mark.torch
def test_what_is_never_merged_is_random_or_writes() -> None:
    torch: Any = pytest.importorskip("torch")
    inductor_prims: Any = pytest.importorskip("torch._inductor.inductor_prims")
    assert inductor_prims
    listed: Any = pytest.importorskip("torch._functorch.compile_utils").rand_ops
    known = names(listed) | {"aten::empty", "aten::copy_"}
    for name in cse.NEVER_MERGED - known:
        namespace, _, base = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), base)
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        assert any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads), name


def test_an_overload_has_the_types_of_its_op() -> None:
    assert cse.types_of("aten::mul.Tensor") == cse.types_of("aten::mul.Scalar")
    assert cse.types_of("aten::mul.Tensor").fusible
    assert cse.types_of("aten::mm").compute_intensive
    assert not cse.types_of("aten::mm").recomputable
