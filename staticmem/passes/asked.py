"""What a request asks of the passes (`passes.pipeline`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from staticmem.ir.record import record

if TYPE_CHECKING:  # few requests ask for them
    from staticmem.ir.dtypes import DType
    from staticmem.ir.graph import Parameter
    from staticmem.scenario.adapters import Lora, Quantized
    from staticmem.scenario.strategies import ContextShare, ExpertShare


@record(frozen=True, slots=True)
class AskedLora:
    """Adapters, and what else of a step their code depends on: the types of autocast and of the whole model, where they
    are given, and whether dropout is on."""

    lora: Lora
    amp: DType | None
    dtype: DType | None
    training: bool


@record(frozen=True, slots=True)
class Asked:
    """What a request says that passes depend on, and two facts of the graph that it is about: `parameters` in the order
    of `Module.named_parameters()`, and `logits`, the sizes of the first output where the graph has none."""

    training: bool = False
    inplace: str = "none"  # a choice of `Request.inplace_activations`
    unfold_batchnorm: bool = False
    freeze: str | None = None  # the pattern, in training only
    parameters: tuple[Parameter, ...] = ()
    inference: bool = False
    # a loss of `scenario.losses.HEAD_LOSSES`, in training only, and the labels of a target of `ctc`
    head_loss: tuple[str, int | None] | None = None
    logits: tuple[int, ...] | None = None
    lora: AskedLora | None = None
    quantize: Quantized | None = None
    inplace_abn: bool = False
    experts: ExpertShare | None = None
    context: ContextShare | None = None
    cast: DType | None = None  # the 16-bit type that the whole model is cast to
