"""All cases, and the rules that none covers, each with its reason."""

from __future__ import annotations

import cases_pointwise
import cases_views

CASES = [*cases_pointwise.CASES, *cases_views.CASES]
UNCOVERED: dict[str, str] = {}
