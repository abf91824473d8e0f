"""Code whose training no recording predicts: it is refused with the reason, and its inference is not."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import real_steps  # noqa: E402
import stateful_models  # noqa: E402
from coded_models import WIDTH, Coded, on_meta  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.utils import checkpoint  # noqa: E402

import staticmem  # noqa: E402
from staticmem.errors import ModelFileError  # noqa: E402
from staticmem.frontends.recorded import RecordedModel  # noqa: E402
from staticmem.recording.record import record  # noqa: E402
from staticmem.scenario.request import request_of  # noqa: E402
from staticmem.studies.study import Study  # noqa: E402

pytestmark = pytest.mark.torch


class OnCPU(Coded):
    """What autograd saves goes to the CPU."""

    def middle(self, x: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return F.relu(self.inner(x))


class Selective(Coded):
    """A checkpoint that keeps the results of matrix products."""

    def middle(self, x: Any) -> Any:
        saved = [torch.ops.aten.addmm.default]
        contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, saved)
        return checkpoint.checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)


class StepsInBackward(Coded):
    """Lets go of each gradient when it has been accumulated, as an optimizer within the backward does."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def scripted(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script
        return torch.jit.script(function)


@scripted
def scripted_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


class Scripted(Coded):
    def middle(self, x: Any) -> Any:
        return scripted_gelu(self.inner(x))


@scripted
def scripted_factor(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float, device=x.device))


class ScriptedFactor(Coded):
    """No gradient goes through the scripted function."""

    def middle(self, x: Any) -> Any:
        return self.inner(x) * scripted_factor(x)


REFUSED = (
    (OnCPU, "changes what autograd saves"),
    (Selective, "recompute some ops"),
    (StepsInBackward, "hooks of gradients"),
)


@pytest.mark.parametrize(("cls", "why"), REFUSED)
def test_training_is_refused(cls: Any, why: str) -> None:
    module, inputs = on_meta(cls)
    model = RecordedModel("<m>", record(module, inputs), "pt2")
    with pytest.raises(ModelFileError, match=why) as error:
        Study(model, request_of({"optimizer": "adam", "loss": "mean"})).report  # noqa: B018
    assert error.value.code == "SM176"
    inference = Study(model, request_of({"mode": "infer", "batch": 700})).report
    assert inference.peak.live_bytes == real_steps.peak(cls, [(700, WIDTH)], outputs="held")


def test_training_of_scripted_code_is_refused() -> None:
    module, inputs = on_meta(Scripted)
    with pytest.raises(ModelFileError, match=r"torch\.jit\.script") as error:
        staticmem.analyze(module, inputs, optimizer="adam", loss="mean")
    assert error.value.code == "SM176"
    inference = staticmem.analyze(module, inputs, mode="infer", outputs="dropped")
    assert inference.peak.live_bytes == real_steps.peak(Scripted, [inputs[0].shape])


def test_scripted_code_without_a_gradient_is_predicted() -> None:
    module, inputs = on_meta(ScriptedFactor)
    report = staticmem.analyze(module, inputs, optimizer="adam", loss="mean", outputs="dropped")
    assert report.peak.live_bytes == real_steps.peak(ScriptedFactor, [inputs[0].shape], optimizer="adam")


def test_hooks_beside_compiled_code_are_refused() -> None:
    module, inputs = on_meta(stateful_models.ScalesGradient)
    with pytest.raises(ModelFileError, match="a part of it is compiled") as error:
        staticmem.analyze(module, inputs, optimizer="adam", compile=("all",))
    assert error.value.code == "SM176"


def test_a_backward_that_gets_none_for_a_result_is_refused() -> None:
    module, inputs = on_meta(stateful_models.DropsUnfilled)
    with pytest.raises(ModelFileError, match="gets no gradient") as error:
        staticmem.analyze(module, inputs, optimizer="adam", loss="mean")
    assert error.value.code == "SM176"


class Ensemble(nn.Module):  # type: ignore[misc]
    """Four models at once: the ops that are seen have the sizes of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(4, WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        return torch.vmap(lambda weight: F.relu(F.linear(x, weight)))(self.weights).mean(0)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_ops_under_vmap_are_refused(mode: str) -> None:
    module, inputs = on_meta(Ensemble)
    with pytest.raises(ModelFileError, match=r"torch\.func\.vmap") as error:
        staticmem.analyze(module, inputs, mode=mode)
    assert error.value.code == "SM178"


class Composite(Coded):
    """An op without a rule, which PyTorch makes of others."""

    def middle(self, x: Any) -> Any:
        return F.relu(self.inner(x)) + torch.linalg.norm(self.inner(x))


def test_composite_ops_without_a_rule_are_what_they_are_made_of() -> None:
    module, inputs = on_meta(Composite)
    document = record(module, inputs)
    assert "aten::linalg_norm" not in document["targets"]
    report = Study(RecordedModel("<m>", document, "pt2"), request_of({"batch": 24, "optimizer": "adam"})).report
    assert not report.coverage.unknown
