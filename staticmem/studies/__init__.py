"""The one entry point of the command line and of Python: a path and a request become a `Report`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from staticmem.report.model import Report
from staticmem.scenario.request import ALL, Request, request_of
from staticmem.studies.study import Study

__all__ = ["ALL", "Request", "Study", "analyze", "request_of", "run", "without_cycle_search"]


@contextmanager
def without_cycle_search() -> Iterator[None]:
    """Python's cyclic collector off: an analysis makes many objects that all live to its end, so that each of its
    searches finds nothing and costs a third of the time. What the analysis leaves, later searches find.

    All that is left counts as old then: else the first search after it would go through every object of the report.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what others have frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def analyze(
    model: object,
    inputs: Sequence[Any] | None = None,
    *,
    batch: int | None = None,
    resolution: int | tuple[int, int] | None = None,
    dims: Mapping[str, int] | None = None,
    mode: str | None = None,
    optimizer: str | None = None,
    optimizer_impl: str = "foreach",
    momentum: float = 0.0,
    loss: str = "auto",
    dtype: str | None = None,
    amp: str | None = None,
    sdpa: str = "auto",
    unfold_batchnorm: bool = False,
    inplace_activations: str = "auto",
    checkpoint: str | tuple[str, ...] = (),
    checkpoint_every: int = 1,
    checkpoint_segments: int | str = 0,
    checkpoint_sequential: str | None = None,
    accumulate: int = 1,
    freeze: str | None = None,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    dampening: float = 0.0,
    amsgrad: bool = False,
    centered: bool = False,
    offload_optimizer: bool = False,
    grad_scaler: bool = False,
    set_to_none: bool = True,
    clip_grad_norm: bool = False,
    parallel: str | None = None,
    devices: int | None = None,
    method: str = "liveness",
    gpu: str | None = None,
    gpus_file: str | os.PathLike[str] | None = None,
    alloc_conf: str | None = None,
    torch_version: str | None = None,
    module_loading: str | None = None,
    tf32: bool = True,
    channels_last: bool = False,
    cudnn_benchmark: bool = False,
    cudnn: str = "tables",
    profile: str | os.PathLike[str] | None = None,
    top: int = 10,
) -> Report:
    """The memory of one step of a model.

    Args:
        model: the path of an ONNX file or of an archive of torch.export; or an `onnx.ModelProto`, an
            `ExportedProgram`, an `nn.Module` or an FX `GraphModule`. A module is exported in the mode that it is in
            (`train()` or `eval()`), under fake tensors: nothing is allocated.
        inputs: example inputs for a module: tensors, also on the meta device. Their batch is the default of `batch`.
        batch: size of axis 0 of every input. An open batch dimension without it is taken as 1, and the report says so.
        resolution: height and width of 4-D image inputs; one number for both.
        dims: sizes of other open dimensions by name.
        mode: "train" or "infer"; by default training where an optimizer is given. Training without an optimizer is
            forward and backward.
        dtype: casts the whole model ("float16", "bf16", ...); amp: runs the forward under torch.autocast.
        sdpa: the kernel of scaled_dot_product_attention; "auto" chooses as PyTorch does on an sm_90 GPU.
        unfold_batchnorm: puts a batch norm behind every convolution with a bias, for files whose norms were folded.
        inplace_activations: "auto", "none" or "all": what ran in place, where the file does not say (ONNX).
        checkpoint: modules that run under `torch.utils.checkpoint`, by class name or path; checkpoint_every: so many of
            them share one checkpoint; checkpoint_segments: segments of `checkpoint_sequential` (a number or "sqrt"),
            over the Sequential at checkpoint_sequential, or the one with the most modules.
        accumulate: micro-batches a step; `batch` is that of one.
        freeze: a regular expression; parameters whose name it matches are not trained.
        weight_decay, nesterov, dampening, amsgrad, centered: as in torch.optim, where they change what is alive.
        offload_optimizer: optimizer state and update on the CPU. grad_scaler: with `torch.amp.GradScaler`.
        set_to_none: what `zero_grad` does. clip_grad_norm: `clip_grad_norm_` before the step.
        parallel: the strategy of a job on `devices` GPUs ("ddp", "zero1", "zero2", "zero3", "fsdp", "tp", "pp"): the
            report is of the rank that needs the most, `batch` what one rank works on at a time (docs/parallel.md).
        method: "textbook" adds the textbook estimate to the report.
        gpu: a card by name or size ("h100-sxm-80gb", "24GB"), which allocated, reserved and device memory are then
            for, and whether it fits. Without one they are for an H100.
        gpus_file: a YAML file with cards of your own (docs/hardware.md).
        alloc_conf: settings of the allocator as PYTORCH_ALLOC_CONF spells them ("expandable_segments:True").
        torch_version: the PyTorch that runs ("2.13"): decides cuBLAS workspaces and the version of cuDNN.
        module_loading: "lazy" or "eager" (CUDA_MODULE_LOADING); None: as that PyTorch does, eager before 1.13.
        tf32: torch.backends.cudnn.allow_tf32. channels_last: the model and its inputs are in torch.channels_last.
        cudnn_benchmark: torch.backends.cudnn.benchmark.
        cudnn: who is asked for workspaces of convolutions: the package's "tables", or an installed "library".
        profile: a YAML file in place of the package's own figures of context, libraries and cuBLAS (docs/hardware.md).
        top: how many of the largest tensors `top_tensors` has.

    Raises:
        StaticmemError: the file or the scenario cannot be analysed; the message says what to do.
    """
    words = locals()
    del words["model"], words["inputs"]
    return run(model, request_of(words), inputs)


def run(model: object, request: Request, inputs: Sequence[Any] | None = None) -> Report:
    """The report of a request on a file or on an object."""
    with without_cycle_search():
        return Study.open(model, request, inputs).report
