"""Writes docs/generated/ops.md, the table of all rules.

python scripts/pages/ops_page.py > docs/generated/ops.md
"""

from __future__ import annotations

import sys
from itertools import groupby

from staticmem.ops import Rule, rules
from staticmem.ops.traces.registry import untraced

HEAD = """# Ops

Every ATen op that staticmem knows, from the registry of its rules (`staticmem/ops/`). A target without an overload
stands for all its overloads. *Autocast* is what `torch.autocast("cuda")` does with floating-point inputs: `half` casts
them down, `float32` copies them to float32, `float32_dtype` passes `dtype=float32` on, `promote` takes the widest.
An op that is not here gets the documented upper bound: everything that goes in and out is saved, and backward makes one
gradient for each input. The report counts those.

Written by `python scripts/pages/ops_page.py`; a test holds it to the registry.
"""


def _module(rule: Rule) -> str:
    return rule.function.__module__.rsplit(".", 1)[-1]


def _row(rules: list[Rule]) -> str:
    targets = ", ".join(f"`{rule.target}`" for rule in rules)
    first = rules[0]
    facts = first.facts.replace("|", "\\|")
    state = "" if first.state == "ruled" else f"*{first.state}.* "
    return f"| {targets} | {first.autocast} | {state}{facts} |"


def page() -> str:
    """The page: one section a module, one row for targets with the same facts."""
    lines = [HEAD]
    entries = sorted(rules().values(), key=lambda rule: (_module(rule), rule.facts, rule.autocast, rule.target))
    lines.append(f"{len(entries)} targets.\n")
    for module, members in groupby(entries, key=_module):
        lines += [f"## {module}\n", "| op | autocast | what it saves, what backward allocates |", "|---|---|---|"]
        rows = [_row(list(same)) for _, same in groupby(members, key=lambda rule: (rule.facts, rule.autocast))]
        lines += [*sorted(rows), ""]
    lines += ["## Without a trace under `torch.compile`\n"]
    lines += ["A compiled step runs each of these as one extern call, or its graph ends there.\n"]
    lines.append(", ".join(f"`{target}`" for target in untraced()))
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
