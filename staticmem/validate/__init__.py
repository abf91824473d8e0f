"""Runs a model on the machine at hand, reads its memory, and lays the reading beside the prediction."""
