"""Allocators: what a framework takes from the driver to serve a process, replayed without a device.

`from_trace` makes the calls of a process out of the trace of a step; `cuda_caching` serves them as PyTorch's allocator
does and keeps a record, `peaks` keeps nothing but the peaks, and `band` says how far reserved memory may be from them.
"""
