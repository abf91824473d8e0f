"""Sizes of inputs."""

from __future__ import annotations

from collections.abc import Mapping

from staticmem.errors import UsageError
from staticmem.ir.record import record
from staticmem.scenario.options import SIZES, option


# fmt: off
@record(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the model's inputs; what is not given is as the file has it."""

    batch: int | None = option(
        None, SIZES, "whole", "N", "size of axis 0 of every input", letter="-b", example="32",
        details="An open axis is 1 without it; a size that the export fixed is changed. Different fixed sizes are an "
        "error (SM120): `--dim INPUT[0]=N` names one",
    )
    resolution: int | tuple[int, int] | None = option(
        None, SIZES, "resolution", "N|HxW", "height and width of 4-D image inputs, one number for both", example="224",
        details="In ONNX files with channels last these are axes 1 and 2",
    )
    dims: Mapping[str, int] | None = option(
        None, SIZES, "dims", "NAME=N", "size of another open dimension, by its name", flag="--dim",
        example="{seq: 512}", details="As in the file, or `input[axis]`",
    )
    # fmt: on

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width, where a resolution is given.

        Raises:
            UsageError: it is of another number of sizes.
        """
        size = self.resolution
        if isinstance(size, int):
            return size, size
        if size is not None and len(size) != 2:
            why = "It is a height and a width."
            raise UsageError(f"a resolution of {len(size)} numbers", why, "Give two, or one for both.", "SM110")
        return size
