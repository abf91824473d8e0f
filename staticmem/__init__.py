"""staticmem: how much GPU memory a model needs, from its exported graph alone.

import staticmem
report = staticmem.analyze("model.pt2", batch=32, optimizer="adam")
print(report.peak.live_bytes)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from staticmem.analysis import analyze as analyze
    from staticmem.report.model import Report as Report
    from staticmem.scenarios.sweep import sweep as sweep

__all__ = ["Report", "StaticmemError", "__version__", "analyze", "sweep"]

from staticmem.errors import StaticmemError
from staticmem.version import __version__


def __getattr__(name: str) -> Any:
    """`analyze`, `sweep` and `Report` on first use: importing the package alone costs nothing."""
    if name == "analyze":
        from staticmem.analysis import analyze

        return analyze
    if name == "sweep":
        from staticmem.scenarios.sweep import sweep

        return sweep
    if name == "Report":
        from staticmem.report.model import Report

        return Report
    raise AttributeError(f"module 'staticmem' has no attribute '{name}'")
