"""The graph of `model.generate` from the graph of a decoder that was exported with its prompt alone."""
