"""The sentences that say why a buffer is alive, each from the hold that it is about."""

from __future__ import annotations

import pytest

from staticmem.eager.reasons import Reason
from staticmem.eager.trace import Buffer, Hold, Kernel
from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Op
from staticmem.liveness.why import module_of, op_place, reasons, short

FRAMES = (Frame("layer1", "Block"), Frame("layer1.relu", "ReLU"))
GRAPH = Graph(
    "g", "pt2", "", (), (), (), (Op("relu", "aten::relu.default", (), {}, ("y",), FRAMES), Op("z", "onnx::NonZero",
    (), {}, ("z",))), (),
)  # fmt: skip
KERNEL = Kernel("aten.native_batch_norm.default", "forward", 0)


def buffer(category: str = "activation") -> Buffer:
    return Buffer(0, 4, (1,), dtypes.float32, category, "x", 0, 0)


def said(*holds: Hold, category: str = "activation") -> tuple[str, ...]:
    return reasons(GRAPH, KERNEL, buffer(category), holds)


@pytest.mark.parametrize(
    ("kind", "who", "op", "sentence"),
    [
        (Reason.SAVED, "ReluBackward0", 0, "saved for the backward of relu in layer1.relu"),
        (Reason.SAVED, "NonzeroBackward0", 1, "saved for the backward of NonZero"),
        (Reason.SAVED, "NllLossBackward0", -1, "saved for the backward of the loss (NllLossBackward0)"),
        (Reason.RECOMPUTED, "ReluBackward0", 0, "run again for the backward of relu in layer1.relu"),
        (Reason.RECOMPUTED, "NllLossBackward0", 2, "run again for the backward of the loss (NllLossBackward0)"),
        (Reason.GRADIENT, "ReluBackward0", 0, "gradient on its way to the backward of relu in layer1.relu"),
        (Reason.GRADIENT, "NllLossBackward0", -1, "gradient on its way to the backward of the loss (NllLossBackward0)"),
        (Reason.GRADIENT, "root gradient", -1, "first gradient of backward()"),
        (Reason.CHECKPOINT, "layer1", -1, "input of the checkpoint of layer1, which runs again from it"),
        (Reason.CHECKPOINT, "", -1, "input of the checkpoint of the model, which runs again from it"),
        (Reason.LOCAL, "grads", -1, "variable grads of optimizer.step()"),
        (Reason.GRAD, "fc.weight", -1, "gradient of fc.weight"),
        (Reason.FRAME, "layer1", -1, "argument of layer1, which has not returned"),
        (Reason.FRAME, "", -1, "held by the model's forward"),
        (Reason.VALUE, "loss", -1, "the loss"),
        (Reason.VALUE, "add_3", -1, "value add_3, which is used later"),
        (Reason.OPTIMIZER, "fc.weight", -1, "optimizer state of fc.weight"),
        (Reason.AUTOCAST, "weight cache", -1, "autocast's cache of cast weights"),
        (Reason.MODULE, "rel_indices", -1, "module rel_indices"),
        (Reason.RANK, "the all-gather of layer1", -1, "the all-gather of layer1"),
    ],
)
def test_each_owner_has_a_sentence(kind: Reason, who: str, op: int, sentence: str) -> None:
    assert said(Hold(0, kind, who, 0, None, op)) == (sentence,)


@pytest.mark.parametrize(
    ("category", "sentence"),
    [
        ("parameter", "parameter"), ("buffer", "buffer of the model"), ("input", "given by the caller"),
        ("activation", "held by the model"),
    ],
)  # fmt: skip
def test_what_the_model_has(category: str, sentence: str) -> None:
    assert said(Hold(0, Reason.MODEL, "", 0, None), category=category) == (sentence,)


def test_owners_for_the_whole_step_explain_it_alone() -> None:
    """And the same sentence is said once."""
    passing = Hold(0, Reason.SAVED, "ReluBackward0", 0, None, 0)
    for kind in (Reason.MODEL, Reason.OPTIMIZER, Reason.GRAD):
        lasting = Hold(0, kind, "w", 0, None)
        assert len(said(passing, lasting, passing)) == 1
        assert said(passing, lasting) == said(lasting) != said(passing)
    assert said(passing, passing) == said(passing)
    both = said(passing, Hold(0, Reason.FRAME, "layer1", 0, None))
    assert both == ("saved for the backward of relu in layer1.relu", "argument of layer1, which has not returned")


def test_what_nobody_holds_is_in_use() -> None:
    assert said() == ("in use by native_batch_norm",)


def test_names_of_kernels_and_places() -> None:
    names = ["aten.native_batch_norm.default", "aten::relu_", "onnx::NonZero", "loss of the previous step", "a.b"]
    assert [short(name) for name in names] == [
        "native_batch_norm", "relu_", "NonZero", "loss of the previous step", "a.b",
    ]  # fmt: skip
    assert [op_place(GRAPH, op) for op in (-1, 0, 1, 2)] == ["", "relu in layer1.relu", "NonZero", ""]


def test_the_module_of_a_buffer() -> None:
    cases = [("parameter", "a.b.weight"), ("buffer", "a.bn.mean"), ("gradient", "a.b.weight.grad"),
             ("optimizer_state", "a.b.weight.exp_avg"), ("activation", "x.y.z")]  # fmt: skip
    found = [module_of(GRAPH, category, name, 0) for category, name in cases]
    assert found == ["a.b", "a.bn", "a.b", "a.b", "layer1.relu"]
    assert [module_of(GRAPH, "activation", "x", op) for op in (-1, 1, 2)] == ["", "", ""]
