"""Formats of results: text for terminals, Markdown, CSV, pages. They read values of `report` and compute none."""
