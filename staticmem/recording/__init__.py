"""What needs PyTorch: recording a module's code, tracing it, and writing files that carry both.

A recording is made by running the module's own Python under fake tensors (`record`): what decides its memory is written
down as a document (`frontends.recording_format`), which `frontends.recorded` reads without torch.
"""

EXPORTERS = ("dynamo", "torchscript")  # of .onnx: torch.onnx.export with dynamo=True, and with dynamo=False
