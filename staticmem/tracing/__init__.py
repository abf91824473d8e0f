"""Graphs of nodes, as `torch.compile` sees them, and the tracer that the ops write them with."""
