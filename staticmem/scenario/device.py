"""The card, the software on it, and the process on the host."""

from __future__ import annotations

import os

from staticmem.ir.record import record
from staticmem.scenario.options import DEVICE, HOST, TRAINED, WORKERS, option

# how parameters come to the GPU: made on it; made on the CPU and moved, without a checkpoint or with one that is read
# whole, or mapped; or by transformers, whose model is empty until each tensor comes from a mapped file
ON_GPU, BUILT, READ, MAPPED, PRETRAINED = "gpu", "cpu", "torch-load", "mapped", "from-pretrained"
LOADINGS = (BUILT, READ, MAPPED, PRETRAINED, ON_GPU)
# what a save copies to the CPU: one tensor at a time, or the whole state first
STREAMED, GATHERED = "streamed", "gathered"


# fmt: off
@record(frozen=True, kw_only=True)
class DeviceOptions:
    """What runs the step, and what a card or its software is told."""

    gpu: str | None = option(
        None, DEVICE, "text", "NAME|SIZE", "a GPU by name or size (h100-sxm-80gb, 24GB), and whether the step fits",
        table="", session=True, unset="an H100 SXM 80 GB is assumed", example="24GB",
        details="Without one there is no verdict",
    )
    gpus_file: str | os.PathLike[str] | None = option(
        None, DEVICE, "text", "FILE", "YAML with GPUs of your own, over those of the package", session=True,
        example="gpus.yaml", details="[hardware](hardware.md)",
    )
    alloc_conf: str | None = option(
        None, DEVICE, "text", "CONF", "settings of the allocator, as in PYTORCH_ALLOC_CONF", table="",
        example="expandable_segments:True",
        details="`expandable_segments:True,max_split_size_mb:128`",
    )
    torch_version: str | None = option(
        None, DEVICE, "text", "V", "the PyTorch that runs the step", unset="2.13", example="2.9",
        details="It decides cuBLAS and cuDNN, before 2.0 also defaults. `1.12+cu113` is a build for another CUDA. A "
        "file's own version does not set it",
    )
    module_loading: str | None = option(
        None, DEVICE, "choice", "WHEN", "when kernels come to the GPU, as CUDA_MODULE_LOADING",
        choices=("lazy", "eager"), unset="as that PyTorch does, eager before 1.13", example="lazy",
        details="A driver before R515 loads eagerly",
    )
    tf32: bool = option(True, DEVICE, "switch", "", "torch.backends.cudnn.allow_tf32 is on")
    channels_last: bool = option(
        False, DEVICE, "switch", "", "model and inputs are in torch.channels_last",
        details="Convolutions need smaller workspaces",
    )
    cudnn_benchmark: bool = option(
        False, DEVICE, "switch", "", "torch.backends.cudnn.benchmark is on",
        details="The first step searches with large workspaces",
    )
    cudnn: str = option(
        "tables", DEVICE, "choice", "SOURCE", "source of workspaces of convolutions: tables, or an installed library",
        choices=("tables", "library"), example="tables",
        details="The library is exact (`pip install 'staticmem[cudnn]'`)",
    )
    profile: str | os.PathLike[str] | None = option(
        None, DEVICE, "text", "FILE", "YAML with your own figures of context, libraries and cuBLAS", session=True,
        example="profile.yaml", details="[hardware](hardware.md)",
    )
    # fmt: on

    @property
    def names_device(self) -> bool:
        """Whether an option was given that only a card or its software can refuse."""
        given = (self.gpu, self.alloc_conf, self.torch_version, self.module_loading, self.profile)
        return given != (None,) * len(given) or self.cudnn != "tables"


# fmt: off
@record(frozen=True, kw_only=True)
class HostOptions:
    """What the process does in the memory of the host. Any of them asks for that memory in the report."""

    host: bool = option(False, HOST, "switch", "", "the memory of the process on the host too")
    workers: int = option(
        0, HOST, "whole", "N", "worker processes of the data loader", unset="the process loads", example="4",
    )
    prefetch: int = option(2, HOST, "whole", "N", "batches that each worker fetches ahead", example="4", needs=WORKERS)
    pin_memory: bool = option(False, HOST, "switch", "", "the data loader copies batches to pinned memory")
    loading: str = option(
        BUILT, HOST, "choice", "HOW", "how parameters come to the GPU", choices=LOADINGS, example=READ,
        details="[The host](host.md#parameters)",
    )
    saving: str = option(
        STREAMED, HOST, "choice", "HOW", "how a checkpoint is saved: tensor by tensor, or gathered on the CPU first",
        choices=(STREAMED, GATHERED), example=GATHERED, needs=TRAINED,
    )
    confidence: float = option(
        0.95, HOST, "fraction", "P", "with which a limit of the host's memory holds", example="0.99",
        details="[Schedulers](how-to/schedulers.md)",
    )
    # fmt: on

    @property
    def asks_host(self) -> bool:
        """Whether any of these options was given."""
        given = (self.host, self.workers, self.prefetch, self.pin_memory, self.loading, self.saving, self.confidence)
        return given != (False, 0, 2, False, BUILT, STREAMED, 0.95)
