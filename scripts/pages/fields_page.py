"""Prints docs/generated/fields.md: the classes that a public function gives, with their fields.

python scripts/pages/fields_page.py > docs/generated/fields.md
"""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass

from staticmem.report import fit, model, sweep

SWEEP = ("Sweep", "SweepRow", "CardFit", "ErrorInfo", "Levers", "LeverRow")
FIT = ("Fit", "Way", "Concession", "Cost", "Settings")


def page() -> str:
    """The page, `Report` first and then in the order of the code."""
    reports = [one for one in vars(model).values() if isinstance(one, type) and is_dataclass(one)]
    reports.sort(key=lambda one: (one.__name__ != "Report", inspect.getsourcelines(one)[1]))
    listed = [*reports, *(getattr(sweep, name) for name in SWEEP), *(getattr(fit, name) for name in FIT)]
    rows = (f"| `{one.__name__}` | {', '.join(f'`{field.name}`' for field in fields(one))} |\n" for one in listed)
    return f"{HEAD}\n| class | fields |\n|---|---|\n{''.join(rows)}"


HEAD = """# Fields

This page has the fields of every class that a function of [the API](../api.md) gives. The JSON has the same names:
[report](../report.md) says what each means.
"""


if __name__ == "__main__":
    print(page(), end="")
