"""What would make a step smaller: the levers of `staticmem levers` that a sizing report shows, by their live peak."""

from __future__ import annotations

from dataclasses import replace

from staticmem.errors import StaticmemError
from staticmem.report.sizing import Lever
from staticmem.report.sweep import TRAINING
from staticmem.scenario.request import as_flags
from staticmem.studies import Request, Study
from staticmem.studies.bench import Bench
from staticmem.studies.checkpoints import repeated_blocks
from staticmem.studies.levers import candidates

DEVICE_ONLY = ("alloc_conf", "channels_last")  # they do not change live memory


def block_class(study: Study) -> str | None:
    """What `--checkpoint` takes for the outermost modules that a model repeats; None where it repeats nothing."""
    found = repeated_blocks(study.result.graph)
    return found[0].selector if found else None


def levers(bench: Bench, request: Request) -> tuple[Lever, ...]:
    """The levers that save something, the largest saving first. Those that train something else are left out, but for
    the same optimizer with state of 8 bits."""
    now = bench.live(request)
    same = f"{bench.study.scenario.optimizer}-8bit"
    found = []
    for lever in candidates(bench.study):
        other = lever.changes == TRAINING and lever.options.get("optimizer") != same
        if other or set(lever.options) & set(DEVICE_ONLY):
            continue
        try:
            live = bench.live(replace(request, **lever.options))
        except StaticmemError:
            continue  # it does not go with the rest of the request
        if live < now:
            found.append(Lever(lever.does, as_flags(lever.options), live, now - live))
    return tuple(sorted(found, key=lambda lever: (-lever.saved_bytes, lever.what)))
