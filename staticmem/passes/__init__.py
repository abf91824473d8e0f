"""Edits of a graph: `restoring`, `requested`, what Python holds (`variables`), and their order (`pipeline`)."""
