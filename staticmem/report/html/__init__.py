"""The report as one HTML page that works offline; `page` has the frame that other pages of staticmem share."""

from staticmem.report.html.beside import CardRow, Extras
from staticmem.report.html.render import render

__all__ = ["CardRow", "Extras", "render"]
