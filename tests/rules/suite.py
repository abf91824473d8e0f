"""All cases, and the rules that none covers, each with its reason."""

from __future__ import annotations

import cases_indexing
import cases_layers
import cases_linear
import cases_pointwise
import cases_reduction
import cases_views

CASES = [
    *cases_pointwise.CASES,
    *cases_views.CASES,
    *cases_linear.CASES,
    *cases_reduction.CASES,
    *cases_indexing.CASES,
    *cases_layers.CASES,
]
UNCOVERED: dict[str, str] = {}
