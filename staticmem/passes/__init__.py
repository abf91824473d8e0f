"""Edits of graphs: `pipeline` has their order, and runs them."""
