"""A replayed process for other tools' viewers: PyTorch's memory_viz and Perfetto."""

from __future__ import annotations

from staticmem.devices.meters import replayed
from staticmem.report.formats.report_viewers import Replayed, dump_snapshot
from staticmem.studies.device import device_of
from staticmem.studies.study import Study


def replay_of(study: Study) -> Replayed:
    """The study's process as the allocator replays it."""
    device, result = device_of(study.request), study.result
    process, replay = replayed(result, device)
    return Replayed(process, replay, result.trace, result.graph, device.settings)


def snapshot(study: Study) -> bytes:
    """A memory snapshot as `torch.cuda.memory._dump_snapshot` writes it."""
    return dump_snapshot(replay_of(study))
