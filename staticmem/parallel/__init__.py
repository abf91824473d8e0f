"""The step of one rank under a parallel strategy, as a step like any other: trace, graph, notes. See `rank.on_rank`."""
