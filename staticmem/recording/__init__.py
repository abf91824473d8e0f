"""What needs PyTorch: recording a module's code, tracing it, and writing files that carry both.

A recording is made by running the module's own Python under fake tensors (`record`): what decides its memory is written
down as a document (`frontends.recording_format`), which `frontends.recorded` reads without torch.
"""

from staticmem.errors import StaticmemError

EXPORTERS = ("dynamo", "torchscript")  # of .onnx: torch.onnx.export with dynamo=True, and with dynamo=False
NOT_RECORDED = "Without a recording of the code"  # how the line begins that tells of an export without one


def not_recorded(error: StaticmemError) -> str:
    """The line for the user of an export whose recording failed."""
    return f"{NOT_RECORDED}: {error.what}. {error.why}"
