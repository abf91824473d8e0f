"""A replayed process for other tools' viewers: PyTorch's memory_viz and Perfetto."""

from __future__ import annotations

from collections.abc import Callable

from staticmem.devices.meters import replayed
from staticmem.studies.device import device_of
from staticmem.studies.study import Study


def snapshot(study: Study) -> bytes:
    """A memory snapshot as `torch.cuda.memory._dump_snapshot` writes it; see `report.snapshot`."""
    from staticmem.report.formats.report_snapshot import dumps

    device, result = device_of(study.request), study.result
    process, replay = replayed(result, device)
    return dumps(process, replay, result.trace, result.graph, device.settings)


def perfetto(study: Study) -> str:
    """Counter tracks of allocated and reserved memory in the trace event format; see `report.perfetto`."""
    from staticmem.report.formats.report_perfetto import dumps

    process, replay = replayed(study.result, device_of(study.request))
    return dumps(process, replay, study.result.trace)


EXPORTS: dict[str, Callable[[Study], str | bytes]] = {"snapshot": snapshot, "perfetto": perfetto}
