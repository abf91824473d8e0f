"""What Inductor makes of a graph: which values have a buffer, in which layout, in which order, and who reuses whose."""
