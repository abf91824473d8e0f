"""Serving engines: whether one starts with a model on a card, how many tokens its cache holds, and which flag to turn.

Rules of an engine are data (`vllm.yaml`), each with the file of its source; no engine needs to be installed.
"""
