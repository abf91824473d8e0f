"""Edits that a request asks for: checkpoints, adapters, quantized weights, ranks, generation."""
