"""The card, and the software on it."""

from __future__ import annotations

import os

from staticmem.ir.record import record
from staticmem.scenario.options import DEVICE, option


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
