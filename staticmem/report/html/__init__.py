"""The report as one HTML page that works offline; `base` has the frame that other pages of staticmem share."""

from staticmem.report.html.extras import Extras, LeverRow
from staticmem.report.html.render import render

__all__ = ["Extras", "LeverRow", "render"]
