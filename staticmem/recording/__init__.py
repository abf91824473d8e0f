"""What needs PyTorch: recording a module's code, tracing it, and writing files that carry both.

A recording is made by running the module's own Python under fake tensors (`record`): what decides its memory is written
down as a document (`frontends.recording_format`), which `frontends.recorded` reads without torch.
"""

import re

from staticmem.errors import StaticmemError

EXPORTERS = ("dynamo", "torchscript")  # of .onnx: torch.onnx.export with dynamo=True, and with dynamo=False
NOT_RECORDED = "Without a recording of the code"  # how the line begins that tells of an export without one
NO_GRAPH = "Without a graph for other tools"  # the same of one that has the recording alone
NEITHER = "Its code cannot be recorded either"  # how the error begins to say so of what cannot be exported

WITHOUT_DATA = (
    "Its forward runs on tensors without data; a branch on contents follows example inputs that are on the CPU."
)


def asks_for_contents(message: str) -> bool:
    """Whether an error of PyTorch says that code asks what a tensor holds, which has no data."""
    return re.search(r"data-dependent|DataDependent|\.numpy\(\)|\.item\(\)", message) is not None


def not_recorded(error: StaticmemError) -> str:
    """The line for the user of an export whose recording failed."""
    return f"{NOT_RECORDED}: {error.what}. {error.why}"


def no_graph(error: StaticmemError) -> str:
    """The line for the user of an export that has the recording alone."""
    return f"{NO_GRAPH}: {error.what}. {error.why.rstrip('.')}."
