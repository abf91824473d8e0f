"""Allocators: what a framework takes from the driver to serve a process, replayed without a device."""

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.events import Event, alloc, free
from staticmem.allocators.jitter import Band, reserved_band
from staticmem.allocators.process import Process
from staticmem.allocators.replay import process
from staticmem.allocators.result import BlockState, Fragmentation, OutOfMemory, Replay, SegmentState
from staticmem.allocators.settings import Settings, parse_settings
from staticmem.allocators.workspace import Workspace, WorkspaceModel

__all__ = [
    "Band", "BlockState", "Event", "Fragmentation", "OutOfMemory", "Process", "Replay", "SegmentState", "Settings",
    "Workspace", "WorkspaceModel", "alloc", "free", "parse_settings", "process", "reserved_band", "simulate",
]  # fmt: skip
