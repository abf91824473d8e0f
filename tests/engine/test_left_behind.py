"""Who holds something when a step is over: the model, the optimizer, `.grad`, the variables of outputs and loss."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from staticmem.eager.reasons import Reason
from staticmem.studies import Request, Study

ROOT = Path(__file__).resolve().parents[2]
MODELS = [ROOT / "models" / "seed.pt2", ROOT / "models" / "resnet18.onnx", ROOT / "tests/data/graphs/mlp_blocks.pt2"]
STEPS: list[dict[str, Any]] = [
    {"optimizer": "adam"},
    {"optimizer": "adam", "amp": "bf16", "grad_scaler": True, "clip_grad_norm": True},
    {"optimizer": "sgd", "accumulate": 3},  # the second backward adds to `.grad`
    {"optimizer": "sgd", "set_to_none": False},
    {"optimizer": "sgd", "momentum": 0.9, "dtype": "bf16", "optimizer_impl": "for-loop"},
    {"optimizer": "sgd", "freeze": "bias"},
    {"optimizer": "sgd", "outputs": "dropped"},
]


@pytest.mark.parametrize("words", STEPS, ids=[" ".join(map(str, words.values())) for words in STEPS])
@pytest.mark.parametrize("path", MODELS, ids=[path.name for path in MODELS])
def test_a_step_leaves_nothing_behind(path: Path, words: dict[str, Any]) -> None:
    """One hold on each gradient, and none of a node, a frame, a saved tensor or a buffer of gradients on its way."""
    trace = Study.open(path, Request(batch=2, **words)).result.trace
    left = Counter(hold.kind for hold in trace.holds if hold.end is None)
    gradients = [b for b in trace.buffers if b.category == "gradient" and b.died is None]
    assert gradients
    assert left[Reason.GRAD] == len(gradients)
    assert left[Reason.VALUE] == 1
    assert left[Reason.OUTPUTS] == (words.get("outputs") != "dropped")
    assert set(left) <= {"model", "optimizer", "grad", "value", "outputs"}
    held = Counter(hold.buffer for hold in trace.holds if hold.end is None)
    assert {held[b.id] for b in gradients} == {1}
    assert all(b.id in held for b in trace.buffers if b.died is None)


def test_the_second_backward_adds_to_each_gradient() -> None:
    """`accumulate_grad.h`: `variable_grad += new_grad`, in place."""
    trace = Study.open(MODELS[0], Request(batch=2, optimizer="sgd", accumulate=3)).result.trace
    found = Counter(kernel.name for kernel in trace.kernels if kernel.phase == "backward")
    backwards = [name for name, _ in trace.phases].count("backward")
    gradients = sum(b.category == "gradient" for b in trace.buffers)
    assert backwards > 1
    assert found["aten.add_.Tensor"] == (backwards - 1) * gradients  # the model adds nothing up: it is a chain
