"""staticmem: how much GPU memory a model needs, from its exported graph alone.

import staticmem
report = staticmem.analyze("model.pt2", batch=32, optimizer="adam")
print(report.peak.live_bytes)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from staticmem.recording.export import export
    from staticmem.report.model import Report as Report
    from staticmem.serving.study import serve
    from staticmem.studies.api import analyze, fit, levers, max_batch, max_dim
    from staticmem.studies.plan import plan
    from staticmem.studies.sweep import sweep

__all__ = [
    "Report",
    "StaticmemError",
    "__version__",
    "analyze",
    "export",
    "fit",
    "levers",
    "max_batch",
    "max_dim",
    "plan",
    "serve",
    "sweep",
]

from staticmem.errors import StaticmemError
from staticmem.version import __version__

_PLACES = {
    "analyze": "staticmem.studies.api",
    "Report": "staticmem.report.model",
    "sweep": "staticmem.studies.sweep",
    "plan": "staticmem.studies.plan",
    "serve": "staticmem.serving.study",
    "max_batch": "staticmem.studies.api",
    "max_dim": "staticmem.studies.api",
    "levers": "staticmem.studies.api",
    "fit": "staticmem.studies.api",
    "export": "staticmem.recording.export",
}


def __getattr__(name: str) -> Any:
    """`analyze` and the others on first use: importing the package alone costs nothing."""
    if name not in _PLACES:
        raise AttributeError(f"module 'staticmem' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
