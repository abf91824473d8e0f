"""The one entry point of the command line and of Python: a path and a request become a `Report`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from staticmem.analysis.request import ALL, Request, request_of
from staticmem.analysis.study import Study
from staticmem.report.model import Report

__all__ = ["ALL", "Request", "Study", "analyze", "request_of", "run", "without_cycle_search"]


@contextmanager
def without_cycle_search() -> Iterator[None]:
    """Python's cyclic collector off: an analysis makes many objects that all live to its end, so that each of its
    searches finds nothing and costs a third of the time. What the analysis leaves, later searches find."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def analyze(
    path: str | os.PathLike[str],
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
    method: str = "liveness",
    gpu: str | None = None,
    top: int = 10,
) -> Report:
    """The memory of one step of the model in a file.

    Args:
        path: an ONNX file or an archive of torch.export.
        batch: size of axis 0 of every input. An open batch dimension without it is taken as 1, and the report says so.
        resolution: height and width of 4-D image inputs; one number for both.
        dims: sizes of other open dimensions by name.
        mode: "train" or "infer"; by default training where an optimizer is given. Training without an optimizer is
            forward and backward.
        dtype: casts the whole model ("float16", "bf16", ...); amp: runs the forward under torch.autocast.
        sdpa: the kernel of scaled_dot_product_attention; "auto" chooses as PyTorch does on an sm_90 GPU.
        unfold_batchnorm: puts a batch norm behind every convolution with a bias, for files whose norms were folded.
        inplace_activations: "auto", "none" or "all": what ran in place, where the file does not say (ONNX).
        method: "textbook" adds the textbook estimate to the report.
        gpu: a card by name or size ("h100-sxm-80gb", "24GB"): adds allocated, reserved and device memory, and whether
            it fits.
        top: how many of the largest tensors `top_tensors` has.

    Raises:
        StaticmemError: the file or the scenario cannot be analysed; the message says what to do.
    """
    words = locals()
    del words["path"]
    return run(path, request_of(words))


def run(path: str | os.PathLike[str], request: Request) -> Report:
    """The report of a request on a file."""
    with without_cycle_search():
        return Study.open(path, request).report
