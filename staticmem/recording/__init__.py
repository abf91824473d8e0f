"""Recording: a module's own Python runs under fake tensors, and what decides its memory is written down.

It imports torch, which nothing else of an analysis of a file does. `record` gives a document (`document.py` of the
frontends reads it), which exports carry.
"""
